"""A mistake made before any schedule exists, told to the ranks that may wait for this one already.

A rank whose stage can't be made never comes to the first step, where the others wait for it. It
leaves a note in the job's store; there they find it. The note is taken back as soon as this rank
makes good. This module knows neither stages nor schedules.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from penstock.cause import cause_of
from penstock.errors import StageError

__all__ = ["NOTE", "announced", "default_group", "key_of", "own_group", "store_of", "withdraw"]

NOTE = "note"
# The groups for which this process has left a note.
_noted: set[str] = set()


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None where there is none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that was asked for; the default one where none was.

    Raises:
        StageError: it is no process group, or one that this process is not in.
    """
    if group is None:
        return default_group()
    if not isinstance(group, dist.ProcessGroup):
        # What torch.distributed.new_group gives to processes that are not in the new group.
        elsewhere = group is dist.GroupMember.NON_GROUP_MEMBER
        given = "one that this process is not in" if elsewhere else repr(group)
        raise StageError(
            f"the process group is {given}, expected a torch.distributed.ProcessGroup with this "
            'process in it, such as device_mesh.get_group("pp")'
        )
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """The store in which the ranks of ``group`` read of each other: one for the whole job.

    Other threads need a connection of their own, which may take seconds: one serves all groups.
    """
    return (default_group() or group).get_group_store()


def key_of(group: dist.ProcessGroup, what: str | int) -> str:
    """The key of that store for one thing of ``group``, alike on all its ranks.

    Args:
        group: the group; others may have its name, but not for the same processes.
        what: the thing.
    """
    # Spelt out, thousands of processes would make a key that torch's store breaks connections over.
    processes = repr(dist.get_process_group_ranks(group)).encode()
    return f"penstock/{group.group_name}/{hashlib.sha256(processes).hexdigest()[:16]}/{what}"


@contextlib.contextmanager
def announced(group: dist.ProcessGroup | None) -> Iterator[None]:
    """What is raised within is told to the other ranks of ``group``, until this one makes good.

    Args:
        group: the pipeline's group; None where there are no other ranks.
    """
    try:
        yield
    except BaseException as error:
        if group is not None and group.size() > 1:
            # Where the store is gone, so is whoever would read it.
            with contextlib.suppress(RuntimeError, dist.DistError):
                cause = cause_of(error, group.rank(), dist.get_process_group_ranks(group))
                store_of(group).set(key_of(group, NOTE), cause.to_json())
                _noted.add(group.group_name)
        raise
    if group is not None:
        withdraw(group)


def withdraw(group: dist.ProcessGroup) -> None:
    """Take back this process's note, if it has left one: the mistake is mended."""
    if group.group_name in _noted:
        _noted.discard(group.group_name)
        with contextlib.suppress(RuntimeError, dist.DistError):
            # Emptied, not deleted: a rank that has seen the key may be about to read it.
            store_of(group).set(key_of(group, NOTE), "")
