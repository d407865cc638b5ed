"""The data of one step: the arguments of the call, its microbatches, and the results.

    StepArgs (a whole batch, or ready microbatches)
        └─ BatchSplitter ─► StepState ─(engine)─► StepState with losses and outputs ─► merged

``microbatch.py`` splits tensors, and ``sequence_chunks.py`` splits sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import optree
import torch
from torch import Tensor

from penstock.runtime.config import RunConfig
from penstock.runtime.microbatch import (
    check_ready,
    check_rows,
    merge_chunks,
    num_chunks,
    split_call,
    split_tree,
)
from penstock.runtime.sequence_chunks import SequenceChunks
from penstock.stage.pytree import NAMESPACE, flatten, tensors_of

__all__ = ["BatchSplitter", "StepArgs", "StepState", "is_placed", "moved"]

_Tree = TypeVar("_Tree")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArgs:
    """The arguments of one call of ``PipelineSchedule.step`` or ``eval``, by their names there.

    Raises:
        TypeError: ``losses`` is no list.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    losses: list[Tensor] | None = None
    return_outputs: bool = True
    merge_outputs: bool = True
    loss_kwargs: Mapping[str, Any] | None = None
    arg_mbs: Sequence[tuple[Any, ...]] | None = None
    kwarg_mbs: Sequence[dict[str, Any]] | None = None
    target_mbs: Sequence[Any] | None = None

    def check(self) -> None:
        """Refuse ``losses`` that can't be filled.

        Raises:
            TypeError: it is no list.
        """
        losses: object = self.losses
        if losses is not None and not isinstance(losses, list):
            raise TypeError(
                f"losses is a {type(losses).__name__}, expected a list, to be filled with the "
                "microbatches' losses"
            )


class StepState:
    """The microbatches of one step on one rank, shared by its stage runners, and the results.

    Attributes:
        args: per microbatch, the positional arguments of the first stage; None where this rank
            was given none.
        kwargs: per microbatch, the keyword arguments of every stage on this rank.
        targets: per microbatch, the target; None where this rank was given none.
        loss_kwargs: keyword arguments of the loss function.
        keep_outputs: whether the last stage's outputs are returned.
        shape_ids: per microbatch, the id of its inputs' shapes, the same on all ranks.
        outputs: per microbatch, the last stage's output, where returned.
        losses: per microbatch, its loss, on the rank of the last stage.
        metrics: per microbatch, the metrics that the loss function returned beside the loss.
    """

    __slots__ = (
        "args",
        "keep_outputs",
        "kwargs",
        "loss_kwargs",
        "losses",
        "metrics",
        "outputs",
        "shape_ids",
        "targets",
    )

    def __init__(self, num_microbatches: int) -> None:
        self.args: Sequence[tuple[Any, ...]] | None = None
        self.kwargs: Sequence[Mapping[str, Any]] = [{}] * num_microbatches
        self.targets: Sequence[Any] | None = None
        self.loss_kwargs: Mapping[str, Any] = {}
        self.keep_outputs = False
        self.shape_ids: Sequence[int] = [0] * num_microbatches
        self.outputs: list[Any] = [None] * num_microbatches
        self.losses: list[Tensor | None] = [None] * num_microbatches
        self.metrics: list[Any] = [None] * num_microbatches

    def given(self, microbatch: int) -> list[Tensor]:
        """This rank's input tensors of a microbatch."""
        given = (each[microbatch] for each in (self.args, self.kwargs, self.targets) if each)
        return tensors_of(tuple(given))


class BatchSplitter:
    """Splits the batches of one schedule, and merges its results.

    Args:
        config: how tensors are split and merged.
        chunks: how sequences are split further, if they are.
        num_microbatches: those of the program: all chunks of all microbatches.
        has_first, has_last: whether inputs enter, and outputs leave, in this process.
    """

    def __init__(
        self,
        config: RunConfig,
        chunks: SequenceChunks,
        num_microbatches: int,
        *,
        has_first: bool,
        has_last: bool,
    ) -> None:
        self._config = config
        self._chunks = chunks
        self._num_in_program = num_microbatches
        self._has_first, self._has_last = has_first, has_last

    def split(self, given: StepArgs) -> StepState:
        """The microbatches of one call.

        Raises:
            ValueError: the batch can't be split, is given twice, or has another number of ready
                microbatches.
        """
        given.check()
        config, num = self._config, self._config.n_microbatches
        has_target = given.target is not None
        ready = {name: getattr(given, name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs")}
        whole = (bool(given.args), bool(given.kwargs), has_target)
        check_ready(ready, dict(zip(ready, whole, strict=True)))
        length = num_chunks(ready)
        if length is not None and length != num:
            raise ValueError(f"{length} ready microbatches, expected n_microbatches={num}")
        step = StepState(self._num_in_program)
        step.keep_outputs = given.return_outputs
        step.loss_kwargs = given.loss_kwargs or {}
        # Row counts of the tensors that count here: where inputs enter, and losses are computed.
        rows: dict[int, torch.Size] = {}
        target_rows: dict[int, torch.Size] = {}
        entering = rows if self._has_first else None
        args, kwargs = split_call(
            given.args,
            given.kwargs,
            num,
            config.args_chunk_spec,
            config.kwargs_chunk_spec,
            entering,
            rows,
        )
        if given.args or given.kwargs or given.arg_mbs or given.kwarg_mbs:
            step.args = given.arg_mbs or args
        step.kwargs = given.kwarg_mbs or kwargs
        step.targets = given.target_mbs
        if given.target_mbs is None and has_target and self._has_last:
            step.targets = split_tree(given.target, num, seen=target_rows)
        check_rows({**target_rows, **rows}, num)
        even, chunks = config.averages_losses, self._chunks
        if step.args is not None:
            step.args = chunks.split(step.args, "input", even=even)
        step.kwargs = chunks.split(step.kwargs, "keyword argument", even=even)
        if step.targets is not None:
            step.targets = chunks.split(step.targets, "target", even=even)
        return step

    def merge_losses(self, losses: Tensor | None) -> Tensor | None:
        """The losses of the batch's microbatches, of those of the program's."""
        return self._chunks.join_losses(losses, mean=self._config.averages_losses)

    def merge_outputs(self, step: StepState, *, merge: bool) -> Any:
        """The outputs that the call returns, merged or as a list; None where there are none.

        Raises:
            ValueError: the outputs can't be merged.
        """
        if not (step.keep_outputs and self._has_last):
            return None
        try:
            outputs = self._chunks.join_outputs(step.outputs)
            spec = self._config.output_merge_spec
            return merge_chunks(outputs, spec) if merge else list(outputs)
        except ValueError as error:
            raise ValueError(
                f"the step is done, but its outputs can't be merged: {error}; pass "
                "merge_outputs=False to get a list with each microbatch's, or return_outputs=False"
            ) from error


def is_placed(tree: Any) -> bool:
    """True if at least one tensor of ``tree`` is not on the CPU.

    Example:
        >>> is_placed([torch.ones(2), 3]), is_placed({"x": torch.ones(2, device="meta")})
        (False, True)
    """
    return any(tensor.device.type != "cpu" for tensor in tensors_of(tree))


def moved(tree: _Tree, device: torch.device) -> _Tree:
    """Move the tensors of a tree, and objects with a method ``to`` (a packed sequence, a mask).

    Example:
        >>> moved({"x": torch.ones(2), "scale": 3}, torch.device("meta"))
        {'x': tensor(..., device='meta', size=(2,)), 'scale': 3}
    """

    def to_device(node: Any) -> Any:
        if isinstance(node, torch.Tensor):
            return node.to(device, non_blocking=True)
        return node.to(device) if _can_move(node) else node

    flatten(tree)  # which registers its dataclasses
    found: Any = optree.tree_map(to_device, cast(Any, tree), is_leaf=_can_move, namespace=NAMESPACE)
    return cast(_Tree, found)


def _can_move(node: Any) -> bool:
    return callable(getattr(node, "to", None))
