"""Train a model twice, in a pipeline over loopback and in the plain loop, and compare."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import penstock
from penstock import Pipeline
from penstock.schedule.catalog import Family
from penstock.testing.compare import PlainResult, Tolerance, assert_same, plain_step, snapshot

__all__ = ["TRAINING", "ROUNDING", "Twins", "virtuals"]

# The schedules that train.
TRAINING = tuple(each.name for each in penstock.schedules() if each.name != "forward-only")
# For the cases, each with its reason, where float32 terms are summed in another order.
ROUNDING = Tolerance(relative=2e-6, absolute=1e-12)


def virtuals(each: Family) -> tuple[int, ...]:
    """The numbers of stages per rank to try."""
    return each.virtuals or (1, 2, 3)


class Twins:
    """A pipeline and the same model in one piece, which train on the same batches.

    Args:
        model: the model: as ``Pipeline`` takes it, if not a list of stages.
        loss_fn: the loss of both.
        tolerance: how far gradients may lie apart; None demands equality.
        options: of the pipeline.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        *,
        tolerance: Tolerance | None = None,
        **options: Any,
    ) -> None:
        whole = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        self.plain: Any = copy.deepcopy(whole)
        self.pipe = Pipeline(model, loss_fn=loss_fn, **options)
        self.loss_fn = loss_fn
        self.scale_grads = options.get("scale_grads", True)
        self.tolerance = tolerance

    def step(self, *args: Any, **kwargs: Any) -> PlainResult:
        """One step on both; losses, gradients and buffers must agree."""
        expected = plain_step(
            self.plain,
            self.loss_fn,
            *args,
            n_microbatches=self.pipe.program.num_microbatches,
            scale_grads=self.scale_grads,
            **kwargs,
        )
        loss = self.pipe.step(*args, **kwargs)
        if self.tolerance is None:
            assert torch.equal(loss, expected.loss)
            assert all(map(torch.equal, self.pipe.losses, expected.losses))
        else:
            torch.testing.assert_close(loss, expected.loss)
        assert len(self.pipe.losses) == len(expected.losses)
        self.compare()
        return expected

    def compare(self) -> None:
        """Hold the pipeline's gradients and buffers against the plain model's."""
        assert_same(snapshot(self.pipe), snapshot(self.plain), tolerance=self.tolerance)
