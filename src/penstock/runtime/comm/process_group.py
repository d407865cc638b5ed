"""Process groups: the one to run over, its transport, and collectives outside of steps.

It knows ranks and processes, and nothing of models or schedules.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from sys import maxsize
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._torch_compat import takes_cpu_tensors
from penstock.cause import own_group
from penstock.errors import PenstockError, ScheduleError, StageError
from penstock.runtime.agreement import pack_header, unpack_headers
from penstock.runtime.comm.c10d import C10dTransport, control_group
from penstock.runtime.comm.gloo import GlooTransport
from penstock.runtime.comm.nccl import NcclTransport
from penstock.runtime.failure import NO_SCHEDULE, calls_over
from penstock.runtime.watchdog import Peers
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import full_tensor

__all__ = [
    "all_gather_ints",
    "chosen_device",
    "collective_call",
    "from_first_rank",
    "gather_state",
    "make_transport",
    "control_group",
    "process_group",
]

# A small message is waited for so long without a watchdog, and so long without sleeping.
QUICK_S = 0.05
SPIN_S = 2e-3


def chosen_device(asked: torch.device | str | None) -> torch.device:
    """The requested device with its index; by default the CPU, or this process's GPU under
    torchrun.

    Example:
        >>> chosen_device("cpu")
        device(type='cpu')
    """
    local_rank = os.environ.get("LOCAL_RANK")
    if asked is None:
        asked = "cuda" if local_rank is not None and torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda" and device.index is None and local_rank is not None:
        # A launcher may show each process its own GPU alone, as the first.
        return torch.device("cuda", int(local_rank) % (torch.cuda.device_count() or maxsize))
    return indexed(device)


def process_group(
    group: dist.ProcessGroup | None, device: torch.device, ranks: int | None
) -> dist.ProcessGroup | None:
    """The group to run over, initialised under torchrun; None to run all ranks in this process.

    Args:
        group: the user's group, if any.
        device: where stages will live.
        ranks: the number of ranks that the user requests, if any.

    Raises:
        ScheduleError: another number of processes run.
        StageError: this process is not in the group, or it is none.
    """
    if not dist.is_available():
        return None
    makes = group is None and not dist.is_initialized()
    makes = makes and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device.type == "cuda" and (makes or dist.is_initialized()):
        # Torch gathers objects over the current device.
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
    """This rank's connection over ``group``, by the device of the stages' tensors.

    Args:
        group: the pipeline's group.
        device: where the stages' tensors live.
        number: how many schedules over this group were made before, alike on all ranks.
        timeout_s: how long any wait may take.

    Raises:
        StageError: no transport moves tensors of such a device.
    """
    if device.type == "cpu":
        return GlooTransport(group, device, number, timeout_s)
    if device.type == "cuda":
        return NcclTransport(group, device, number, timeout_s)
    raise StageError(
        f"stages on {device.type} can't be joined over processes: messages go from CPU to "
        "CPU (gloo) or from CUDA to CUDA (NCCL); play all ranks in one process, without "
        "torchrun, or put the stages on one of these"
    )


# --- collectives outside of steps: saving, clipping, gathering ---------------------------------


@contextmanager
def collective_call(
    group: dist.ProcessGroup | None, what: str, alike: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A block in which the ranks of a group wait for each other, watched as a step is.

    Args:
        group: the ranks; all processes if None.
        what: the call as messages name it; the same on every rank.
        alike: exceptions that all ranks raise together, so that none waits for another.

    Raises:
        PenstockError: another rank failed, or is in another call.
    """
    group = own_group(group)
    if group is None or group.size() == 1 or not takes_cpu_tensors(group):
        yield
        return
    with _watched(group, what, alike) as transport:
        transport.all_gather_ints(0)
        with transport.waiting_for_ranks():
            yield


# The tensors of the latest gathering, held as in ``C10dTransport``.
_gathered: list[Tensor] = []


def all_gather_ints(group: dist.ProcessGroup, what: str, number: int) -> list[int]:
    """Every rank's integer, by rank, over a group that takes CPU tensors.

    Args:
        group: the ranks.
        what: the call as messages name it; the same on every rank.
        number: this rank's, of 127 bits.

    Raises:
        PenstockError: another rank failed, or is in another call.
    """
    header = pack_header(number, what)
    parts = [torch.empty_like(header) for _ in range(group.size())]
    _gathered[:] = [header, *parts]
    work = group.allgather([parts], [header])
    begun = perf_counter()
    while not work.is_completed() and (waited_s := perf_counter() - begun) < QUICK_S:
        sleep(0 if waited_s < SPIN_S else 5e-5)
    if work.is_completed():
        with suppress(RuntimeError):  # raised again below, under the watchdog
            work.wait()
            calls_over(group).begin(what)
            return unpack_headers(parts)
    with _watched(group, what) as transport:
        transport.wait_for((work,), Peers.ALL_RANKS)
        return unpack_headers(parts)


@contextmanager
def _watched(
    group: dist.ProcessGroup, what: str, alike: tuple[type[Exception], ...] = ()
) -> Iterator[C10dTransport]:
    # One transport for each call, with a number of its own, so that a later call does not read an
    # earlier one's failure. Kept by its group, it would keep the group alive.
    number = NO_SCHEDULE - 1 - calls_over(group).count
    transport = GlooTransport(group, torch.device("cpu"), number, math.inf)
    try:
        transport.begin(what)
        yield transport
    except alike:
        raise
    except BaseException as error:
        raised = transport.fail(error)
        if raised is None or not isinstance(error, Exception):
            raise
        raise raised from error
    finally:
        transport.close()


def from_first_rank(group: dist.ProcessGroup | None, make: Callable[[], str]) -> str:
    """The text that ``make`` returns on the first rank, on every rank; its PenstockError likewise.

    Args:
        group: the ranks; None where all of them are in this process.
        make: called on the first rank alone, since ranks might come to different texts.
    """
    if group is None:
        return make()
    shared: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            shared[0] = make()
        except PenstockError as error:
            shared[1] = error
    source = dist.get_global_rank(group, 0)
    by = control_group(group)
    with collective_call(by, "Pipeline()"):
        dist.broadcast_object_list(shared, src=source, group=by)
    text, failure = shared
    if failure is not None:
        raise failure
    return str(text)


def gather_state(group: dist.ProcessGroup | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all ranks in one, on every rank: full tensors, on the CPU.

    Args:
        group: the ranks; None where all of them are in this process.
        state: this rank's part. Every rank calls, and so does every replica that holds shards
            (DTensors) of the same tensors.
    """
    mine = {
        name: full_tensor(value).detach().cpu() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }
    if group is None:
        return mine
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group=control_group(group))
    return {name: value for part in parts for name, value in part.items()}
