"""Cut a model into stage modules by the first method that works.

nn.Sequential, a list    layer by layer             sequential.py
any other model          by module                  forward/by_module.py
if that fails            by torch.export            export/pipe.py, with a warning
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.partition.sequential import cut, even_split, is_sequence, layers_of
from penstock.partition.spec import Example, SplitSpec, as_call

__all__ = ["CutMethod", "ModelCut", "cut_model"]

logger = logging.getLogger(__name__)

CutMethod: TypeAlias = Literal["module", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCut:
    """A model cut into stages."""

    modules: tuple[nn.Module, ...]
    whole_call: bool = False  # True if the first stage takes the model's own arguments
    has_loss: bool = False  # True if the model's output has a loss
    names: tuple[tuple[str, ...], ...] = ()  # per stage the names of its layers or modules


def cut_model(
    model: nn.Module | Sequence[nn.Module],
    split: SplitSpec | None,
    num_stages: int,
    *,
    example: Example | None = None,
    device: torch.device,
    method: CutMethod | None = None,
) -> ModelCut:
    """Cut a model into stages.

    Args:
        model: the model, or a list of its layers, which is always cut layer by layer.
        split: the places to cut; None for even counts of blocks.
        num_stages: the number of stages.
        example: one microbatch.
        device: the device of the stages.
        method: ``"module"``, ``"export"``, or None to try one after the other.

    Raises:
        PartitionError: the model can't be cut at these places.
    """
    if method not in ("module", "export", None):
        raise PartitionError(f"method={method!r}: expected 'module', 'export' or None")
    if not isinstance(model, nn.Module) or is_sequence(model):
        layers = layers_of(model)
        parts = split.counts or split.stages if split else even_split(len(layers), num_stages)
        stages = cut(layers, parts)
        return ModelCut(modules=tuple(stages), names=tuple(tuple(each.layers) for each in stages))
    # Lazy imports, here and below: sequences of layers then load half as many modules.
    from penstock.partition.blocks import find_blocks
    from penstock.partition.forward.by_module import NotByModule, computes_loss

    if num_stages == 1 and split is None:
        has_loss = example is not None and computes_loss(model, example)
        names = ((type(model).__name__,),)
        return ModelCut(modules=(model,), names=names, whole_call=True, has_loss=has_loss)
    blocks = find_blocks(model)
    if split is None and blocks:
        split = SplitSpec(counts=tuple(even_split(len(blocks), num_stages)))
    name = type(model).__name__
    if method == "export" or split is None:
        if example is None or method == "module":
            why = "method='export' needs example=" if split else "it has no list of repeated blocks"
            raise PartitionError(
                f"the {name} can't be cut: {why}; name the modules of each stage in split=, or "
                "pass example=, one microbatch, for split='auto' or pipe_split() in its forward"
            )
        return _export(model, split, num_stages, example)
    try:
        return _cut_by_module(model, split, example, device)
    except NotByModule as error:
        if example is None or method == "module":
            raise
        try:
            exported = _export(model, split, num_stages, example)
        except PartitionError as other:
            raise PartitionError(f"{error}; nor by torch.export: {other}") from error
        logger.warning(
            "%s: cut by torch.export, since it can't be cut by module: %s. The stages run a fixed "
            "graph: other inputs than tensors keep the example's values, and hooks and attributes "
            "of modules are not updated. method='export' accepts this, method='module' refuses it",
            name,
            error,
        )
        return exported


def _cut_by_module(
    model: nn.Module, split: SplitSpec, example: Example | None, device: torch.device
) -> ModelCut:
    from penstock.partition.forward.by_module import split_by_module

    done = split_by_module(model, split, example, device=device)
    message = "%s: cut by module into %d stages; every stage runs the model's own forward"
    logger.info(message, type(model).__name__, len(done.stages))
    has_loss = done.plan is not None and done.plan.trace.loss
    return ModelCut(modules=done.stages, names=done.names, whole_call=True, has_loss=has_loss)


def _export(
    model: nn.Module, split: SplitSpec | None, num_stages: int, example: Example
) -> ModelCut:
    """Cut by torch.export at the places in ``split``, or at the marks in the model's forward."""
    from penstock.partition.export.pipe import pipeline_of

    args, kwargs = as_call(example)
    pipe, name = pipeline_of(model, args, kwargs, split), type(model).__name__
    if pipe.num_stages != num_stages:
        raise PartitionError(
            f"by torch.export, the {name} has {pipe.num_stages} stages, one more than its forward "
            f"calls pipe_split(), expected {num_stages}; split='auto' measures its modules and "
            "cuts between any of them, or change ranks, or name the modules of each stage in split="
        )
    logger.info("%s: cut by torch.export into %d stages", name, num_stages)
    modules = tuple(pipe.get_stage_module(i) for i in range(num_stages))
    has_loss = bool(getattr(modules[-1], "has_loss", False))
    names = tuple(tuple(dict.fromkeys(map(_block_of, each.state_dict()))) for each in modules)
    return ModelCut(modules=modules, names=names, whole_call=True, has_loss=has_loss)


def _block_of(name: str) -> str:
    """The numbered block of a parameter, or else its module: ``h.0`` for ``h.0.norm.weight``."""
    parts = name.split(".")
    last = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return ".".join(parts[: last + 1]) or name
