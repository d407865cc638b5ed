"""The data of one step: its microbatches, and the results.

    a batch, or ready microbatches ─ BatchSplitter ─► StepState ─ engine ─► losses, outputs: merged

A program may split each microbatch's sequences into ``num_splits`` chunks, which it counts as
microbatches. Losses and outputs are joined, so that callers see microbatches alone:

    batch            microbatches              chunks, num_splits = 2
    (rows, length) ─► (rows/M, length) ─────► (rows/M, length/2), (rows/M, length/2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime import microbatch
from penstock.runtime.config import RunConfig
from penstock.runtime.microbatch import merge_chunks, split_args_kwargs_into_chunks, split_tree
from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.stage.device_streams import widest_float
from penstock.stage.pytree import flatten, tensors_of, unflatten
from penstock.stage.stage import Stage, takes_state

__all__ = ["BatchSplitter", "StepState", "is_placed", "moved"]

_Tree = TypeVar("_Tree")


class StepState:
    """The microbatches of one step on one rank, shared by its stage runners, and the results.

    All sequences are by microbatch; arguments and targets are None where this rank was given none.
    """

    def __init__(self, num_microbatches: int) -> None:
        # Of the first stage; and of every stage on this rank.
        self.args: Sequence[tuple[Any, ...]] | None = None
        self.kwargs: Sequence[Mapping[str, Any]] = [{}] * num_microbatches
        self.targets: Sequence[Any] | None = None
        # The number of the batch's microbatches with rows; 0 where this rank can't tell.
        self.num_with_rows = 0
        # Numbers of rows of this rank's split tensors, each with its number of shards; and whether
        # a rank has such shards.
        self.rows: Sequence[tuple[int, int]] = ()
        self.is_split_by_shard = False
        self.loss_kwargs: Mapping[str, Any] = {}
        self.keep_outputs = False
        self.reduces = True  # the gradients of this rank's stages, at the step's end
        # The ids of the inputs' shapes and the seed of random streams, the same on all ranks.
        self.shape_ids = [0] * num_microbatches
        self.seed = 0
        self.outputs: list[Any] = [None] * num_microbatches
        self.metrics: list[Any] = [None] * num_microbatches
        # Float64 represents every narrower loss exactly; zeros where no loss is computed.
        self.losses: Tensor | None = None
        self.loss_dtype: torch.dtype | None = None

    def keep_loss(self, microbatch: int, loss: Tensor) -> None:
        """Keep the loss of a microbatch."""
        if self.losses is None:
            # A tensor for all: small ones, each kept to the end, would split the memory that large
            # ones free, and the next large ones would need more.
            dtype = widest_float(loss.device)
            self.losses = torch.zeros(len(self.outputs), dtype=dtype, device=loss.device)
            self.loss_dtype = loss.dtype
        self.losses[microbatch] = loss
        self.loss_dtype = torch.promote_types(loss.dtype, self.loss_dtype or loss.dtype)

    def truncate(self, num_microbatches: int) -> None:
        """Drop the microbatches without rows."""
        self.kwargs = self.kwargs[:num_microbatches]
        self.args = None if self.args is None else self.args[:num_microbatches]
        self.targets = None if self.targets is None else self.targets[:num_microbatches]
        for results in (self.shape_ids, self.outputs, self.metrics):
            del results[num_microbatches:]

    def given(self, microbatch: int) -> list[Tensor]:
        """This rank's input tensors of a microbatch."""
        return tensors_of([m[microbatch] for m in (self.args, self.kwargs, self.targets) if m])


class BatchSplitter:
    """Splits the batches of one schedule, and merges its results.

    Attributes:
        has_first, has_last: whether inputs enter, and outputs leave, in this process.

    Raises:
        ScheduleError: a program of sequence chunks has a stage without state, or recomputation.
    """

    def __init__(self, config: RunConfig, program: Program, stages: Mapping[int, Stage]) -> None:
        self._num, self._dim = config.n_microbatches, config.sequence_dim
        self._num_in_program, self._num_splits = program.num_microbatches, program.num_splits
        # The loss of a step is the mean over its microbatches.
        self._averages = config.loss_fn is not None and config.scale_grads
        self.has_first = any(i in stages for i in program.placement.entries)
        self.has_last = any(i in stages for i in program.placement.exits)
        if self._num_splits > 1:
            _check_chunks(program, stages)

    # --- splitting ---------------------------------------------------------------------------

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], specs: tuple[Any, Any]
    ) -> StepState:
        """The microbatches of one call; ``kwargs`` also hold its target and its options.

        ``specs`` are the chunk specs of the positional and the keyword arguments.

        Raises:
            ValueError: the batch can't be split, is given twice, or has another number of ready
                microbatches.
        """
        step, num = StepState(self._num_in_program), self._num
        step.keep_outputs = kwargs.pop("return_outputs", True)
        step.loss_kwargs = kwargs.pop("loss_kwargs", None) or {}
        target = kwargs.pop("target")
        ready = {name: kwargs.pop(name, None) for name in ("arg_mbs", "kwarg_mbs", "target_mbs")}
        whole = (bool(args), bool(kwargs), target is not None)
        microbatch.check_ready(ready, whole, num)
        num = next((len(mbs) for mbs in ready.values() if mbs is not None), num)
        # Row counts of the tensors that count here: where inputs enter, and losses are computed.
        rows: microbatch.Rows = {}
        seen = (rows if self.has_first else {}, rows)
        arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(args, kwargs, num, *specs, seen=seen)
        if args or kwargs or ready["arg_mbs"] or ready["kwarg_mbs"]:
            step.args = self._split_sequences(ready["arg_mbs"] or arg_mbs)
        step.kwargs = self._split_sequences(ready["kwarg_mbs"] or kwarg_mbs)
        targets = ready["target_mbs"]
        if targets is None and target is not None and self.has_last:
            targets = split_tree(target, num, seen=rows)
        step.rows, step.num_with_rows = [*rows], microbatch.num_with_rows(rows, num)
        if any(item is not None for mbs in ready.values() for item in mbs or ()):
            if 0 < step.num_with_rows < num:
                raise ValueError(f"{step.num_with_rows} rows beside {num} ready microbatches")
            step.num_with_rows = num
        if targets is not None:
            step.targets = self._split_sequences(targets)
        return step

    def _split_sequences(self, trees: Sequence[Any]) -> Sequence[Any]:
        """The pytrees of the microbatches' sequence chunks."""
        if self._num_splits == 1:
            return trees
        found: list[Any] = []
        for tree in trees:
            leaves, treedef = flatten(tree)
            columns = [self._split_leaf(leaf) for leaf in leaves]
            found += [unflatten(treedef, [c[i] for c in columns]) for i in range(self._num_splits)]
        return found

    def _split_leaf(self, leaf: Any) -> Sequence[Any]:
        num, dim = self._num_splits, self._dim
        if not self._has_sequence(leaf):
            return [leaf] * num
        length, evenly = leaf.size(dim), " evenly" if self._averages else ""
        if length < num or (self._averages and length % num):
            raise ValueError(
                f"a tensor of shape {tuple(leaf.shape)} can't be split{evenly} into {num} sequence "
                f"chunks along dimension {dim}; pad it, or for uneven chunks sum in the loss and "
                "pass scale_grads=False"
            )
        return torch.tensor_split(leaf, num, dim=dim)

    def _has_sequence(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and -leaf.dim() <= self._dim < leaf.dim()

    # --- merging -----------------------------------------------------------------------------

    def merge_losses(self, losses: Tensor | None) -> Tensor | None:
        """Reduce the losses of sequence chunks to one loss per microbatch."""
        if self._num_splits == 1 or losses is None:
            return losses
        by_microbatch = losses.reshape(-1, self._num_splits)
        return by_microbatch.mean(1) if self._averages else by_microbatch.sum(1)

    def merge_outputs(self, step: StepState, spec: Any, *, merge: bool) -> Any:
        """The outputs that the call returns, merged or as a list; None where there are none."""
        if not (step.keep_outputs and self.has_last):
            return None
        outputs, num = step.outputs, self._num_splits
        try:
            if num > 1:
                starts = range(0, len(outputs), num)
                outputs = [self._join_chunks(outputs[i : i + num]) for i in starts]
            if not merge:
                return outputs
            return merge_chunks(outputs, spec, split_by_shard=step.is_split_by_shard)
        except ValueError as error:
            raise ValueError(
                f"the step is done, but its outputs can't be merged: {error}; pass "
                "merge_outputs=False to get a list with each microbatch's, or return_outputs=False"
            ) from error

    def _join_chunks(self, chunks: Sequence[Any]) -> Any:
        """A microbatch's output: those of its chunks, concatenated along the sequence."""
        flats = [flatten(chunk) for chunk in chunks]
        treedef = flats[0][1]
        if any(tree != treedef for _, tree in flats):
            raise ValueError("the outputs of sequence chunks differ in structure")
        columns = zip(*(leaves for leaves, _ in flats), strict=True)
        return unflatten(treedef, [self._join_leaf(column) for column in columns])

    def _join_leaf(self, column: tuple[Any, ...]) -> Any:
        if self._has_sequence(column[0]):
            return torch.cat(column, dim=self._dim)
        if isinstance(column[0], Tensor):  # such as a value per row: a new last dimension
            return torch.stack(column, dim=-1)
        return merge_chunks(column)


def _check_chunks(program: Program, stages: Mapping[int, Stage]) -> None:
    for index, stage in stages.items():
        if not takes_state(stage.submod):
            raise ScheduleError(
                f"stage {index}: {program.name} splits sequences into {program.num_splits} chunks, "
                f"and the forward of {type(stage.submod).__name__} takes no state; let it take "
                "state=None, and return (output, state for the next chunk)"
            )
    refused = next((a for a in program.actions() if a.op in (Op.RECOMPUTE, Op.OFFLOAD)), None)
    if refused is not None:
        raise ScheduleError(
            f"{refused}: forwards of sequence chunks can't be recomputed or offloaded; use "
            "checkpointing within the modules, or whole sequences"
        )


# --- devices -------------------------------------------------------------------------------------


def is_placed(tree: Any) -> bool:
    """True if at least one tensor of ``tree`` is not on the CPU."""
    return any(tensor.device.type != "cpu" for tensor in tensors_of(tree))


def moved(tree: _Tree, device: torch.device) -> _Tree:
    """Move the tensors of a tree, and objects with a method ``to`` (a packed sequence, a mask).

    Examples:
        >>> moved({"x": torch.ones(2), "scale": 3}, torch.device("meta"))
        {'x': tensor(..., device='meta', size=(2,)), 'scale': 3}
    """

    def can_move(node: Any) -> bool:
        return callable(getattr(node, "to", None))

    def to_device(node: Any) -> Any:
        if isinstance(node, Tensor):
            return node.to(device, non_blocking=True)
        return node.to(device) if can_move(node) else node

    leaves, treedef = flatten(tree, can_move)
    return cast(_Tree, unflatten(treedef, [to_device(leaf) for leaf in leaves]))
