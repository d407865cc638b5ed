"""From what ``step()`` and ``eval()`` are called with to a batch, and from it to what they return.

    a whole batch, or ready microbatches ──► Batch ──(the engine)──► outputs, merged or one by one

How a tensor is split is the affair of ``microbatch.py``, and of ``pieces.py`` for sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.runtime.engine import Engine
from penstock.runtime.microbatch import (
    check_ready,
    check_rows,
    merge_chunks,
    num_chunks,
    split_call,
    split_tree,
)
from penstock.runtime.sequence_chunks import SequenceChunks

__all__ = ["Batching", "Passed", "Specs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """How arguments are split and outputs merged; along dimension 0 where None."""

    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None
    output: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What one call of ``PipelineSchedule.step`` or ``eval`` was given, by its arguments' names."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    arg_mbs: Sequence[tuple[Any, ...]] | None
    kwarg_mbs: Sequence[dict[str, Any]] | None
    target_mbs: Sequence[Any] | None
    loss_kwargs: Mapping[str, Any] | None
    return_outputs: bool


class Batching:
    """The batches of one schedule.

    Args:
        engine: what runs them.
        n_microbatches: microbatches per step.
        specs: how they are split and merged.
        pieces: how the program splits sequences, if it does.
        averages: whether there are losses, and microbatches count alike in their mean.
    """

    def __init__(
        self,
        engine: Engine,
        n_microbatches: int,
        specs: Specs,
        pieces: SequenceChunks,
        *,
        averages: bool,
    ) -> None:
        self._engine = engine
        self._num = n_microbatches
        self._specs = specs
        self._pieces = pieces
        self._averages = averages

    def split(self, passed: Passed) -> Batch:
        """The batch of one call.

        Raises:
            ValueError: it can't be split, or is there twice, or is not as many microbatches.
        """
        has_target = passed.target is not None
        ready = {name: getattr(passed, name) for name in ("arg_mbs", "kwarg_mbs", "target_mbs")}
        whole = (bool(passed.args), bool(passed.kwargs), has_target)
        check_ready(ready, dict(zip(ready, whole, strict=True)))
        length = num_chunks(ready)
        if length is not None and length != self._num:
            raise ValueError(f"{length} ready microbatches, expected n_microbatches={self._num}")
        batch = Batch(self._engine.num_microbatches)
        batch.keep_outputs = passed.return_outputs
        batch.loss_kwargs = passed.loss_kwargs or {}
        specs, has_first = self._specs, self._engine.has_first
        # The rows of what counts here: where the inputs enter, and the loss is computed.
        rows: dict[int, torch.Size] = {}
        target_rows: dict[int, torch.Size] = {}
        entering = rows if has_first else None
        args, kwargs = split_call(
            passed.args, passed.kwargs, self._num, specs.args, specs.kwargs, entering, rows
        )
        if passed.args or passed.kwargs or passed.arg_mbs or passed.kwarg_mbs:
            batch.args = passed.arg_mbs or args
        batch.kwargs = passed.kwarg_mbs or kwargs
        batch.targets = passed.target_mbs
        if passed.target_mbs is None and has_target and self._engine.has_last:
            batch.targets = split_tree(passed.target, self._num, seen=target_rows)
        check_rows({**target_rows, **rows}, self._num)
        self._pieces.split(batch, even=self._averages)
        return batch

    def join_losses(self, losses: Tensor | None) -> Tensor | None:
        """The microbatches' losses, of those of a program's microbatches."""
        return self._pieces.join_losses(losses, mean=self._averages)

    def join_outputs(self, batch: Batch, *, merges: bool) -> Any:
        """What the call returns: outputs, merged or a list; None where they are not here.

        Raises:
            ValueError: they can't be merged.
        """
        if not (batch.keep_outputs and self._engine.has_last):
            return None
        try:
            outputs = self._pieces.join_outputs(batch.outputs)
            return merge_chunks(outputs, self._specs.output) if merges else list(outputs)
        except ValueError as error:
            raise ValueError(
                f"the step is done, but its outputs can't be merged: {error}; pass "
                "merge_outputs=False to get a list with each microbatch's, or return_outputs=False"
            ) from error
