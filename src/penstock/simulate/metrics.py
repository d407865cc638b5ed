"""A measured step beside the simulated one, action by action.

    measured    0F0 ▬▬▬▬      0F1 ▬▬▬           unit: seconds
    simulated   0F0 ▬▬ 0F1 ▬▬                   unit: whatever the costs were in
                          ╰─ starts later by that much, once a simulated unit is so many seconds

This module measures, simulates and draws nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.rules import COMPUTE
from penstock.trace import Span, Trace

__all__ = ["Comparison", "Difference", "compare_traces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One action in two traces. Times are in the unit of the measured one.

    Args:
        rank: the rank that ran it.
        action: what ran.
        measured: its span as measured, from the first computation of the step on.
        simulated: its span as simulated, likewise, scaled.
    """

    rank: int
    action: Action
    measured: Span
    simulated: Span

    @property
    def later(self) -> float:
        """By how much it started later than simulated; negative where earlier."""
        return self.measured.start - self.simulated.start

    @property
    def longer(self) -> float:
        """By how much it took longer than simulated; negative where it was quicker."""
        measured = self.measured.end - self.measured.start
        return measured - (self.simulated.end - self.simulated.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two traces of one program.

    Args:
        scale: how much of the measured unit one simulated unit is.
        rows: the actions that both have, by rank and measured start.
        only_measured: spans whose action was not simulated.
        only_simulated: spans whose action was not measured.
    """

    scale: float
    rows: tuple[Difference, ...]
    only_measured: tuple[Span, ...]
    only_simulated: tuple[Span, ...]


def compare_traces(measured: Trace, simulated: Trace, *, scale: float | None = None) -> Comparison:
    """Lay two traces over each other at their first computation.

    Args:
        measured: of a real step.
        simulated: of the same program.
        scale: how much of the measured unit one simulated unit is; None for what makes the
            computations that both have take equally long in all, so that what is left is where
            and when, not how fast the machine is.

    Returns:
        For each action that both traces have, how it differs; and what only one of them has.
        An action that runs several times is paired by turn.

    Raises:
        ScheduleError: no scale is given, and the traces have no computation in common that takes
            time.

    Example:
        >>> from penstock.schedule.registry import build
        >>> from penstock.simulate.costs import Costs
        >>> from penstock.simulate.simulation import simulate
        >>> program = build("1f1b", ranks=2, microbatches=2)
        >>> slow = simulate(program, Costs(forward=2, input_grad=2, weight_grad=2)).trace
        >>> compared = compare_traces(slow, simulate(program).trace)
        >>> compared.scale, max(abs(row.later) for row in compared.rows)
        (2.0, 0.0)
    """
    pairs, only_measured, only_simulated = _paired(measured, simulated)
    if scale is None:
        scale = _scale(pairs)
    starts = [
        min((s.start for s in trace.spans if s.action.op in COMPUTE), default=0.0)
        for trace in (measured, simulated)
    ]
    rows = [
        Difference(
            rank=mine.rank,
            action=mine.action,
            measured=_moved(mine, starts[0], 1.0),
            simulated=_moved(other, starts[1], scale),
        )
        for mine, other in pairs
    ]
    rows.sort(key=lambda row: (row.rank, row.measured.start))
    return Comparison(
        scale=scale,
        rows=tuple(rows),
        only_measured=only_measured,
        only_simulated=only_simulated,
    )


def _paired(
    measured: Trace, simulated: Trace
) -> tuple[list[tuple[Span, Span]], tuple[Span, ...], tuple[Span, ...]]:
    """The spans of what both ran; what is left of the one, and of the other."""
    waiting: defaultdict[tuple[int, Action], list[Span]] = defaultdict(list)
    for span in sorted(simulated.spans, key=lambda s: s.start):
        waiting[span.rank, span.action].append(span)
    pairs: list[tuple[Span, Span]] = []
    alone: list[Span] = []
    for span in sorted(measured.spans, key=lambda s: s.start):
        others = waiting[span.rank, span.action]
        if others:
            pairs.append((span, others.pop(0)))
        else:
            alone.append(span)
    left: Iterator[Span] = (span for spans in waiting.values() for span in spans)
    return pairs, tuple(alone), tuple(sorted(left, key=lambda s: (s.rank, s.start)))


def _scale(pairs: list[tuple[Span, Span]]) -> float:
    computing = [pair for pair in pairs if pair[0].action.op in COMPUTE]
    measured = sum(mine.end - mine.start for mine, _ in computing)
    simulated = sum(other.end - other.start for _, other in computing)
    if not (measured > 0 and simulated > 0):
        raise ScheduleError(
            f"the traces have {len(computing)} computations in common, which take {measured:g} "
            f"measured and {simulated:g} simulated; traces of one program have a scale, or pass one"
        )
    return measured / simulated


def _moved(span: Span, origin: float, scale: float) -> Span:
    return Span(
        rank=span.rank,
        action=span.action,
        start=(span.start - origin) * scale,
        end=(span.end - origin) * scale,
    )
