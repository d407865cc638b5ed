"""The private corners of torch that the runtime stands on do what we think, on this torch."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock._torch_compat import (
    grad_hooks_of,
    is_lost_connection,
    make_group,
    profiler_is_on,
    takes_cpu_tensors,
)
from tests.processes import run_ranks


def test_hooks_on_gradients() -> None:
    param = nn.Parameter(torch.ones(2))
    for at, register in enumerate((param.register_hook, param.register_post_accumulate_grad_hook)):
        assert not any(grad_hooks_of(param))
        hook = register(lambda _: None)
        assert grad_hooks_of(param)[at] and not grad_hooks_of(param)[1 - at]
        hook.remove()
    assert not any(grad_hooks_of(param))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_whether_the_profiler_is_on() -> None:
    assert not profiler_is_on()
    with torch.profiler.profile():
        assert profiler_is_on()
    assert not profiler_is_on()


def made_by_two(rank: int, num_ranks: int) -> list[float]:
    """The last two processes make a group of their own, in turned order, and the first none."""
    assert dist.group.WORLD is not None and takes_cpu_tensors(dist.group.WORLD)
    ranks = [num_ranks - 1, num_ranks - 2]
    if rank not in ranks:
        return []
    group = make_group(ranks, "gloo", "two", timeout_s=20)
    assert takes_cpu_tensors(group)
    assert dist.get_process_group_ranks(group) == ranks
    assert dist.get_global_rank(group, 0) == ranks[0]
    told = torch.tensor([float(rank)])
    if group.rank() == 0:
        group.send([told], 1, 0).wait()
    else:
        group.recv([told], 0, 0).wait()
    return [*told.tolist(), float(group.rank())]


def test_some_processes_make_a_group_by_themselves() -> None:
    told = [outcome.result() for outcome in run_ranks(made_by_two, 3)]
    assert told == [[], [2.0, 1.0], [2.0, 0.0]]


def left_alone(rank: int, num_ranks: int) -> bool:
    """Whether the error of a receive from a process that is gone is taken for what it is."""
    if rank == 1:
        os._exit(1)
    try:
        dist.recv(torch.zeros(1), 1)
    except RuntimeError as error:
        return is_lost_connection(error)
    return False


def test_a_lost_connection_is_known_by_its_error() -> None:
    assert run_ranks(left_alone, 2)[0].result()
    assert not is_lost_connection(RuntimeError("of another kind"))
    assert not is_lost_connection(None)
