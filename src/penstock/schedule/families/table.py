"""Penstock's families of schedules: each is a file in this folder and a row here.

``penstock.schedule.registry`` looks names up in the table, and adds users' families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import getdoc
from sys import maxsize, modules
from typing import Any

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
from penstock.schedule.program import Program

__all__ = ["FAMILIES"]


def _rows_of(
    arrangement: Arrangement, virtual: int, virtuals: Sequence[int] | None
) -> Callable[..., Family]:
    """A row factory for one arrangement."""

    def row(
        name: str,
        builder: Callable[..., Program],
        summary: str | None = None,
        default_virtual: int = virtual,
        **more: Any,
    ) -> Family:
        # The docstring of a builder's module starts with a one-line summary, followed by a
        # timeline, formulas and the source.
        doc = getdoc(modules[builder.__module__]) or ""
        source = re.search(r"Source:.*?(arXiv:\d+\.\d+)", doc, flags=re.DOTALL)
        assert source is not None, "each method is published"
        return Family(
            name=name,
            builder=builder,
            arrangement=arrangement,
            default_virtual=default_virtual,
            virtuals=virtuals,
            summary=summary or doc.partition("\n")[0].partition(": ")[2].rstrip("."),
            source=source[1],
            doc=doc,
            **more,
        )

    return row


_linear = _rows_of(Arrangement.LINEAR, 1, (1,))
_looped = _rows_of(Arrangement.LOOPED, 2, None)
_v_shaped = _rows_of(Arrangement.V_SHAPE, 2, (2,))
_wave = _rows_of(Arrangement.WAVE, 2, range(2, maxsize, 2))
_both_ways = _rows_of(Arrangement.BIDIRECTIONAL, 1, (1,))

_GROUP = {"group": "the most microbatches that go round the loop together"}
_AHEAD = {"ahead": "how many computations a reload is asked for ahead of its backward"}
_COSTS = {
    "forward": "what a forward costs: a number, or one per stage",
    "input_grad": "what an input gradient costs: a number, or one per stage",
    "weight_grad": "what a weight gradient costs: a number, or one per stage",
}

FAMILIES: tuple[Family, ...] = (
    _looped("forward-only", forward_only, default_virtual=1),
    _linear("gpipe", gpipe),
    _linear("1f1b", one_f_one_b, aliases=("dapple",)),
    _linear("eager-1f1b", eager_1f1b),
    _linear(
        "seq1f1b",
        seq1f1b,
        options={"splits": "into how many chunks each sequence is split"},
        splits_sequences=True,
    ),
    _looped("interleaved-1f1b", interleaved_1f1b, options=_GROUP),
    _looped("looped-bfs", looped_bfs, aliases=("breadth-first",)),
    _linear("zb-h1", zb_h1),
    _linear("zb-h2", zb_h2),
    _linear(
        "zb-1p",
        zb_1p,
        "zero bubble searched for given costs, in the memory of P activations",
        options=_COSTS,
    ),
    _linear(
        "zb-2p",
        zb_2p,
        "zero bubble searched for given costs, in the memory of 2P activations",
        options=_COSTS,
    ),
    _looped("interleaved-zb", interleaved_zb, aliases=("interleaved-zero-bubble",)),
    _looped(
        "gis", gis, "interleaved zero bubble in less memory, for a larger bubble", options=_GROUP
    ),
    _looped(
        "gis-h",
        gis_h,
        "GIS in groups of P / 2: about half the memory of interleaved 1F1B",
        options=_GROUP,
    ),
    _looped(
        "po-h",
        po_h,
        "interleaved, the activations of the earlier stages offloaded to the host",
        options=_AHEAD,
    ),
    _looped("po-f", po_f, "GIS, all activations offloaded to the host", options=_AHEAD),
    _v_shaped("zbv", zbv, aliases=("zbv-zero-bubble",)),
    _v_shaped("v-zb", v_zb),
    _v_shaped("v-half", v_half),
    _v_shaped("v-min", v_min),
    _v_shaped(
        "1f1b-v", one_f_one_b_v, options={"limit": "the most activations that a rank may hold"}
    ),
    _wave("hanayo", hanayo, options={"waves": "how many waves there are: half of virtual"}),
    _v_shaped("dualpipev", dualpipev),
    _both_ways("dualpipe", dualpipe, rule="even P, even M ≥ 2P", nearest=nearest_dualpipe),
    _both_ways("chimera", chimera, rule="even P, M ≥ 2", nearest=nearest_chimera),
)
