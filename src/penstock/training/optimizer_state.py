"""The state of an optimizer by parameter name, and the plain model's optimizer over several ranks.

the plain model's optimizer            one rank's optimizer            a checkpoint
numbered parameters  ── load_optimizer_state ──►  its own  ── optimizer_state ──►  by name
                     ◄── plain_optimizer_state ──          ◄── fill_optimizer ──
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.runtime.comm.process_group import collective_call
from penstock.stage.dtensor import full_tensor, sharded_like
from penstock.stage.pytree import map_tensors

__all__ = [
    "Model", "NamedParam", "WholeOptimizerState", "fill_optimizer", "find_conflicts",
    "load_optimizer_state", "named_params", "optimizer_state", "plain_optimizer_state",
    "refuse_misfits",
]  # fmt: skip

# The state of torch's optimizers that has the parameter's shape.
_ELEMENTWISE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum")


class Model(Protocol):
    """A ``penstock.Pipeline``, or any ``nn.Module``."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


def load_optimizer_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    names: Iterable[str] = (),
) -> None:
    """Load the state of the plain model's optimizer; each rank takes that of its own parameters.

    Args:
        model: gives the names of this process's parameters.
        optimizer: of these parameters; its state and settings are overwritten.
        state: ``optimizer.state_dict()`` of the plain model, as ``torch.load`` returns it.
        names: the names of all parameters of that optimizer, in its order; of one made from
            ``plain.parameters()``, those of ``plain.named_parameters()``. Not needed for an
            optimizer made from named parameters.

    Raises:
        PartitionError: there are more or fewer names than parameters; the state lacks a parameter
            of this optimizer or has it in another shape; or it has other settings for parameters
            that are one group now. Nothing was overwritten.

    Examples:
        >>> plain, layer = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> state = torch.optim.SGD(plain.parameters(), lr=0.5).state_dict()
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
        >>> load_optimizer_state(layer, sgd, state, [name for name, _ in plain.named_parameters()])
        >>> sgd.param_groups[0]["lr"]
        0.5
    """
    groups = [(group, index) for group in state["param_groups"] for index in group["params"]]
    named = [name for group in state["param_groups"] for name in group.get("param_names", ())]
    named = named or list(names)
    if len(named) != len(groups):
        raise PartitionError(
            f"the optimizer's state has {len(groups)} parameters, but {len(named)} names were "
            "given; pass names=, those of all its parameters in their order"
        )
    by_name = {name: (group, index) for name, (group, index) in zip(named, groups, strict=True)}
    params = named_params(model, optimizer)
    faults = [f"{p.name} is missing" for p in params if p.name not in by_name]
    refuse_misfits("the optimizer's state", faults)
    flat: dict[str, Any] = {}
    for param in params:
        group, index = by_name[param.name]
        for key, value in state["state"].get(index, {}).items():
            if not isinstance(value, Tensor):
                value = deepcopy(value)
            elif value.shape == param.tensor.shape:
                value = sharded_like(param.tensor, value).clone()
            elif key in _ELEMENTWISE:
                was, expected = tuple(value.shape), tuple(param.tensor.shape)
                faults.append(f"{key} of {param.name} has shape {was}, expected {expected}")
            else:
                value = value.clone()
            flat[f"state.{param.name}.{key}"] = value
        flat |= {name: group.get(key, param.group[key]) for name, key in param.settings.items()}
    refuse_misfits("the optimizer's state", [*faults, *find_conflicts(params, flat)])
    fill_optimizer(optimizer, params, flat)


def optimizer_state(model: Model, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """An optimizer's state by parameter name, flat.

    Args:
        model: gives the names.
        optimizer: of this process's parameters; None has no state.

    Returns:
        ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<setting>``, as of torch's
        ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict``.

    Raises:
        PartitionError: the optimizer has a parameter that the model has not.

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> sgd = torch.optim.SGD(layer.parameters(), lr=0.5)
        >>> optimizer_state(layer, sgd)["param_groups.weight.lr"]
        0.5
    """
    flat: dict[str, Any] = {}
    for param in named_params(model, optimizer):
        assert optimizer is not None, "it has parameters"
        state = optimizer.state.get(param.tensor, {})
        flat |= {f"state.{param.name}.{key}": value for key, value in state.items()}
        flat |= {name: param.group[key] for name, key in param.settings.items()}
    return flat


def plain_optimizer_state(
    model: Model,
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any] | None:
    """Gather the state of the plain model's optimizer, as ``load_optimizer_state`` takes it.

    Args:
        model: gives the names of this process's parameters.
        optimizer: of these parameters.
        names: by parameter group, the names of all parameters of the plain model's optimizer.
        group: the ranks of the pipeline, for CPU tensors; if None, this process has all of it.

    Returns:
        What the plain optimizer's ``state_dict()`` would be, on the CPU, on the first rank; None on
        other ranks.
    """
    states = {p.name: optimizer.state.get(p.tensor, {}) for p in named_params(model, optimizer)}
    found: Any = map_tensors(lambda tensor: full_tensor(tensor.detach()).cpu(), states)
    parts = [found]
    if group is not None:
        parts = [None] * group.size()
        with collective_call(group, "plain_optimizer_state()"):
            is_first = group.rank() == 0
            dist.gather_object(found, parts if is_first else None, group=group, group_dst=0)
        if not is_first:
            return None
    by_name = {name: state for part in parts for name, state in part.items() if state}
    number = {name: i for i, name in enumerate(chain(*names))}
    groups = zip(optimizer.param_groups, names, strict=True)
    return {
        "state": {number[name]: by_name[name] for name in number if name in by_name},
        "param_groups": [{**g, "params": [number[n] for n in named]} for g, named in groups],
    }


class WholeOptimizerState:
    """The state of the whole model's optimizer, of which this process keeps its own parameters.

    The optimizer's ``state_dict()`` is the whole state once after ``gather``; what it loads is the
    whole state, or its own part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: Iterable[nn.Parameter],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.optimizer, self._model, self._group = optimizer, model, group
        self._gathered: list[dict[str, Any]] = []
        mine, groups = {*map(id, own)}, optimizer.param_groups
        named = named_params(model, optimizer)
        self._names = [[param.name for param in named if param.group is each] for each in groups]
        for each in groups:
            each["params"] = [param for param in each["params"] if id(param) in mine]
        for param in [param for param in optimizer.state if id(param) not in mine]:
            del optimizer.state[param]  # Adagrad makes its state at once
        optimizer.register_state_dict_post_hook(
            lambda *_: self._gathered.pop() if self._gathered else None
        )
        optimizer.register_load_state_dict_pre_hook(self._load)

    def gather(self, *, keeps: bool) -> None:
        """Gather the whole state on the first rank, where it ``keeps`` it; a collective call."""
        state = plain_optimizer_state(self._model, self.optimizer, self._names, group=self._group)
        self._gathered[:] = [state] if state and keeps else []

    def _load(self, optimizer: torch.optim.Optimizer, state: Any) -> Any:
        """Load this rank's part of a whole state; None, for no change, if that is all of it."""
        sizes = [len(group["params"]) for group in state["param_groups"]]
        if sizes == [len(group["params"]) for group in optimizer.param_groups]:
            return None
        load_optimizer_state(self._model, optimizer, state, chain(*self._names))
        return optimizer.state_dict()


def refuse_misfits(what: str, faults: Sequence[str]) -> None:
    """Raise a PartitionError about ``what`` if there are faults."""
    if faults:
        raise PartitionError(f"{what}: {'; '.join(faults)}")


class NamedParam(NamedTuple):
    """A parameter of an optimizer, its name in the model, and its parameter group."""

    name: str
    tensor: Tensor
    group: dict[str, Any]

    @property
    def settings(self) -> dict[str, str]:
        """The keys of its group's settings, such as ``lr``, by flat name."""
        keys = (key for key in self.group if key not in ("params", "param_names"))
        return {f"param_groups.{self.name}.{key}": key for key in keys}


def named_params(model: Model, optimizer: torch.optim.Optimizer | None) -> list[NamedParam]:
    """An optimizer's parameters, in its order; none for None."""
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    params = [(param, group) for group in groups for param in group["params"]]
    if num_foreign := sum(id(param) not in names for param, _ in params):
        raise PartitionError(
            f"{num_foreign} of the optimizer's {len(params)} parameters are none of the "
            "model's; make the optimizer from the parameters of this model or pipeline"
        )
    for param, state in () if optimizer is None else optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, dict | list):
                raise PartitionError(
                    f"the optimizer keeps {key!r} of {names[id(param)]} in a "
                    f"{type(value).__name__}, which is saved as part of extra= alone"
                )
    return [NamedParam(names[id(param)], param, group) for param, group in params]


def find_conflicts(params: Sequence[NamedParam], values: Mapping[str, Any]) -> list[str]:
    """Parameters of one group that were saved with different settings."""
    first: dict[tuple[int, str], tuple[str, Any]] = {}
    faults = []
    for param in params:
        for name, key in param.settings.items():
            other, value = first.setdefault((id(param.group), key), (param.name, values[name]))
            if values[name] != value:
                faults.append(
                    f"{key} is {value} for {other} and {values[name]} for {param.name}, which are "
                    "in one group of this optimizer; make its groups like the saved optimizer's"
                )
    return faults


def fill_optimizer(
    optimizer: torch.optim.Optimizer, params: Sequence[NamedParam], flat: Mapping[str, Any]
) -> None:
    """Load the state by the optimizer's own ``load_state_dict``, which may convert it."""
    states: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        if name.startswith("state."):
            param_name, _, key = name.removeprefix("state.").rpartition(".")
            states.setdefault(param_name, {})[key] = value
    loaded = optimizer.state_dict()
    loaded["state"] = by_index = {}
    first: dict[str, int] = {}
    places = [(group, i) for group in loaded["param_groups"] for i in group["params"]]
    for (group, index), param in zip(places, params, strict=True):
        group.update({key: flat[name] for name, key in param.settings.items()})
        if param.name in states:
            # Copies of a shared parameter have one name, but each a state of its own.
            is_copy = first.setdefault(param.name, index) != index
            by_index[index] = deepcopy(states[param.name]) if is_copy else states[param.name]
    optimizer.load_state_dict(loaded)
