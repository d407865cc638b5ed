"""From measured steps to costs: what the simulator needs to predict a step on this machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from penstock import Costs, Op, Trace
from penstock.view.picture import draw

__all__ = ["draw_beside", "measured_costs"]


def measured_costs(traces: Sequence[Trace], num_stages: int) -> Costs:
    """The median time of every op on every stage, in seconds.

    Args:
        traces: measured steps of one program.
        num_stages: how many stages it has.
    """
    times: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for trace in traces:
        for span in trace.spans:
            times[span.action.stage, span.action.op].append(span.end - span.start)

    def typical(stage: int, op: Op) -> float:
        return median(times[stage, op]) if times[stage, op] else 0.0

    forward, input_grad, weight_grad = [], [], []
    for stage in range(num_stages):
        forward.append(typical(stage, Op.FORWARD))
        # A full backward counts as an input gradient that leaves nothing to W.
        split = bool(times[stage, Op.INPUT_GRAD])
        input_grad.append(typical(stage, Op.INPUT_GRAD if split else Op.FULL_BACKWARD))
        weight_grad.append(typical(stage, Op.WEIGHT_GRAD) if split else 0.0)
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad)


def draw_beside(measured: Trace, simulated: Trace, path: Path) -> None:
    """A picture of a measured step above the one simulated from its costs."""
    both = [measured, replace(simulated, unit=measured.unit)]
    titles = [
        f"{measured.name}, {what}: {trace.makespan * 1e3:.0f} ms, bubble {trace.bubble_ratio:.1%}"
        for what, trace in zip(("measured", "simulated"), both, strict=True)
    ]
    draw(both, path, titles=titles)
