"""Checkpoints that know nothing of pipelines: the plain model's names, in torch's own format.

    rank 0   its stages' parameters ─┐                        ┌─► any other number of ranks
    rank 1   its stages' parameters ─┴─► a folder, by name ───┴─► the plain model, one process

What is written is what ``torch.distributed.checkpoint`` (DCP) writes of
``{"model": model.state_dict(), "optim": ...}`` with the optimizer's state flattened by parameter
name, so that DCP alone reads it. This module knows neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from os import PathLike, fspath
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from penstock.errors import PartitionError
from penstock.runtime.comm.process_group import collective_call
from penstock.training.files import cut_short, is_distributed, read, write
from penstock.training.model_state import names_in_common, told_of_common

__all__ = ["Model", "load", "optimizer_state", "save"]

T = TypeVar("T")

_STATE = "optim.state."
# How many faults a message lists.
_SHOWN = 10


class Model(Protocol):
    """What is saved and loaded: a ``penstock.Pipeline``, or any ``nn.Module``."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters, under the plain model's names."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers, under the plain model's names."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any:
        """Take parameters and buffers over."""
        ...


def save(
    path: str | PathLike[str],
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    keep: Callable[[str], bool] = lambda _: True,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint. Every rank calls it; each writes what it holds, and of what several hold
    the first of them writes.

    Args:
        path: a folder that all ranks reach; it is made if there is none, and a checkpoint that
            is in it is replaced, as soon as this one is whole.
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
        _raise_together([] if optimizer is None else _strangers(model, optimizer), group)
        # A plain module is no stage, and may be the same on every rank.
        stages = getattr(type(model), "parameter_stages", None)
        mine = ({} if stages is None else stages(model), fspath(path))
        named, folders = zip(*_gathered(mine, group), strict=True)
        if len(set(folders)) > 1:
            told = ", ".join(
                f"rank {rank}: {folder}" for rank, folder in enumerate(folders[:_SHOWN])
            )
            raise PartitionError(
                f"the ranks do not save to one folder ({told}); where each pipeline is to have a "
                "checkpoint of its own, pass its process group as group="
            )
        common = names_in_common(named)
        if common:
            raise PartitionError(told_of_common(common))
        state: dict[str, Any] = {"model": _kept(_state_of(model, group), keep)}
        if optimizer is not None:
            state["optim"] = optimizer_state(model, optimizer)
        write(path, state, group)


def load(
    path: str | PathLike[str],
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
    with collective_call(group, "load()", (PartitionError, FileNotFoundError)):
        metadata = _described(path, group)
        saved: Mapping[str, object] = metadata.state_dict_metadata
        held = _state_of(model, group)
        state: dict[str, Any] = {"model": _kept(held, keep)}
        settings: dict[str, Any] = {}
        faults = _faults(saved, {f"model.{name}": value for name, value in state["model"].items()})
        if optimizer is not None:
            faults += _strangers(model, optimizer)
            if not faults:
                settings = _blank_settings(saved, model, optimizer)
                state["optim"] = _blank_state(metadata, model, optimizer)
                faults += _faults(saved, {f"optim.{key}": None for key in settings})
        _raise_together([f"checkpoint {path}: {fault}" for fault in faults], group)
        # What is read into the model overwrites it: whatever may be refused is read before.
        read(path, {"optim": settings}, group)
        if optimizer is not None:
            faults = _conflicts(model, optimizer, settings)
        _raise_together([f"checkpoint {path}: {fault}" for fault in faults], group)
        read(path, state, group)
        model.load_state_dict({**held, **state["model"]})
        if optimizer is not None:
            _fill_optimizer(model, optimizer, {**state["optim"], **settings})


def optimizer_state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat.

    Args:
        model: gives the names.
        optimizer: of this process's parameters.

    Returns:
        ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<setting>``: what torch's
        ``get_optimizer_state_dict`` gives when told to flatten.

    Raises:
        PartitionError: the optimizer holds a parameter that the model does not.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        >>> optimizer_state(layer, sgd)["param_groups.weight.lr"]
        0.5
    """
    strangers = _strangers(model, optimizer)
    if strangers:
        raise PartitionError(strangers[0])
    flat: dict[str, Any] = {}
    for name, param, group in _held(model, optimizer):
        for key, value in optimizer.state.get(param, {}).items():
            flat[f"state.{name}.{key}"] = value
        for key in _settings(group):
            flat[f"param_groups.{name}.{key}"] = group[key]
    return flat


def _kept(state: Mapping[str, Any], keep: Callable[[str], bool]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if keep(name)}


def _strangers(model: Model, optimizer: torch.optim.Optimizer) -> list[str]:
    known = {id(param) for _, param in model.named_parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = sum(id(param) not in known for param in held)
    if not strangers:
        return []
    return [
        f"{strangers} of the optimizer's {len(held)} parameters are none of the model's; make the "
        "optimizer from the parameters of this model or pipeline"
    ]


def _held(
    model: Model, optimizer: torch.optim.Optimizer
) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Every parameter of the optimizer with its name and its group, in the optimizer's order."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        (names[id(param)], param, group)
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def _settings(group: Mapping[str, Any]) -> list[str]:
    """The names of a group's settings, such as ``lr``."""
    return [key for key in group if key not in ("params", "param_names")]


def _described(path: str | PathLike[str], group: dist.ProcessGroup | None) -> Metadata:
    """What a checkpoint says of what is in it."""
    missing = damaged = ""
    cut: list[str] = []
    metadata = None
    try:
        metadata = FileSystemReader(path).read_metadata()
        cut = cut_short(path, metadata)
    except FileNotFoundError as error:
        missing = (
            f"{error}; it is written last: was the saving interrupted, or is the folder not one "
            "that all ranks reach?"
        )
    except Exception as error:  # it is pickled: anything may be wrong with it
        damaged = f"{path}: its metadata can't be read, {type(error).__name__}: {error}"
    _raise_together([missing] if missing else [], group, FileNotFoundError)
    _raise_together([damaged] if damaged else cut, group)
    assert metadata is not None, "it was read"
    return metadata


def _state_of(model: Model, group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What each rank holds; a fault of one is raised on all."""
    held: dict[str, Any] = {}
    faults = []
    try:
        held = model.state_dict()
    except PartitionError as error:
        faults = [str(error)]
    _raise_together(faults, group)
    return held


def _gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """What every rank has."""
    if not is_distributed():
        return [mine]
    everyones = [mine for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, mine, group=group)
    return everyones


def _raise_together(
    faults: list[str],
    group: dist.ProcessGroup | None,
    error: type[Exception] = PartitionError,
) -> None:
    """Raise on every rank where there is a fault on any: nobody waits for one that stopped."""
    if is_distributed():
        everyones = enumerate(_gathered(faults, group))
        faults = [f"rank {r}: {fault}" for r, found in everyones for fault in found]
    if faults:
        rest = len(faults) - _SHOWN
        more = [f"and {rest} more"] if rest > 0 else []
        raise error("; ".join([*faults[:_SHOWN], *more]))


def _faults(saved: Mapping[str, object], wanted: Mapping[str, Any]) -> list[str]:
    """What of ``wanted`` is missing, or saved in another shape."""
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


def _blank_settings(
    saved: Mapping[str, object], model: Model, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Where the optimizer's settings are to be read into; most are plain values."""
    keys = [
        f"param_groups.{name}.{key}"
        for name, _, group in _held(model, optimizer)
        for key in _settings(group)
    ]
    return {key: _blank(saved.get(f"optim.{key}")) for key in keys}


def _blank_state(
    metadata: Metadata, model: Model, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """What is to be read, as the checkpoint describes it: an optimizer that has taken no step has
    no state yet to read into. Some keep lists and dicts, whose items are saved one by one."""
    held = {name: param for name, param, _ in _held(model, optimizer)}
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    blank: dict[str | int, Any] = {}
    for key, meta in metadata.state_dict_metadata.items():
        _, entry, *within = paths.get(key, ("optim", key.removeprefix("optim.")))
        name, _, _ = str(entry).removeprefix("state.").rpartition(".")
        if not key.startswith(_STATE) or name not in held:
            continue
        place: dict[str | int, Any] = blank
        for step in [entry, *within][:-1]:
            place = place.setdefault(step, {})
        place[[entry, *within][-1]] = _blank(meta, held[name])
    return {str(entry): _as_lists(value) for entry, value in blank.items()}


def _as_lists(value: Any) -> Any:
    """Dicts that have numbers for keys, which stand for lists, made lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _as_lists(item) for key, item in value.items()}
    return [items[i] for i in sorted(items)] if all(isinstance(i, int) for i in items) else items


def _blank(meta: object, param: Tensor | None = None) -> Tensor | None:
    if not isinstance(meta, TensorStorageMetadata):
        return None
    if param is not None and meta.size == param.shape:
        # Like the parameter: on its device, and sharded as it is.
        return torch.empty_like(param, dtype=meta.properties.dtype, requires_grad=False)
    return torch.empty(meta.size, dtype=meta.properties.dtype)


def _conflicts(
    model: Model, optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> list[str]:
    """Where parameters of one group were saved with different settings."""
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
    """Hand the state over by the optimizer's own ``load_state_dict``, which may convert it."""
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
                own = deepcopy(states[name]) if name in given else states[name]
                plain["state"][index] = own
                given.add(name)
            if position == 0:
                group.update({key: flat[f"param_groups.{name}.{key}"] for key in _settings(group)})
    optimizer.load_state_dict(plain)
