"""The program and the costs of a measured step."""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import Any

from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, HOST_TRANSFERS
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.trace import Trace

__all__ = ["costs_from_trace", "program_from_trace"]


def program_from_trace(trace: Trace) -> Program:
    """The program of a trace: computations and copies in the order in which ranks started them.

    Raises:
        ScheduleError: a rank computed nothing, or stages are missing.

    Examples:
        >>> from penstock.schedule.registry import build
        >>> from penstock.simulate.simulation import simulate
        >>> program = build("dualpipev", ranks=2, microbatches=4)
        >>> program_from_trace(simulate(program).trace) == program
        True
    """
    pair_of = trace.pair_of()
    ranks: list[list[str]] = [[] for _ in range(trace.num_ranks)]
    for span in trace.spans:
        if span.action.op in COMPUTE | HOST_TRANSFERS:
            pair, steps = pair_of.get(span.action), ranks[span.rank]
            # A pair takes the position of its first action.
            if pair is None or str(pair) not in steps:
                steps.append(str(pair or span.action))
    return parse_csv("\n".join(map(",".join, ranks)), name=trace.name)


def costs_from_trace(trace: Trace, num_stages: int) -> Costs:
    """The median time of every op on every stage of a measured step."""
    times: defaultdict[tuple[Op, int], list[float]] = defaultdict(list)
    for span in trace.spans:
        times[span.action.op, span.action.stage].append(span.end - span.start)

    def typical(op: Op) -> list[float]:
        stages = range(num_stages)
        return [median(times[op, stage]) if times[op, stage] else 0.0 for stage in stages]

    input_grad = typical(Op.INPUT_GRAD)
    for stage, whole in enumerate(typical(Op.FULL_BACKWARD)):
        # A full backward counts as an input gradient with a W of no time.
        if not times[Op.INPUT_GRAD, stage]:
            input_grad[stage], times[Op.WEIGHT_GRAD, stage] = whole, []
    # An op that no stage runs is left out.
    others: dict[str, Any] = {
        op.name.lower(): typical(op)
        for op in (Op.RECOMPUTE, Op.OFFLOAD, Op.RELOAD)
        if any(times[op, stage] for stage in range(num_stages))
    }
    forward, weight_grad = typical(Op.FORWARD), typical(Op.WEIGHT_GRAD)
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, **others)
