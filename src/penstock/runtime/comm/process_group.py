"""The process group that a pipeline runs over, and what its ranks tell each other beforehand.

It knows ranks and processes, and nothing of models or schedules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from sys import maxsize
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from penstock._torch_compat import make_group, takes_cpu_tensors
from penstock.compat.announcing import key_of, own_group
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime.together import together
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import full_tensor

__all__ = ["chosen_device", "from_first_rank", "gather_state", "objects_group", "process_group"]

# How long torch waits for ranks that gather objects.
_OBJECTS_TIMEOUT_S = 1800.0


def chosen_device(asked: torch.device | str | None) -> torch.device:
    """The device that is asked for, with its index; the CPU, or under torchrun with GPUs this
    process's GPU, where none is.

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
    """The group to run over; None to play all ranks in this process.

    Args:
        group: the group that the user gives, if any.
        device: where stages will live.
        ranks: how many ranks the user asks for, if so.

    Raises:
        ScheduleError: another number of processes run.
        StageError: this process is not in the group, or it is none.
    """
    if not dist.is_available():
        return None
    makes = group is None and not dist.is_initialized()
    makes = makes and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device.type == "cuda" and (makes or dist.is_initialized()):
        # Torch takes the current device where it is told none: to gather objects, for one.
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


def from_first_rank(group: dist.ProcessGroup | None, make: Callable[[], str]) -> str:
    """What ``make`` returns on the first rank, on every rank; what it raises, likewise.

    Args:
        group: the ranks; None where all of them are in this process.
        make: called on the first rank alone, since it may come out differently on each.
    """
    if group is None:
        return make()
    told: list[Any] = [None, None]
    if group.rank() == 0:
        try:
            told[0] = make()
        except PenstockError as error:
            told[1] = error
    source = dist.get_global_rank(group, 0)
    by = objects_group(group)
    with together(by, "Pipeline()"):
        dist.broadcast_object_list(told, src=source, group=by)
    text, failure = told
    if failure is not None:
        raise failure
    return str(text)


def gather_state(group: dist.ProcessGroup | None, state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all ranks in one, on every rank: whole tensors, on the CPU.

    Args:
        group: the ranks; None where all of them are in this process.
        state: this rank's part. Every rank calls, and so does every replica that holds shards
            (DTensors) of the same tensors.
    """
    mine = {
        name: full_tensor(value).detach().cpu() if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    if group is None:
        return mine
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, mine, group=objects_group(group))
    return {name: value for part in parts for name, value in part.items()}


# By group, one of the same ranks that moves objects by the host's memory, not by the device's.
_objects: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def objects_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks that moves objects by the host's memory; every rank calls."""
    if takes_cpu_tensors(group):
        return group
    if group not in _objects:
        ranks = dist.get_process_group_ranks(group)
        name = key_of(group, "objects")
        _objects[group] = make_group(ranks, "gloo", name, timeout_s=_OBJECTS_TIMEOUT_S)
    return _objects[group]
