"""What the transport does on NCCL alone, tried over gloo: groups, connections, held sends.

NCCL itself needs a device per rank (``tests/gpu``). That host and device order what they do alike
is not shown here; that the same calls are made by all ranks in an order that ends, is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from penstock.runtime import pipeline_schedule, torch_private
from penstock.runtime.c10d import C10dTransport
from penstock.runtime.nccl import as_wire, pairs_of
from penstock.testing.processes import run_ranks
from tests.agreement import ROUNDING, Twins
from tests.models import features, mlp


class Directed(C10dTransport):
    """Takes the way of CUDA tensors, and notes with whom it makes connections."""

    met: list[int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._on_cuda = True
        self.met = []

    def introduce(self, peers: Iterable[int]) -> None:
        peers = set(peers)
        self.met += sorted(peers)
        super().introduce(peers)


def train_directed(rank: int, num_ranks: int, schedule: str, virtual: int) -> dict[str, Any]:
    """Two steps beside the plain loop, after this rank alone has made groups of its own."""
    made: list[str] = []
    make_group = torch_private.make_group

    def make_gloo_group(ranks: Any, backend: str, name: str, **options: Any) -> dist.ProcessGroup:
        made.append(f"{backend} {name.rpartition('/')[2]}")
        return make_group(ranks, "gloo", name, **options)

    torch_private.make_group = make_gloo_group
    pipeline_schedule.C10dTransport = Directed  # type: ignore[misc]
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    both = Twins(
        mlp(num_ranks * virtual),
        F.mse_loss,
        schedule=schedule,
        virtual=virtual,
        n_microbatches=4,
        tolerance=ROUNDING,
        timeout_s=60.0,
    )
    for step in range(2):
        inputs, target = features(8, step)
        both.step(inputs, target=target)
    both.pipe.eval(inputs)
    (transport,) = both.pipe._schedule.engine.transports
    assert isinstance(transport, Directed)
    return {"made": made, "met": transport.met}


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual"),
    [("1f1b", 3, 1), ("interleaved-1f1b", 3, 2), ("dualpipev", 2, 2), ("dualpipe", 2, 1)],
)
def test_every_direction_has_its_group_and_connections_are_made_first(
    schedule: str, ranks: int, virtual: int
) -> None:
    outcomes = run_ranks(train_directed, ranks, schedule, virtual, timeout_s=120)
    for rank, outcome in enumerate(outcomes):
        told = outcome.result()
        assert told["made"] == ["nccl up", "nccl down"]
        neighbours = {rank - 1, rank + 1} & set(range(ranks))
        assert neighbours <= set(told["met"])


@given(st.integers(2, 8), st.data())
def test_connections_are_never_waited_for_in_a_circle(ranks: int, data: st.DataObject) -> None:
    every = [(low, high) for low in range(ranks) for high in range(low + 1, ranks)]
    wanted = data.draw(st.sets(st.sampled_from(every)))
    queues = {
        rank: list(pairs_of(rank, [a + b - rank for a, b in wanted if rank in (a, b)]))
        for rank in range(ranks)
    }
    left = len(wanted)
    while left:
        heads = [queue[0] for queue in queues.values() if queue]
        meeting = [pair for pair in set(heads) if heads.count(pair) == 2]
        assert meeting, queues
        for low, high in meeting:
            queues[low].pop(0)
            queues[high].pop(0)
            left -= 1


def order_of_group(rank: int, num_ranks: int) -> tuple[list[int], int, int]:
    """A group in an order of its own, made where the ranks are in different numbers of groups."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    group = torch_private.make_group([2, 0, 1], "gloo", "test", timeout_s=60.0)
    total = torch.tensor([rank])
    group.allreduce([total]).wait()
    return dist.get_process_group_ranks(group), group.rank(), int(total)


def test_a_group_is_made_in_the_order_asked_for_whatever_else_ranks_are_in() -> None:
    told = [outcome.result() for outcome in run_ranks(order_of_group, 3)]
    assert told == [([2, 0, 1], 1, 3), ([2, 0, 1], 2, 3), ([2, 0, 1], 0, 3)]


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.int16, torch.float8_e4m3fn, torch.float32, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_what_nccl_does_not_know_travels_as_bytes_of_the_same_memory(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    sent = torch.arange(6.0)[: max(1, 6 * (shape != ()))].to(dtype)
    sent = sent[:0].reshape(shape) if 0 in shape else sent.reshape(shape)
    arrived = torch.zeros(shape, dtype=dtype)
    as_wire(arrived).copy_(as_wire(sent))
    assert torch.equal(arrived.to(torch.complex64), sent.to(torch.complex64))


def test_a_conjugate_travels_conjugated() -> None:
    sent, arrived = torch.tensor([1 + 2j]).conj(), torch.zeros(1, dtype=torch.complex64)
    as_wire(arrived).copy_(as_wire(sent))
    assert arrived.item() == 1 - 2j


def train_elsewhere(rank: int, num_ranks: int) -> None:
    """A step while new tensors are made elsewhere unless it is said where."""
    both = Twins(mlp(2), F.mse_loss, schedule="zb-h1", n_microbatches=4, timeout_s=60.0)
    inputs, target = features(8, 0)
    with torch.device("meta"):
        both.pipe.step(inputs, target=target)
        both.pipe.trace()
    both.pipe.eval(inputs)


def test_the_default_device_is_for_the_users_tensors() -> None:
    for outcome in run_ranks(train_elsewhere, 2, timeout_s=120):
        outcome.result()
