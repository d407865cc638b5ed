"""Checkpoints under the plain model's names, in the format of ``torch.distributed.checkpoint``.

    rank 0   its stages' parameters ─┐                        ┌─► any other number of ranks
    rank 1   its stages' parameters ─┴─► a folder, by name ───┴─► the plain model, one process

A checkpoint is what DCP writes of ``{"model": model.state_dict(), "optim": ...}``, the optimizer's
state flattened by parameter name, so that DCP alone reads it. Each save writes new files, and
removes the previous checkpoint's once it is complete, so that a killed process or a full disk
leaves the previous checkpoint, never a mixture of two:

    runs/it/__0_3f9c_0.distcp   written by rank 0
            __1_3f9c_0.distcp   written by rank 1
            .metadata           names the files, and is written last
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar
from uuid import uuid4

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

from penstock.errors import PartitionError
from penstock.runtime.comm.process_group import collective_call
from penstock.training.model_state import names_in_common, refuse_common

__all__ = ["Model", "load", "optimizer_state", "save"]

T = TypeVar("T")
Folder: TypeAlias = str | PathLike[str]

# Limit on the faults, or ranks, in a message.
_SHOWN = 10


class Model(Protocol):
    """A ``penstock.Pipeline``, or any ``nn.Module``: this process's tensors by the plain model's
    names."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def save(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint. Every rank calls it and writes its own tensors; of tensors that several
    ranks have, the first rank's are written.

    Args:
        path: a folder that all ranks reach, made if missing.
        model: a pipeline, or a plain module.
        optimizer: of the model's parameters; left out if None.
        keep: by name, whether to write a parameter or buffer; frozen ones may be left out.
        group: the participating processes, all by default. Several pipelines with a checkpoint
            each pass their own group.

    Raises:
        PartitionError: the optimizer has a parameter that the model has not, stages have names
            in common, or ranks give other paths; on every rank, and nothing was written.
        OSError: some rank could not write; on every rank. The previous checkpoint remains.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> model = nn.Linear(2, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save(folder, model, torch.optim.SGD(model.parameters()))
        ...     names = FileSystemReader(folder).read_metadata().state_dict_metadata
        >>> "model.weight" in names, "optim.param_groups.weight.lr" in names
        (True, True)
    """
    with collective_call(group, "save()", (PartitionError, OSError)):
        optim = _on_all_ranks(group, lambda: _NamedOptimizer(model, optimizer)).state()
        tensors = _on_all_ranks(group, model.state_dict)
        # A plain module is no stage, and may be the same on every rank.
        stages: dict[str, int] = getattr(type(model), "parameter_stages", lambda _: {})(model)
        named, folders = zip(*_gather((stages, fspath(path)), group), strict=True)
        if len(set(folders)) > 1:
            listed = ", ".join(f"rank {rank}: {at}" for rank, at in enumerate(folders[:_SHOWN]))
            raise PartitionError(
                f"the ranks do not save to one folder ({listed}); where each pipeline is to have a "
                "checkpoint of its own, pass its process group as group="
            )
        refuse_common(names_in_common(named))
        state = {"model": {name: value for name, value in tensors.items() if keep(name)}}
        _write(path, state if optimizer is None else {**state, "optim": optim}, group)


def load(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint. Every rank calls it and reads its own tensors; ranks, schedule and split
    may differ from those of ``save``.

    Args:
        path: the folder.
        model: a pipeline, or a plain module, that is overwritten.
        optimizer: of the model's parameters; its state and settings are overwritten. Not
            touched if None.
        keep: by name, whether to read a parameter or buffer; others stay unchanged.
        group: the participating processes; all by default.

    Raises:
        FileNotFoundError: some rank sees no complete checkpoint in the folder; on every rank.
        PartitionError: it is damaged, lacks a name of the model's or of the optimizer's, has it
            in another shape, or has other settings for parameters that are one group now; on
            every rank, and nothing was overwritten, but for damage that only reading finds.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> trained, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save(folder, trained)
        ...     load(folder, fresh)
        >>> torch.equal(trained.weight, fresh.weight)
        True
    """

    with collective_call(group, "load()", (PartitionError, FileNotFoundError)):
        metadata = _on_all_ranks(group, lambda: _metadata(path))
        before = _on_all_ranks(group, model.state_dict)
        state: dict[str, Any] = {"model": {name: t for name, t in before.items() if keep(name)}}
        named = _on_all_ranks(group, lambda: _NamedOptimizer(model, optimizer))
        saved: Mapping[str, object] = metadata.state_dict_metadata
        settings = {name: _empty(saved.get(f"optim.{name}")) for name in named.settings}
        wanted = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        wanted |= {f"optim.{name}": None for name in settings}
        _on_all_ranks(group, lambda: _refuse(path, _faults(saved, wanted)))
        # Reading into the model overwrites it, so that all checks come before.
        _read(path, {"optim": settings}, group)
        _on_all_ranks(group, lambda: _refuse(path, named.conflicts(settings)))
        if optimizer is not None:
            state["optim"] = named.empty_state(metadata)
        _read(path, state, group)
        model.load_state_dict({**before, **state["model"]})
        if optimizer is not None:
            named.fill(optimizer, {**state["optim"], **settings})


def optimizer_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat.

    Args:
        model: gives the names.
        optimizer: of this process's parameters.

    Returns:
        ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<setting>``, as of torch's
        ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``.

    Raises:
        PartitionError: the optimizer has a parameter that the model has not.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        >>> optimizer_state(layer, sgd)["param_groups.weight.lr"]
        0.5
    """
    return _NamedOptimizer(model, optimizer).state()


# --- the optimizer -------------------------------------------------------------------------------


class _NamedOptimizer:
    """An optimizer's parameters, in its order, and settings by the model's names; none for None."""

    def __init__(self, model: Model, optimizer: torch.optim.Optimizer | None) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        groups = [] if optimizer is None else optimizer.param_groups
        params = [(param, group) for group in groups for param in group["params"]]
        if num_foreign := sum(id(param) not in names for param, _ in params):
            raise PartitionError(
                f"{num_foreign} of the optimizer's {len(params)} parameters are none of the "
                "model's; make the optimizer from the parameters of this model or pipeline"
            )
        self._states = {} if optimizer is None else optimizer.state
        self._params = [(names[id(param)], param) for param, _ in params]
        # By flat name: the parameter's name, its group, and the name of a setting, such as ``lr``.
        self.settings: dict[str, tuple[str, dict[str, Any], str]] = {
            f"param_groups.{names[id(param)]}.{key}": (names[id(param)], group, key)
            for param, group in params
            for key in group
            if key not in ("params", "param_names")
        }

    def state(self) -> dict[str, Any]:
        """The flat state; see ``optimizer_state``."""
        flat = {name: group[key] for name, (_, group, key) in self.settings.items()}
        for name, param in self._params:
            state = self._states.get(param, {})
            flat.update({f"state.{name}.{key}": value for key, value in state.items()})
        return flat

    def empty_state(self, metadata: Metadata) -> dict[str, Any]:
        """Tensors to read the saved state into, since an optimizer that took no step has none.
        Items of lists and dicts in the state are saved one by one."""
        params = dict(self._params)
        paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
        empty: dict[str | int, Any] = {}
        for key, meta in metadata.state_dict_metadata.items():
            _, *within = paths.get(key, ("optim", key.removeprefix("optim.")))
            name, _, _ = str(within[0]).removeprefix("state.").rpartition(".")
            if key.startswith("optim.state.") and name in params:
                place = empty
                for step in within[:-1]:
                    place = place.setdefault(step, {})
                place[within[-1]] = _empty(meta, params[name])
        return {str(entry): _with_lists(value) for entry, value in empty.items()}

    def conflicts(self, values: Mapping[str, Any]) -> list[str]:
        """Parameters of one group that were saved with different settings."""
        first: dict[tuple[int, str], tuple[str, Any]] = {}
        faults = []
        for flat, (name, group, key) in self.settings.items():
            other_name, other = first.setdefault((id(group), key), (name, values[flat]))
            if values[flat] != other:
                faults.append(
                    f"{key} is {other} for {other_name} and {values[flat]} for {name}, which are "
                    "in one group of this optimizer; make its groups as those of the one that was "
                    "saved"
                )
        return faults

    def fill(self, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any]) -> None:
        """Load the state by the optimizer's own ``load_state_dict``, which may convert it."""
        states: dict[str, dict[str, Any]] = {}
        for key, value in flat.items():
            if key.startswith("state."):
                name, _, entry = key.removeprefix("state.").rpartition(".")
                states.setdefault(name, {})[entry] = value
        loaded = optimizer.state_dict()
        groups = loaded["param_groups"]
        loaded["state"] = {}
        used: set[str] = set()
        indices = (index for group in groups for index in group["params"])
        for index, (name, _) in zip(indices, self._params, strict=True):
            if name in states:
                # Copies of a shared parameter have one name, but each a state of its own.
                state = deepcopy(states[name]) if name in used else states[name]
                loaded["state"][index] = state
                used.add(name)
        by_id = dict(zip(map(id, optimizer.param_groups), groups, strict=True))
        for name, (_, group, key) in self.settings.items():
            by_id[id(group)][key] = flat[name]
        optimizer.load_state_dict(loaded)


def _with_lists(value: Any) -> Any:
    """Replace dicts with integer keys by lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[i] for i in sorted(items)] if all(isinstance(i, int) for i in items) else items


def _empty(meta: object, param: Tensor | None = None) -> Tensor | None:
    if not isinstance(meta, TensorStorageMetadata):
        return None
    if param is not None and meta.size == param.shape:
        # On the parameter's device, and sharded as it is.
        return torch.empty_like(param, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)


# --- ranks ---------------------------------------------------------------------------------------


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gather(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Gather every rank's object."""
    if not _is_distributed():
        return [mine]
    gathered = [mine for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _on_all_ranks(group: dist.ProcessGroup | None, function: Callable[[], T]) -> T:
    """Call a function; a failure on one rank is raised on all, so that none waits for another."""
    failure = None
    try:
        result = function()
    except (PartitionError, FileNotFoundError) as error:
        failure = error
    failures = {
        rank: error for rank, error in enumerate(_gather(failure, group)) if error is not None
    }
    if failures and _is_distributed():
        listed = [f"rank {rank}: {error}" for rank, error in failures.items()]
        failure = type(next(iter(failures.values())))("; ".join(listed[:_SHOWN]))
    if failure is not None:
        raise failure
    return result


def _refuse(path: Folder, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise PartitionError(f"checkpoint {path}: {'; '.join(faults[:_SHOWN])}{more}")


def _faults(saved: Mapping[str, object], wanted: Mapping[str, Any]) -> list[str]:
    """The names in ``wanted`` that are missing, or saved in another shape."""
    missing = "is missing; was it saved from another model or optimizer?"
    faults = [f"{name} {missing}" for name in wanted if name not in saved]
    for name, value in wanted.items():
        size = getattr(saved.get(name), "size", None)
        if isinstance(value, Tensor) and size not in (None, value.shape):
            faults.append(f"{name} has shape {tuple(size)}, expected {tuple(value.shape)}")
    return faults


# --- files ---------------------------------------------------------------------------------------


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
        super().finish(metadata, results)
        written = {result.storage_data.relative_path for part in results for result in part}
        for path in Path(self.path).glob("__*.distcp"):
            if path.name not in written:
                with contextlib.suppress(OSError):
                    path.unlink()


def _write(path: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    def failure(faults: str) -> OSError:
        return OSError(
            f"checkpoint {path} was not written ({faults}); one that was there is there still"
        )

    with _dcp(failure):
        save_by_name(
            state,
            storage_writer=_Writer(path),
            # Of tensors that several ranks have, the first rank writes all: replicas' statistics
            # differ, and one replica's mean does not go with another one's variance.
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            process_group=group,
            no_dist=not _is_distributed(),
        )


def _read(path: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Overwrite ``state`` by the checkpoint's."""

    def failure(faults: str) -> PartitionError:
        return PartitionError(
            f"checkpoint {path} can't be read ({faults}); some of it may have been loaded: load "
            "another one, or make the model anew"
        )

    with _dcp(failure):
        load_by_name(state, checkpoint_id=path, process_group=group, no_dist=not _is_distributed())


@contextlib.contextmanager
def _dcp(failure: Callable[[str], Exception]) -> Iterator[None]:
    """A context for DCP without its warnings of a single process and of an overwritten checkpoint,
    and with one line per failed rank in place of its tracebacks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
            yield
    except CheckpointException as error:
        failures = sorted(error.failures.items())[:_SHOWN]
        faults = (f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failures)
        raise failure("; ".join(fault.partition("\n")[0] for fault in faults)) from error


def _metadata(path: Folder) -> Metadata:
    """The checkpoint's metadata, if all files that it names are there in full."""
    try:
        metadata = FileSystemReader(path).read_metadata()
        lengths: dict[Path, int] = {}
        for part in metadata.storage_data.values():
            file = Path(path) / part.relative_path
            lengths[file] = max(lengths.get(file, 0), part.offset + part.length)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; it is written last: was the saving interrupted, or is the folder not one "
            "that all ranks reach?"
        ) from error
    except Exception as error:  # unpickling a damaged file may raise any exception
        raise PartitionError(
            f"{path}: its metadata can't be read, {type(error).__name__}: {error}"
        ) from error
    _refuse(path, [f"{file} is missing" for file in lengths if not file.exists()])
    found = {file: file.stat().st_size for file in lengths}
    cut = [file for file, length in lengths.items() if found[file] < length]
    _refuse(path, [f"{file} has {found[file]} bytes, expected {lengths[file]}" for file in cut])
    return metadata
