"""Buffers of received tensors: used again within a step, never while anything refers to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import memory
from penstock.runtime.comm.base import MIN_REUSED_BYTES, RecvBuffers
from penstock.stage.boundary import TensorMeta
from tests.processes import run_ranks

CPU = torch.device("cpu")
NUM = MIN_REUSED_BYTES // 4


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> TensorMeta:
    return TensorMeta(shape=torch.Size(shape), dtype=dtype, requires_grad=True)


def test_memory_that_nothing_refers_to_serves_again() -> None:
    buffers = RecvBuffers()
    first, other = buffers.take(meta(2, NUM), CPU), buffers.take(meta(2, NUM), CPU)
    places, version = {first.data_ptr(), other.data_ptr()}, first._version
    assert len(places) == 2
    first.fill_(1).requires_grad_()
    (first * 2).sum().backward()
    del first, other
    again = buffers.take(meta(NUM, 4, dtype=torch.bfloat16), CPU)
    assert again.data_ptr() in places
    assert (again.shape, again.dtype, again.is_contiguous()) == ((NUM, 4), torch.bfloat16, True)
    # Nothing of the tensor before is left in it.
    assert (again.requires_grad, again.grad, again._base) == (False, None, None)
    assert again._version == version


USES: dict[str, Callable[[Tensor], object]] = {
    "view": lambda taken: taken[1:2],
    "graph": lambda taken: torch.ones(NUM, requires_grad=True).mul(taken),
    "array": lambda taken: taken.numpy(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_memory_that_is_in_use_does_not_serve_again(use: Callable[[Tensor], object]) -> None:
    buffers = RecvBuffers()
    taken = buffers.take(meta(NUM), CPU).fill_(3)
    place, kept = taken.data_ptr(), use(taken)
    del taken
    assert buffers.take(meta(NUM), CPU).data_ptr() != place
    del kept
    assert place in {buffers.take(meta(NUM), CPU).data_ptr() for _ in range(2)}


def test_memory_of_shapes_that_are_gone_is_given_back() -> None:
    buffers = RecvBuffers()
    held: list[Tensor] = []
    for rows in range(2, 40):
        held = [buffers.take(meta(rows, NUM), CPU)]
    assert sum(map(len, buffers._by_size.values())) <= 2, held


def peak_bytes(rank: int, num_ranks: int, num_microbatches: int) -> int:
    memory.ROWS = 64  # 1 MB per message
    return memory._peak_bytes(rank, num_ranks, "penstock", num_microbatches)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_does_not_grow_with_the_microbatches_in_the_default_allocator() -> None:
    few, many = (
        [outcome.result() for outcome in run_ranks(peak_bytes, 2, num)] for num in (16, 256)
    )
    for before, after in zip(few, many, strict=True):
        assert after < 1.3 * before, (few, many)
