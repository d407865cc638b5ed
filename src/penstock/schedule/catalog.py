"""The families of schedules by name, and what ranks, stages and microbatches each takes.

Penstock's own are the rows of ``penstock.schedule.family_rows``; users add their own with the
decorator of ``penstock.schedule.own``, or through the entry point group ``penstock.schedules``.
This module builds nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from penstock.errors import ScheduleError
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.program import Program
from penstock.schedule.sizes import refuse_sizes

__all__ = [
    "Arrangement",
    "Family",
    "add",
    "build",
    "family",
    "refuse_no_name",
    "refuse_options",
    "remove",
    "schedules",
]

_ENTRY_POINTS = "penstock.schedules"
_log = logging.getLogger(__name__)


def _normal(name: str) -> str:
    """``name`` without what doesn't tell names apart: case, separators, torch's prefix."""
    plain = "".join(c for c in name.lower() if c not in "-_ ")
    return plain.removeprefix("schedule")


@cache
def _own() -> tuple[Family, ...]:
    """Penstock's own: imported with the first question, for they are many modules."""
    from penstock.schedule.family_rows import FAMILIES

    return FAMILIES


@cache
def _by_name() -> dict[str, Family]:
    return {_normal(name): each for each in _own() for name in (each.name, *each.aliases)}


# Added by users, by canonical name in normal form.
_ADDED: dict[str, Family] = {}


def schedules() -> tuple[Family, ...]:
    """All families: Penstock's own, then those that users have added.

    Example:
        >>> [each.name for each in schedules()][:3]
        ['forward-only', 'gpipe', '1f1b']
    """
    _discover()
    return (*_own(), *_ADDED.values())


def add(new: Family) -> None:
    """Add a family, or put it in the place of one that was added under the same name before.

    Args:
        new: the family; ``penstock.schedule.own`` makes one of a function.

    Raises:
        ScheduleError: one of its names is that of another family, or no name at all.
    """
    for name in (new.name, *new.aliases):
        refuse_no_name(name)
    key = _normal(new.name)
    for name in (new.name, *new.aliases):
        holder = _lookup(name)
        if (holder is not None and _normal(holder.name) != key) or _normal(name) in _by_name():
            raise ScheduleError(
                f"a schedule can't be called {name!r}: Penstock has one of that name already"
            )
    _ADDED[key] = new


def refuse_no_name(name: object) -> None:
    """Refuse what no schedule can be asked for by.

    Args:
        name: what a schedule is to be called.

    Raises:
        ScheduleError: it is not a string, or there is nothing in it but what doesn't tell names
            apart.
    """
    if not (isinstance(name, str) and _normal(name)):
        raise ScheduleError(
            f"a schedule can't be called {name!r}; give it a name, as in "
            "@penstock.schedule('my-schedule')"
        )


def remove(name: str) -> None:
    """Take a family that users have added away again; nothing happens if there is none."""
    _ADDED.pop(_normal(name), None)


def _lookup(name: str) -> Family | None:
    wanted = _normal(name)
    if wanted in _by_name():
        return _by_name()[wanted]
    for each in _ADDED.values():
        if wanted in map(_normal, (each.name, *each.aliases)):
            return each
    return None


@cache
def _discover() -> tuple[str, ...]:
    """Import what installed packages add, once; what is wrong with those that can't be."""
    faults = []
    for entry in entry_points(group=_ENTRY_POINTS):
        try:
            found = entry.load()
            if callable(found) and not any(_made_by(each, found) for each in _ADDED.values()):
                from penstock.schedule.own import schedule

                schedule(entry.name)(found)
        except Exception as error:
            # One broken package must not take the other schedules away.
            _log.warning("schedule %s of %s: %r", entry.name, entry.value, error)
            faults.append(f"{entry.name!r} ({entry.value}) can't be loaded: {error!r}")
    return tuple(faults)


def _made_by(each: Family, function: object) -> bool:
    """Whether a family is one of ``function``, which the decorator has registered already."""
    return getattr(each.builder, "__wrapped__", None) is function


def family(name: str) -> Family:
    """The family called ``name``.

    Args:
        name: a family's name; case and separators (hyphen, underscore, space) don't count, and
            torch's class names are understood too.

    Raises:
        ScheduleError: there is no such family, or ``name`` is not a string.

    Example:
        >>> family("ScheduleInterleavedZeroBubble").name
        'interleaved-zb'
    """
    if not isinstance(name, str):
        raise ScheduleError(f"a schedule is asked for by its name, not by {name!r}")
    found = _lookup(name)
    if found is None:
        faults = "".join(f"; {fault}" for fault in _discover())
        found = _lookup(name)
    if found is None:
        known = schedules()
        written = {_normal(n): each.name for each in known for n in (each.name, *each.aliases)}
        near = get_close_matches(_normal(name), written, n=1)
        hint = f"did you mean {written[near[0]]!r}? The" if near else "the"
        names = ", ".join(each.name for each in known)
        raise ScheduleError(f"there is no schedule {name!r}; {hint} schedules are: {names}{faults}")
    return found


def build(
    name: str, *, ranks: int, microbatches: int, virtual: int | None = None, **options: object
) -> Program:
    """The program of a schedule.

    Args:
        name: the family's name, as ``family`` takes it.
        ranks: number of ranks.
        microbatches: number of microbatches per step.
        virtual: stages per rank; None for what is usual in the family.
        options: further arguments of the family's builder, such as ``group`` for
            interleaved-1f1b.

    Returns:
        A program that spells out computations only; ``penstock.schedule.passes`` adds the rest.

    Raises:
        ScheduleError: no such schedule, an option that it does not have, or a number that it
            can't work with (the message says which work).

    Example:
        >>> program = build("1F1B", ranks=2, microbatches=2)
        >>> " ".join(map(str, program.ranks[0]))
        '0F0 0F1 0B0 0B1'
    """
    chosen = family(name)
    virtual = chosen.default_virtual if virtual is None else virtual
    refuse_sizes(chosen.name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    refuse_options(chosen, options)
    if not chosen.works(ranks=ranks, microbatches=microbatches):
        near_ranks, near_microbatches = chosen.nearest(ranks, microbatches)
        raise ScheduleError(
            f"{chosen.name}: ranks={ranks} and microbatches={microbatches} do not work, it takes "
            f"{chosen.rule}; the nearest that do are ranks={near_ranks} and "
            f"microbatches={near_microbatches}",
            parameter="ranks",
        )
    if chosen.virtuals is not None and virtual not in chosen.virtuals:
        near = " or ".join(map(str, chosen.virtuals_near(virtual)))
        works = chosen.virtuals_text
        nearest = "" if near == works else f" (the nearest: {near})"
        raise ScheduleError(
            f"{chosen.name}: virtual={virtual} stages per rank do not work; {works} does{nearest}, "
            f"and any number does with {_any_virtual()}",
            parameter="virtual",
        )
    if chosen.virtuals is None or len(chosen.virtuals) > 1:
        options = {"virtual": virtual, **options}
    return chosen.builder(ranks=ranks, microbatches=microbatches, **options)


def refuse_options(chosen: Family, options: Iterable[str]) -> None:
    """Refuse names that are no options of a family.

    Args:
        chosen: the family.
        options: the names.

    Raises:
        ScheduleError: one of them is none; the message tells all that are.
    """
    for option in options:
        if not chosen.takes_option(option):
            has = (
                f"its options are: {', '.join(chosen.options)}" if chosen.options else "it has none"
            )
            raise ScheduleError(f"{chosen.name} has no option {option!r}; {has}")


def _any_virtual() -> str:
    return ", ".join(each.name for each in schedules() if each.virtuals is None)
