"""The pipeline's process group, its transport, and collectives outside of steps."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._torch_compat import takes_cpu_tensors
from penstock.cause import default_group, own_group, store_of
from penstock.errors import PenstockError, ScheduleError, StageError
from penstock.runtime.comm.c10d import C10dTransport, control_group
from penstock.runtime.comm.nccl import NcclTransport
from penstock.runtime.failure import Peers, record_of
from penstock.stage.device_streams import indexed

__all__ = [
    "Link", "chosen_device", "collective_call", "from_rank", "from_first_replica",
    "gather_objects", "make_transport", "measure_link", "process_group",
]  # fmt: skip

T = TypeVar("T")

# Of ``measure_link``: the size of a large message, and the number of round trips (the fastest
# counts, since a rank may have waited in the others).
LARGE_BYTES, NUM_TRIPS = 1 << 20, 5


def chosen_device(requested: torch.device | str | None) -> torch.device:
    """The requested device with its index; by default this process's GPU under torchrun, else
    CPU."""
    local_rank = os.environ.get("LOCAL_RANK")
    if requested is None:
        requested = "cuda" if local_rank is not None and torch.cuda.is_available() else "cpu"
    device = torch.device(requested)
    if device.type == "cuda" and device.index is None and local_rank is not None:
        # A launcher may make only one GPU visible to each process, as index 0.
        visible = torch.cuda.device_count()
        return torch.device("cuda", int(local_rank) % visible if visible else int(local_rank))
    return indexed(device)


def process_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks: int | None
) -> dist.ProcessGroup | None:
    """The pipeline's group, initialized under torchrun; None to run all ranks in this process.

    Raises:
        ScheduleError: ``ranks`` differs from the number of processes.
        StageError: ``group`` is no process group, or does not include this process.
    """
    if not dist.is_available():
        return None
    is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    makes = group is None and not dist.is_initialized() and is_launched
    if device.type == "cuda" and (makes or dist.is_initialized()):
        # Torch gathers objects through the current device.
        torch.cuda.set_device(device)
    if makes:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group = own_group(group)
    if group is None or group.size() == 1:
        return None
    if ranks not in (None, group.size()):
        raise ScheduleError(
            f"ranks={ranks}, but {group.size()} processes run: leave ranks out under torchrun"
        )
    return group


def make_transport(
    group: dist.ProcessGroup, device: torch.device, number: int, timeout_s: float
) -> C10dTransport:
    """Make this rank's transport for the stages' device; arguments as of ``C10dTransport``.

    Raises:
        StageError: no transport supports the device.
    """
    kinds: dict[str, type[C10dTransport]] = {"cpu": C10dTransport, "cuda": NcclTransport}
    if device.type not in kinds:
        raise StageError(
            f"stages on {device.type} can't be joined over processes: messages go from CPU to "
            "CPU (gloo) or from CUDA to CUDA (NCCL); run all ranks in one process, without "
            "torchrun, or put the stages on one of these"
        )
    return kinds[device.type](group, device, number, timeout_s)


@contextmanager
def collective_call(
    group: dist.ProcessGroup | None, call: str, shared_errors: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A watched context, named ``call``, in which the ranks of ``group`` wait for each other.

    Args:
        shared_errors: exceptions that all ranks raise together.

    Raises:
        PenstockError: another rank failed, or is in another call.
    """
    group = own_group(group)
    if group is None or group.size() == 1 or not takes_cpu_tensors(group):
        yield
        return
    # Each call has its own number, unlike any schedule's, and reads no earlier call's failure.
    number = -1 - record_of(group).num_calls
    transport = C10dTransport(group, torch.device("cpu"), number, math.inf)
    try:
        transport.begin(call)
        transport.all_gather_bytes(b"")
        with transport.watching(Peers.ALL_RANKS):
            yield
    except shared_errors:
        raise
    except BaseException as error:
        raised = transport.fail(error)
        if raised is None or not isinstance(error, Exception):
            raise
        raise raised from error
    finally:
        transport.close()


def from_first_replica(group: dist.ProcessGroup, subject: object, make: Callable[[], T]) -> T:
    """The result of ``make`` in the first pipeline of the job that has one for ``subject``.

    Called on one rank of each pipeline. Replicas of a pipeline call it alike over other groups, and
    get one result without waiting for each other. The n-th calls for a subject belong together.
    """
    made = make()
    if group.size() == dist.get_world_size():
        return made
    store = store_of(group)
    name = f"penstock/replicas/{hashlib.sha256(repr(subject).encode()).hexdigest()[:16]}"
    number = store.add(f"{name}/{dist.get_rank()}", 1)
    text = base64.b85encode(zlib.compress(pickle.dumps(made))).decode()
    first = store.compare_set(f"{name}/made/{number}", "", text)
    result: T = pickle.loads(zlib.decompress(base64.b85decode(first)))
    return result


def from_rank(group: dist.ProcessGroup | None, rank: int, call: str, make: Callable[[], T]) -> T:
    """Broadcast the result, or the PenstockError, of ``make`` on one rank, as part of a ``call``;
    ``group`` is None if all ranks are in this process."""
    if group is None:
        return make()
    made: list[Any] = [None]
    if group.rank() == rank:
        try:
            made = [make()]
        except PenstockError as error:
            made = [error]
    control = control_group(group)
    with collective_call(control, call):
        dist.broadcast_object_list(made, group=control, group_src=rank)
    if isinstance(made[0], PenstockError):
        raise made[0]
    result: T = made[0]
    return result


def gather_objects(group: dist.ProcessGroup | None, mine: T) -> list[T]:
    """Gather every rank's object, by rank of ``group``, or of all processes if None."""
    if default_group() is None:
        return [mine]
    gathered = [mine for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest connection between neighbours: the smallest message's time in seconds, and the
    bytes per second beyond it."""

    latency_s: float
    bandwidth: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Time messages between neighbours, on ``device``; a collective with one result on all ranks.

    round 0   0 ↔ 1   2 ↔ 3   4 ↔ 5     a small message there and back, then a large one
    round 1       1 ↔ 2   3 ↔ 4
    """
    slowest = torch.zeros(2, dtype=torch.float64, device=device)
    for parity in (0, 1):
        starts = group.rank() % 2 == parity
        peer = group.rank() + (1 if starts else -1)
        for i, size in enumerate((1, LARGE_BYTES) if 0 <= peer < group.size() else ()):
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            trips = [_trip_s(group, message, peer, starts) for _ in range(1 + NUM_TRIPS)]
            slowest[i] = max(float(slowest[i]), min(trips))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    small_s, large_s = slowest.tolist()
    # On a busy machine the small message may have taken as long as the large one.
    bytes_s = max(large_s - small_s, 0.01 * large_s)
    return Link(latency_s=small_s, bandwidth=LARGE_BYTES / bytes_s)


def _trip_s(group: dist.ProcessGroup, message: Tensor, peer: int, starts: bool) -> float:
    """The one-way time of a message, in seconds."""
    started = time.perf_counter()
    for sends in (starts, not starts):
        (group.send if sends else group.recv)([message], peer, 0).wait()
        if message.device.type != "cpu":
            torch.accelerator.synchronize(message.device)
    return (time.perf_counter() - started) / 2
