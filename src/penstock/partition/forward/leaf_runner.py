"""Run leaf modules while a model is traced without its values.

on shapes      a copy whose parameters are placeholders
on values      if that fails: a copy with the module's own parameters, or with small numbers
               where it has none, called with small numbers
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor, nn

from penstock.partition.forward.module_state import (
    ModuleSnapshot,
    StateChanges,
    TensorVersions,
    are_same,
)
from penstock.partition.forward.placeholder import (
    PlaceholderTensor,
    Provenance,
    on_meta,
    with_values,
)
from penstock.partition.forward.stage_tree import copy_with_tensors
from penstock.partition.huggingface import mark, replay
from penstock.stage.pytree import flatten, unflatten

__all__ = ["LeafResult", "LeafRunner"]

logger = logging.getLogger("penstock.partition.forward")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeafResult:
    """The result of one call of a leaf module; its tensors have no meaning but their shapes."""

    output: Any
    changes: StateChanges  # of its own state, undone since
    writes: tuple[int, ...]  # the leaves of its arguments that it wrote into
    fills: bool  # True if it changed a list or dict among its arguments


class LeafRunner:
    """Run the leaf modules of one model for a trace."""

    def __init__(self, leaves: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device

        def placeholder(tensor: Tensor) -> Tensor:
            made = PlaceholderTensor(on_meta(tensor), device, Provenance(set()))
            is_param = isinstance(tensor, nn.Parameter)
            return nn.Parameter(made, requires_grad=False) if is_param else made

        self._copies = {name: copy_with_tensors(leaf, placeholder) for name, leaf in leaves.items()}
        # Kept until a trace shows that no values are needed: a rank may drop the other stages.
        self._leaves: Mapping[str, nn.Module] = leaves
        self._needs_values = False

    def train(self, training: bool) -> None:
        """Set the mode of the copies."""
        for module in self._copies.values():
            module.train(training)

    def end_trace(self) -> None:
        """Release the leaf modules, unless one of them needs values; their shapes are kept."""
        if not self._needs_values:
            self._leaves = {}

    def run(self, leaf: str, leaves: Sequence[Any], tree: optree.PyTreeSpec) -> LeafResult:
        """Call a leaf module with the arguments of these leaves."""
        copy, marked = self._copies[leaf], mark()
        try:
            return self._run(copy, leaves, tree)
        except Exception as error:
            if not self._needs_values:
                reason = next(iter(str(error).splitlines()), "")
                reason = f"{leaf} can't run on shapes alone ({type(error).__name__}: {reason})"
                logger.info("traced on values: %s", reason)
        self._needs_values = True
        replay({key: [] for key in marked or ()}, marked)  # what hooks have collected up to there
        own = self._leaves.get(leaf, copy)
        device = next((p.device for p in own.parameters() if not p.is_meta), self._device)

        def with_value(tensor: Tensor) -> Tensor:
            # Any values like those at initialization will do: only the result's shape matters.
            has_value = not tensor.is_meta and type(tensor) is not PlaceholderTensor
            is_kept = has_value and isinstance(tensor, nn.Parameter)
            return tensor if is_kept else with_values(tensor, device)

        # Released after the call: a single module fits in memory if the model does not.
        module = copy_with_tensors(own, with_value).train(copy.training)
        return self._run(module, [with_values(each, device) for each in leaves], tree)

    def _run(self, module: nn.Module, leaves: Sequence[Any], tree: optree.PyTreeSpec) -> LeafResult:
        versions = TensorVersions(leaves)
        given = unflatten(tree, leaves)
        snapshot = ModuleSnapshot(module)
        try:
            snapshot.watch_writes()
            output = module(*given[0], **given[1])
            changes = snapshot.changes()
        finally:
            snapshot.restore()
        after, tree_after = flatten(given)
        return LeafResult(
            output=output,
            changes=changes,
            writes=versions.written(),
            fills=tree_after != tree or not are_same(after, leaves),
        )
