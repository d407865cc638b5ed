"""What a batch's rows are worth remarking on: that some count more than others, or are not split.

Neither is a mistake by itself, so it is said once per schedule, in the log, with what to do. This
module splits nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.block_mask import is_block_mask
from penstock.stage.trees import flatten

__all__ = ["RowRemarks"]

_log = logging.getLogger(__name__)


class RowRemarks:
    """The remarks of one schedule.

    Args:
        weighs_rows: whether microbatches' losses are averaged, each counting alike.
    """

    def __init__(self, *, weighs_rows: bool) -> None:
        self._weighs_rows = weighs_rows
        self._seen: set[type[Any]] = set()

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
            if cls.__module__ == "builtins" or cls in self._seen or not rows:
                continue
            self._seen.add(cls)
            if isinstance(leaf, (Tensor, torch.nn.Module)) or is_block_mask(leaf):
                continue
            if any(t.dim() and t.size(0) in rows for t in _held(leaf)):
                _log.warning(
                    "a %s goes whole to every microbatch, and holds a tensor with as many rows as "
                    "the batch; if its rows are the batch's, register the class with "
                    "torch.utils._pytree.register_pytree_node, pass its tensors in a dict, or pass "
                    "ready microbatches",
                    cls.__qualname__,
                )


def _held(value: Any) -> list[Tensor]:
    """The tensors among an object's attributes, and in a list, tuple or dict there; no deeper."""
    held: list[Any] = []
    for attribute in getattr(value, "__dict__", {}).values():
        match attribute:
            case list() | tuple():
                held += attribute
            case dict():
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
    return [leaf for leaf in flatten(mb)[0] if isinstance(leaf, Tensor)]
