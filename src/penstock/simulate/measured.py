"""From a measured step back to a program and its costs: what a simulation of it needs.

This module measures nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, COPIES
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.trace import Span, Trace

__all__ = ["costs_of", "program_of"]

_OTHERS = {"recompute": Op.RECOMPUTE, "offload": Op.OFFLOAD, "reload": Op.RELOAD}


def program_of(trace: Trace) -> Program:
    """The program that ran: its computations and its copies to the host and back, in the order in
    which each rank began them.

    Args:
        trace: of a whole step.

    Raises:
        ScheduleError: a rank computed nothing, or stages are missing.

    Example:
        >>> from penstock.schedule.registry import build
        >>> from penstock.simulate.simulation import simulate
        >>> program = build("dualpipev", ranks=2, microbatches=4)
        >>> program_of(simulate(program).trace) == program
        True
    """
    block_of = trace.block_of()
    kept = COMPUTE | COPIES
    played = [span for span in trace.spans if span.action.op in kept]
    lanes = [
        _steps([span for span in played if span.rank == rank], block_of)
        for rank in range(trace.num_ranks)
    ]
    text = "\n".join(",".join(map(str, lane)) for lane in lanes)
    return parse_csv(text, name=trace.name)


def _steps(lane: Sequence[Span], block_of: Mapping[Action, Overlap]) -> Iterator[Step]:
    """What a rank did; a block stands where its first part began."""
    begun = set()
    for span in lane:
        block = block_of.get(span.action)
        if block is None:
            yield span.action
        elif block not in begun:
            begun.add(block)
            yield block


def costs_of(trace: Trace, num_stages: int) -> Costs:
    """The median time of every op on every stage.

    Args:
        trace: a measured step.
        num_stages: how many stages it has.
    """
    times: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for span in trace.spans:
        if span.action.op in COMPUTE | COPIES:
            times[span.action.stage, span.action.op].append(span.end - span.start)

    def typical(stage: int, op: Op) -> float:
        return median(times[stage, op]) if times[stage, op] else 0.0

    stages = range(num_stages)
    split = [bool(times[stage, Op.INPUT_GRAD]) for stage in stages]
    # A full backward counts as an input gradient that leaves nothing to W.
    whole = [typical(stage, Op.FULL_BACKWARD) for stage in stages]
    # What a stage does not do costs nothing; of what no stage does, there is nothing to tell.
    others: dict[str, Any] = {
        name: [typical(stage, op) for stage in stages]
        for name, op in _OTHERS.items()
        if any(times[stage, op] for stage in stages)
    }
    return Costs(
        forward=[typical(stage, Op.FORWARD) for stage in stages],
        **others,
        input_grad=[typical(s, Op.INPUT_GRAD) if split[s] else whole[s] for s in stages],
        weight_grad=[typical(s, Op.WEIGHT_GRAD) if split[s] else 0.0 for s in stages],
    )
