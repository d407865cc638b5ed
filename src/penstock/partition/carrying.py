"""Stages of a row of layers whose sequences are split: each layer keeps a state of its own.

    piece i     embed ──────► block ──────► block ──────► head        looks at each position alone
                              │ state       │ state
    piece i+1   embed ──────► block ──────► block ──────► head

A layer that looks along the sequence takes ``state`` and returns ``(output, state)``; any other
must be known to treat every position by itself, or it would see each piece as a whole sequence,
and give another result. This module knows neither schedules nor messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.sequential import LayerRow
from penstock.stage.carry import takes_state

__all__ = ["CarryingRow", "carrying"]

# Of torch's own layers, those that treat every position of a sequence by itself.
_POSITIONWISE = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.Dropout,
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Mish,
    nn.Hardswish,
)


class CarryingRow(LayerRow):
    """Consecutive layers of a sequence, some of which hand a state from piece to piece.

    Args:
        chain: the same layers for whole sequences.

    Raises:
        PartitionError: a layer takes no state, and is not known to do without.
    """

    def __init__(self, chain: LayerRow) -> None:
        layers = chain.layers
        super().__init__(layers, last=chain.last)
        for name, layer in layers.items():
            if not takes_state(layer) and not _is_positionwise(layer):
                raise PartitionError(
                    f"layer {name!r}, a {type(layer).__name__}, takes no state, so that it would "
                    "see each piece of a split sequence alone. Let its forward take state=None "
                    "and return (output, state); or, if it treats every position by itself, give "
                    "it the attribute positionwise = True"
                )
        self._stateful = frozenset(name for name, layer in layers.items() if takes_state(layer))

    def forward(self, value: Any, state: tuple[Any, ...] | None = None) -> Any:
        """Run the layers one after the other, each with its own state of the piece before."""
        states: list[Any] = []
        for i, (name, layer) in enumerate(self.layers.items()):
            if name in self._stateful:
                value, new = layer(value, state=None if state is None else state[i])
            else:
                value, new = layer(value), None
            states.append(new)
        return value if self.last else (value,), tuple(states)


def carrying(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """The stages for pieces of sequences, of those for whole ones.

    Args:
        modules: the stages as a model was cut into.

    Raises:
        PartitionError: the model was not cut layer by layer, or a layer takes no state.
    """
    chains: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, LayerRow):
            raise PartitionError(
                "where sequences are split, the model is a list of layers or an nn.Sequential of "
                "them, each of which takes the state of the piece before; or pass PipelineStages"
            )
        chains.append(CarryingRow(module))
    return tuple(chains)


def _is_positionwise(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Sequential):
        return all(map(_is_positionwise, layer))
    return type(layer) in _POSITIONWISE or getattr(layer, "positionwise", False) is True
