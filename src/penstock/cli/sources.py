"""What a subcommand is pointed at: the name of a schedule, or a file.

    1f1b                          a schedule, in the setting of the command line
    interleaved-1f1b:virtual=4    the same with options of its own, parted by commas
    mine.csv, mine.json           a program, as ``penstock.schedule.text`` writes it
    trace.json                    a trace, as ``penstock.view.perfetto`` writes it

This module reads and builds; it shows nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.cli.setting import Setting
from penstock.cli.values import read_options
from penstock.errors import ScheduleError
from penstock.schedule.catalog import family, refuse_options
from penstock.schedule.check import check
from penstock.schedule.family import Family
from penstock.schedule.program import Program
from penstock.schedule.text import from_json, load_csv
from penstock.simulate.fitting import build_for
from penstock.trace import Trace

__all__ = ["is_file", "load", "load_program", "takes_virtual"]

_SUFFIXES = (".csv", ".json")
_SEPARATORS = tuple(mark for mark in (os.sep, os.altsep) if mark)
# As a key: in a text it would stand behind a backslash.
_TRACE = re.compile(r'"traceEvents"\s*:')


def is_file(source: str) -> bool:
    """Whether ``source`` stands for a file, there or not.

    A file that is called as a schedule is takes a folder's name before its own, such as ``./1f1b``.

    Example:
        >>> [is_file(each) for each in ("1f1b", "mine.csv", "./1f1b", "zbv:virtual=2")]
        [False, True, True, False]
    """
    path = Path(source)
    if path.suffix.lower() in _SUFFIXES or any(mark in source for mark in _SEPARATORS):
        return True
    try:
        family(source.partition(":")[0])
    except ScheduleError:
        return path.is_file()
    return False


def load_program(source: str, setting: Setting, *, each_its_own: bool = False) -> Program:
    """The program that ``source`` stands for, checked.

    Args:
        source: a schedule's name, or a file with a program.
        setting: what a schedule is built for.
        each_its_own: whether ``source`` is one of several: what the setting asks for and this
            schedule can't take (stages per rank, options) is then left out.

    Raises:
        ScheduleError: no such schedule or file, an impossible setting, or a wrong program.
        OSError: the file can't be read.
    """
    found = load(source, setting, each_its_own=each_its_own)
    if isinstance(found, Trace):
        raise ScheduleError(f"{source}: a trace, expected a schedule or a file with a program")
    return check(found)


def load(source: str, setting: Setting, *, each_its_own: bool = False) -> Program | Trace:
    """What ``source`` stands for; a program as it is, not checked.

    Args:
        source: a schedule's name, a file with a program, or a trace.
        setting: as ``load_program`` takes it.
        each_its_own: likewise.

    Raises:
        ScheduleError: as ``load_program``; a file beside what only a schedule takes, such as ranks.
        OSError: the file can't be read.
    """
    if not is_file(source):
        return _build(source, setting, each_its_own)
    if not each_its_own:
        setting.refuse_beside_file(source)
    if Path(source).suffix.lower() != ".json":
        return load_csv(source)
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
        if _TRACE.search(text):
            from penstock.view.perfetto import from_perfetto

            return from_perfetto(text)
        return from_json(text)
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{source}: not a text file in UTF-8 ({error})") from error
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from error


def _build(source: str, setting: Setting, each_its_own: bool) -> Program:
    name, colon, own = source.partition(":")
    chosen = family(name)
    options = setting.options()
    virtual = setting.virtual
    if each_its_own:
        options = {key: value for key, value in options.items() if chosen.takes_option(key)}
        virtual = virtual if takes_virtual(chosen, virtual) else None
    options |= read_options(own.split(","), own=True) if colon else {}
    virtual = options.pop("virtual", virtual)  # type: ignore[assignment]
    refuse_options(chosen, options)
    return build_for(
        setting.costs(),
        name,
        ranks=setting.num_ranks,
        microbatches=setting.num_microbatches,
        virtual=virtual,
        **options,
    )


def takes_virtual(chosen: Family, virtual: int | None) -> bool:
    """Whether a family can have so many stages per rank; None is what is usual in it."""
    if virtual is None:
        return True
    return virtual >= 1 if chosen.virtuals is None else virtual in chosen.virtuals
