"""What crosses each cut between the blocks of a model, where it is cut by module.

    blocks    wte, wpe | h.0 | h.1 | ln_f, lm_head
    cut               0     1     2
    crosses   ids, labels, output of drop     ids, labels, output of h.0     ...

The same dry run tells it that the stages go by, so the sizes are those of what they send. Nothing
is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.partition.forward.absent import Source, SourceKind
from penstock.partition.forward.by_module import run_first
from penstock.partition.forward.homes import try_cut
from penstock.partition.forward.recorded import DryRun
from penstock.partition.forward.units import find_units
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import named_tensors
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["cross_between"]

Crossing = tuple[TensorMeta, ...]


def cross_between(
    model: nn.Module,
    blocks: Sequence[Sequence[str]],
    example: tuple[Any, ...] | Mapping[str, Any],
    device: torch.device,
) -> list[Crossing | None]:
    """The tensors that cross each cut.

    Args:
        model: the model.
        blocks: per block the names of its modules, in the order in which they run.
        example: one microbatch: a tuple of positional, or a dict of keyword arguments.
        device: where the stages will live.

    Returns:
        What crosses the cut behind each block but the last; None where the model can't be cut by
        module there.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        ...     def forward(self, x):
        ...         return x + self.layers[1](self.layers[0](x).relu())
        >>> blocks = [["layers.0"], ["layers.1"]]
        >>> [crossing] = cross_between(Net(), blocks, (torch.ones(2, 4),), torch.device("cpu"))
        >>> [tuple(meta.shape) for meta in crossing]  # x, and what the first layer returns
        [(2, 4), (2, 4)]
    """
    cuts = range(1, len(blocks))
    try:
        parts = find_units(model, [name for names in blocks for name in names])
        seen = run_first(parts, device, example)[1]
    except PartitionError:
        return [None for _ in cuts]
    assert seen is not None, "there is an example"

    def crossing(cut: int) -> Crossing | None:
        sides = blocks[:cut], blocks[cut:]
        spec = SplitSpec(stages=tuple(tuple(n for names in side for n in names) for side in sides))
        found = try_cut(parts, spec, seen)
        if found is None:
            return None
        return tuple(_meta(source, seen, model) for source in found.carried[0])

    return [crossing(cut) for cut in cuts]


def _meta(source: Source, seen: DryRun, model: nn.Module) -> TensorMeta:
    """What a value is that crosses."""
    if source.kind is SourceKind.PARAMETER:
        return TensorMeta.of(named_tensors(model)[source.name])
    spec = seen.inputs if source.kind is SourceKind.INPUT else seen.calls[source.call].output
    found = spec.leaves[source.leaf]
    assert isinstance(found, TensorMeta), f"{source} is a tensor"
    return found
