"""Gives all places of what is shared the same value: that of the first stage's.

It runs once, before the first step, when every rank has its parameters; it knows no gradients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.parallel.tied_names import Groups
from penstock.parallel.tied_places import Shared, buckets, local
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.flat import flat_meta, flatten_tensors, unflatten_tensors
from penstock.schedule.placement import Placement

__all__ = ["equalize"]


def equalize(
    every: Sequence[Shared], groups: Groups, placement: Placement, transport: Transport | None
) -> None:
    """Hold all places against each other, and overwrite all by the first.

    Args:
        every: what this process holds of what is shared.
        groups: what is shared, by stage and name.
        placement: which rank holds which stage.
        transport: this rank's connection; None where one process plays all ranks.

    Raises:
        PartitionError: shapes, dtypes or shards differ, or a place has nothing; the same on
            every rank.
    """
    _compare(every, groups, placement, transport)
    with torch.no_grad():
        for shared in every:
            for other in shared.here[1:]:
                local(other).copy_(local(shared.here[0]))
        if transport is not None:
            for bucket in buckets(every):
                _spread(bucket, transport)
                transport.drain()


def _compare(
    every: Sequence[Shared], groups: Groups, placement: Placement, transport: Transport | None
) -> None:
    mine = [[*shared.title, _described(t), shared.label] for shared in every for t in shared.here]
    notes = [json.dumps(mine).encode()]
    if transport is not None:
        notes = transport.all_gather_bytes(notes[0])
    # By title and rank: what it is there, and what it is called.
    told: dict[tuple[int, str], dict[int, tuple[str, str]]] = {}
    for rank, note in enumerate(notes):
        for number, name, kind, label in json.loads(note):
            was = told.setdefault((number, name), {}).setdefault(rank, (kind, label))
            _refuse_unlike(was, (kind, label))
    for (number, name), places in told.items():
        first = next(iter(places.values()))
        for other in places.values():
            _refuse_unlike(first, other)
        wanted = groups.ranks(number, placement) if transport is not None else ()
        lacking = [rank for rank in wanted if rank not in places]
        if lacking:
            raise PartitionError(
                f"{first[1]} is shared with rank {lacking[0]}, whose stage has no {name!r} in "
                f"{groups.every[number]}; the modules must have the same parameters and buffers"
            )


def _described(tensor: Tensor) -> str:
    told = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    # Of sharded ones (DTensor) what ranks hold is summed: it must be the same part.
    shards = [str(p) for p in getattr(tensor, "placements", ()) if not p.is_replicate()]
    return f"{told}, {tuple(local(tensor).shape)} by {', '.join(shards)}" if shards else told


def _refuse_unlike(one: tuple[str, str], other: tuple[str, str]) -> None:
    if one[0] != other[0]:
        raise PartitionError(
            f"{one[1]} ({one[0]}) and {other[1]} ({other[0]}) can't be shared: shapes, "
            "dtypes or shards differ"
        )


def _spread(bucket: Sequence[Shared], transport: Transport) -> None:
    """Overwrite the values on all ranks by those of the home."""
    likes = [shared.like for shared in bucket]
    home = bucket[0].home
    if transport.rank == home:
        flat = flatten_tensors(likes, likes)
        for peer in bucket[0].ranks:
            if peer != home:
                transport.send(peer, [flat])
        return
    receipt = transport.receive(home, [flat_meta(likes)], likes[0].device)
    for shared, value in zip(bucket, unflatten_tensors(receipt.wait()[0], likes), strict=True):
        for tensor in shared.here:
            assert value is not None, "the home holds what it sends"
            local(tensor).copy_(value)
