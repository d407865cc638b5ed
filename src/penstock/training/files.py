"""The files of a checkpoint, in the form of ``torch.distributed.checkpoint`` (DCP).

    runs/it/__0_3f9c_0.distcp   what rank 0 wrote
            __1_3f9c_0.distcp   what rank 1 wrote
            .metadata           names them, and is written last

Each saving has files of its own, and those of the one before go when it is whole. So a process that
is killed, or a disk that is full, leaves the checkpoint before, and never a mixture of two. This
module knows neither models nor optimizers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_by_name
from torch.distributed.checkpoint.state_dict_saver import save as save_by_name
from torch.distributed.checkpoint.storage import WriteResult

from penstock.errors import PartitionError

__all__ = ["cut_short", "is_distributed", "read", "write"]

# Of how many ranks a message tells what failed.
_SHOWN = 4


class _Writer(FileSystemWriter):
    """Leaves the checkpoint that is in the folder whole until the new one is."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Called on one rank, for all of them.
        saving = uuid4().hex[:8]
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{rank}_{saving}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        named = {result.storage_data.relative_path for mine in results for result in mine}
        for path in Path(self.path).glob("__*.distcp"):
            if path.name not in named:
                with contextlib.suppress(OSError):
                    path.unlink()


def write(
    path: str | PathLike[str], state: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint; every rank of the group calls.

    Raises:
        OSError: it could not be written, on some rank; on every rank.
    """
    try:
        with _quietly():
            alone = not is_distributed()
            # What several ranks hold, the first of them writes: replicas' statistics differ, and
            # a mean of one is of no use with a variance of another.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            writer = _Writer(path)
            save_by_name(
                state, storage_writer=writer, planner=planner, process_group=group, no_dist=alone
            )
    except CheckpointException as error:
        raise OSError(
            f"checkpoint {path} was not written ({_told(error)}); one that was there is there still"
        ) from error


def read(path: str | PathLike[str], state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Overwrite what is in ``state`` by what a checkpoint has; every rank of the group calls.

    Raises:
        PartitionError: it could not be read, on some rank; on every rank.
    """
    try:
        with _quietly():
            load_by_name(
                state, checkpoint_id=path, process_group=group, no_dist=not is_distributed()
            )
    except CheckpointException as error:
        raise PartitionError(
            f"checkpoint {path} can't be read ({_told(error)}); some of it may have been loaded: "
            "load another one, or make the model anew"
        ) from error


def cut_short(path: str | PathLike[str], metadata: Metadata) -> list[str]:
    """The files of a checkpoint that are not there, or not as long as they were written."""
    faults = []
    for name, length in _lengths(metadata).items():
        file = Path(path) / name
        found = file.stat().st_size if file.exists() else None
        if found is None:
            faults.append(f"{file} is missing")
        elif found < length:
            faults.append(f"{file} has {found} bytes, expected {length}")
    return faults


def is_distributed() -> bool:
    """Whether there are other processes to write and read with."""
    return dist.is_available() and dist.is_initialized()


def _lengths(metadata: Metadata) -> dict[str, int]:
    """The least length of each file that a checkpoint consists of."""
    lengths: dict[str, int] = {}
    for at in metadata.storage_data.values():
        lengths[at.relative_path] = max(lengths.get(at.relative_path, 0), at.offset + at.length)
    return lengths


def _told(error: CheckpointException) -> str:
    """What failed on which rank; torch's own text has every traceback, of which many are alike."""
    told = []
    for rank, (failed, _) in sorted(error.failures.items()):
        first_line, _, _ = str(failed).partition("\n")
        told.append(f"rank {rank}: {type(failed).__name__}: {first_line}")
    return "; ".join([*told[:_SHOWN], *(["…"] if told[_SHOWN:] else [])])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """DCP warns of a single process, and of a checkpoint that is overwritten, both meant so."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
