"""Cut a sequence of layers into stages.

    layers   embed  0  1  2  3  head        split=[2, 2, 2]
    stages   ───────┘  ────┘  ──────        names as in the plain model

If sequences are split into chunks, a layer that mixes positions keeps a state from chunk to chunk:
it takes ``state`` and returns ``(output, state)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

from penstock._torch_compat import children, has_forward_hooks, is_sequential
from penstock.errors import PartitionError
from penstock.partition.plan import split_by_counts
from penstock.stage.stage import takes_state

__all__ = ["SequentialStage", "cut", "even_split", "is_sequence", "layers_of", "with_states"]

# torch's own layers that treat every position of a sequence independently.
_POSITIONWISE = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.ReLU),
    *(nn.ReLU6, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus),
    *(nn.Mish, nn.Hardswish),
)


class SequentialStage(nn.Module):
    """Consecutive layers of a sequence, under their names in the sequence.

    All stages but the last wrap their output, so that the next stage is called with one value, as
    in ``nn.Sequential``.
    """

    def __init__(self, layers: Mapping[str, nn.Module], *, last: bool) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._names = tuple(layers)
        self.last = last

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers by name, in order."""
        return {name: self.get_submodule(name) for name in self._names}

    def forward(self, value: Any) -> Any:
        """Run the layers one after the other."""
        for name in self._names:
            value = self._modules[name](value)  # type: ignore[misc]
        return value if self.last else (value,)


class _StatefulStage(SequentialStage):
    """A stage's layers, some of which pass state from one sequence chunk to the next.

    Refuses a layer that takes no state and is not known to treat positions independently.
    """

    def __init__(self, stage: SequentialStage) -> None:
        super().__init__(stage.layers, last=stage.last)
        self._stateful = {name for name, layer in stage.layers.items() if takes_state(layer)}
        for name, layer in stage.layers.items():
            if name not in self._stateful and not _is_positionwise(layer):
                raise PartitionError(
                    f"layer {name!r}, a {type(layer).__name__}, takes no state, so that it would "
                    "see each chunk of a sequence alone. Let its forward take state=None and "
                    "return (output, state); or, if it treats every position by itself, give it "
                    "the attribute positionwise = True"
                )

    def forward(self, value: Any, state: dict[str, Any] | None = None) -> Any:
        """Run the layers in sequence, each with its own state from the previous chunk."""
        states: dict[str, Any] = {}
        for name, layer in self.layers.items():
            if name in self._stateful:
                before = None if state is None else state[name]
                value, states[name] = layer(value, state=before)
            else:
                value = layer(value)
        return value if self.last else (value,), states


def with_states(modules: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    """Convert stages for whole sequences to stages for sequence chunks; refuse any others."""
    stages = [module for module in modules if isinstance(module, SequentialStage)]
    if len(stages) < len(modules):
        raise PartitionError(
            "sequence chunks need a list of layers or an nn.Sequential of them, each of which "
            "takes the state of the chunk before; or pass PipelineStages"
        )
    return tuple(map(_StatefulStage, stages))


def _is_positionwise(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Sequential):
        return all(map(_is_positionwise, layer))
    return type(layer) in _POSITIONWISE or getattr(layer, "positionwise", False) is True


def is_sequence(model: Any) -> TypeGuard[nn.Sequential | Sequence[Any]]:
    """True for an ``nn.Sequential`` or a list of layers."""
    return not isinstance(model, nn.Module) or isinstance(model, nn.Sequential)


def layers_of(model: nn.Sequential | Sequence[Any]) -> dict[str, nn.Module]:
    """The layers of an ``nn.Sequential`` by name, of a list by index; repeated ones in each place.

    Raises:
        PartitionError: a layer is no module, or the model does more than run its layers in turn.
    """
    if not isinstance(model, nn.Module):
        for i, layer in enumerate(model):
            if not isinstance(layer, nn.Module):
                raise PartitionError(
                    f"item {i} of the list is a {type(layer).__name__}, expected modules alone; "
                    "wrap a function in a module, and don't mix modules with PipelineStages"
                )
        return {str(i): layer for i, layer in enumerate(model)}
    if not is_sequential(model) or has_forward_hooks(model):
        raise PartitionError(
            f"the {type(model).__name__} does more than to run its layers in turn (a forward of "
            "its own, or hooks on the whole), which stages would leave out; pass its layers as a "
            "list, or PipelineStages"
        )
    return dict(children(model))


def even_split(num_layers: int, num_stages: int) -> list[int]:
    """Layer counts per stage, as even as possible, with the longer stages first."""
    if num_layers < num_stages:
        raise PartitionError(
            f"{num_layers} layers can't make {num_stages} stages; use fewer ranks or virtual "
            "stages, or cut the model finer"
        )
    quotient, rest = divmod(num_layers, num_stages)
    return [quotient + (stage < rest) for stage in range(num_stages)]


def cut(
    layers: Mapping[str, nn.Module], split: Sequence[int] | Sequence[Sequence[str]]
) -> list[SequentialStage]:
    """Cut layers into stages; ``split`` has per stage the number of its layers, or their names.

    Raises:
        PartitionError: the split leaves layers out, names unknown ones, or has empty stages.
    """
    names = list(layers)
    counts = [part for part in split if isinstance(part, int)]
    if counts and (min(counts) < 1 or sum(counts) != len(names)):
        raise PartitionError(
            f"the split {counts} counts {sum(counts)} layers, but there are {len(names)}; say for "
            "each stage how many layers it has, at least one"
        )
    groups = [list(part) for part in split if not isinstance(part, int)]
    groups = groups or split_by_counts(names, counts)
    flat = [name for group in groups for name in group]
    if flat != names or not all(groups):
        raise PartitionError(
            "the split must name every layer once and in order, and leave no stage empty: unknown "
            f"{[name for name in flat if name not in layers]}, left over "
            f"{[name for name in names if name not in flat]}, named {groups}, layers are {names}"
        )
    last = len(groups) - 1
    return [
        SequentialStage({name: layers[name] for name in group}, last=i == last)
        for i, group in enumerate(groups)
    ]
