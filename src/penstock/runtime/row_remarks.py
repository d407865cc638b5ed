"""What a batch's rows are worth remarking on: that some count more than others, or are not split,
or that tensors have more or fewer of them than others.

None of these is a mistake by itself, so it is said once per schedule, in the log, with what to do.
Tensors whose rows can't belong together are one, and refused. This module splits nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.block_mask import is_block_mask
from penstock.runtime.microbatch import is_split_alike
from penstock.stage.pytree import flatten, tensors_of

__all__ = ["RowRemarks"]

_log = logging.getLogger(__name__)
_WHOLE = (
    "one whose rows are not the batch's (a mask or a table for all, offsets of packed sequences) "
    "goes whole to every microbatch where args_chunk_spec= or kwargs_chunk_spec= has None for it, "
    "or as it belongs there into each of the ready microbatches: arg_mbs=, kwarg_mbs=, target_mbs="
)


class RowRemarks:
    """The remarks of one schedule.

    Args:
        weighs_rows: whether microbatches' losses are averaged, each counting alike.
    """

    def __init__(self, *, weighs_rows: bool) -> None:
        self._weighs_rows = weighs_rows
        self._seen: set[type[Any]] = set()
        self._has_told_counts = False

    def on_rows(self, mbs: Sequence[Any], *, ready: bool) -> None:
        """Say that microbatches differ in rows.

        Args:
            mbs: the microbatches' arguments.
            ready: whether they were given so, and may differ in other dimensions than the rows'.
        """
        counts = _differing_rows(mbs, ready=ready) if self._weighs_rows else None
        if counts is None:
            return
        self._weighs_rows = False
        # Of rows shared out over many microbatches the first and the last tell the rest.
        shown = [*map(str, counts[:8]), *(["…", str(counts[-1])] if len(counts) > 8 else [])]
        _log.warning(
            "%d rows in %d microbatches are %s, and each microbatch counts alike in the mean, so "
            "that rows of shorter ones count more; pass batches that divide (drop_last=True in the "
            "DataLoader), or sum in the loss and pass scale_grads=False",
            sum(counts),
            len(counts),
            ", ".join(shown),
        )

    def on_counts(
        self,
        inputs: Mapping[int, torch.Size],
        targets: Mapping[int, torch.Size],
        chunks: int,
        *,
        says: bool,
    ) -> None:
        """Say that inputs differ in their number of rows; targets may have several for each.

        Args:
            inputs: the numbers of rows of what is split, each with a tensor's shape.
            targets: likewise.
            chunks: into how many microbatches.
            says: whether a remark is to be made here.

        Raises:
            ValueError: they are cut at different places, so that rows of a microbatch can't belong
                together.
        """
        counts = {**targets, **inputs}
        if len(counts) < 2 or chunks == 1:
            return
        (rows, shape), *others = sorted(counts.items(), reverse=True)
        for other_rows, other in others:
            if not is_split_alike(rows, other_rows, chunks):
                raise ValueError(
                    f"{rows} rows of a tensor of shape {tuple(shape)} and {other_rows} of one of "
                    f"shape {tuple(other)} are cut at different places for {chunks} microbatches; "
                    f"{_WHOLE}"
                )
        if says and len(inputs) > 1 and not self._has_told_counts:
            self._has_told_counts = True
            _log.warning(
                "inputs of shapes %s are all split into %d microbatches by rows; %s",
                " and ".join(str(tuple(inputs[count])) for count in sorted(inputs, reverse=True)),
                chunks,
                _WHOLE,
            )

    def on_objects(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Say that an object whose tensors have the batch's rows goes whole to each microbatch.

        Of each class the first object is looked at.
        """
        if all(isinstance(arg, Tensor) for arg in (*args, *kwargs.values())):
            return
        leaves, _ = flatten((tuple(args), dict(kwargs)))
        rows = {leaf.size(0) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
        for leaf in leaves:
            cls = type(leaf)
            if cls.__module__ == "builtins" or cls in self._seen:
                continue
            self._seen.add(cls)
            if isinstance(leaf, (Tensor, torch.nn.Module)) or is_block_mask(leaf):
                continue
            if any(t.dim() and (not rows or t.size(0) in rows) for t in _held(leaf)):
                alike = " with as many rows as the batch" if rows else ", as no other input does"
                _log.warning(
                    "a %s goes whole to every microbatch, and holds a tensor%s; if its rows are "
                    "the batch's, register the class with "
                    "torch.utils._pytree.register_pytree_node, pass its tensors in a dict, or pass "
                    "ready microbatches",
                    cls.__qualname__,
                    alike,
                )


def _held(value: Any) -> list[Tensor]:
    """The tensors among an object's attributes, and in a list, tuple or dict there; no deeper."""
    held: list[Any] = []
    for attribute in getattr(value, "__dict__", {}).values():
        match attribute:
            case list() | tuple():
                held += attribute
            case Mapping():
                held += attribute.values()
            case _:
                held.append(attribute)
    return [each for each in held if isinstance(each, Tensor)]


def _differing_rows(mbs: Sequence[Any], *, ready: bool) -> list[int] | None:
    """The rows of each microbatch, where they differ."""
    # Of rows shared out as evenly as they go the first and the last microbatch tell.
    looked_at = mbs if ready else (mbs[0], mbs[-1])
    columns = zip(*map(_tensors, looked_at), strict=False)
    for place, (first, *others) in enumerate(columns):
        for other in others:
            if other.shape == first.shape or other.dim() != first.dim():
                continue
            dim = next(d for d in range(first.dim()) if other.size(d) != first.size(d))
            if not (ready and dim):
                return [_tensors(mb)[place].size(dim) for mb in mbs]
    return None


def _tensors(mb: Any) -> list[Tensor]:
    # The common cases, kept quick: a tensor, or a tuple of them.
    if type(mb) is tuple and all(isinstance(value, Tensor) for value in mb):
        return list(mb)
    return tensors_of(mb)
