"""Measured steps: their program, their costs, and their differences from simulated steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, HOST_TRANSFERS
from penstock.schedule.text import parse_csv
from penstock.simulate.costs import Costs
from penstock.trace import Span, Trace

__all__ = ["Difference", "compare_traces", "costs_of", "program_of"]

_OTHERS = {"recompute": Op.RECOMPUTE, "offload": Op.OFFLOAD, "reload": Op.RELOAD}


def program_of(trace: Trace) -> Program:
    """The program of a trace: computations and copies in the order in which ranks started them.

    Raises:
        ScheduleError: a rank computed nothing, or stages are missing.

    Example:
        >>> from penstock.schedule.registry import build
        >>> from penstock.simulate.simulation import simulate
        >>> program = build("dualpipev", ranks=2, microbatches=4)
        >>> program_of(simulate(program).trace) == program
        True
    """
    block_of = trace.pair_of()
    kept = COMPUTE | HOST_TRANSFERS
    played = [span for span in trace.spans if span.action.op in kept]
    lanes = [
        _steps([span for span in played if span.rank == rank], block_of)
        for rank in range(trace.num_ranks)
    ]
    text = "\n".join(",".join(map(str, lane)) for lane in lanes)
    return parse_csv(text, name=trace.name)


def _steps(lane: Sequence[Span], block_of: Mapping[Action, Overlap]) -> Iterator[Step]:
    """The steps of a rank; an overlapped pair takes the position of its first action."""
    begun = set()
    for span in lane:
        block = block_of.get(span.action)
        if block is None:
            yield span.action
        elif block not in begun:
            begun.add(block)
            yield block


def costs_of(trace: Trace, num_stages: int) -> Costs:
    """The median time of every op on every stage of a measured step."""
    times: defaultdict[tuple[int, Op], list[float]] = defaultdict(list)
    for span in trace.spans:
        if span.action.op in COMPUTE | HOST_TRANSFERS:
            times[span.action.stage, span.action.op].append(span.end - span.start)

    def typical(stage: int, op: Op) -> float:
        return median(times[stage, op]) if times[stage, op] else 0.0

    stages = range(num_stages)
    split = [bool(times[stage, Op.INPUT_GRAD]) for stage in stages]
    # A full backward counts as an input gradient with a W of no time.
    whole = [typical(stage, Op.FULL_BACKWARD) for stage in stages]
    # An op that no stage runs is left out.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One action in two traces; times count from the first computation of each trace.

    Args:
        rank: its rank.
        action: the action.
        measured: its span in the first trace.
        simulated: its span in the second.
    """

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
