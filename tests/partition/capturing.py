"""Capture a model, train its stages under a schedule, and hold them against the model itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock import Pipe, Pipeline, PipelineStage, SplitPoint, pipeline
from tests.compare import Tolerance, assert_same, plain_step, snapshot

__all__ = ["ROUNDING", "Pair", "cuts_before"]

# Where gradients of several users are summed in another order than in one graph.
ROUNDING = Tolerance(relative=2e-6, absolute=1e-9)


def cuts_before(*names: str) -> dict[str, SplitPoint]:
    """A cut at the beginning of each of these modules."""
    return dict.fromkeys(names, SplitPoint.BEGINNING)


class Pair:
    """A model and its captured stages, with the same parameters in different memory.

    Args:
        model: the model; it is copied.
        args: positional arguments of the example.
        kwargs: its keyword arguments.
        spec: where to cut.
        tolerance: how far gradients may lie apart; None demands equality.
        options: of ``pipeline``.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        spec: dict[str, SplitPoint] | None = None,
        tolerance: Tolerance | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.tolerance = tolerance
        mine = copy.deepcopy(model)
        self.cut: Pipe = pipeline(mine, args, kwargs, spec, **options)
        self.modules = [self.cut.get_stage_module(i) for i in range(self.cut.num_stages)]

    def train(
        self,
        loss_fn: Callable[..., Any],
        *args: Any,
        schedule: str = "1f1b",
        n_microbatches: int = 4,
        target: Any = None,
        dynamic_shapes: bool = False,
        **kwargs: Any,
    ) -> Pipeline:
        """One step of a fresh copy of both; losses, gradients and buffers must agree."""
        plain = copy.deepcopy(self.model)
        expected = plain_step(
            plain, loss_fn, *args, target=target, n_microbatches=n_microbatches, **kwargs
        )
        pipe = self.pipe(loss_fn, schedule, n_microbatches, dynamic_shapes=dynamic_shapes)
        loss = pipe.step(*args, target=target, **kwargs)
        assert loss is not None
        torch.testing.assert_close(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=self.tolerance)
        return pipe

    def pipe(
        self,
        loss_fn: Callable[..., Any] | None,
        schedule: str,
        num: int,
        *,
        dynamic_shapes: bool = False,
    ) -> Pipeline:
        """The stages, copied, on as many ranks as the schedule lays them on."""
        modules: Sequence[nn.Module] = copy.deepcopy(self.modules)
        per_rank = next(e.default_virtual for e in penstock.schedules() if e.name == schedule)
        program = penstock.build(
            schedule, ranks=len(modules) // per_rank, microbatches=num, virtual=per_rank
        )
        device, placement = torch.device("cpu"), program.placement
        # Two-way schedules hold every stage of the model twice.
        stages = [
            PipelineStage(modules[placement.model_stage(i)], i, program.num_stages, device)
            for i in range(program.num_stages)
        ]
        return Pipeline(stages, loss_fn=loss_fn, schedule=program, dynamic_shapes=dynamic_shapes)

    def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Outputs in eval mode must agree, exactly, and change no buffer."""
        plain = copy.deepcopy(self.model).eval()
        pipe = self.pipe(None, "1f1b", 2).train(False)
        before = snapshot(pipe)
        for module in pipe.stages:
            module.has_backward = False
        values = pipe.eval(*args, **kwargs)
        mine, theirs = leaves(values), leaves(plain(*args, **kwargs))
        assert len(mine) == len(theirs)
        for left, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(left, right)
        assert_same(snapshot(pipe), before)


def leaves(value: Any) -> list[Tensor]:
    """The tensors with dimensions in a value."""
    if isinstance(value, Tensor):
        return [value.detach()] if value.dim() else []
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return []
