"""From a model and how it is to be cut to the modules of its stages, by whichever way works.

    nn.Sequential, a list    its layers in a row        sequential.py
    any other model          by module                  by_module.py
    one that can't be so     captured as a graph        split_model.py

By module comes first: it runs the model's own code, for inputs of any shape, and needs no export.
Capture is for models whose code between the modules can't be run on several stages. This module
chooses, and says in one line of the log what it chose and why; it cuts nothing itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.partition.balance.plan import Plan
from penstock.partition.calls import Example, as_call
from penstock.partition.export.not_captured import NotCaptured
from penstock.partition.forward.homes import Cuts, CutSpec
from penstock.partition.sequential import cut, even_split, is_sequence, layers_of

if TYPE_CHECKING:
    from penstock.partition.balance.own_plan import OwnPlan
    from penstock.partition.export.pipe import Pipe

__all__ = [
    "ModelCut",
    "SplitSpec",
    "cut_model",
    "read_split",
    "stages_asked_for",
]

logger = logging.getLogger(__name__)

SplitSpec: TypeAlias = Cuts | str

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """A model cut into stages.

    Args:
        modules: one per stage.
        way: how it was cut, for people to read.
        why: why it was captured, likewise.
        whole_call: whether the stages together are called as the model is, so that it may
            compute its loss itself, and no target is needed.
        has_loss: whether the model's output has a loss.
    """

    modules: tuple[nn.Module, ...]
    way: str
    why: str = ""
    whole_call: bool = False
    has_loss: bool = False


def read_split(split: SplitSpec | os.PathLike[str] | None) -> SplitSpec | None:
    """``split`` as the user gave it, with a plan in place of a plan's file.

    Raises:
        PartitionError: the file is no plan, the word unknown, or it is nothing of the kind.
    """
    if isinstance(split, os.PathLike):
        return Plan.load(os.fspath(split))
    if isinstance(split, str) and split.endswith((".toml", ".json")):
        return Plan.load(split)
    if split is None or isinstance(split, Plan) or _is_listed(split) or split == AUTO:
        return split
    raise PartitionError(
        f"split={split!r}: expected 'auto', a plan or its file (.toml, .json), or a list that has "
        "for each stage the names of its modules, or the number of its layers"
    )


def _is_listed(split: object) -> bool:
    """Whether it has something for each stage: a count, a name, or several names."""
    return (
        isinstance(split, Sequence)
        and not isinstance(split, (str, bytes))
        and bool(len(split))
        and all(isinstance(part, (int, str, Sequence)) for part in split)
    )


def stages_asked_for(model: Any, split: SplitSpec | None) -> int | None:
    """How many stages a split has; None where that follows from the ranks."""
    if split is None or isinstance(split, str):
        return None
    if isinstance(split, Plan):
        return split.num_stages
    names = bool(split) and all(isinstance(part, str) for part in split)
    return len(split) + (1 if names and not is_sequence(model) else 0)


def cut_model(
    model: nn.Module | Sequence[nn.Module],
    split: SplitSpec | None,
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
        example: one microbatch: a tuple of positional, or a dict of keyword arguments; or its
            one argument.
        device: where the stages will live.

    Raises:
        PartitionError: it can't be cut so.
    """
    if not isinstance(model, nn.Module) or is_sequence(model):
        return _cut_row(model, split, num_stages)
    # What rows of layers do without is imported when it is needed, here and below: it is half of
    # all that Pipeline would import.
    from penstock.partition.balance.own_plan import OwnPlan
    from penstock.partition.forward.by_module import computes_loss
    from penstock.partition.forward.units import find_blocks

    if num_stages == 1 and split is None:
        has_loss = example is not None and computes_loss(model, example)
        return ModelCut(modules=(model,), way="whole", whole_call=True, has_loss=has_loss)
    own = OwnPlan.of(model)
    own.tell(type(model).__name__)
    blocks = find_blocks(model)
    if split is None and blocks:
        split = even_split(len(blocks), num_stages)
    if split is None:
        return _captured_where_marked(model, num_stages, example)
    assert not isinstance(split, str)
    return _by_module_or_captured(model, split, num_stages, blocks, own, example, device)


def _captured_where_marked(model: nn.Module, num_stages: int, example: Example | None) -> ModelCut:
    if example is None:
        raise PartitionError(
            f"this {type(model).__name__} has no list of repeated blocks to share out; name the "
            "modules of each stage in split=, or pass an example= for split='auto', or to capture "
            "it with pipe_split() in its forward"
        )
    return _captured(model, None, num_stages, example, "it has no list of repeated blocks")


def _by_module_or_captured(
    model: nn.Module,
    split: Cuts,
    num_stages: int,
    blocks: Sequence[str],
    own: OwnPlan,
    example: Example | None,
    device: torch.device,
) -> ModelCut:
    from penstock.partition.forward.by_module import NotByModule, split_by_module

    name = type(model).__name__
    try:
        done = split_by_module(model, split, example, device=device)
    except NotByModule as error:
        if example is None:
            raise
        try:
            return _captured(model, split, num_stages, example, f"not by module: {error}")
        except PartitionError as other:
            told = other.without_by_module if isinstance(other, NotCaptured) else str(other)
            raise PartitionError(f"{error}; nor can it be captured: {told}") from error
    logger.info(
        "%s: cut by module into %d stages, since %s; every stage runs the model's own forward",
        name,
        len(done.stages),
        why_by_module(own, blocks),
    )
    if done.dry_run is not None:
        own.check_order(name, done.dry_run.first_calls())
    return ModelCut(
        modules=done.stages,
        way="by module",
        whole_call=True,
        has_loss=done.dry_run is not None and done.dry_run.loss,
    )


def why_by_module(own: OwnPlan, blocks: Sequence[str]) -> str:
    """Why a model is cut by module, for the log."""
    if own.trunks:
        return f"its own plan has {len(blocks)} blocks in {', '.join(own.trunks)}"
    return f"it has {len(blocks)} repeated blocks" if blocks else "its modules are named"


def _cut_row(
    model: nn.Module | Sequence[nn.Module], split: SplitSpec | None, num_stages: int
) -> ModelCut:
    layers = layers_of(model)
    if split is None:
        split = even_split(len(layers), num_stages)
    parts: Any = split.stages if isinstance(split, Plan) else split
    return ModelCut(modules=tuple(cut(layers, parts)), way="layer by layer")


def _captured(
    model: nn.Module, split: Cuts | None, num_stages: int, example: Example, why: str
) -> ModelCut:
    pipe = _pipe(model, split, example)
    if pipe.num_stages == 1:
        raise PartitionError(
            f"this {type(model).__name__} has no list of repeated blocks to share out, and its "
            "forward calls no pipe_split(); split='auto' measures its modules and cuts between "
            "any of them, or name the modules of each stage in split="
        )
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
    return ModelCut(modules=modules, way="captured", why=why, whole_call=True, has_loss=has_loss)


def _pipe(model: nn.Module, split: Cuts | None, example: Example) -> Pipe:
    """The captured model, cut as asked for; where its forward marks it, if nothing is."""
    from penstock.partition.export.by_names import pipeline_of_counts, pipeline_of_names
    from penstock.partition.export.markers import SplitPoint
    from penstock.partition.export.split_model import pipeline

    args, kwargs = as_call(example)
    if split is None:
        return pipeline(model, args, kwargs)
    spec = CutSpec.of(model, split)
    if spec.stages:
        Plan(stages=spec.stages).check(model)
        return pipeline_of_names(model, args, kwargs, spec.stages)
    if spec.counts:
        return pipeline_of_counts(model, args, kwargs, spec.blocks, spec.counts)
    points = dict.fromkeys(spec.starts, SplitPoint.BEGINNING)
    return pipeline(model, args, kwargs, split_spec=points)
