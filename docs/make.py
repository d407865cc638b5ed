"""Writes what is generated in the guides: `.venv/bin/python docs/make.py`.

    ```console                      each command is run, and what it prints is put below it
    $ penstock compare gpipe 1f1b
    ...
    ```
    <!-- families --> ... <!-- -->  a section per schedule, with its timeline

The tests run the same functions, and fail where a page would change.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from unittest import mock

from penstock import build, schedules, simulate
from penstock.cli.app import main as penstock
from penstock.cli.output import figures_text, peaks_text
from penstock.errors import ScheduleError
from penstock.schedule.family import Family
from penstock.schedule.program import Program
from penstock.view.text import to_text

HERE = Path(__file__).resolve().parent
PAGES = tuple(HERE / f"{name}.md" for name in ("schedules", "gallery", "cli", "sequences"))

_WIDTH = 118
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.S | re.M)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.M)
_FAMILIES = re.compile(r"(<!-- families -->\n).*?(<!-- -->)", re.S)
# Ranks and microbatches of the timelines: the first that work, and are narrow enough to draw.
_SIZES = ((4, 8), (4, 6), (4, 4), (3, 4), (3, 3), (2, 4), (2, 2))


def written(page: str) -> str:
    """A page with all that is generated in it; commands run in the working directory."""
    with_families = _FAMILIES.sub(lambda found: found[1] + families() + found[2], page)
    return _CONSOLE.sub(lambda found: f"```console\n{_replayed(found[1])}```", with_families)


def _replayed(block: str) -> str:
    return "".join(
        f"$ {command}\n{run(command)}" for command in (m[1] for m in _COMMAND.finditer(block))
    )


def run(command: str) -> str:
    """What a command that begins with ``penstock`` prints."""
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "penstock", command
    told = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": str(_WIDTH)}), redirect_stdout(told):
        try:
            penstock(arguments)
        except SystemExit as ended:
            assert not ended.code, f"{command}: exit code {ended.code}"
    lines = [line.rstrip() for line in told.getvalue().strip("\n").splitlines()]
    return "".join(f"{line}\n" for line in lines)


def families() -> str:
    """A section per schedule."""
    return "\n".join(_section(each) for each in schedules()) + "\n"


def _section(each: Family) -> str:
    program, drawn = _drawn(each)
    result = simulate(program)
    figures = re.sub(r"\[/?[a-z ]*\]", "", f"{figures_text(result)}; {peaks_text(result)}")
    facts = [f"{each.arrangement.value} placement", f"stages per rank: {each.virtuals_text}"]
    if each.num_directions > 1:
        twice = "[the weights exist twice](schedules.md#two-copies-of-the-weights)"
        facts[-1] += f" and direction, so that {twice}"
    if "splits" in each.options:
        facts.append("a model has to [take sequences in chunks](sequences.md)")
    if each.rule:
        facts.append(each.rule)
    facts += [f"`{name}=`: {what}" if what else f"`{name}=`" for name, what in each.options.items()]
    summary = each.summary[:1].upper() + each.summary[1:]
    source = f" ([{each.source}](https://arxiv.org/abs/{each.source.removeprefix('arXiv:')}))"
    return (
        f"### {each.name}\n\n"
        f"{summary}{source if each.source.startswith('arXiv:') else ''}; {'; '.join(facts)}.\n\n"
        f"```text\n{drawn}```\n\n"
        f"{program.num_ranks} ranks, {program.num_whole_microbatches} microbatches: {figures}.\n"
    )


def _drawn(each: Family) -> tuple[Program, str]:
    """The largest program that a page has room for, and its timeline."""
    for ranks, microbatches in _SIZES:
        try:
            program = build(each.name, ranks=ranks, microbatches=microbatches)
        except ScheduleError:
            continue
        drawn = to_text(simulate(program).trace, width=1000)
        if max(map(len, drawn.splitlines())) <= _WIDTH:
            return program, drawn
    raise AssertionError(f"{each.name}: no size of {_SIZES} works and fits")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for path in PAGES:
            path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
