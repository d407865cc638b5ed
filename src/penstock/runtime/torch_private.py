"""The private torch calls of the runtime, in one place.

``tests/test_torch.py`` names the versions of torch that they were seen to work on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = [
    "has_grad_hooks",
    "has_tensor_hooks",
    "is_lost_connection",
    "make_group",
    "profiler_is_on",
    "takes_cpu_tensors",
]


def has_grad_hooks(param: Tensor) -> bool:
    """Whether hooks run whenever the gradient of ``param`` has been accumulated."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def has_tensor_hooks(param: Tensor) -> bool:
    """Whether hooks change the gradient of ``param`` before it is accumulated."""
    return bool(param._backward_hooks)


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether torch raised ``error`` for a process that can't be reached; gloo says so in words."""
    said_by_gloo = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return said_by_gloo or isinstance(error, dist.DistError)


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether one of the group's backends moves CPU tensors."""
    return torch.device("cpu") in group._device_types


def profiler_is_on() -> bool:
    """Whether ``torch.profiler`` is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def make_group(
    ranks: Sequence[int], backend: str, name: str, *, timeout_s: float
) -> dist.ProcessGroup:
    """A group of some processes, made by these alone.

    ``new_group`` names groups by how many this process is in already, which may differ from rank
    to rank; sorts the ranks; and, where the default group is bound to a device, makes one over
    which sends and receives wait for each other, by a call that all processes have to join.

    Args:
        ranks: the processes, in the group's order; each of them calls.
        backend: ``"gloo"`` or ``"nccl"``.
        name: the same on each of them, and of no other group.
        timeout_s: after how long torch itself ends a wait of theirs.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a pipeline's group"
    _, store = distributed_c10d._world.pg_map[world]
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            ranks.index(world.rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
            group_desc="penstock",
        )
    finally:
        world.bound_device_id = bound
    numbers = {process: number for number, process in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[made] = numbers
    assert isinstance(made, dist.ProcessGroup)
    return made
