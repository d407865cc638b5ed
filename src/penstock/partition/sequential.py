"""Cut a sequence of layers into stages.

    layers   embed  0  1  2  3  head        split=[2, 2, 2]
    stages   ───────┘  ────┘  ──────        names as in the plain model

It knows nothing of schedules or ranks, and moves no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from penstock._torch_compat import children, has_forward_hooks, is_sequential
from penstock.errors import PartitionError
from penstock.partition.balance.plan import dealt

__all__ = ["LayerRow", "LayerSplit", "cut", "even_split", "is_row", "layers_of"]

LayerSplit: TypeAlias = Sequence[int] | Sequence[Sequence[str]]


class LayerRow(nn.Module):
    """Consecutive layers of a sequence, under the names that they have there.

    Args:
        layers: the layers by name.
        last: whether they end the sequence. The others wrap their output, whatever it is, so
            that the next stage is called with that one value, as ``nn.Sequential`` does.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, last: bool) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._layers = tuple(layers)
        self.last = last

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, in order."""
        return {name: self.get_submodule(name) for name in self._layers}

    def forward(self, value: Any) -> Any:
        """Run the layers one after the other."""
        for name in self._layers:
            value = self._modules[name](value)  # type: ignore[misc]
        return value if self.last else (value,)


def is_row(model: Any) -> bool:
    """Whether a model is its layers in a row: an ``nn.Sequential``, or a list."""
    return not isinstance(model, nn.Module) or isinstance(model, nn.Sequential)


def layers_of(model: nn.Module | Sequence[Any]) -> dict[str, nn.Module]:
    """The layers of a sequence by name, in order; one that stands in several places, in each.

    Args:
        model: an ``nn.Sequential``, or a list of modules, which are named by their numbers.

    Raises:
        PartitionError: it is neither, or does more than to run its layers one after the other.

    Example:
        >>> relu = nn.ReLU()
        >>> list(layers_of(nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)))
        ['0', '1', '2', '3']
    """
    if not isinstance(model, nn.Module):
        for i, layer in enumerate(model):
            if not isinstance(layer, nn.Module):
                raise PartitionError(
                    f"item {i} of the list is a {type(layer).__name__}, expected modules alone; "
                    "wrap a function in a module, and don't mix modules with PipelineStages"
                )
        return {str(i): layer for i, layer in enumerate(model)}
    name = type(model).__name__
    if not isinstance(model, nn.Sequential):
        raise PartitionError(
            f"a {name} can't be cut by itself; pass an nn.Sequential, a list of modules, or "
            "PipelineStages"
        )
    if not is_sequential(model) or has_forward_hooks(model):
        raise PartitionError(
            f"the {name} does more than to run its layers in turn (a forward of its own, or hooks "
            "on the whole), which stages would leave out; pass its layers as a list, or "
            "PipelineStages"
        )
    return dict(children(model))


def even_split(num_layers: int, num_stages: int) -> list[int]:
    """Layer counts per stage, as even as they go, the first stages one layer longer.

    Raises:
        PartitionError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise PartitionError(
            f"{num_layers} layers can't make {num_stages} stages; use fewer ranks or virtual "
            "stages, or cut the model finer"
        )
    whole, rest = divmod(num_layers, num_stages)
    return [whole + (stage < rest) for stage in range(num_stages)]


def cut(layers: Mapping[str, nn.Module], split: LayerSplit) -> list[LayerRow]:
    """Cut layers into stages.

    Args:
        layers: all layers by name, in order.
        split: per stage either the number of its layers, or their names.

    Returns:
        One chain per stage.

    Raises:
        PartitionError: the split leaves layers out, names unknown ones, or has empty stages.
    """
    names = list(layers)
    if not split:
        raise PartitionError("the split is empty; name the layers of each stage, or count them")
    groups = _groups(names, split)
    if any(not group for group in groups):
        raise PartitionError(f"stage {groups.index([])} of the split is empty: {list(split)}")
    flat = [name for group in groups for name in group]
    if flat != names:
        unknown = [name for name in flat if name not in layers]
        missing = [name for name in names if name not in flat]
        raise PartitionError(
            f"the split must name every layer once and in order: unknown {unknown}, left over "
            f"{missing}, named {flat}, layers are {names}"
        )
    last = len(groups) - 1
    return [
        LayerRow({name: layers[name] for name in group}, last=i == last)
        for i, group in enumerate(groups)
    ]


def _groups(names: list[str], split: LayerSplit) -> list[list[str]]:
    counts = [part for part in split if isinstance(part, int)]
    if not counts:
        return [[part] if isinstance(part, str) else list(part) for part in split]  # type: ignore
    if len(counts) < len(split):
        raise PartitionError(f"the split {list(split)} mixes counts with names; use either")
    if min(counts) < 0:
        raise PartitionError(
            f"the split {counts} has a negative count; say for each stage how many layers it has"
        )
    if sum(counts) != len(names):
        raise PartitionError(
            f"the split {counts} counts {sum(counts)} layers, but there are {len(names)}"
        )
    return dealt(names, counts)
