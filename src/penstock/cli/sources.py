"""Load the source of a subcommand: a schedule by name, or a file.

1f1b                          a schedule, built with the options of the command line
interleaved-1f1b:virtual=4    a schedule with options of its own, separated by commas
mine.csv, mine.json           a program, as ``penstock.schedule.text`` writes it
trace.json                    a trace, as ``penstock.view.perfetto`` writes it
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from penstock.cli.settings import Settings
from penstock.errors import ScheduleError
from penstock.schedule.check import check
from penstock.schedule.family import Family, parse_options
from penstock.schedule.program import Program
from penstock.schedule.registry import family, refuse_options, schedules
from penstock.schedule.text import from_json, load_csv
from penstock.simulate.costs import build_for
from penstock.trace import Trace

__all__ = ["argument", "complete", "is_file", "load", "load_program", "takes_virtual"]

_SUFFIXES = (".csv", ".json")
# Matches as a key: inside a JSON string a backslash would precede the quotation mark.
_TRACE = re.compile(r'"traceEvents"\s*:')


def complete(incomplete: str) -> Iterator[tuple[str, str]]:
    """Shell completions of schedules and files, each with a description."""
    for each in schedules():
        if each.name.startswith(incomplete.lower()):
            yield each.name, each.summary
    head, slash, begun = incomplete.rpartition("/")
    for path in sorted(Path(head + slash).glob(f"{begun}*")):
        if path.is_dir():
            yield f"{head}{slash}{path.name}/", "folder"
        elif path.suffix in _SUFFIXES:
            yield f"{head}{slash}{path.name}", "file"


def argument(text: str, **more: Any) -> Any:
    """An argument of a subcommand that names sources, with its help."""
    return typer.Argument(help=text, autocompletion=complete, **more)


def is_file(source: str) -> bool:
    """True if ``source`` names a file, existing or not: ``mine.csv``, or ``./1f1b``.

    A schedule's name takes precedence.
    """
    if source.lower().endswith(_SUFFIXES) or os.path.dirname(source):
        return True
    try:
        family(source.partition(":")[0])
    except ScheduleError:
        return Path(source).is_file()
    return False


def load_program(source: str, settings: Settings, *, lenient: bool = False) -> Program:
    """Load or build a program, and check it; the arguments are those of ``load``."""
    found = load(source, settings, lenient=lenient)
    if isinstance(found, Trace):
        raise ScheduleError(f"{source}: a trace, expected a schedule or a file with a program")
    return check(found)


def load(source: str, settings: Settings, *, lenient: bool = False) -> Program | Trace:
    """Load a program or a trace from a file, or build a schedule; does not check the program.

    With ``lenient``, options that this schedule does not take are dropped, as when comparing
    several.
    """
    if not is_file(source):
        return _build(source, settings, lenient)
    if not lenient:
        settings.refuse_for(source)
    if Path(source).suffix.lower() != ".json":
        return load_csv(source)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
        if _TRACE.search(text):
            from penstock.view.perfetto import from_perfetto

            return from_perfetto(text)
        return from_json(text)
    except (UnicodeDecodeError, ScheduleError) as error:
        raise ScheduleError(f"{source}: {error}") from error


def _build(source: str, settings: Settings, lenient: bool) -> Program:
    name, colon, own = source.partition(":")
    chosen, options, sizes = family(name), settings.options(), settings.sizes()
    if lenient:
        options = {key: value for key, value in options.items() if chosen.takes_option(key)}
        sizes["virtual"] = settings.virtual if takes_virtual(chosen, settings.virtual) else None
    options |= parse_options(own.split(",")) if colon else {}
    sizes["virtual"] = options.pop("virtual", sizes["virtual"])
    refuse_options(chosen, options)
    return build_for(settings.costs(), name, **sizes, **options)


def takes_virtual(chosen: Family, virtual: int | None) -> bool:
    """True if a family works with ``virtual`` stages per rank; None stands for its default."""
    if virtual is None:
        return True
    return virtual >= 1 if chosen.virtuals is None else virtual in chosen.virtuals
