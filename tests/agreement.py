"""Train a model twice, in a pipeline and in the plain loop, and compare.

The pipeline is over loopback, or over the ranks' processes where they run: then every rank trains
the whole plain model beside its stages, and compares its own part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import penstock
from penstock import Pipeline, split_args_kwargs_into_chunks
from penstock.schedule.family import Family
from tests.compare import PlainResult, Tolerance, assert_same, plain_step, snapshot

__all__ = ["BIDIRECTIONAL", "TRAINING", "ROUNDING", "Twins", "virtuals"]

# The schedules that train, in one direction: what they sum, they sum in the plain loop's order.
# Those that split sequences want stages that hand on their state.
TRAINING = tuple(
    each.name
    for each in penstock.schedules()
    if each.name != "forward-only" and each.num_directions == 1 and "splits" not in each.options
)
# Those with a copy of the weights for each of two directions, which are summed apart.
BIDIRECTIONAL = tuple(each.name for each in penstock.schedules() if each.num_directions > 1)
# For the cases, each with its reason, where float32 terms are summed in another order.
ROUNDING = Tolerance(relative=2e-6, absolute=1e-12)


def virtuals(each: Family) -> tuple[int, ...]:
    """The numbers of stages per rank to try."""
    return tuple(v for v in (1, 2, 4) if each.virtuals is None or v in each.virtuals)


class Twins:
    """A pipeline and the same model in one piece, which train on the same batches.

    Args:
        model: the model: as ``Pipeline`` takes it, if not a list of stages.
        loss_fn: the loss of both.
        tolerance: how far gradients may lie apart; None demands equality.
        all_inputs: whether every rank passes inputs and targets, or just those that need them.
        options: of the pipeline.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module],
        loss_fn: Callable[..., Any],
        *,
        tolerance: Tolerance | None = None,
        all_inputs: bool = True,
        **options: Any,
    ) -> None:
        whole = model if isinstance(model, nn.Sequential) else nn.Sequential(*model)
        self.plain: Any = copy.deepcopy(whole)
        self.pipe = Pipeline(model, loss_fn=loss_fn, **options)
        self.loss_fn = loss_fn
        self.scale_grads = options.get("scale_grads", True)
        self.tolerance = tolerance
        self.all_inputs = all_inputs

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
        loss = self.pipe.step(*self.inputs(args), **self.targets(kwargs))
        assert len(self.pipe.losses) == len(expected.losses)
        if self.tolerance is None:
            assert torch.equal(loss, expected.loss)
            assert all(map(torch.equal, self.pipe.losses, expected.losses))
        else:
            torch.testing.assert_close(loss, expected.loss)
            torch.testing.assert_close(self.pipe.losses, list(expected.losses))
        self.compare()
        return expected

    def eval(self, *args: Any) -> None:
        """Evaluate both; the outputs must agree, where the pipeline's is."""
        out = self.pipe.eval(*self.inputs(args))
        has_last = any(stage.is_last for stage in self.pipe.stages)
        assert (out is not None) == has_last
        if has_last:
            num = min(self.pipe.program.num_microbatches, len(args[0]))
            with torch.no_grad():
                outs = [self.plain(*mb) for mb in split_args_kwargs_into_chunks(args, {}, num)[0]]
            assert not out.requires_grad
            assert torch.equal(out, torch.cat(outs))
        self.compare()

    def inputs(self, args: Any) -> Any:
        """``args`` on the ranks that are to pass them."""
        has_first = any(stage.is_first for stage in self.pipe.stages)
        return args if self.all_inputs or has_first else ()

    def targets(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs``, without the target on the ranks that are not to pass it."""
        has_last = any(stage.is_last for stage in self.pipe.stages)
        return kwargs if self.all_inputs or has_last else kwargs | {"target": None}

    def descend(self) -> None:
        """Take a gradient step on both, and forget the gradients.

        By hand: the first use of an optimizer imports torch's compiler, in every process.
        """
        with torch.no_grad():
            for model in (self.pipe, self.plain):
                for param in model.parameters():
                    if param.grad is not None:
                        param -= 0.1 * param.grad
                        param.grad = None

    def compare(self) -> None:
        """Hold the pipeline's gradients and buffers against the plain model's."""
        assert_same(
            snapshot(self.pipe),
            snapshot(self.plain),
            tolerance=self.tolerance,
            partial=self.pipe.is_distributed,
        )
