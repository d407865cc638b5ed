"""A trace as columns of numbers and texts: what pages draw, whatever they draw it with.

    one lane       0.08 ┌────┐┌────────┐      ┌──┐    boxes: what the rank computes
                   0.60 └────┘└────────┘      └──┘
                   0.66  ▀▀▀▀▀                        strip: copies and collectives beside it
                   0.72 ─────────▂▂▂▂▄▄▄▄▂▂▂───       memory: activations held
                   0.97

A lane is one unit high, rank r's from r to r + 1, counted downwards. This module knows neither
Bokeh nor the command line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE, TRANSFERS
from penstock.simulate.result import Simulation
from penstock.trace import Span, Trace
from penstock.view.causes import critical_path, makers, waited_for
from penstock.view.palette import ink, name_of, shades

__all__ = ["Drawing", "MemoryLine", "Step", "amount", "arrange", "memory_lines", "trace_of"]

_TOP, _FOOT, _FOOT_ALONE = 0.08, 0.62, 0.92
_STRIP_TOP, _STRIP_FOOT = 0.63, 0.69
_ENDS = frozenset({Op.FULL_BACKWARD, Op.WEIGHT_GRAD})
_MEMORY_TOP, _MEMORY_FOOT = 0.70, 0.97

Step: TypeAlias = Trace | Simulation
"""One step: what ran when, measured or simulated."""

MemoryLine: TypeAlias = Sequence[tuple[float, float]]
"""A rank's memory: from each time on, how much it holds; times rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What a page draws of one trace; columns of equal length, by name.

    Args:
        boxes: what ranks compute, and what runs beside it; ``alpha`` pales what is not on the
            critical path.
        path: the boxes of the critical path, and lines from one to the next.
        memory: one outline for all ranks, parted by NaN.
        peaks: per rank, the most it held.
        end: the time at which the last span ends.
    """

    boxes: dict[str, list[Any]]
    path: dict[str, list[Any]]
    memory: dict[str, list[Any]]
    peaks: tuple[float, ...]
    end: float


def arrange(
    step: Step, *, unit: str | None = None, differences: dict[str, str] | None = None
) -> Drawing:
    """Lay a step out.

    Args:
        step: drawn from its first computation on. Of a simulation, memory is what its costs say;
            of a trace, activations held from F to W.
        unit: of its times; the trace's own if None. Seconds are drawn as milliseconds.
        differences: by action in text form, a line more for its tooltip.
    """
    trace = trace_of(step)
    origin = min((s.start for s in trace.spans if s.action.op in COMPUTE), default=0.0)
    spans = [s for s in trace.spans if _is_drawn(s)]
    lines: Sequence[MemoryLine]
    if isinstance(step, Trace):
        lines, causes = memory_lines(step), waited_for(step)
        path = critical_path(step, causes)
    else:
        lines, causes, path = step.memory, _causes(step, spans), step.critical_path
    peaks = tuple(max((value for _, value in line), default=0.0) for line in lines)
    clock = _Clock(origin=origin, scale=1e3 if (unit or trace.unit) == "s" else 1.0)
    end = clock.at(max((s.end for s in spans), default=origin))
    return Drawing(
        boxes=_boxes(trace, spans, causes, set(path), clock, differences or {}),
        path=_path(path, clock),
        memory=_outline(lines, clock, end, max(peaks, default=0.0)),
        peaks=peaks,
        end=end,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clock:
    """From a trace's times to those of the drawing."""

    origin: float
    scale: float

    def at(self, time: float) -> float:
        return (time - self.origin) * self.scale


def trace_of(step: Step) -> Trace:
    """The trace of a step."""
    return step if isinstance(step, Trace) else step.trace


def _causes(result: Simulation, spans: Sequence[Span]) -> dict[Span, Span]:
    """For each computation, what it waited for, or the one before it on its rank."""
    if result.program.has_transfers:
        # There it waits for a receive, which is not drawn, and means a computation elsewhere.
        return waited_for(result.trace)
    made = makers(spans)
    causes: dict[Span, Span] = {}
    before: dict[int, Span] = {}
    for span in spans:
        if span.action.op in COMPUTE:
            needed = result.waited_for(span)
            cause = before.get(span.rank) if needed is None else made.get(needed)
            if cause is not None:
                causes[span] = cause
            before[span.rank] = span
    return causes


def _is_drawn(span: Span) -> bool:
    """Messages take no time of the rank's; what takes no time has no box."""
    act = span.action
    return act.op in COMPUTE or (act.op not in TRANSFERS and span.end > span.start)


def memory_lines(trace: Trace) -> tuple[MemoryLine, ...]:
    """How many activations each rank holds: from the start of F to the end of W or B, but for
    the time that they are on the host, or dropped until they are computed again."""
    has_backward = any(s.action.op in _ENDS or s.action.op is Op.INPUT_GRAD for s in trace.spans)
    dropped = {_place(s) for s in trace.spans if s.action.op is Op.RECOMPUTE}
    events: list[list[tuple[float, int]]] = [[] for _ in range(trace.num_ranks)]
    for span in trace.spans:
        match span.action.op:
            case Op.FORWARD:
                events[span.rank].append((span.start, 1))
                if not has_backward or _place(span) in dropped:
                    events[span.rank].append((span.end, -1))
            case Op.RECOMPUTE | Op.RELOAD:
                events[span.rank].append((span.start, 1))
            case Op.FULL_BACKWARD | Op.WEIGHT_GRAD | Op.OFFLOAD:
                events[span.rank].append((span.end, -1))
            case _:
                pass
    return tuple(_summed(sorted(each)) for each in events)


def _place(span: Span) -> tuple[int, int | None]:
    return span.action.stage, span.action.microbatch


def _summed(events: list[tuple[float, int]]) -> MemoryLine:
    line: list[tuple[float, float]] = []
    held = 0
    for time, change in events:
        held += change
        if line and line[-1][0] == time:
            line[-1] = (time, held)
        else:
            line.append((time, held))
    return line


def amount(value: float) -> str:
    """A number for people: at most four digits, and a letter for thousands and more.

    Example:
        >>> amount(8), amount(0.12345), amount(1536), amount(3.2e9)
        ('8', '0.1235', '1536', '3.2 G')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


_COLUMNS = (
    "left", "right", "lasts", "top", "foot", "foot_alone", "fill", "ink", "label",
    "rank", "action", "kind", "stage", "microbatch", "waited", "beside", "alpha",
)  # fmt: skip


def _boxes(
    trace: Trace,
    spans: Sequence[Span],
    causes: dict[Span, Span],
    path: set[Span],
    clock: _Clock,
    differences: dict[str, str],
) -> dict[str, list[Any]]:
    colours = shades(trace)
    inks = {colour: ink(colour) for colour in set(colours.values())}
    rows = []
    free: dict[int, float] = {}
    for span in spans:
        act = span.action
        computes = act.op in COMPUTE
        fill = colours[span.rank, act.op, act.stage]
        top, foot, alone = (
            (_TOP, _FOOT, _FOOT_ALONE) if computes else (_STRIP_TOP, _STRIP_FOOT, _STRIP_FOOT)
        )
        number = "" if act.microbatch is None else str(act.microbatch)
        left, right, name = clock.at(span.start), clock.at(span.end), str(act)
        row: tuple[Any, ...] = (
            left, right, right - left, span.rank + top, span.rank + foot, span.rank + alone,
            fill, inks[fill], number if computes else "",
            span.rank, name, name_of(act.op), act.stage, number,
            _waited(span, causes.get(span), free.get(span.rank), clock),
            differences.get(name, ""), 1.0 if span in path else 0.3,
        )  # fmt: skip
        rows.append(row)
        if computes:
            free[span.rank] = span.end
    columns = zip(*rows, strict=True) if rows else ((),) * len(_COLUMNS)
    return {name: list(column) for name, column in zip(_COLUMNS, columns, strict=True)}


def _waited(span: Span, cause: Span | None, free: float | None, clock: _Clock) -> str:
    if cause is None or span.action.op not in COMPUTE:
        return "nothing"
    if cause.rank == span.rank:
        return f"its rank, busy with {cause.action}"
    idle = clock.scale * (span.start - (clock.origin if free is None else free))
    return f"{cause.action} of rank {cause.rank}, idle for {amount(idle)}"


def _path(path: Sequence[Span], clock: _Clock) -> dict[str, list[Any]]:
    return {
        "left": [clock.at(s.start) for s in path],
        "right": [clock.at(s.end) for s in path],
        "top": [s.rank + _TOP for s in path],
        "foot": [s.rank + _FOOT for s in path],
        "foot_alone": [s.rank + _FOOT_ALONE for s in path],
        # From each box to the next one; the last leads nowhere.
        "xs": [[clock.at(a.end), clock.at(b.start)] for a, b in pairwise(path)] + [[]] * bool(path),
        "ys": [
            [a.rank + (_TOP + _FOOT) / 2, b.rank + (_TOP + _FOOT) / 2] for a, b in pairwise(path)
        ]
        + [[]] * bool(path),
    }


def _outline(
    lines: Sequence[MemoryLine], clock: _Clock, end: float, highest: float
) -> dict[str, list[Any]]:
    """Steps, closed along each lane's foot; one path for all ranks is quick to draw."""
    xs: list[float] = []
    ys: list[float] = []
    for rank, line in enumerate(lines):
        if not line or highest <= 0:
            continue
        foot, height = rank + _MEMORY_FOOT, (_MEMORY_FOOT - _MEMORY_TOP) / highest
        level = foot
        xs.append(clock.at(line[0][0]))
        ys.append(foot)
        for time, value in line:
            xs += [clock.at(time)] * 2
            ys += [level, foot - value * height]
            level = ys[-1]
        xs += [end, end, math.nan]
        ys += [level, foot, math.nan]
    return {"x": xs, "y": ys}
