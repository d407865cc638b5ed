"""Calls that all ranks of a group make together and that are no step: saving, clipping, gathering.

Torch would let them wait for a rank that has failed, or calls something else, until its own
timeout. Within ``together`` a rank that waits so is told instead, as in a step. This module does
not know what is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._torch_compat import takes_cpu_tensors
from penstock.compat.announcing import own_group
from penstock.runtime.comm.c10d import C10dTransport
from penstock.runtime.comm.control_plane import head_of, numbers_in
from penstock.runtime.group_log import NOBODY, calls_over
from penstock.runtime.watcher import Others

__all__ = ["all_gather_ints", "together"]

# So long a small message is waited for without a thread that watches.
QUICK_S = 0.05
# And so long without sleeping: to be woken takes longer than most such messages.
SPIN_S = 2e-3
# What was last gathered: gloo's threads may not be the last to let go of it, see ``ControlPlane``.
_gathered: list[Tensor] = []


@contextmanager
def together(
    group: dist.ProcessGroup | None, what: str, alike: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """A call in which the ranks of a group wait for each other.

    Args:
        group: the ranks; all processes if None.
        what: the call, as a message would name it; the same on every rank.
        alike: what all ranks raise where one does, so that none waits for another.

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


def all_gather_ints(group: dist.ProcessGroup, what: str, number: int) -> list[int]:
    """Every rank's number, by rank, over a group that takes CPU tensors.

    Args:
        group: the ranks.
        what: the call, as a message would name it; the same on every rank.
        number: this rank's, of 128 bits.

    Raises:
        PenstockError: another rank failed, or is in another call.
    """
    head = head_of(number, what)
    parts = [torch.empty_like(head) for _ in range(group.size())]
    _gathered[:] = [head, *parts]
    work = group.allgather([parts], [head])
    begun = perf_counter()
    while not work.is_completed() and (waited_s := perf_counter() - begun) < QUICK_S:
        sleep(0 if waited_s < SPIN_S else 5e-5)
    if work.is_completed():
        with suppress(RuntimeError):  # it will be raised again, and be told
            work.wait()
            calls_over(group).begin(what)
            return numbers_in(parts)
    with _watched(group, what) as transport:
        transport.wait_for((work,), Others.RANKS)
        return numbers_in(parts)


@contextmanager
def _watched(
    group: dist.ProcessGroup, what: str, alike: tuple[type[Exception], ...] = ()
) -> Iterator[C10dTransport]:
    # One for each call: kept by its group, it would keep the group alive. Its number is its own,
    # so that a later call does not find what an earlier one has left.
    number = NOBODY - 1 - calls_over(group).count
    transport = C10dTransport(group, torch.device("cpu"), number, math.inf)
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
