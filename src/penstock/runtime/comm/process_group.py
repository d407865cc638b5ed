"""The pipeline's process group, its transport, and collectives outside of steps.

This module depends on neither models nor schedules.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from sys import maxsize
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._torch_compat import takes_cpu_tensors
from penstock.cause import own_group
from penstock.errors import PenstockError, ScheduleError, StageError
from penstock.runtime.comm.agreement import pack_header, unpack_headers
from penstock.runtime.comm.c10d import C10dTransport, control_group
from penstock.runtime.comm.gloo import GlooTransport
from penstock.runtime.comm.nccl import NcclTransport
from penstock.runtime.failure import NO_SCHEDULE, calls_over
from penstock.runtime.watchdog import Peers
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import full_tensor

__all__ = [
    "Link",
    "all_gather_ints",
    "chosen_device",
    "collective_call",
    "control_group",
    "from_first_rank",
    "gather_state",
    "make_transport",
    "measure_link",
    "process_group",
]

# The time that a wait for a small message runs without a watchdog, and without sleeping.
QUICK_S = 0.05
SPIN_S = 2e-3
# Of ``measure_link``: the size of a large message, the number of round trips (the fastest counts,
# since a rank may have waited in the others), and the lower bound on the share of a large message's
# time that the bandwidth term takes.
LARGE_BYTES = 1 << 20
NUM_TRIPS = 5
MIN_SHARE = 0.01


def chosen_device(requested: torch.device | str | None) -> torch.device:
    """The requested device with its index; by default this process's GPU under torchrun, else CPU.

    Example:
        >>> chosen_device("cpu")
        device(type='cpu')
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if requested is None:
        requested = "cuda" if local_rank is not None and torch.cuda.is_available() else "cpu"
    device = torch.device(requested)
    if device.type == "cuda" and device.index is None and local_rank is not None:
        # A launcher may make only one GPU visible to each process, as index 0.
        return torch.device("cuda", int(local_rank) % (torch.cuda.device_count() or maxsize))
    return indexed(device)


def process_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks: int | None
) -> dist.ProcessGroup | None:
    """The pipeline's group, initialized under torchrun; None to run all ranks in this process.

    Args:
        group: the user's group, if any.
        device: the stages' device.
        ranks: the number of ranks that the user passed, if any.

    Raises:
        ScheduleError: ``ranks`` differs from the number of processes.
        StageError: ``group`` is no process group, or does not include this process.
    """
    if not dist.is_available():
        return None
    makes = group is None and not dist.is_initialized()
    makes = makes and int(os.environ.get("WORLD_SIZE", "1")) > 1
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
    if device.type == "cpu":
        return GlooTransport(group, device, number, timeout_s)
    if device.type == "cuda":
        return NcclTransport(group, device, number, timeout_s)
    raise StageError(
        f"stages on {device.type} can't be joined over processes: messages go from CPU to "
        "CPU (gloo) or from CUDA to CUDA (NCCL); run all ranks in one process, without "
        "torchrun, or put the stages on one of these"
    )


# --- collectives outside of steps: saving, clipping, gathering -----------------------------------


@contextmanager
def collective_call(
    group: dist.ProcessGroup | None, call: str, shared_errors: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A watched context in which the ranks of a group wait for each other.

    Args:
        group: the ranks; all processes if None.
        call: the call's name in messages; the same on every rank.
        shared_errors: exceptions that all ranks raise together.

    Raises:
        PenstockError: another rank failed, or is in another call.
    """
    group = own_group(group)
    if group is None or group.size() == 1 or not takes_cpu_tensors(group):
        yield
        return
    with _transport(group, call, shared_errors) as transport:
        transport.all_gather_ints(0)
        with transport.watching(Peers.ALL_RANKS):
            yield


# References to the latest gathered tensors, for the reason in ``C10dTransport``.
_gathered: list[Tensor] = []


def all_gather_ints(group: dist.ProcessGroup, call: str, number: int) -> list[int]:
    """Gather every rank's integer (127 bits), by rank, over a group that handles CPU tensors;
    arguments and exceptions as of ``collective_call``."""
    header = pack_header(number, call)
    parts = [torch.empty_like(header) for _ in range(group.size())]
    _gathered[:] = [header, *parts]
    work = group.allgather([parts], [header])
    begun = time.perf_counter()
    while not work.is_completed() and (waited_s := time.perf_counter() - begun) < QUICK_S:
        time.sleep(0 if waited_s < SPIN_S else 5e-5)
    if work.is_completed():
        with suppress(RuntimeError):  # raised again below, under the watchdog
            work.wait()
            calls_over(group).begin(call)
            return unpack_headers(parts)
    with _transport(group, call) as transport:
        transport.wait_for((work,), Peers.ALL_RANKS)
        return unpack_headers(parts)


@contextmanager
def _transport(
    group: dist.ProcessGroup, call: str, shared_errors: tuple[type[Exception], ...] = ()
) -> Iterator[C10dTransport]:
    # Each call has its own transport and number, so that it does not read an earlier call's
    # failure. A transport cached by group would keep the group alive.
    number = NO_SCHEDULE - 1 - calls_over(group).count
    transport = GlooTransport(group, torch.device("cpu"), number, math.inf)
    try:
        transport.begin(call)
        yield transport
    except shared_errors:
        raise
    except BaseException as error:
        raised = transport.fail(error)
        if raised is None or not isinstance(error, Exception):
            raise
        raise raised from error
    finally:
        transport.close()


def from_first_rank(group: dist.ProcessGroup | None, make: Callable[[], str]) -> str:
    """Broadcast the text, or the PenstockError, of ``make`` on the first rank, since its result
    may differ between ranks; ``group`` is None if all ranks are in this process."""
    if group is None:
        return make()
    shared: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            shared[0] = make()
        except PenstockError as error:
            shared[1] = error
    control = control_group(group)
    with collective_call(control, "Pipeline()"):
        dist.broadcast_object_list(shared, src=dist.get_global_rank(group, 0), group=control)
    text, failure = shared
    if failure is not None:
        raise failure
    return str(text)


def gather_state(group: dist.ProcessGroup | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the states of all ranks, on every rank, as full tensors on the CPU.

    Args:
        group: the ranks; None if all ranks are in this process.
        state: this rank's part. The call is collective over all ranks, and over all replicas with
            shards (DTensors) of the same tensors.
    """
    local = {
        name: full_tensor(value).detach().cpu() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    if group is None:
        return local
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, local, group=control_group(group))
    return {name: value for part in parts for name, value in part.items()}


# --- the connection between neighbours -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest connection between neighbouring ranks.

    Args:
        latency_s: the time of the smallest message, in seconds.
        bandwidth: bytes per second, in addition to the latency.
    """

    latency_s: float
    bandwidth: float


def measure_link(group: dist.ProcessGroup, device: torch.device) -> Link:
    """Time messages between neighbours, on ``device``; a collective with one result on all ranks.

    round 0   0 ↔ 1   2 ↔ 3   4 ↔ 5     a small message there and back, then a large one
    round 1       1 ↔ 2   3 ↔ 4
    """
    messages = [torch.zeros(size, dtype=torch.uint8, device=device) for size in (1, LARGE_BYTES)]
    slowest = torch.zeros(len(messages), dtype=torch.float64, device=device)
    for parity in (0, 1):
        starts = group.rank() % 2 == parity
        peer = group.rank() + (1 if starts else -1)
        if 0 <= peer < group.size():
            times = [_trip_s(group, message, peer, starts=starts) for message in messages]
            slowest = slowest.max(torch.tensor(times, dtype=torch.float64, device=device))
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group)
    small_s, large_s = slowest.tolist()
    # On a busy machine the small message may have taken as long as the large one.
    bytes_s = max(large_s - small_s, MIN_SHARE * large_s)
    return Link(latency_s=small_s, bandwidth=LARGE_BYTES / bytes_s)


def _trip_s(group: dist.ProcessGroup, message: Tensor, peer: int, *, starts: bool) -> float:
    """The one-way time of a message, in seconds."""
    best_s = math.inf
    for _ in range(1 + NUM_TRIPS):  # the first message makes the connection
        started = time.perf_counter()
        for sends in (starts, not starts):
            (group.send if sends else group.recv)([message], peer, 0).wait()
            if message.device.type != "cpu":
                torch.accelerator.synchronize(message.device)
        best_s = min(best_s, (time.perf_counter() - started) / 2)
    return best_s
