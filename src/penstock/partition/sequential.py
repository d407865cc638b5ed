"""Cut a sequence of layers into stages.

    layers   embed  0  1  2  3  head        split=[2, 2, 2]
    stages   ───────┘  ────┘  ──────        names as in the plain model

It knows nothing of schedules or ranks, and moves no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from penstock.errors import PartitionError

__all__ = ["Chain", "Split", "cut", "even_split"]

Split: TypeAlias = Sequence[int] | Sequence[Sequence[str]]


class Chain(nn.Module):
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
        self._last = last

    def forward(self, value: Any) -> Any:
        """Run the layers one after the other."""
        for name in self._layers:
            value = self._modules[name](value)  # type: ignore[misc]
        return value if self._last else (value,)


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


def cut(layers: Mapping[str, nn.Module], split: Split) -> list[Chain]:
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
    groups = _groups(names, split)
    if any(not group for group in groups):
        raise PartitionError(f"stage {groups.index([])} of the split is empty: {list(split)}")
    flat = [name for group in groups for name in group]
    if flat != names:
        unknown = [name for name in flat if name not in layers]
        missing = [name for name in names if name not in flat]
        raise PartitionError(
            f"the split must name every layer once and in order: unknown {unknown}, left over "
            f"{missing}, layers are {names}"
        )
    last = len(groups) - 1
    return [
        Chain({name: layers[name] for name in group}, last=i == last)
        for i, group in enumerate(groups)
    ]


def _groups(names: list[str], split: Split) -> list[list[str]]:
    if not all(isinstance(part, int) for part in split):
        return [[part] if isinstance(part, str) else list(part) for part in split]  # type: ignore
    counts = [part for part in split if isinstance(part, int)]
    if sum(counts) != len(names) or min(counts, default=0) < 0:
        raise PartitionError(
            f"the split {counts} counts {sum(counts)} layers, but there are {len(names)}"
        )
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [names[end - count : end] for end, count in zip(ends, counts, strict=True)]
