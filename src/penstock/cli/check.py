"""``penstock check``: prove that a program is right, or say all that is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.setting import Setting
from penstock.cli.sources import is_file, load
from penstock.cli.terminal import stdout
from penstock.errors import ScheduleError
from penstock.schedule.check import problems
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE
from penstock.trace import Trace

__all__ = ["check"]


def check(
    file: Annotated[str, typer.Argument(help="A program as CSV, in torch's form, or as JSON.")],
) -> None:
    """Prove that a program is right; else list its problems, with exit code 1."""
    if not is_file(file):
        raise ScheduleError(f"{file!r} is no file; check takes a program as *.csv or *.json")
    program = load(file, Setting())
    if isinstance(program, Trace):
        raise ScheduleError(f"{file}: a trace of what ran; check takes a program")
    found = problems(program)
    console = stdout()
    if not found:
        console.print(f"[bold green]ok[/] {_summary(program)}", soft_wrap=True)
        return
    number = "a problem" if len(found) == 1 else f"{len(found)} problems"
    console.print(f"[bold red]{number}[/] {_summary(program)}", soft_wrap=True)
    for each in found:
        console.print(f"  {each}", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def _summary(program: Program) -> str:
    actions = list(program.actions())
    computes = sum(act.op in COMPUTE for act in actions)
    transfers = (
        "with transfers" if program.has_transfers else "transfers not spelled out, to be inserted"
    )
    return (
        f"{program.name}: {program.num_ranks} ranks, {program.num_stages} stages, "
        f"{program.num_microbatches} microbatches, {len(actions)} actions "
        f"({computes} computations), {transfers}"
    )
