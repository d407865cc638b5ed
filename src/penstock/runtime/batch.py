"""One step's data on one rank: microbatches of inputs and targets, and what comes of them.

A batch holds; it neither splits nor computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from penstock.stage.pytree import map_tensors, tensors_of

__all__ = ["Batch"]


class Batch:
    """What the players of one rank share during a step.

    Attributes:
        args: per microbatch, the positional arguments of the first stage; None where this rank
            was given none.
        kwargs: per microbatch, the keyword arguments of every stage on this rank.
        targets: per microbatch, the target; None where this rank was given none.
        loss_kwargs: keyword arguments of the loss function.
        keep_outputs: whether the last stage's outputs are asked for.
        shape_ids: per microbatch, the number under which all ranks know the shapes that follow
            from its inputs.
        outputs: per microbatch, the last stage's output, where asked for.
        losses: per microbatch, its loss, on the rank of the last stage.
        metrics: per microbatch, what the loss function returned beside the loss.
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
        """The tensors that this rank was given for a microbatch."""
        given = (each[microbatch] for each in (self.args, self.kwargs, self.targets) if each)
        return tensors_of(tuple(given))

    @contextmanager
    def as_before(self, microbatch: int, before: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Give a microbatch as it was, before stages wrote into it.

        Args:
            microbatch: the microbatch.
            before: tensors of its, each with what is to be given in its place.
        """
        if not before:
            yield
            return
        instead = {id(tensor): old for tensor, old in before}

        def restored(tree: Any) -> Any:
            return map_tensors(lambda tensor: instead.get(id(tensor), tensor), tree)

        now = self.args, self.kwargs, self.targets
        then: list[Any] = [
            each and [*each[:microbatch], restored(each[microbatch]), *each[microbatch + 1 :]]
            for each in now
        ]
        try:
            self.args, self.kwargs, self.targets = then
            yield
        finally:
            self.args, self.kwargs, self.targets = now
