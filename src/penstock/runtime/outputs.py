"""The model's outputs where they leave on several ranks: each of these gets what the others have.

    rank 0   outputs of microbatches 1, 3 ─┐        ┌─► 0, 1, 2, 3
    rank 3   outputs of microbatches 0, 2 ─┴────────┴─► 0, 1, 2, 3

It merges nothing, and knows no losses.
"""

from __future__ import annotations

import torch

from penstock.runtime.batch import Batch
from penstock.runtime.comm.base import Transport
from penstock.schedule.program import Program
from penstock.stage.boundary import BoundarySpec, describe

__all__ = ["join_outputs"]


def join_outputs(
    batch: Batch, program: Program, transport: Transport, device: torch.device
) -> None:
    """Fill ``batch.outputs`` on every rank where outputs leave.

    Args:
        batch: holds the outputs of this rank's own microbatches.
        program: says where outputs leave.
        transport: this rank's connection.
        device: where received outputs go.

    Raises:
        BoundaryError: an output is not made of tensors and plain values.
    """
    placement = program.placement
    leaving: dict[int, list[int]] = {}
    for stage in placement.exits:
        passing = [m for m in range(program.num_microbatches) if placement.passes(m, stage)]
        leaving.setdefault(placement.rank_of(stage), []).extend(passing)
    if transport.rank not in leaving:
        return
    mine = tuple(batch.outputs[m] for m in leaving[transport.rank])
    spec = describe(mine)
    tensors = spec.pack(spec.tensors(mine))
    others = sorted(leaving.keys() - {transport.rank})
    for peer in others:
        transport.send_metadata(peer, spec.encode())
    for peer in others:
        theirs = BoundarySpec.decode(transport.recv_metadata(peer))
        receipt = transport.receive(peer, theirs.metas, device)
        transport.send(peer, tensors)
        outputs = theirs.arguments(theirs.unpack(receipt.wait()))
        for microbatch, output in zip(leaving[peer], outputs, strict=True):
            batch.outputs[microbatch] = output
