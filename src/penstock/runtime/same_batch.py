"""Were all ranks given the same batch? Looked at once, before the first step.

    rank 0, inputs enter     x of shard 0     y            what counts is x of rank 0
    rank 1, the loss         x                y of shard 1   and y of rank 1

A rank that needs no inputs may pass none, or whatever it likes; so ranks that differ are no
mistake by themselves. Mostly they are one: a sampler that deals out the data, or another seed on
each rank. Numbers are compared, not tensors: a few of each.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.stage.pytree import flatten

__all__ = ["looks_of", "remark_on_others"]

_log = logging.getLogger(__name__)
_NUM_SAMPLES = 16


def looks_of(batch: Batch) -> tuple[int, int]:
    """What kind of inputs a rank was given, and a number that tells them from others.

    Two ranks' inputs are alike in kind where both are positional, or keywords of the same names.
    The kind is 0 where none were given.
    """
    if batch.args is None:
        return 0, 0
    is_positional = bool(batch.args[0])
    kind = "positional" if is_positional else repr(sorted(batch.kwargs[0]))
    mbs: Sequence[Any] = batch.args if is_positional else batch.kwargs
    return _number(kind), _number(repr(list(map(_samples, flatten([mbs[0], mbs[-1]])[0]))))


def _samples(leaf: Any) -> Any:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return None
    flat = leaf.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // _NUM_SAMPLES)]
    bits = some.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return tuple(leaf.shape), leaf.dtype, bits.tolist()


def _number(text: str) -> int:
    return zlib.crc32(text.encode()) + 1


def remark_on_others(
    mine: tuple[int, int], rank: int, theirs: Sequence[int], first_rank: int
) -> None:
    """Say that this rank was given other inputs than the one whose are used."""
    if 0 in mine or mine[0] != theirs[0] or mine[1] == theirs[1]:
        return
    _log.warning(
        "rank %d was given other inputs than rank %d, where the model's inputs enter; its targets, "
        "if the loss is computed here, may belong to these: give every rank of a pipeline the same "
        "batch (the same seed, and no DistributedSampler over its ranks), or no inputs where they "
        "are not used",
        rank,
        first_rank,
    )
