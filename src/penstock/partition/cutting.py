"""From a model and a wish to the modules of its stages, by whichever way works.

    nn.Sequential, a list    its layers in a row        sequential.py
    any other model          by module                  by_module.py
    one that can't be so     captured as a graph        split_model.py

By module comes first: it runs the model's own code, for inputs of any shape, and needs no export.
Capture is for models whose code between the modules can't be run on several stages. This module
chooses, and says in one line of the log what it chose and why; it cuts nothing itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.homes import Cuts
from penstock.partition.plan import Plan
from penstock.partition.sequential import cut, even_split, layers_of

__all__ = [
    "Example",
    "ModelCut",
    "SplitWish",
    "balanced_plan",
    "cut_model",
    "own_loss",
    "read_split",
    "stages_asked_for",
]

logger = logging.getLogger(__name__)

Example: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
SplitWish: TypeAlias = Cuts | str

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """A model cut into stages.

    Args:
        modules: one per stage.
        way: how it was cut, for people to read.
        whole_call: whether the stages together are called as the model is, so that it may
            compute its loss itself, and no target is needed.
        has_loss: whether the model's output has a loss.
    """

    modules: tuple[nn.Module, ...]
    way: str
    whole_call: bool = False
    has_loss: bool = False


def read_split(split: SplitWish | None) -> SplitWish | None:
    """``split`` as the user gave it, with a plan in place of a plan's file.

    Raises:
        PartitionError: the file is no plan, or the word unknown.
    """
    if not isinstance(split, str) or split == AUTO:
        return split
    if split.endswith((".toml", ".json")):
        return Plan.load(split)
    raise PartitionError(
        f"split={split!r}: expected 'auto', a plan or its file (.toml, .json), names of modules or "
        "counts"
    )


def stages_asked_for(model: Any, split: SplitWish | None) -> int | None:
    """How many stages a split has; None where that follows from the ranks."""
    if split is None or isinstance(split, str):
        return None
    if isinstance(split, Plan):
        return split.num_stages
    names = bool(split) and all(isinstance(part, str) for part in split)
    return len(split) + (1 if names and not is_row(model) else 0)


def is_row(model: Any) -> bool:
    """Whether a model is its layers in a row: an ``nn.Sequential``, or a list."""
    return not isinstance(model, nn.Module) or isinstance(model, nn.Sequential)


def cut_model(
    model: nn.Module | Sequence[nn.Module],
    split: SplitWish | None,
    num_stages: int,
    *,
    example: Example | None = None,
    device: torch.device,
) -> ModelCut:
    """Cut a model into stages.

    Args:
        model: the model, or a list of its layers.
        split: a plan, names or counts (see ``split_by_module``); even counts if None.
        num_stages: how many stages to make.
        example: one microbatch: a tuple of positional, or a dict of keyword arguments.
        device: where the stages will live.

    Raises:
        PartitionError: it can't be cut so.
    """
    if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential):
        return _cut_row(model, split, num_stages)
    # What rows of layers do without is imported when it is needed, here and below: it is half of
    # all that Pipeline would import.
    from penstock.partition.by_module import NotByModule, computes_loss, split_by_module
    from penstock.partition.units import find_blocks

    name = type(model).__name__
    if num_stages == 1 and split is None:
        has_loss = example is not None and computes_loss(model, example)
        return ModelCut(modules=(model,), way="whole", whole_call=True, has_loss=has_loss)
    blocks = find_blocks(model)
    if split is None and blocks:
        split = even_split(len(blocks), num_stages)
    if split is None:
        if example is None:
            raise PartitionError(
                f"this {name} has no list of repeated blocks to share out; name the modules of "
                "each stage in split=, or pass an example= to capture it, with pipe_split() in "
                "its forward"
            )
        return _captured(model, None, num_stages, example, "it has no list of repeated blocks")
    assert not isinstance(split, str)
    try:
        done = split_by_module(model, split, example, device=device)
    except NotByModule as error:
        if example is None:
            raise
        try:
            starts = _starts(split, blocks)
            return _captured(model, starts, num_stages, example, f"not by module: {error}")
        except PartitionError as other:
            raise PartitionError(_neither(error, other)) from error
    logger.info(
        "%s: cut by module into %d stages, since %s; every stage runs the model's own forward",
        name,
        len(done.stages),
        f"it has {len(blocks)} repeated blocks" if blocks else "its modules are named",
    )
    return ModelCut(
        modules=done.stages,
        way="by module",
        whole_call=True,
        has_loss=done.dry_run is not None and done.dry_run.loss,
    )


def _cut_row(
    model: nn.Module | Sequence[nn.Module], split: SplitWish | None, num_stages: int
) -> ModelCut:
    layers = layers_of(model)
    if split is None:
        split = even_split(len(layers), num_stages)
    parts: Any = split.stages if isinstance(split, Plan) else split
    return ModelCut(modules=tuple(cut(layers, parts)), way="layer by layer")


def _starts(split: Cuts, blocks: Sequence[str]) -> list[str]:
    """The modules with which stages after the first begin."""
    parts: list[Any] = list(split.stages if isinstance(split, Plan) else split)
    if all(isinstance(part, str) for part in parts):
        return parts
    if all(isinstance(part, int) for part in parts):
        return [blocks[sum(parts[:i])] for i in range(1, len(parts))]
    return [names[0] for names in parts[1:]]


def _captured(
    model: nn.Module, starts: Sequence[str] | None, num_stages: int, example: Example, why: str
) -> ModelCut:
    from penstock.partition.by_module import as_call
    from penstock.partition.markers import SplitPoint
    from penstock.partition.split_model import pipeline

    args, kwargs = as_call(example)
    spec = dict.fromkeys(starts, SplitPoint.BEGINNING) if starts else None
    pipe = pipeline(model, args, kwargs, split_spec=spec)
    if pipe.num_stages != num_stages:
        raise PartitionError(
            f"captured, the {type(model).__name__} has {pipe.num_stages} stages (one more than "
            f"its forward calls pipe_split()), expected {num_stages}; change ranks, or name the "
            "modules of each stage in split="
        )
    logger.info(
        "%s: captured as a graph and cut into %d stages, since %s",
        type(model).__name__,
        num_stages,
        why,
    )
    modules = tuple(pipe.get_stage_module(i) for i in range(num_stages))
    has_loss = bool(getattr(modules[-1], "has_loss", False))
    return ModelCut(modules=modules, way="captured", whole_call=True, has_loss=has_loss)


def _neither(by_module: PartitionError, captured: PartitionError) -> str:
    from penstock.partition.capture import BY_MODULE

    told = str(captured)
    for joined in ("; ", ", or "):
        told = told.replace(f"{joined}{BY_MODULE}", "")  # it has been tried
    return f"{by_module}; nor can it be captured: {told}"


def balanced_plan(
    model: nn.Module | Sequence[nn.Module], num_stages: int, example: Example | None
) -> Plan:
    """The plan whose slowest stage is the quickest, measured on this machine.

    Args:
        model: the model, on one device.
        num_stages: how many stages to make.
        example: one microbatch.

    Raises:
        PartitionError: there is no example to measure with, or there are too few blocks.
    """
    if example is None:
        raise PartitionError(
            "split='auto' measures the model: pass example=, one microbatch as a tuple of "
            "positional or a dict of keyword arguments"
        )
    from penstock.partition.balance import balance
    from penstock.partition.profile import profile

    measured = profile(model, tuple(example) if not isinstance(example, Mapping) else example)
    return measured.plan(balance(measured, num_stages).counts, made="balanced on this machine")


def own_loss(output: Any, target: object = None) -> Tensor | None:
    """The loss that a model has computed itself: a loss function for such models.

    Args:
        output: what the model returns, with an attribute or a key ``loss``.
        target: not looked at.

    Returns:
        The loss; None where there is none, as in an evaluation without labels.

    Example:
        >>> own_loss({"loss": torch.tensor(2.0)})
        tensor(2.)
    """
    if isinstance(output, Mapping):
        return output.get("loss")
    loss: Tensor | None = getattr(output, "loss", None)
    return loss
