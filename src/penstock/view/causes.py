"""What each action of a trace waited for, and the path that made the step as long as it was.

    rank 0  F0 F1 .. .. B0 --        B0 waited for rank 1's B0, which came after its own F0,
    rank 1  .. F0 B0 -- F1 ..        which waited for rank 0's F0: the critical path

Seen from times alone, so it holds for measured and simulated steps alike: where a rank goes from
one action to the next without a pause, it was busy; where it was idle, what it needed came late.
This module draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.schedule.action import Action, Op, action
from penstock.schedule.rules import COMPUTE, COVERS, REQUIRES
from penstock.trace import Span, Trace

__all__ = ["critical_path", "makers", "needs", "waited_for"]

# Times are sums of costs: two that differ by less than this share of the makespan are one.
_ROUNDING = 1e-9
# A measured step has a pause of some microseconds between any two actions.
_PAUSE = 0.002


def makers(spans: Sequence[Span]) -> dict[Action, Span]:
    """By action, the span that fulfils it."""
    found: dict[Action, Span] = {}
    for span in spans:
        act = span.action
        for op in (act.op, *COVERS.get(act.op, ())):
            found[action(act.stage, op, act.microbatch)] = span
    return found


def waited_for(trace: Trace) -> dict[Span, Span]:
    """For each span that computes, the one that it could not start before.

    Args:
        trace: measured or simulated.

    Returns:
        The rank's own span before it where the rank was busy until then; else, of what it needs,
        that which ended last. A span that waited for nothing is left out.
    """
    computes = [span for rank in range(trace.num_ranks) for span in trace.compute(rank)]
    made = makers(computes)
    slack = trace.makespan * (_PAUSE if trace.unit == "s" else _ROUNDING)
    causes: dict[Span, Span] = {}
    before: Span | None = None
    for span in computes:
        if before is not None and before.rank != span.rank:
            before = None
        was_busy = before is not None and before.end >= span.start - slack
        needed = (
            maker
            for _, maker in ([] if was_busy else needs(span, made))
            if maker is not span and maker.start < span.end
        )
        latest = max(needed, key=lambda each: each.end, default=before)
        if latest is not None and latest is not span:
            causes[span] = latest
        before = span
    return causes


def needs(span: Span, made: dict[Action, Span]) -> Iterator[tuple[Op, Span]]:
    """The ops whose results a computation uses, each with the span that fulfils it.

    Args:
        span: what computes.
        made: by action, the span that fulfils it.
    """
    for op, offset in REQUIRES[span.action.op]:
        stage = span.action.stage + offset
        maker = made.get(action(stage, op, span.action.microbatch)) if stage >= 0 else None
        if maker is not None:
            yield op, maker


def critical_path(trace: Trace, causes: dict[Span, Span]) -> tuple[Span, ...]:
    """From the last span to end back to one that waited for nothing, in order of time.

    Args:
        trace: measured or simulated.
        causes: what ``waited_for`` says of it.
    """
    computes = [span for span in trace.spans if span.action.op in COMPUTE]
    if not computes:
        return ()
    path = [max(computes, key=lambda span: span.end)]
    seen = {path[0]}
    while (cause := causes.get(path[-1])) is not None and cause not in seen:
        path.append(cause)
        seen.add(cause)
    return tuple(reversed(path))
