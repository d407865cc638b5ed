"""What the transport does on NCCL alone, tried over gloo: groups, connections, held sends.

NCCL itself needs a device per rank (``tests/gpu``). That host and device order what they do alike
is not shown here; that the same calls are made by all ranks in an order that ends, is.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from penstock import Pipeline, _torch_compat
from penstock.errors import ScheduleError
from penstock.runtime import pipeline_schedule
from penstock.runtime.comm.c10d import C10dTransport, as_wire
from penstock.runtime.comm.nccl import NcclTransport, pairs_of
from penstock.runtime.failure import ErrorStore, GroupRecord, Peers, Watchdog, record_of
from tests.agreement import ROUNDING, Twins
from tests.models import features, mlp
from tests.processes import run_ranks


class Directed(NcclTransport):
    """Takes the way of CUDA tensors, and notes with whom it makes connections."""

    met: list[int]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.met = []
        self.gave_up = threading.Event()

    def abort_groups(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().abort_groups(groups)
        self.gave_up.set()

    def register_peers(self, peers: Iterable[int]) -> None:
        peers = set(peers)
        self.met += sorted(peers)
        super().register_peers(peers)


def take_the_way_of_nccl() -> list[str]:
    """From now on, in this process; returns what groups are made, as they are."""
    made: list[str] = []
    make_group = _torch_compat.make_group

    def make_gloo_group(ranks: Any, backend: str, name: str, **options: Any) -> dist.ProcessGroup:
        made.append(f"{backend} {name.rpartition('/')[2]}")
        return make_group(ranks, "gloo", name, **options)

    _torch_compat.make_group = make_gloo_group
    pipeline_schedule.make_transport = Directed  # type: ignore[assignment]
    return made


def train_directed(rank: int, num_ranks: int, schedule: str, virtual: int) -> dict[str, Any]:
    """Two steps beside the plain loop, after this rank alone has made groups of its own."""
    made = take_the_way_of_nccl()
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


def train_two(rank: int, num_ranks: int) -> tuple[list[str], list[int]]:
    """Two pipelines over one group, the second one by a schedule with further neighbours."""
    made, connected = take_the_way_of_nccl(), []
    for schedule, virtual in (("1f1b", 1), ("interleaved-1f1b", 2)):
        pipe = Pipeline(
            mlp(num_ranks * virtual),
            loss_fn=F.mse_loss,
            schedule=schedule,
            n_microbatches=num_ranks,
            timeout_s=60.0,
        )
        inputs, target = features(2 * num_ranks, 0)
        pipe.step(inputs, target=target)
        connected.append(len(record_of(dist.group.WORLD).data_plane.connected))  # type: ignore[arg-type]
    return made, connected


def test_schedules_over_one_group_share_its_communicators() -> None:
    for rank, outcome in enumerate(run_ranks(train_two, 3, timeout_s=120)):
        made, connected = outcome.result()
        assert made == ["nccl up", "nccl down"]
        assert connected == [2 if rank == 1 else 1, 2]


def fail(rank: int, num_ranks: int, when: str) -> tuple[str, str, float]:
    """What each rank raises where the second fails, and after how many seconds."""
    take_the_way_of_nccl()
    pipe = Pipeline(mlp(2), loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=4, timeout_s=60.0)
    inputs, target = features(8, 0)
    batch: dict[str, Any] = {"arg_mbs": [(inputs,)] * 5} if rank and when == "at first" else {}
    if when == "later":
        (transport,) = pipe._schedule.engine.transports
        assert isinstance(transport, Directed)

        microbatches = iter(range(4))

        def forward(module: object, args: object) -> None:
            if rank:
                raise ValueError("5 ready microbatches")
            # The first rank waits for its device, which nobody sees, and that for the second.
            assert next(microbatches) == 0 or transport.gave_up.wait(30)

        pipe.stages[0].submod.register_forward_pre_hook(forward)
    began = time.monotonic()
    try:
        pipe.step(*([] if batch else [inputs]), target=target, **batch)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "nothing was raised", 0.0


@pytest.mark.parametrize(("when", "own"), [("at first", "ValueError"), ("later", "StageError")])
def test_a_failure_is_heard_where_no_wait_of_ours_is(when: str, own: str) -> None:
    """While torch makes groups, and while the host waits for the device."""
    first, second = (outcome.result() for outcome in run_ranks(fail, 2, when, timeout_s=90))
    assert first[0] == "PeerError" and second[0] == own
    for _, message, elapsed_s in (first, second):
        assert "5 ready microbatches" in message
        assert elapsed_s < 5


class Group:
    """A group that notes what is asked of it, and a work that is done."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def abort(self) -> None:
        self.noted.append("abort")

    def barrier(self, options: dist.BarrierOptions) -> Group:
        self.noted.append(options.device)
        return self

    def wait(self) -> None:
        pass


class Busy:
    """Of a device's streams, whether the step before is over: at the third look."""

    def __init__(self, noted: list[Any]) -> None:
        self.noted = noted

    def is_over(self, event: object) -> bool:
        self.noted.append(event)
        return len(self.noted) > 2


def test_the_step_before_ends_before_its_messages_are_given_up() -> None:
    noted: list[Any] = []
    transport: Any = object.__new__(NcclTransport)
    transport._streams, transport._last_step = Busy(noted), "the step before"
    transport.abort_groups([Group(noted), Group(noted)])
    assert noted == ["the step before"] * 3 + ["abort"] * 2


class Waiting:
    """A device's streams that have passed the first mark alone."""

    def __init__(self) -> None:
        self.made: list[list[str]] = []

    def current(self) -> None:
        return None

    def event(self) -> list[str]:
        self.made.append([])
        return self.made[-1]

    def mark(self, event: list[str], stream: None) -> None:
        event.append("marked")

    def is_over(self, event: list[str]) -> bool:
        return event is self.made[0] and len(event) == 1


class NoFailures(ErrorStore):
    """An error store to which nobody writes."""

    def __init__(self) -> None:
        self.is_lost, self.interval_s = False, 0.1

    def read(self, waited_s: float = 0.0) -> None:
        return None


@pytest.mark.parametrize("late", [2, Peers.REPLICAS])
def test_what_the_device_waits_for_has_a_deadline(late: Any) -> None:
    """Also while the host is in the user's code, which may wait for the device."""
    transport: Any = object.__new__(NcclTransport)
    given_up: list[Any] = []
    ended = threading.Event()

    def abort(peer: Any) -> None:
        given_up.append(peer)
        ended.set()

    watchdog = transport._watchdog = Watchdog(0.3, abort, transport.device_wait)
    transport._streams, transport._limit, transport._device_waits = Waiting(), (), deque()
    watchdog.start(NoFailures(), always=True)
    for peer in (1, late, 3):
        if isinstance(peer, int):
            transport.wait_for_message((Group([]),), (), peer)
        else:
            with transport.waiting_for_replicas():
                pass
    assert ended.wait(20)
    assert given_up == [late] and watchdog.timed_out
    with pytest.raises(RuntimeError, match="given up"):
        transport.wait_for((Group([]),), 5)
    waited = watchdog.stop()
    assert waited is not None and waited[1] == late


def test_ranks_meet_on_the_host() -> None:
    """In a group that has NCCL as well, a barrier would be one of the devices."""
    noted: list[Any] = []
    transport: Any = object.__new__(C10dTransport)
    transport._watchdog, transport._control = Watchdog(1.0, noted.append), Group(noted)
    transport._limit, transport._record, transport._collected = (), GroupRecord(), ()
    transport.barrier()
    assert noted == [torch.device("cpu")] and transport._record.num_collectives == 1


def make_with_one_queue(rank: int, num_ranks: int) -> str:
    """Rank 1 alone has one queue for all streams."""
    take_the_way_of_nccl()
    if rank == 1:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    with pytest.raises(ScheduleError) as caught:
        pipe = Pipeline(mlp(num_ranks), loss_fn=F.mse_loss, n_microbatches=2, timeout_s=60.0)
        inputs, target = features(4, 0)
        pipe.step(inputs, target=target)
    return str(caught.value)


def test_one_queue_for_all_streams_is_refused_on_every_rank() -> None:
    for outcome in run_ranks(make_with_one_queue, 2):
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1 gives the device one queue" in outcome.result()


def dropped(rank: int, num_ranks: int) -> int:
    """How many threads are left of pipelines that are gone."""
    for _ in range(3):
        both = Twins(mlp(2), F.mse_loss, schedule="1f1b", n_microbatches=4, timeout_s=60.0)
        inputs, target = features(8, 0)
        both.step(inputs, target=target)
        del both
        gc.collect()
    return sum(thread.name == "penstock-watchdog" for thread in threading.enumerate())


def test_a_pipeline_that_is_dropped_leaves_no_thread() -> None:
    for outcome in run_ranks(dropped, 2):
        assert outcome.result() == 0


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


@pytest.mark.parametrize("distances", [{1}, {1, 63}, {1, 2}])
def test_neighbours_connect_in_rounds_whose_number_does_not_grow_with_the_ranks(
    distances: set[int],
) -> None:
    ranks, done, end = 64, 0, Counter[int]()
    wanted = {(low, low + by) for by in distances for low in range(ranks - by)}
    queues = {
        rank: pairs_of(rank, [a + b - rank for a, b in wanted if rank in (a, b)])
        for rank in range(ranks)
    }
    while done < len(wanted):
        heads = Counter(queue[0] for queue in queues.values() if queue)
        for low, high in [pair for pair, count in heads.items() if count == 2]:
            end[low] = end[high] = 1 + max(end[low], end[high])
            done += 1
            for rank in (low, high):
                queues[rank].pop(0)
    assert max(end.values()) <= 2 * len(distances)


def order_of_group(rank: int, num_ranks: int) -> tuple[list[int], int, int]:
    """A group in an order of its own, made where the ranks are in different numbers of groups."""
    for _ in range(rank):
        dist.new_group([rank], use_local_synchronization=True)
    group = _torch_compat.make_group([2, 0, 1], "gloo", "test", timeout_s=60.0)
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
def test_dtypes_unknown_to_nccl_travel_as_bytes_of_the_same_memory(
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
