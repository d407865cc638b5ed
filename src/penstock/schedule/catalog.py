"""The families of schedules by name, and what ranks, stages and microbatches each takes.

A new family is a file in ``builders/`` and a row here. This module builds nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from penstock.errors import ScheduleError
from penstock.schedule.builders.dualpipev import dualpipev
from penstock.schedule.builders.forward_only import forward_only
from penstock.schedule.builders.gpipe import gpipe
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.interleaved_zb import interleaved_zb
from penstock.schedule.builders.looped_bfs import looped_bfs
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.zbv import zbv
from penstock.schedule.program import Program

__all__ = ["Arrangement", "Family", "build", "family", "schedules"]


class Arrangement(Enum):
    """How a family lays its stages on ranks (drawn in ``penstock.schedule.placement``)."""

    LINEAR = "linear"
    LOOPED = "looped"
    V_SHAPE = "v-shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of schedules.

    Args:
        name: the canonical name, which its programs carry.
        builder: called with ``ranks``, ``microbatches``, the family's options, and ``virtual``
            where the family takes more than one number of stages per rank.
        arrangement: how stages lie on ranks.
        default_virtual: stages per rank where none is asked for.
        virtuals: the numbers of stages per rank that work; None for any.
        summary: one line for people.
        source: where the method was published.
        aliases: other names, beside those that differ in case, separators or a leading
            "Schedule" alone.
        options: names of the builder's further arguments.
    """

    name: str
    builder: Callable[..., Program]
    arrangement: Arrangement
    default_virtual: int
    virtuals: tuple[int, ...] | None
    summary: str
    source: str
    aliases: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


_FAMILIES = (
    Family(
        name="forward-only",
        builder=forward_only,
        arrangement=Arrangement.LOOPED,
        default_virtual=1,
        virtuals=None,
        summary="forwards alone, for evaluation",
        source="arXiv:2104.04473",
    ),
    Family(
        name="gpipe",
        builder=gpipe,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="all forwards, then all backwards",
        source="arXiv:1811.06965",
    ),
    Family(
        name="1f1b",
        builder=one_f_one_b,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="one forward, one backward in turn: GPipe's time in less memory",
        source="arXiv:2007.01045",
        aliases=("dapple",),
    ),
    Family(
        name="interleaved-1f1b",
        builder=interleaved_1f1b,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="1F1B over several stages per rank: a smaller bubble, more messages",
        source="arXiv:2104.04473",
        options=("group",),
    ),
    Family(
        name="looped-bfs",
        builder=looped_bfs,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="GPipe over several stages per rank, for sharded parameters",
        source="arXiv:2211.05953",
        aliases=("breadth-first",),
    ),
    Family(
        name="interleaved-zb",
        builder=interleaved_zb,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="interleaved, with weight gradients put off into the bubble",
        source="arXiv:2401.10241",
        aliases=("interleaved-zero-bubble",),
    ),
    Family(
        name="zbv",
        builder=zbv,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="zero bubble over a V-shape, in 1F1B's memory",
        source="arXiv:2401.10241",
        aliases=("zbv-zero-bubble",),
    ),
    Family(
        name="dualpipev",
        builder=dualpipev,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="forwards overlapped with backwards over a V-shape",
        source="arXiv:2412.19437",
    ),
)


def _normal(name: str) -> str:
    """``name`` without what doesn't tell names apart: case, separators, torch's prefix."""
    plain = "".join(c for c in name.lower() if c not in "-_ ")
    return plain.removeprefix("schedule")


_BY_NAME = {_normal(name): each for each in _FAMILIES for name in (each.name, *each.aliases)}


def schedules() -> tuple[Family, ...]:
    """All families.

    Example:
        >>> [each.name for each in schedules()][:3]
        ['forward-only', 'gpipe', '1f1b']
    """
    return _FAMILIES


def family(name: str) -> Family:
    """The family called ``name``.

    Args:
        name: a family's name; case and separators (hyphen, underscore, space) don't count, and
            torch's class names are understood too.

    Raises:
        ScheduleError: there is no such family.

    Example:
        >>> family("ScheduleInterleavedZeroBubble").name
        'interleaved-zb'
    """
    found = _BY_NAME.get(_normal(name))
    if found is None:
        near = get_close_matches(_normal(name), _BY_NAME, n=1)
        hint = f"did you mean {_BY_NAME[near[0]].name!r}? " if near else ""
        known = ", ".join(each.name for each in _FAMILIES)
        raise ScheduleError(f"there is no schedule {name!r}; {hint}The schedules are: {known}")
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
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("virtual", virtual)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(
                f"{chosen.name}: {what}={number!r} must be a whole number from 1 on"
            )
    for option in options:
        if option not in chosen.options:
            has = (
                f"its options are: {', '.join(chosen.options)}" if chosen.options else "it has none"
            )
            raise ScheduleError(f"{chosen.name} has no option {option!r}; {has}")
    if chosen.virtuals is None:
        return chosen.builder(ranks=ranks, microbatches=microbatches, virtual=virtual, **options)
    if virtual not in chosen.virtuals:
        works = " or ".join(map(str, chosen.virtuals))
        raise ScheduleError(
            f"{chosen.name}: virtual={virtual} stages per rank do not work; {works} does, and any "
            f"number does with {_any_virtual()}"
        )
    return chosen.builder(ranks=ranks, microbatches=microbatches, **options)


def _any_virtual() -> str:
    return ", ".join(each.name for each in _FAMILIES if each.virtuals is None)
