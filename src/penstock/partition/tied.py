"""Finds the parameters that several stages have in common.

    stage 0   embed.weight ─┐
    stage 3   head.weight ──┴─ one parameter      {0: "embed.weight", 3: "head.weight"}

A tie is a mapping from each stage that holds the parameter to its name there. Where stages lie on
several ranks each process has a parameter of its own, and a tie is what remains to say that they
are one: ``penstock.parallel.tied_params`` sums their gradients. Running statistics can't be summed
so, for each call starts from what the last one left: they are refused. This module knows no ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from torch import nn

from penstock.errors import PartitionError
from penstock.stage.wrappers import named_plainly

__all__ = ["Tie", "all_names", "find_ties", "first_name", "refuse_shared_statistics", "tell_ties"]

Tie: TypeAlias = Mapping[int, str]
"""For each stage that holds it, the name of a parameter there; or of a module, for all of its."""


def find_ties(modules: Sequence[nn.Module]) -> tuple[dict[int, str], ...]:
    """The parameters that stand in several modules, seen from their being one object.

    Args:
        modules: the modules of all stages, in order.

    Returns:
        A tie for each such parameter, stages rising; where a stage has it under several names,
        the first. In the order of the first stages' parameters.

    Example:
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


def tell_ties(modules: Sequence[nn.Module]) -> tuple[dict[int, str], ...]:
    """Find the parameters that stand in several modules, and tell each module of them.

    A ``PipelineStage`` reads it there: a process that is given one stage can't see the others.

    Args:
        modules: the modules of all stages, in order, as a cut has made them.

    Returns:
        As ``find_ties``.
    """
    ties = find_ties(modules)
    for module in modules:
        module.ties_of_stages = ties  # type: ignore[assignment]
    return ties


def refuse_shared_statistics(modules: Mapping[int, nn.Module]) -> None:
    """Refuse a layer with running statistics that several stages call.

    In one process a microbatch meets it at each depth before the next one comes; in a pipeline
    many meet it at one depth first, and over processes each depth has statistics of its own.

    Args:
        modules: the modules of the model's stages, rising; of all of them, or of those that are
            known here.

    Raises:
        PartitionError: a layer that keeps running statistics stands in several stages.

    Example:
        >>> norm = nn.BatchNorm1d(4)
        >>> refuse_shared_statistics({0: norm, 1: norm})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        penstock.errors.PartitionError: the BatchNorm1d of stage 0 is that of stage 1 too...
        >>> refuse_shared_statistics({0: norm.eval(), 1: norm})
    """
    seen: dict[int, tuple[int, str]] = {}
    for stage, module in modules.items():
        for name, layer in module.named_modules():
            if not (layer.training and getattr(layer, "track_running_stats", False)):
                continue
            first, name_there = seen.setdefault(id(layer), (stage, name))
            if first != stage:
                what = f"{type(layer).__name__} {name_there}".rstrip()
                raise PartitionError(
                    f"the {what} of stage {first} is that of stage {stage} too, and updates its "
                    "running statistics in each call: not in the order of one process; give each "
                    "its own, freeze it before "
                    "(eval()), or cut so that both lie in one stage"
                )


def first_name(ties: Sequence[Tie], stage: int, name: str) -> str:
    """What the plain model calls a parameter of a stage: a tied one, as the first stage does.

    Args:
        ties: what is tied.
        stage: the stage that holds the parameter.
        name: its name there.

    Example:
        >>> first_name([{0: "embed", 3: "head"}], 3, "head.weight")
        'embed.weight'
        >>> first_name([{0: "embed", 3: "head"}], 2, "norm.weight")
        'norm.weight'
    """
    return next(iter(all_names(ties, stage, name)), name)


def all_names(ties: Sequence[Tie], stage: int, name: str) -> list[str]:
    """The names that a parameter of a stage has in the stages that it is tied to.

    Args:
        ties: what is tied.
        stage: the stage that holds the parameter.
        name: its name there.

    Example:
        >>> all_names([{0: "embed", 3: "head"}], 3, "head.weight")
        ['embed.weight', 'head.weight']
    """
    found = []
    for tie in ties:
        here = tie.get(stage)
        if here is not None and (name == here or name.startswith(f"{here}.")):
            found += [tie[at] + name.removeprefix(here) for at in sorted(tie)]
    return found
