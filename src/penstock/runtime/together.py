"""Calls that all ranks of a group make together and that are no step: saving, clipping, gathering.

Torch would let them wait for a rank that has failed, or calls something else, until its own
timeout. Within ``together`` a rank that waits so is told instead, as in a step. This module does
not know what is called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.runtime.c10d import C10dTransport
from penstock.runtime.group_log import NOBODY, calls_over
from penstock.runtime.torch_private import takes_cpu_tensors
from penstock.stage.announcing import own_group

__all__ = ["together"]


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
    # One for each call: kept by its group, it would keep the group alive. Its number is its own,
    # so that a later call does not find what an earlier one has left.
    number = NOBODY - 1 - calls_over(group).count
    transport = C10dTransport(group, torch.device("cpu"), number, math.inf)
    try:
        transport.begin(what)
        transport.gather_numbers(0)
        with transport.among_ranks():
            yield
    except alike:
        raise
    except BaseException as error:
        raised = transport.fail(error)
        if raised is None or not isinstance(error, Exception):
            raise
        raise raised from error
    finally:
        transport.close()
