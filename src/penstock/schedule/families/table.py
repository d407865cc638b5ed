"""Penstock's families of schedules, a row each; the builders lie in this folder.

``penstock.schedule.registry`` looks names up in the table, and adds users' families.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import getdoc
from sys import maxsize, modules
from typing import Any

from penstock.schedule.families.breadth_first import forward_only, gpipe, looped_bfs
from penstock.schedule.families.chimera import chimera
from penstock.schedule.families.dualpipe import dualpipe, dualpipev
from penstock.schedule.families.interleaved import gis, gis_h, interleaved_1f1b
from penstock.schedule.families.one_f_one_b import eager_1f1b, one_f_one_b, seq1f1b
from penstock.schedule.families.pipe_offload import po_f, po_h
from penstock.schedule.families.wave_patterns import hanayo, one_f_one_b_v, v_half, v_min, v_zb
from penstock.schedule.families.zb_capped import zb_1p, zb_2p
from penstock.schedule.families.zero_bubble import interleaved_zb, zb_h1, zb_h2, zbv
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.program import Program

__all__ = ["FAMILIES"]


def _family(
    arrangement: Arrangement,
    virtuals: Sequence[int] | None,
    virtual: int,
    name: str,
    builder: Callable[..., Program],
    source: str,
    **more: Any,
) -> Family:
    return Family(
        name=name,
        builder=builder,
        arrangement=arrangement,
        default_virtual=virtual,
        virtuals=virtuals,
        summary=(getdoc(builder) or "").partition("\n")[0].rstrip("."),
        source=f"arXiv:{source}",
        costs=tuple(option for option in more.get("options", ()) if option in _COSTS),
        # The docstring of a builder's module has timelines, formulas and sources.
        doc=getdoc(modules[builder.__module__]) or "",
        **more,
    )


_linear = partial(_family, Arrangement.LINEAR, (1,), 1)
_looped = partial(_family, Arrangement.LOOPED, None, 2)
_v_shaped = partial(_family, Arrangement.V_SHAPE, (2,), 2)
_both_ways = partial(_family, Arrangement.BIDIRECTIONAL, (1,), 1)

_SPLITS = {"splits": "chunks per sequence"}
_GROUP = {"group": "the most microbatches that go round the loop together"}
_AHEAD = {"ahead": "computations between the start of a reload and its backward"}
_COSTS = {
    "forward": "time of a forward: a number, or one per stage",
    "input_grad": "time of an input gradient: a number, or one per stage",
    "weight_grad": "time of a weight gradient: a number, or one per stage",
    "latency": "travel time of a result to the next stage's rank: a number, or one per stage",
}
_EVEN = range(2, maxsize, 2)

FAMILIES: tuple[Family, ...] = (
    _family(Arrangement.LOOPED, None, 1, "forward-only", forward_only, "2104.04473"),
    _linear("gpipe", gpipe, "1811.06965"),
    _linear("1f1b", one_f_one_b, "2007.01045", aliases=("dapple",)),
    _linear("eager-1f1b", eager_1f1b, "2211.05322"),
    _linear("seq1f1b", seq1f1b, "2406.03488", options=_SPLITS),
    _looped("interleaved-1f1b", interleaved_1f1b, "2104.04473", options=_GROUP),
    _looped("looped-bfs", looped_bfs, "2211.05953", aliases=("breadth-first",)),
    _linear("zb-h1", zb_h1, "2401.10241"),
    _linear("zb-h2", zb_h2, "2401.10241"),
    _linear("zb-1p", zb_1p, "2401.10241", options=_COSTS),
    _linear("zb-2p", zb_2p, "2401.10241", options=_COSTS),
    _looped("interleaved-zb", interleaved_zb, "2401.10241", aliases=("interleaved-zero-bubble",)),
    _looped("gis", gis, "2503.01328", options=_GROUP),
    _looped("gis-h", gis_h, "2503.01328", options=_GROUP),
    _looped("po-h", po_h, "2503.01328", options=_AHEAD),
    _looped("po-f", po_f, "2503.01328", options=_AHEAD),
    _v_shaped("zbv", zbv, "2401.10241", options=_COSTS, aliases=("zbv-zero-bubble",)),
    _v_shaped("v-zb", v_zb, "2405.15362", options=_COSTS),
    _v_shaped("v-half", v_half, "2405.15362", options=_COSTS),
    _v_shaped("v-min", v_min, "2405.15362", options=_COSTS),
    _v_shaped("1f1b-v", one_f_one_b_v, "2405.15362", options=_COSTS),
    _family(Arrangement.WAVE, _EVEN, 2, "hanayo", hanayo, "2308.15762"),
    _v_shaped("dualpipev", dualpipev, "2412.19437"),
    _both_ways(
        "dualpipe",
        dualpipe,
        "2412.19437",
        rule="even P, even M ≥ 2P",
        nearest=lambda p, m: (p + p % 2, max(m + m % 2, 2 * (p + p % 2))),
    ),
    _both_ways(
        "chimera",
        chimera,
        "2107.06925",
        rule="even P, M ≥ 2",
        nearest=lambda p, m: (p + p % 2, max(m, 2)),
    ),
)
