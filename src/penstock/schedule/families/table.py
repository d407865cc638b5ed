"""The families of schedules that Penstock has: a file in this folder, and a row here.

``penstock.schedule.registry`` looks names up in the table, and adds the families of users.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import getdoc
from sys import maxsize, modules

from penstock.schedule.families.chimera import chimera
from penstock.schedule.families.chimera import nearest as nearest_chimera
from penstock.schedule.families.dualpipe import dualpipe
from penstock.schedule.families.dualpipe import nearest as nearest_dualpipe
from penstock.schedule.families.dualpipev import dualpipev
from penstock.schedule.families.eager_1f1b import eager_1f1b
from penstock.schedule.families.forward_only import forward_only
from penstock.schedule.families.gis import gis, gis_h
from penstock.schedule.families.gpipe import gpipe
from penstock.schedule.families.hanayo import hanayo
from penstock.schedule.families.interleaved_1f1b import interleaved_1f1b
from penstock.schedule.families.interleaved_zb import interleaved_zb
from penstock.schedule.families.looped_bfs import looped_bfs
from penstock.schedule.families.one_f_one_b import one_f_one_b
from penstock.schedule.families.one_f_one_b_v import one_f_one_b_v
from penstock.schedule.families.po import po_f, po_h
from penstock.schedule.families.seq1f1b import seq1f1b
from penstock.schedule.families.v_half import v_half
from penstock.schedule.families.v_min import v_min
from penstock.schedule.families.v_zb import v_zb
from penstock.schedule.families.zb_capped import zb_1p, zb_2p
from penstock.schedule.families.zb_h1 import zb_h1
from penstock.schedule.families.zb_h2 import zb_h2
from penstock.schedule.families.zbv import zbv
from penstock.schedule.family import Arrangement, Family

__all__ = ["FAMILIES"]

_linear = partial(Family, arrangement=Arrangement.LINEAR, default_virtual=1, virtuals=(1,))
_looped = partial(Family, arrangement=Arrangement.LOOPED, default_virtual=2, virtuals=None)
_v_shaped = partial(Family, arrangement=Arrangement.V_SHAPE, default_virtual=2, virtuals=(2,))
_both_ways = partial(
    Family, arrangement=Arrangement.BIDIRECTIONAL, default_virtual=1, virtuals=(1,)
)

_GROUP = {"group": "the most microbatches that go round the loop together"}
_AHEAD = {"ahead": "how many computations a reload is asked for ahead of its backward"}
_COSTS = {
    "forward": "what a forward costs: a number, or one per stage",
    "input_grad": "what an input gradient costs: a number, or one per stage",
    "weight_grad": "what a weight gradient costs: a number, or one per stage",
}

_ROWS = (
    _looped(
        name="forward-only",
        builder=forward_only,
        default_virtual=1,
        summary="forwards alone, for evaluation",
        source="arXiv:2104.04473",
    ),
    _linear(
        name="gpipe",
        builder=gpipe,
        summary="all forwards, then all backwards",
        source="arXiv:1811.06965",
    ),
    _linear(
        name="1f1b",
        builder=one_f_one_b,
        summary="one forward, one backward in turn: GPipe's time in less memory",
        source="arXiv:2007.01045",
        aliases=("dapple",),
    ),
    _linear(
        name="eager-1f1b",
        builder=eager_1f1b,
        summary="1F1B with twice the warm-up, so that messages travel while ranks compute",
        source="arXiv:2211.05322",
    ),
    _linear(
        name="seq1f1b",
        builder=seq1f1b,
        summary="1F1B over chunks of sequences, for causal models: a smaller bubble, less memory",
        source="arXiv:2406.03488",
        options={"splits": "into how many chunks each sequence is split"},
        splits_sequences=True,
    ),
    _looped(
        name="interleaved-1f1b",
        builder=interleaved_1f1b,
        summary="1F1B over several stages per rank: a smaller bubble, more messages",
        source="arXiv:2104.04473",
        options=_GROUP,
    ),
    _looped(
        name="looped-bfs",
        builder=looped_bfs,
        summary="GPipe over several stages per rank, for sharded parameters",
        source="arXiv:2211.05953",
        aliases=("breadth-first",),
    ),
    _linear(
        name="zb-h1",
        builder=zb_h1,
        summary="1F1B with a split backward: a third of the bubble, the same memory",
        source="arXiv:2401.10241",
    ),
    _linear(
        name="zb-h2",
        builder=zb_h2,
        summary="no bubble within a rank's own time, for twice the memory",
        source="arXiv:2401.10241",
    ),
    _linear(
        name="zb-1p",
        builder=zb_1p,
        summary="zero bubble searched for given costs, in the memory of P activations",
        source="arXiv:2401.10241",
        options=_COSTS,
    ),
    _linear(
        name="zb-2p",
        builder=zb_2p,
        summary="zero bubble searched for given costs, in the memory of 2P activations",
        source="arXiv:2401.10241",
        options=_COSTS,
    ),
    _looped(
        name="interleaved-zb",
        builder=interleaved_zb,
        summary="interleaved, with weight gradients put off into the bubble",
        source="arXiv:2401.10241",
        aliases=("interleaved-zero-bubble",),
    ),
    _looped(
        name="gis",
        builder=gis,
        summary="interleaved zero bubble in less memory, for a larger bubble",
        source="arXiv:2503.01328",
        options=_GROUP,
    ),
    _looped(
        name="gis-h",
        builder=gis_h,
        summary="GIS in groups of P / 2: about half the memory of interleaved 1F1B",
        source="arXiv:2503.01328",
        options=_GROUP,
    ),
    _looped(
        name="po-h",
        builder=po_h,
        summary="interleaved, the activations of the earlier stages offloaded to the host",
        source="arXiv:2503.01328",
        options=_AHEAD,
    ),
    _looped(
        name="po-f",
        builder=po_f,
        summary="GIS, all activations offloaded to the host",
        source="arXiv:2503.01328",
        options=_AHEAD,
    ),
    _v_shaped(
        name="zbv",
        builder=zbv,
        summary="zero bubble over a V-shape, in 1F1B's memory",
        source="arXiv:2401.10241",
        aliases=("zbv-zero-bubble",),
    ),
    _v_shaped(
        name="v-zb",
        builder=v_zb,
        summary="zero bubble over a V-shape by a periodic pattern, in 1F1B's memory",
        source="arXiv:2405.15362",
    ),
    _v_shaped(
        name="v-half",
        builder=v_half,
        summary="half of 1F1B's memory and half of its bubble over a V-shape",
        source="arXiv:2405.15362",
    ),
    _v_shaped(
        name="v-min",
        builder=v_min,
        summary="a third of 1F1B's memory, two thirds of its bubble over a V-shape",
        source="arXiv:2405.15362",
    ),
    _v_shaped(
        name="1f1b-v",
        builder=one_f_one_b_v,
        summary="1F1B over a V-shape: two thirds of its memory, whole backwards",
        source="arXiv:2405.15362",
        options={"limit": "the most activations that a rank may hold"},
    ),
    Family(
        name="hanayo",
        builder=hanayo,
        arrangement=Arrangement.WAVE,
        default_virtual=2,
        virtuals=range(2, maxsize, 2),
        summary="waves down and up the ranks: a bubble that falls with their number",
        source="arXiv:2308.15762",
        options={"waves": "how many waves there are: half of virtual"},
    ),
    _v_shaped(
        name="dualpipev",
        builder=dualpipev,
        summary="forwards and backwards overlapped over a V-shape",
        source="arXiv:2412.19437",
    ),
    _both_ways(
        name="dualpipe",
        builder=dualpipe,
        summary="two directions, a forward of one overlapped with a backward of the other",
        source="arXiv:2412.19437",
        rule="even P, even M ≥ 2P",
        nearest=nearest_dualpipe,
    ),
    _both_ways(
        name="chimera",
        builder=chimera,
        summary="1F1B in two directions, each in the other's bubbles",
        source="arXiv:2107.06925",
        rule="even P, M ≥ 2",
        nearest=nearest_chimera,
    ),
)

FAMILIES = tuple(
    # The docstring of a builder's module draws a timeline, and has formulas and the source.
    replace(row, doc=getdoc(modules[row.builder.__module__]) or "")
    for row in _ROWS
)
