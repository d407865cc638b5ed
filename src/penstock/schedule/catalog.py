"""The families of schedules by name, and what ranks, stages and microbatches each takes.

A new family is a file in ``builders/`` and a row here; users add their own with the decorator of
``penstock.schedule.own``, or through the entry point group ``penstock.schedules``. This module
builds nothing itself.
"""

from __future__ import annotations

import logging
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points

from penstock.errors import ScheduleError
from penstock.schedule.builders.chimera import chimera
from penstock.schedule.builders.chimera import nearest as nearest_chimera
from penstock.schedule.builders.dualpipe import dualpipe
from penstock.schedule.builders.dualpipe import nearest as nearest_dualpipe
from penstock.schedule.builders.dualpipev import dualpipev
from penstock.schedule.builders.eager_1f1b import eager_1f1b
from penstock.schedule.builders.forward_only import forward_only
from penstock.schedule.builders.gis import gis, gis_h
from penstock.schedule.builders.gpipe import gpipe
from penstock.schedule.builders.hanayo import hanayo
from penstock.schedule.builders.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.builders.interleaved_zb import interleaved_zb
from penstock.schedule.builders.looped_bfs import looped_bfs
from penstock.schedule.builders.one_f_one_b import one_f_one_b
from penstock.schedule.builders.one_f_one_b_v import one_f_one_b_v
from penstock.schedule.builders.v_half import v_half
from penstock.schedule.builders.v_min import v_min
from penstock.schedule.builders.v_zb import v_zb
from penstock.schedule.builders.zb_capped import zb_1p, zb_2p
from penstock.schedule.builders.zb_h1 import zb_h1
from penstock.schedule.builders.zb_h2 import zb_h2
from penstock.schedule.builders.zbv import zbv
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.program import Program

__all__ = ["Arrangement", "Family", "add", "build", "family", "remove", "schedules"]

_ENTRY_POINTS = "penstock.schedules"
_log = logging.getLogger(__name__)

_GROUP = "how many microbatches go round the loop together"
_COSTS = {
    "forward": "what a forward costs: a number, or one per stage",
    "input_grad": "what an input gradient costs: a number, or one per stage",
    "weight_grad": "what a weight gradient costs: a number, or one per stage",
}

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
        name="eager-1f1b",
        builder=eager_1f1b,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="1F1B with twice the warm-up, so that messages travel while ranks compute",
        source="arXiv:2211.05322",
    ),
    Family(
        name="interleaved-1f1b",
        builder=interleaved_1f1b,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="1F1B over several stages per rank: a smaller bubble, more messages",
        source="arXiv:2104.04473",
        options={"group": _GROUP},
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
        name="zb-h1",
        builder=zb_h1,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="1F1B with a split backward: a third of the bubble, the same memory",
        source="arXiv:2401.10241",
    ),
    Family(
        name="zb-h2",
        builder=zb_h2,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="no bubble within a rank's own time, for twice the memory",
        source="arXiv:2401.10241",
    ),
    Family(
        name="zb-1p",
        builder=zb_1p,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="zero bubble searched for given costs, in the memory of P activations",
        source="arXiv:2401.10241",
        options=_COSTS,
    ),
    Family(
        name="zb-2p",
        builder=zb_2p,
        arrangement=Arrangement.LINEAR,
        default_virtual=1,
        virtuals=(1,),
        summary="zero bubble searched for given costs, in the memory of 2P activations",
        source="arXiv:2401.10241",
        options=_COSTS,
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
        name="gis",
        builder=gis,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="interleaved zero bubble in less memory, for a larger bubble",
        source="arXiv:2503.01328",
        options={"group": _GROUP},
    ),
    Family(
        name="gis-h",
        builder=gis_h,
        arrangement=Arrangement.LOOPED,
        default_virtual=2,
        virtuals=None,
        summary="GIS in groups of P / 2: about half the memory of interleaved 1F1B",
        source="arXiv:2503.01328",
        options={"group": _GROUP},
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
        name="v-zb",
        builder=v_zb,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="zero bubble over a V-shape by a repeated block, in 1F1B's memory",
        source="arXiv:2405.15362",
    ),
    Family(
        name="v-half",
        builder=v_half,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="half of 1F1B's memory and half of its bubble over a V-shape",
        source="arXiv:2405.15362",
    ),
    Family(
        name="v-min",
        builder=v_min,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="a third of 1F1B's memory, two thirds of its bubble over a V-shape",
        source="arXiv:2405.15362",
    ),
    Family(
        name="1f1b-v",
        builder=one_f_one_b_v,
        arrangement=Arrangement.V_SHAPE,
        default_virtual=2,
        virtuals=(2,),
        summary="1F1B over a V-shape: two thirds of its memory, whole backwards",
        source="arXiv:2405.15362",
        options={"limit": "the most activations that a rank may hold"},
    ),
    Family(
        name="hanayo",
        builder=hanayo,
        arrangement=Arrangement.WAVE,
        default_virtual=2,
        virtuals=range(2, 1 << 16, 2),
        summary="waves down and up the ranks: a bubble that falls with their number",
        source="arXiv:2308.15762",
        options={"waves": "how many waves there are: half of virtual"},
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
    Family(
        name="dualpipe",
        builder=dualpipe,
        arrangement=Arrangement.BIDIRECTIONAL,
        default_virtual=1,
        virtuals=(1,),
        summary="two directions, forwards of one overlapped with backwards of the other",
        source="arXiv:2412.19437",
        rule="even P, even M ≥ 2P",
        nearest=nearest_dualpipe,
    ),
    Family(
        name="chimera",
        builder=chimera,
        arrangement=Arrangement.BIDIRECTIONAL,
        default_virtual=1,
        virtuals=(1,),
        summary="1F1B in two directions, each in the other's bubbles",
        source="arXiv:2107.06925",
        rule="even P, M ≥ 2",
        nearest=nearest_chimera,
    ),
)


def _normal(name: str) -> str:
    """``name`` without what doesn't tell names apart: case, separators, torch's prefix."""
    plain = "".join(c for c in name.lower() if c not in "-_ ")
    return plain.removeprefix("schedule")


_BY_NAME = {_normal(name): each for each in _FAMILIES for name in (each.name, *each.aliases)}


# Added by users, by canonical name in normal form.
_ADDED: dict[str, Family] = {}


def schedules() -> tuple[Family, ...]:
    """All families: Penstock's own, then those that users have added.

    Example:
        >>> [each.name for each in schedules()][:3]
        ['forward-only', 'gpipe', '1f1b']
    """
    _discover()
    return (*_FAMILIES, *_ADDED.values())


def add(new: Family) -> None:
    """Add a family, or put it in the place of one that was added under the same name before.

    Args:
        new: the family; ``penstock.schedule.own`` makes one of a function.

    Raises:
        ScheduleError: one of its names is that of another family.
    """
    key = _normal(new.name)
    for name in (new.name, *new.aliases):
        holder = _lookup(name)
        if (holder is not None and _normal(holder.name) != key) or _normal(name) in _BY_NAME:
            raise ScheduleError(
                f"a schedule can't be called {name!r}: Penstock has one of that name already"
            )
    _ADDED[key] = new


def remove(name: str) -> None:
    """Take a family that users have added away again; nothing happens if there is none."""
    _ADDED.pop(_normal(name), None)


def _lookup(name: str) -> Family | None:
    wanted = _normal(name)
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
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
            entry.load()
        except Exception as error:
            # One broken package must not take the other schedules away.
            _log.warning(
                "schedule %s of %s can't be loaded", entry.name, entry.value, exc_info=True
            )
            faults.append(f"{entry.name!r} ({entry.value}) can't be loaded: {error!r}")
    return tuple(faults)


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
    found = _lookup(name)
    if found is None:
        faults = "".join(f"; {fault}" for fault in _discover())
        found = _lookup(name)
    if found is None:
        known = schedules()
        written = {_normal(n): each.name for each in known for n in (each.name, *each.aliases)}
        near = get_close_matches(_normal(name), written, n=1)
        hint = f"did you mean {written[near[0]]!r}? " if near else ""
        names = ", ".join(each.name for each in known)
        raise ScheduleError(
            f"there is no schedule {name!r}; {hint}The schedules are: {names}{faults}"
        )
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
    if not chosen.works(ranks=ranks, microbatches=microbatches):
        near_ranks, near_microbatches = chosen.nearest(ranks, microbatches)
        raise ScheduleError(
            f"{chosen.name}: ranks={ranks} and microbatches={microbatches} do not work, it takes "
            f"{chosen.rule}; the nearest that do are ranks={near_ranks} and "
            f"microbatches={near_microbatches}"
        )
    if chosen.virtuals is not None and virtual not in chosen.virtuals:
        works = chosen.virtuals_text
        raise ScheduleError(
            f"{chosen.name}: virtual={virtual} stages per rank do not work; {works} does, and any "
            f"number does with {_any_virtual()}"
        )
    if chosen.virtuals is None or len(chosen.virtuals) > 1:
        options = {"virtual": virtual, **options}
    return chosen.builder(ranks=ranks, microbatches=microbatches, **options)


def _any_virtual() -> str:
    return ", ".join(each.name for each in schedules() if each.virtuals is None)
