"""Checkpoints under the plain model's names, in the format of ``torch.distributed.checkpoint``.

    rank 0   its stages' parameters ─┐                        ┌─► any other number of ranks
    rank 1   its stages' parameters ─┴─► a folder, by name ───┴─► the plain model, one process

A checkpoint is what DCP writes of ``{"model": model.state_dict(), "optim": ...}``, the optimizer's
state flattened by parameter name, so that DCP alone reads it; and of ``"extra"``, by rank a tuple
of the user's dict and the states of the random generators. Each save writes new files, and removes
the previous ones once it is complete: a killed process or a full disk leaves the previous one.

    runs/it/__0_3f9c_0.distcp   written by rank 0
            __1_3f9c_0.distcp   written by rank 1
            .metadata           names the files, and is written last
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from uuid import uuid4
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as load_by_name
from torch.distributed.checkpoint.state_dict_saver import save as save_by_name
from torch.distributed.checkpoint.storage import WriteResult

from penstock.cause import default_group, text_of
from penstock.errors import PartitionError
from penstock.runtime.comm.process_group import collective_call, gather_objects
from penstock.runtime.microbatch import sample_of
from penstock.stage.rng import random_states, set_random_states
from penstock.training.model_state import refuse_common
from penstock.training.optimizer_state import (
    Model,
    fill_optimizer,
    find_conflicts,
    load_optimizer_state,
    named_params,
    optimizer_state,
    plain_optimizer_state,
    refuse_misfits,
)

__all__ = ["load", "load_optimizer_state", "optimizer_state", "plain_optimizer_state", "save"]

T = TypeVar("T")
Folder: TypeAlias = str | PathLike[str]

_SHOWN = 10  # ranks in a message


def save(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint. Every rank calls it and writes its own tensors; of tensors that several
    ranks have, the first rank's are written.

    Args:
        path: a folder that all ranks reach, made if missing.
        model: a pipeline, or a plain module.
        optimizer: of the model's parameters; left out if None.
        extra: what else this rank needs to resume: its step, ``scheduler.state_dict()``, its
            position in the data; any picklable values. With it go the states of its random
            generators: torch's, Python's and NumPy's.
        keep: by name, whether to write a parameter or buffer; frozen ones may be left out.
        group: the participating processes: all by default, or those of one of several pipelines.

    Raises:
        PartitionError: the optimizer has a parameter that the model has not, stages have names in
            common, or ranks give other paths, or plain modules with other parameters by the same
            names; on every rank, and nothing was written.
        OSError: some rank could not write; on every rank. The previous checkpoint remains.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> model = nn.Linear(2, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save(folder, model, torch.optim.SGD(model.parameters()))
        ...     names = FileSystemReader(folder).read_metadata().state_dict_metadata
        >>> "model.weight" in names, "optim.param_groups.weight.lr" in names
        (True, True)
    """
    with collective_call(group, "save()", (PartitionError, OSError)):
        tensors = _on_all_ranks(group, model.state_dict)
        flat = _on_all_ranks(group, lambda: optimizer_state(model, optimizer))
        state = {"model": {name: value for name, value in tensors.items() if keep(name)}}
        if optimizer is not None:
            state["optim"] = flat
        if extra is not None:  # a tuple is one entry; DCP would take a dict apart
            state["extra"] = {str(_rank(group)): (dict(extra), _generator_states(model))}
        # By name the stage of a parameter; in a plain module, a checksum of its values.
        if isinstance(model, nn.Module):
            some = {n: sample_of(state["model"].get(n)) for n, _ in model.named_parameters()}
            owners = {n: crc32(repr(each).encode()) for n, each in some.items() if each is not None}
        else:
            owners = getattr(model, "parameter_stages", dict)()
        named, folders = zip(*gather_objects(group, (owners, fspath(path))), strict=True)
        if len(set(folders)) > 1:
            listed = ", ".join(f"rank {rank}: {at}" for rank, at in enumerate(folders[:_SHOWN]))
            raise PartitionError(
                f"the ranks do not save to one folder ({listed}); for a checkpoint per pipeline, "
                "pass its process group as group="
            )
        refuse_common(chain.from_iterable(each.items() for each in named))
        with _dcp(path, OSError, "was not written", "an earlier checkpoint there is intact"):
            save_by_name(
                state,
                storage_writer=_Writer(path),
                # Of tensors that several ranks have, the first rank writes all: replicas'
                # statistics differ, and one's mean does not go with another one's variance.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
                no_dist=default_group() is None,
            )


def load(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint. Every rank calls it and reads its own tensors; ranks, schedule and split
    may differ from those of ``save``.

    Args:
        path: the folder.
        model: a pipeline, or a plain module, that is overwritten.
        optimizer: of the model's parameters; its state and settings are overwritten.
        extra: a dict, updated by what this rank's ``save`` was given; its random generators are
            restored too. Ranks beyond those that saved take rank 0's. If None, neither is read.
        keep: by name, whether to read a parameter or buffer; others stay unchanged.
        group: the participating processes; all by default.

    Raises:
        FileNotFoundError: some rank sees no complete checkpoint in the folder; on every rank.
        PartitionError: it lacks a name of the model's or of the optimizer's, or has it in another
            shape; it has no ``extra``; or it has other settings for parameters that are one group
            now; on every rank, and nothing was overwritten. Or its files are damaged, found while
            reading: then part of the model may be overwritten.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> trained, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save(folder, trained)
        ...     load(folder, fresh)
        >>> torch.equal(trained.weight, fresh.weight)
        True
    """
    with collective_call(group, "load()", (PartitionError, FileNotFoundError)):
        metadata, before, params = _on_all_ranks(
            group, lambda: (_metadata(path), model.state_dict(), named_params(model, optimizer))
        )
        saved: Mapping[str, Any] = metadata.state_dict_metadata
        tensors = {name: tensor for name, tensor in before.items() if keep(name)}
        names = [name for param in params for name in param.settings if f"optim.{name}" in saved]
        found = {name: _empty(saved[f"optim.{name}"]) for name in names}
        lacking = [f"it lacks {p.name}" for p in params if p.settings.keys().isdisjoint(found)]
        rank = str(_rank(group)) if f"extra.{_rank(group)}" in saved else "0"
        _on_all_ranks(group, lambda: refuse_misfits(f"checkpoint {path}", lacking))
        _read(path, {"optim": found}, group)
        # A setting that was not saved, such as a scheduler's, stays as it is.
        settings = {n: found.get(n, p.group[key]) for p in params for n, key in p.settings.items()}
        conflicts = find_conflicts(params, settings)
        _on_all_ranks(group, lambda: refuse_misfits(f"checkpoint {path}", conflicts))
        # Reads into the model; DCP compares names and shapes on all ranks before it reads.
        states = _empty_states(metadata, {param.name: param.tensor for param in params})
        own: dict[str, Any] = {rank: ({}, {})} if extra is not None else {}
        _read(path, {"model": tensors, "optim": states, "extra": own}, group)
        model.load_state_dict({**before, **tensors})
        if optimizer is not None:
            fill_optimizer(optimizer, params, {**states, **settings})
        if extra is not None:
            extra.update(own[rank][0])
            saved_states = own[rank][1]
            now = _generator_states(model)
            set_random_states({key: saved_states.get(key, state) for key, state in now.items()})


def _empty_states(metadata: Metadata, params: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors to read the saved state of ``params`` into, since an optimizer that took no step has
    none."""
    empty = {}
    for key, meta in metadata.state_dict_metadata.items():
        name, _, _ = key.removeprefix("optim.state.").rpartition(".")
        if key.startswith("optim.state.") and name in params:
            empty[key.removeprefix("optim.")] = _empty(meta, params[name])
    return empty


def _empty(meta: object, param: Tensor | None = None) -> Tensor | None:
    if not isinstance(meta, TensorStorageMetadata):
        return None
    dtype = meta.properties.dtype
    if param is not None and meta.size == param.shape:  # also on its device, and sharded as it is
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=dtype)


def _on_all_ranks(group: dist.ProcessGroup | None, function: Callable[[], T]) -> T:
    """Call a function; a failure on one rank is raised on all, so that none waits for another."""
    failure: Exception | None = None
    try:
        result = function()
    except (PartitionError, FileNotFoundError) as error:
        failure = error
    gathered = gather_objects(group, failure)
    failures = [(rank, error) for rank, error in enumerate(gathered) if error is not None]
    if failures and len(gathered) > 1:
        listed = "; ".join(f"rank {rank}: {error}" for rank, error in failures[:_SHOWN])
        failure = type(failures[0][1])(listed)
    if failure is not None:
        raise failure
    return result


def _rank(group: dist.ProcessGroup | None) -> int:
    return 0 if default_group() is None else dist.get_rank(group)


def _generator_states(model: Model) -> dict[Any, Any]:
    """The states of the generators of the host and of the model's device, by its kind alone."""
    first = next((param.device for _, param in model.named_parameters()), torch.device("cpu"))
    device: torch.device = getattr(model, "device", first)
    states = random_states(device).items()
    return {torch.device(k.type) if isinstance(k, torch.device) else k: v for k, v in states}


class _Writer(FileSystemWriter):
    """A writer that keeps the previous checkpoint until the new one is complete."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Called on one rank, for all of them.
        number = uuid4().hex[:8]
        return [
            replace(plan, storage_data=replace(plan.storage_data, prefix=f"__{rank}_{number}_"))
            for rank, plan in enumerate(super().prepare_global_plan(plans))
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.fs.rm_file = lambda path: None  # type: ignore[method-assign]  # rename replaces it
        super().finish(metadata, results)
        written = {result.storage_data.relative_path for part in results for result in part}
        for path in Path(self.path).glob("__*.distcp"):
            if path.name not in written:
                with contextlib.suppress(OSError):
                    path.unlink()


def _read(path: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Overwrite ``state``, by saved names, by the checkpoint's."""
    advice = (
        "was it saved from this model, with this optimizer and extra=? Unless a missing key or a "
        "size is named, some of it may have been loaded: make the model anew"
    )
    with _dcp(path, PartitionError, "can't be read", advice):
        load_by_name(
            state, checkpoint_id=path, process_group=group, no_dist=default_group() is None
        )


@contextlib.contextmanager
def _dcp(path: Folder, kind: type[Exception], failed: str, advice: str) -> Iterator[None]:
    """A context for DCP that ignores its warnings of a single process and of an overwritten
    checkpoint, and raises one line per failed rank."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())[:_SHOWN]
        lines = (f"rank {rank}: {text_of(e)}" for rank, (e, _) in failures)
        faults = "; ".join(line.partition("\n")[0] for line in lines)
        raise kind(f"checkpoint {path} {failed} ({faults}); {advice}") from error


def _metadata(path: Folder) -> Metadata:
    try:
        return FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; it is written last: was the saving interrupted, or is the folder not one "
            "that all ranks reach?"
        ) from error
    except Exception as error:  # unpickling a damaged file may raise any exception
        raise PartitionError(f"{path}: its metadata can't be read, {text_of(error)}") from error
