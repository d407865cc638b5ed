"""Checkpoints under the plain model's names, in the format of ``torch.distributed.checkpoint``.

    rank 0   its stages' parameters ─┐                        ┌─► any other number of ranks
    rank 1   its stages' parameters ─┴─► a folder, by name ───┴─► the plain model, one process

A checkpoint is what DCP writes of ``{"model": model.state_dict(), "optim": ...}``, the optimizer's
state flattened by parameter name, so that DCP alone reads it. This module knows neither stages nor
schedules.

    runs/it/__0_3f9c_0.distcp   written by rank 0
            __1_3f9c_0.distcp   written by rank 1
            .metadata           names the files, and is written last

Each save writes new files, and removes the previous checkpoint's files once it is complete. So a
killed process or a full disk leaves the previous checkpoint, never a mixture of two.
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
from penstock.training.model_state import common_names_message, names_in_common

__all__ = ["Model", "load", "optimizer_state", "save"]

T = TypeVar("T")
Folder: TypeAlias = str | PathLike[str]

_STATE = "optim.state."
# Limit on the faults, or ranks, in a message.
_SHOWN = 10


class Model(Protocol):
    """A ``penstock.Pipeline``, or any ``nn.Module``."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, under the plain model's names."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers, under the plain model's names."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Load parameters and buffers."""
        ...


def save(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint. Every rank calls it and writes what it holds; of what several ranks
    hold, the first one writes.

    Args:
        path: a folder that all ranks reach; it is made if there is none, and a checkpoint in it is
            replaced as soon as this one is whole.
        model: a pipeline, or a plain module.
        optimizer: of the model's parameters, all of which it holds; left out if None.
        keep: by the name of a parameter or buffer, whether to write it: what is frozen, and
            comes from elsewhere, may be left out.
        group: the processes that take part; all if None. Where there are several pipelines with a
            checkpoint each, the pipeline's.

    Raises:
        PartitionError: the optimizer holds a parameter that the model does not, stages have names
            in common, or ranks give other paths; on every rank, and nothing was written.
        OSError: some rank could not write; on every rank. A checkpoint that was in the folder is
            there still.

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
        _raise_together([] if optimizer is None else _foreign_params(model, optimizer), group)
        # A plain module is no stage, and may be the same on every rank.
        stages = getattr(type(model), "parameter_stages", None)
        mine = ({} if stages is None else stages(model), fspath(path))
        named, folders = zip(*_gathered(mine, group), strict=True)
        if len(set(folders)) > 1:
            listed = ", ".join(f"rank {rank}: {at}" for rank, at in enumerate(folders[:_SHOWN]))
            raise PartitionError(
                f"the ranks do not save to one folder ({listed}); where each pipeline is to have a "
                "checkpoint of its own, pass its process group as group="
            )
        if common := names_in_common(named):
            raise PartitionError(common_names_message(common))
        state: dict[str, Any] = {"model": _kept(_state_of(model, group), keep)}
        if optimizer is not None:
            state["optim"] = optimizer_state(model, optimizer)
        _write(path, state, group)


def load(
    path: Folder,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint. Every rank calls it; each reads what it holds.

    The ranks, schedule and split may be others than those that it was saved with.

    Args:
        path: the folder.
        model: a pipeline, or a plain module, that is overwritten.
        optimizer: of the model's parameters; its state and settings are overwritten. Not
            touched if None.
        keep: by the name of a parameter or buffer, whether to read it; others stay as they are.
        group: the processes that take part; all if None.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the folder, as some rank sees it; on
            every rank.
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

    def refuse(faults: list[str]) -> None:
        _raise_together([f"checkpoint {path}: {fault}" for fault in faults], group)

    with collective_call(group, "load()", (PartitionError, FileNotFoundError)):
        metadata = _metadata(path, group)
        saved: Mapping[str, object] = metadata.state_dict_metadata
        held = _state_of(model, group)
        state: dict[str, Any] = {"model": _kept(held, keep)}
        settings: dict[str, Any] = {}
        faults = _faults(saved, {f"model.{name}": value for name, value in state["model"].items()})
        if optimizer is not None:
            faults += _foreign_params(model, optimizer)
            if not faults:
                keys = [
                    f"param_groups.{name}.{key}"
                    for name, _, params in _held(model, optimizer)
                    for key in _settings(params)
                ]
                settings = {key: _blank(saved.get(f"optim.{key}")) for key in keys}
                state["optim"] = _blank_state(metadata, model, optimizer)
                faults += _faults(saved, {f"optim.{key}": None for key in settings})
        refuse(faults)
        # Reading into the model overwrites it: all that may be refused is read before.
        _read(path, {"optim": settings}, group)
        refuse([] if optimizer is None else _conflicts(model, optimizer, settings))
        _read(path, state, group)
        model.load_state_dict({**held, **state["model"]})
        if optimizer is not None:
            _fill_optimizer(model, optimizer, {**state["optim"], **settings})


def optimizer_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat.

    Args:
        model: gives the names.
        optimizer: of this process's parameters.

    Returns:
        ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<setting>``, as of torch's
        ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``.

    Raises:
        PartitionError: the optimizer holds a parameter that the model does not.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        >>> optimizer_state(layer, sgd)["param_groups.weight.lr"]
        0.5
    """
    if foreign := _foreign_params(model, optimizer):
        raise PartitionError(foreign[0])
    flat: dict[str, Any] = {}
    for name, param, group in _held(model, optimizer):
        for key, value in optimizer.state.get(param, {}).items():
            flat[f"state.{name}.{key}"] = value
        for key in _settings(group):
            flat[f"param_groups.{name}.{key}"] = group[key]
    return flat


# --- the optimizer -------------------------------------------------------------------------------


def _foreign_params(model: Model, optimizer: torch.optim.Optimizer) -> list[str]:
    known = {id(param) for _, param in model.named_parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    num_foreign = sum(id(param) not in known for param in held)
    if not num_foreign:
        return []
    return [
        f"{num_foreign} of the optimizer's {len(held)} parameters are none of the model's; make "
        "the optimizer from the parameters of this model or pipeline"
    ]


def _held(
    model: Model, optimizer: torch.optim.Optimizer
) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Each parameter of the optimizer with its name and its group, in the optimizer's order."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = optimizer.param_groups
    return [(names[id(param)], param, group) for group in groups for param in group["params"]]


def _settings(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's settings, such as ``lr``."""
    return [key for key in group if key not in ("params", "param_names")]


def _blank_state(
    metadata: Metadata, model: Model, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Tensors to read the saved state into: an optimizer that took no step has none yet. Items of
    lists and dicts in the state are saved one by one."""
    held = {name: param for name, param, _ in _held(model, optimizer)}
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    blank: dict[str | int, Any] = {}
    for key, meta in metadata.state_dict_metadata.items():
        _, *within = paths.get(key, ("optim", key.removeprefix("optim.")))
        name, _, _ = str(within[0]).removeprefix("state.").rpartition(".")
        if not key.startswith(_STATE) or name not in held:
            continue
        place = blank
        for step in within[:-1]:
            place = place.setdefault(step, {})
        place[within[-1]] = _blank(meta, held[name])
    return {str(entry): _with_lists(value) for entry, value in blank.items()}


def _with_lists(value: Any) -> Any:
    """Dicts with integer keys stand for lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _with_lists(item) for key, item in value.items()}
    return [items[i] for i in sorted(items)] if all(isinstance(i, int) for i in items) else items


def _blank(meta: object, param: Tensor | None = None) -> Tensor | None:
    if not isinstance(meta, TensorStorageMetadata):
        return None
    if param is not None and meta.size == param.shape:
        # On the parameter's device, and sharded as it is.
        return torch.empty_like(param, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def _conflicts(
    model: Model, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> list[str]:
    """Parameters of one group that were saved with different settings."""
    first: dict[tuple[int, str], tuple[str, Any]] = {}
    faults = []
    for name, _, group in _held(model, optimizer):
        for key in _settings(group):
            value = settings[f"param_groups.{name}.{key}"]
            of, other = first.setdefault((id(group), key), (name, value))
            if value != other:
                faults.append(
                    f"{key} is {other} for {of} and {value} for {name}, which are in one group "
                    "of this optimizer; make its groups as those of the one that was saved"
                )
    return faults


def _fill_optimizer(
    model: Model, optimizer: torch.optim.Optimizer, flat: Mapping[str, Any]
) -> None:
    """Load the state by the optimizer's own ``load_state_dict``, which may convert it."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        if kind == "state":
            name, _, entry = rest.rpartition(".")
            states.setdefault(name, {})[entry] = value
    names = iter([name for name, _, _ in _held(model, optimizer)])
    given: set[str] = set()
    plain = optimizer.state_dict()
    plain["state"] = {}
    for group in plain["param_groups"]:
        for position, index in enumerate(group["params"]):
            name = next(names)
            if name in states:
                # Places of a shared parameter have one name, but each a state of its own.
                plain["state"][index] = deepcopy(states[name]) if name in given else states[name]
                given.add(name)
            if position == 0:
                group.update({key: flat[f"param_groups.{name}.{key}"] for key in _settings(group)})
    optimizer.load_state_dict(plain)


# --- ranks ---------------------------------------------------------------------------------------


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """Gather every rank's object."""
    if not _is_distributed():
        return [mine]
    everyones = [mine for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _raise_together(
    faults: list[str],
    group: dist.ProcessGroup | None,
    error: type[Exception] = PartitionError,
) -> None:
    """Raise on every rank if there is a fault on any, so that no rank waits for another."""
    if _is_distributed():
        everyones = enumerate(_gathered(faults, group))
        faults = [f"rank {r}: {fault}" for r, found in everyones for fault in found]
    if faults:
        rest = len(faults) - _SHOWN
        raise error("; ".join([*faults[:_SHOWN], *([f"and {rest} more"] if rest > 0 else [])]))


def _kept(state: Mapping[str, Any], keep: Callable[[str], bool]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if keep(name)}


def _state_of(model: Model, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """The model's state; a fault of one rank is raised on all."""
    state: dict[str, Any] = {}
    faults = []
    try:
        state = model.state_dict()
    except PartitionError as error:
        faults = [str(error)]
    _raise_together(faults, group)
    return state


def _faults(saved: Mapping[str, object], wanted: Mapping[str, Any]) -> list[str]:
    """The names in ``wanted`` that are missing, or saved in another shape."""
    faults = []
    for name, value in wanted.items():
        meta = saved.get(name)
        if meta is None:
            faults.append(f"{name} is missing; was it saved from another model or optimizer?")
            continue
        if not isinstance(meta, TensorStorageMetadata) or not isinstance(value, Tensor):
            continue
        if meta.size != value.shape:
            was, expected = tuple(meta.size), tuple(value.shape)
            faults.append(f"{name} has shape {was}, expected {expected}")
    return faults


# --- files ---------------------------------------------------------------------------------------


class _Writer(FileSystemWriter):
    """A writer that keeps the previous checkpoint until the new one is complete."""

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


def _write(path: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    try:
        with _quietly():
            # Of what several ranks hold, the first one writes all: replicas' statistics differ,
            # and one replica's mean does not go with another one's variance.
            planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
            save_by_name(
                state,
                storage_writer=_Writer(path),
                planner=planner,
                process_group=group,
                no_dist=not _is_distributed(),
            )
    except CheckpointException as error:
        raise OSError(
            f"checkpoint {path} was not written ({_summary(error)}); one that was there is there "
            "still"
        ) from error


def _read(path: Folder, state: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Overwrite ``state`` by the checkpoint's."""
    try:
        with _quietly():
            load_by_name(
                state, checkpoint_id=path, process_group=group, no_dist=not _is_distributed()
            )
    except CheckpointException as error:
        raise PartitionError(
            f"checkpoint {path} can't be read ({_summary(error)}); some of it may have been "
            "loaded: load another one, or make the model anew"
        ) from error


def _metadata(path: Folder, group: dist.ProcessGroup | None) -> Metadata:
    """The checkpoint's metadata, once all files that it names are there in full."""
    missing: list[str] = []
    damaged: list[str] = []
    metadata = None
    try:
        metadata = FileSystemReader(path).read_metadata()
        lengths: dict[str, int] = {}
        for at in metadata.storage_data.values():
            name, end = at.relative_path, at.offset + at.length
            lengths[name] = max(lengths.get(name, 0), end)
        for file, length in ((Path(path) / name, length) for name, length in lengths.items()):
            if not file.exists():
                damaged.append(f"{file} is missing")
            elif (found := file.stat().st_size) < length:
                damaged.append(f"{file} has {found} bytes, expected {length}")
    except FileNotFoundError as error:
        missing = [
            f"{error}; it is written last: was the saving interrupted, or is the folder not one "
            "that all ranks reach?"
        ]
    except Exception as error:  # unpickling a damaged file may raise any exception
        damaged = [f"{path}: its metadata can't be read, {type(error).__name__}: {error}"]
    _raise_together(missing, group, FileNotFoundError)
    _raise_together(damaged, group)
    assert metadata is not None, "it was read"
    return metadata


def _summary(error: CheckpointException) -> str:
    """The failure of each rank; torch's own text has every traceback."""
    failures = []
    for rank, (failed, _) in sorted(error.failures.items())[:_SHOWN]:
        first_line, _, _ = str(failed).partition("\n")
        failures.append(f"rank {rank}: {type(failed).__name__}: {first_line}")
    return "; ".join(failures)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warnings of a single process and of an overwritten checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        yield
