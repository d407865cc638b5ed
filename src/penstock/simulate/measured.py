"""Measured steps: their program, their costs, and their differences from simulated steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from penstock.schedule.action import Action, Op
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, HOST_TRANSFERS
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.trace import Span, Trace

__all__ = ["Difference", "compare_traces", "costs_of", "program_of"]


def program_of(trace: Trace) -> Program:
    """The program of a trace: computations and copies in the order in which ranks started them.

    Raises:
        ScheduleError: a rank computed nothing, or stages are missing.

    Examples:
        >>> from penstock.schedule.registry import build
        >>> from penstock.simulate.simulation import simulate
        >>> program = build("dualpipev", ranks=2, microbatches=4)
        >>> program_of(simulate(program).trace) == program
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


def costs_of(trace: Trace, num_stages: int) -> Costs:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One action's spans in two traces, with times from the first computation of each trace."""

    rank: int
    action: Action
    measured: Span
    simulated: Span

    @property
    def later(self) -> float:
        """The delay of its start over the simulation; negative if it started earlier."""
        return self.measured.start - self.simulated.start

    @property
    def longer(self) -> float:
        """The increase of its duration over the simulation; negative if it was faster."""
        measured = self.measured.end - self.measured.start
        return measured - (self.simulated.end - self.simulated.start)


def compare_traces(measured: Trace, simulated: Trace) -> tuple[Difference, ...]:
    """The differences between two traces of one program, in the same unit.

        measured    0F0 ▬▬▬▬      0F1 ▬▬▬
        simulated   0F0 ▬▬ 0F1 ▬▬
                              ╰─ starts later by that much

    Returns:
        The actions in both traces, by rank and measured start. Repeated actions are matched in
        order.
    """
    waiting: defaultdict[tuple[int, Action], list[Span]] = defaultdict(list)
    for span in sorted(_from_first(simulated), key=lambda s: s.start):
        waiting[span.rank, span.action].append(span)
    return tuple(
        Difference(rank=span.rank, action=span.action, measured=span, simulated=others.pop(0))
        for span in sorted(_from_first(measured), key=lambda s: (s.rank, s.start))
        if (others := waiting[span.rank, span.action])
    )


def _from_first(trace: Trace) -> Iterator[Span]:
    """The spans, with times from the first computation."""
    first = min((s.start for s in trace.spans if s.action.op in COMPUTE), default=0.0)
    return (replace(s, start=s.start - first, end=s.end - first) for s in trace.spans)
