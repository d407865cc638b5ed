"""How a rank's lane is divided, and what it holds as time goes on.

    one lane, with memory               without
    0.03 ▀▀▀▀▀   ▀▀▀▀▀                  ▀▀▀▀▀   ▀▀▀▀▀     strips: offloads above reloads, only
    0.11    ▀▀▀▀▀▀▀▀                       ▀▀▀▀▀▀▀▀       where a step has any
    0.21 ┌────┐┌────────┐      ┌──┐     ┌────┐┌────────┐  boxes: what the rank computes; from 0.08
    0.62 └────┘└────────┘      └──┘     │    ││        │  on where there are no strips
    0.72 ─────────▂▂▂▂▄▄▄▄▂▂▂───        │    ││        │  memory: activations held
    0.97                                └────┘└────────┘

A lane is one unit high, rank r's from r to r + 1, counted downwards. This module knows no colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Op
from penstock.schedule.rules import BACKWARDS, COMPUTE, TRANSFERS
from penstock.trace import Span, Trace

__all__ = ["Clock", "LaneLayout", "MemoryLine", "drawn", "layout_of", "memory_lines", "outline"]

_TOP, _TOP_BELOW_STRIPS = 0.08, 0.21
_FOOT, _FOOT_ALONE = 0.62, 0.92
_UPPER_STRIP, _LOWER_STRIP = (0.03, 0.10), (0.11, 0.18)
_MEMORY_TOP, _MEMORY_FOOT = 0.70, 0.97
# What takes a smaller share of a measured step is not worth a strip.
_SMALL = 0.001

MemoryLine: TypeAlias = Sequence[tuple[float, float]]
"""A rank's memory: from each time on, how much it holds; times rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLayout:
    """Where things lie in a lane.

    Args:
        top: of boxes.
    """

    top: float

    def of(self, op: Op, share: tuple[int, int] = (0, 1)) -> tuple[float, float, float, float]:
        """Top and foot of an op, with the memory and without it.

        Args:
            op: what is drawn.
            share: which of how many equal parts of a box's height; the first of one is all of it.
        """
        if op not in COMPUTE:
            strip = _LOWER_STRIP if op is Op.RELOAD else _UPPER_STRIP
            return *strip, *strip
        part, parts = share
        found: list[float] = []
        for foot in (_FOOT, _FOOT_ALONE):
            height = (foot - self.top) / parts
            found += (self.top + part * height, self.top + (part + 1) * height)
        return found[0], found[1], found[2], found[3]

    @property
    def middle(self) -> float:
        """Of boxes, above the memory."""
        return (self.top + _FOOT) / 2


def drawn(trace: Trace) -> list[Span]:
    """The spans that a drawing shows: what ranks compute, and what takes time beside it.

    Messages take no time of a rank's, and what takes none has no box. A measured step tells of
    each thing that was done, even where there was nothing to do.
    """
    shortest = trace.makespan * _SMALL if trace.unit == "s" else 0.0
    return [
        s
        for s in trace.spans
        if s.action.op in COMPUTE or (s.action.op not in TRANSFERS and s.end - s.start > shortest)
    ]


def layout_of(spans: Sequence[Span]) -> LaneLayout:
    """The layout of lanes that show these spans."""
    strips = any(span.action.op not in COMPUTE for span in spans)
    return LaneLayout(top=_TOP_BELOW_STRIPS if strips else _TOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """From a trace's times to those of a drawing.

    Args:
        origin: the trace's time at which the drawing begins.
        scale: how many of the drawing's units the trace's unit is.
    """

    origin: float
    scale: float

    def at(self, time: float) -> float:
        """A time of the trace, in the drawing."""
        return (time - self.origin) * self.scale


def memory_lines(trace: Trace) -> tuple[MemoryLine, ...]:
    """How many activations each rank holds: from the start of F to the end of W or B, but for
    the time that they are on the host, or dropped until they are computed again."""
    has_backward = any(span.action.op in BACKWARDS for span in trace.spans)
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


def outline(
    lines: Sequence[MemoryLine], clock: Clock, end: float, highest: float
) -> dict[str, list[float]]:
    """The memory of all ranks as one outline, of steps closed along each lane's foot.

    Args:
        lines: per rank, what it holds.
        clock: of the drawing.
        end: when the drawing ends.
        highest: the amount that fills its part of a lane.

    Returns:
        Points as columns ``x`` and ``y``, ranks parted by NaN: one path is quick to draw.
    """
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
