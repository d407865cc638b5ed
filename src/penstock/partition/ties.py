"""Ties: parameters and buffers with several names, or shared by several stages.

    stage 0   embed.weight ─┐
    stage 3   head.weight ──┴─ one parameter      {0: "embed.weight", 3: "head.weight"}

A tie maps each stage that holds the parameter to its name there. Each process has its own copy of
the parameter, and ``penstock.parallel.shared_params`` sums the copies' gradients. Buffers that a
forward writes can't be summed, so layers that write buffers in several stages are refused. This
module knows no ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor, nn

from penstock._torch_compat import buffers_of, version_of
from penstock.errors import PartitionError
from penstock.stage.wrappers import named_plainly

__all__ = [
    "SharedBuffers", "Tie", "all_names", "find_ties", "first_name", "named_tensors",
    "names_by_tensor", "record_ties",
]  # fmt: skip

Tie: TypeAlias = Mapping[int, str]
"""For each stage that holds a parameter, its name there; or the name of a module, for all its
parameters."""


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, each under all its names."""
    params = model.named_parameters(remove_duplicate=False)
    return {**dict(params), **dict(model.named_buffers(remove_duplicate=False))}


def names_by_tensor(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each parameter and buffer, by id, in the order of the model's tree."""
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in named_tensors(model).items():
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found


def find_ties(modules: Sequence[nn.Module]) -> tuple[dict[int, str], ...]:
    """Find the parameters that several stages' modules, given in order, share as one object.

    Returns a tie for each, in the order of the first stages' parameters, with the first name that
    each stage has for it.

    Examples:
        >>> embed, head = nn.Embedding(5, 2), nn.Linear(2, 5, bias=False)
        >>> head.weight = embed.weight
        >>> find_ties([embed, nn.Linear(2, 2), head])
        ({0: 'weight', 2: 'weight'},)
    """
    ties: dict[int, dict[int, str]] = {}
    for stage, module in enumerate(modules):
        for name, param in named_plainly(module, buffers=False):
            ties.setdefault(id(param), {})[stage] = name
    return tuple(tie for tie in ties.values() if len(tie) > 1)


def record_ties(modules: Sequence[nn.Module]) -> tuple[dict[int, str], ...]:
    """Record the ties between all stage modules as ``ties_of_stages`` on each, and return them.

    A ``PipelineStage`` reads the attribute: a process with one stage can't see the others.
    """
    ties = find_ties(modules)
    for module in modules:
        module.ties_of_stages = ties  # type: ignore[assignment]
    return ties


def all_names(ties: Sequence[Tie], stage: int, name: str) -> list[str]:
    """The names of a stage's parameter in all stages tied to it; empty if it is not tied."""
    found = []
    for tie in ties:
        here = tie.get(stage)
        if here is not None and (name == here or name.startswith(f"{here}.")):
            found += [tie[at] + name.removeprefix(here) for at in sorted(tie)]
    return found


def first_name(ties: Sequence[Tie], stage: int, name: str) -> str:
    """The plain model's name of a stage's parameter: for a tied one, the name in its first stage.

    Examples:
        >>> ties = [{0: "embed", 3: "head"}]
        >>> first_name(ties, 3, "head.weight"), first_name(ties, 2, "norm.weight")
        ('embed.weight', 'norm.weight')
    """
    return next(iter(all_names(ties, stage, name)), name)


class SharedBuffers:
    """Buffers of layers shared by several stages, which no step may write.

    A single process writes them once per use and microbatch, in order. In a pipeline the order
    differs, and each process has buffers of its own.

    ``modules`` are those of the stages, rising; those of other ranks may be missing. A shared layer
    that updates running statistics is refused at once.
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        # Per buffer its layer and name, and the message if it is written.
        self._shared: list[tuple[weakref.ref[nn.Module], str, str]] = []
        seen: dict[int, tuple[int, str]] = {}
        for stage, module in modules.items():
            for name, layer in module.named_modules():
                first, path = seen.setdefault(id(layer), (stage, name))
                if first == stage:
                    continue
                if layer.training and getattr(layer, "track_running_stats", False):
                    what = f"{type(layer).__name__} {path}".rstrip()
                    how = "updates its running statistics"
                    raise PartitionError(_shared_message(what, first, stage, how))
                for buffer in buffers_of(layer):
                    what = f"buffer {f'{path}.{buffer}'.removeprefix('.')}"
                    message = _shared_message(what, first, stage, "is written")
                    self._shared.append((weakref.ref(layer), buffer, message))

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raise a PartitionError on leaving, if a buffer was written or replaced."""
        before = self._versions()
        yield
        for (*_, message), was, now in zip(self._shared, before, self._versions(), strict=True):
            if now[0] is not was[0] or now[1] != was[1]:
                raise PartitionError(message)

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        layers = ((ref(), name) for ref, name, _ in self._shared)
        found = [None if layer is None else buffers_of(layer).get(name) for layer, name in layers]
        return [(b, 0 if b is None or b.is_inference() else version_of(b)) for b in found]


def _shared_message(what: str, first: int, stage: int, how: str) -> str:
    return (
        f"the {what} of stage {first} is that of stage {stage} too, and {how} in each call, in "
        "another order than one process; give each stage its own layer, freeze it before (eval()), "
        "or put both uses in one stage"
    )
