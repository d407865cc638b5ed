"""Split each microbatch's sequences into ``num_splits`` chunks, and join the results.

    batch            microbatches              chunks, num_splits = 2
    (rows, length) ─► (rows/M, length) ─────► (rows/M, length/2), (rows/M, length/2)

A program counts chunks as microbatches (``Program.num_splits``). Losses and outputs are joined, so
that callers see microbatches alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.microbatch import merge_chunks
from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.stage.pytree import flatten, unflatten
from penstock.stage.sequence_state import takes_state
from penstock.stage.stage import Stage

__all__ = ["SequenceChunks"]


class SequenceChunks:
    """The split of sequences by one program.

    Args:
        num_splits: the number of chunks of a sequence; 1 splits nothing.
        sequence_dim: the dimension along which sequences run.
    """

    def __init__(self, num_splits: int, sequence_dim: int) -> None:
        self._num = num_splits
        self._dim = sequence_dim

    def prepare(self, stages: Sequence[Stage], program: Program) -> None:
        """Check that stages can run sequence chunks.

        Raises:
            ScheduleError: a stage's module takes no state, or the program recomputes forwards.
        """
        if self._num == 1:
            return
        for stage in stages:
            if not takes_state(stage.submod):
                raise ScheduleError(
                    f"stage {stage.stage_index}: {program.name} splits sequences into {self._num} "
                    f"chunks, and the forward of {type(stage.submod).__name__} takes no state; "
                    "let it take state=None, the state that it returned for the chunk before, and "
                    "return (output, state)"
                )
        rerun = (Op.RECOMPUTE, Op.OFFLOAD)
        refused = next((act for act in program.actions() if act.op in rerun), None)
        if refused is not None:
            raise ScheduleError(
                f"{refused}: forwards of sequence chunks can't be recomputed or offloaded; use "
                "checkpointing within the modules, or whole sequences"
            )

    def split(self, trees: Sequence[Any], what: str, *, even: bool) -> Sequence[Any]:
        """Split the pytrees of microbatches into those of their chunks.

        Args:
            trees: a pytree per microbatch.
            what: the name of such a tensor in errors, such as "input".
            even: whether chunks must be of one length, as for means of their losses.

        Raises:
            ValueError: a sequence has fewer positions than there are chunks, or can't be split
                evenly.
        """
        if self._num == 1:
            return trees
        return list(chain.from_iterable(self._split_tree(tree, what, even) for tree in trees))

    def _split_tree(self, tree: Any, what: str, even: bool) -> list[Any]:
        leaves, treedef = flatten(tree)
        columns = [self._split_leaf(leaf, what, even) for leaf in leaves]
        return [unflatten(treedef, [c[i] for c in columns]) for i in range(self._num)]

    def _split_leaf(self, leaf: Any, what: str, even: bool) -> Sequence[Any]:
        if not self._has_sequence(leaf):
            return [leaf] * self._num
        length = leaf.size(self._dim)
        shown = f"a {what} of shape {tuple(leaf.shape)} can't be split"
        if length < self._num:
            raise ValueError(
                f"{shown} into {self._num} sequence chunks along dimension {self._dim}; pass "
                f"sequences of at least {self._num} positions, or split them into fewer chunks"
            )
        if even and length % self._num:
            raise ValueError(
                f"{shown} evenly into {self._num} sequence chunks along dimension {self._dim}, and "
                "the mean of uneven chunks' losses is not that of the sequence; pad it, or sum in "
                "the loss and pass scale_grads=False"
            )
        return torch.tensor_split(leaf, self._num, dim=self._dim)

    def _has_sequence(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and -leaf.dim() <= self._dim < leaf.dim()

    def join_losses(self, losses: Tensor | None, *, mean: bool) -> Tensor | None:
        """The microbatches' losses: the mean of their chunks' losses, or the sum."""
        if self._num == 1 or losses is None:
            return losses
        by_microbatch = losses.reshape(-1, self._num)
        return by_microbatch.mean(1) if mean else by_microbatch.sum(1)

    def join_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """The microbatches' outputs: those of their chunks, concatenated.

        Tensors without a sequence dimension are stacked in a new last dimension.
        """
        if self._num == 1:
            return outputs
        return [
            self._join_tree(outputs[first : first + self._num])
            for first in range(0, len(outputs), self._num)
        ]

    def _join_tree(self, chunks: Sequence[Any]) -> Any:
        flats = [flatten(chunk) for chunk in chunks]
        if any(tree != flats[0][1] for _, tree in flats):
            raise ValueError("the outputs of sequence chunks differ in structure")
        columns = zip(*(leaves for leaves, _ in flats), strict=True)
        return unflatten(flats[0][1], [self._join_leaf(c) for c in columns])

    def _join_leaf(self, column: tuple[Any, ...]) -> Any:
        if self._has_sequence(column[0]):
            return torch.cat(column, dim=self._dim)
        if isinstance(column[0], Tensor):
            return torch.stack(column, dim=-1)
        return merge_chunks(column)
