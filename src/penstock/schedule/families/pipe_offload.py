"""PO-H and PO-F: interleaved schedules that offload activations to the host.

PO-H, P = 2, V = 2, M = 3 (tF = tB = tW = 1); lower case is a rank's second stage. Copies run beside
the compute; rank 0 offloads the activations of F0, F1 and F2:

    rank 0  F0 F1 f0 .. .. i0 w0 F2 f1 I0 W0 i1 w1 f2 I1 W1 i2 w2 I2 W2
    rank 1  .. F0 F1 f0 i0 w0 I0 W0 F2 f1 i1 w1 I1 W1 f2 i2 w2 I2 W2 ..

A periodic pattern: forwards follow one another down all stages, input gradients up again, each
weight gradient right after its input gradient. An activation of stage s of S = PV lives for about
2(S - s) units, so the earlier half of the stages holds three quarters of the memory.

PO-F, P = 2, V = 2, M = 3, is GIS with copies put in:

    rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 .. I0 W0 f2 I1 W1 i2 w2 I2 W2
    rank 1  .. F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 I1 W1 f2 i2 w2 I2 W2 ..

            offloaded                            activations held     bubble, unit costs
    po-h    the earlier half of a rank's stages  about (V + 2) P / 8  about V(2P - 3), at most 2PV
    po-f    all stages                           none                 (P - 1)(tF + tB)

and at most four more that are being made, used or copied. Copies are free as long as an activation
is copied there and back while a rank runs one F, one I and one W. Any P ≥ 1, V ≥ 1, M ≥ 1.

Source: arXiv:2503.01328 (PipeOffload).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.families.common import program_of, with_weight_grads
from penstock.schedule.families.interleaved import gis
from penstock.schedule.families.periodic import PeriodicPattern, chain_pattern
from penstock.schedule.passes import offload
from penstock.schedule.placement import Placement, looped
from penstock.schedule.program import Program

__all__ = ["po_f", "po_h"]


def po_h(*, ranks: int, microbatches: int, virtual: int, ahead: int = 1) -> Program:
    """Interleaved, the activations of the earlier stages offloaded to the host."""
    placement = looped(ranks, virtual)
    orders = _pattern(placement, virtual).orders(placement, microbatches=microbatches)
    orders = [with_weight_grads(order, placement.num_stages) for order in orders]
    program = program_of("po-h", placement, microbatches, orders)
    earlier = range(ranks * -(-virtual // 2))
    return offload(program, stages=earlier, ahead=ahead)


def po_f(*, ranks: int, microbatches: int, virtual: int, ahead: int = 1) -> Program:
    """GIS, all activations offloaded to the host."""
    program = gis(ranks=ranks, microbatches=microbatches, virtual=virtual)
    return replace(offload(program, ahead=ahead), name="po-f")


def _pattern(placement: Placement, virtual: int) -> PeriodicPattern:
    """The pattern with the shortest activation lifetimes, over paths of forwards between ranks.

    A backward takes two units of its rank, but passes its input gradient on after the first.
    """
    ranks, stages = placement.num_ranks, placement.num_stages
    patterns = []
    for around in range(1, 2 * virtual + 2):
        forward = [1 if stage % ranks else around for stage in range(1, stages)]
        gaps = (*forward, *[1] * stages)
        patterns.append(chain_pattern(placement, gaps=gaps, period=3 * virtual, full=True))
    later = range(ranks * -(-virtual // 2) % stages, stages)
    return min(patterns, key=lambda p: (_lifetime(p, placement, later), max(p.starts)))


def _lifetime(pattern: PeriodicPattern, placement: Placement, stages: range) -> float:
    """The longest lifetime on any rank of the activations of ``stages``."""
    starts, num_stages = pattern.starts, placement.num_stages
    return max(
        sum(starts[num_stages + s] - starts[s] for s in placement.stages_of(rank) if s in stages)
        for rank in range(placement.num_ranks)
    )
