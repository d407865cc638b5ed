"""The layout of a timeline: its boxes, lines and labels, as columns of numbers and texts.

    one lane, with memory               without
    0.03 ▀▀▀▀▀   ▀▀▀▀▀                  ▀▀▀▀▀   ▀▀▀▀▀     strips: offloads above reloads, only
    0.11    ▀▀▀▀▀▀▀                       ▀▀▀▀▀▀▀▀       where a step has any
    0.21 ┌────┐┌────────┐      ┌──┐     ┌────┐┌────────┐  boxes: computations; from 0.08 on where
    0.62 └────┘└────────┘      └──┘     │    ││        │  there are no strips
    0.70 ─────────▂▂▂▂▄▄▄▄▂▂▂───        │    ││        │  memory: activations held
    0.97                                └────┘└────────┘  to 0.92

Rank r's lane reaches from r to r + 1, downwards. Pictures and pages draw these columns; this module
knows neither Bokeh nor Matplotlib.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from penstock.schedule.action import Op, Overlap
from penstock.schedule.rules import COMPUTE, TRANSFERS
from penstock.simulate.costs import Costs
from penstock.simulate.critical_path import StepCauses
from penstock.simulate.memory import Curve, StageMemory, memory_curves
from penstock.simulate.simulation import Simulation
from penstock.trace import Span, Trace
from penstock.view.palette import FRAME, LOOKS, amount, ink, shade, shades

__all__ = [
    "Columns", "Drawable", "Drawing", "LegendEntry", "arrange", "drawn", "legend", "trace_of",
]  # fmt: skip

Drawable: TypeAlias = Trace | Simulation
"""One step, measured or simulated."""

Columns: TypeAlias = dict[str, list[Any]]
"""Columns of equal length, by name."""

_TOP, _TOP_BELOW_STRIPS = 0.08, 0.21
_FOOT, _FOOT_ALONE = 0.62, 0.92
_OFFLOADS, _RELOADS = (0.03, 0.10), (0.11, 0.18)
_MEMORY_TOP, _MEMORY_FOOT = 0.70, 0.97
# The share of a measured step below which a strip is not drawn.
_SMALL = 0.001
# Opacity of boxes off the critical path, while the path is shown.
_PALE = 0.3

_FRAME_COLUMNS = ("left", "right", "top", "foot")
_BOX_COLUMNS = (
    *_FRAME_COLUMNS, "lasts", "fill", "ink", "label", "rank", "action", "kind", "stage",
    "microbatch", "waited", "pair", "alpha",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """The layout of one step."""

    boxes: Columns  # computations and copies; alpha: opacity while the critical path is shown
    overlapped_pairs: Columns  # frames around overlapped pairs
    path: Columns  # frames around the critical path, and lines from each box to the next
    memory: Columns  # points x and y of one outline, ranks separated by NaN
    peaks: tuple[float, ...]  # peak memory per rank
    end: float  # end of the last span
    axis_label: str


def trace_of(step: Drawable) -> Trace:
    """The trace of a step."""
    return step if isinstance(step, Trace) else step.trace


def drawn(trace: Trace) -> list[Span]:
    """The spans shown in a drawing: computations, and copies that take time.

    Messages have no box. A measured trace also records copies that moved nothing.
    """
    shortest = trace.makespan * _SMALL if trace.unit == "s" else 0.0
    return [
        s
        for s in trace.spans
        if s.action.op in COMPUTE or (s.action.op not in TRANSFERS and s.end - s.start > shortest)
    ]


class LegendEntry(NamedTuple):
    """An entry of a legend: its text, the colours of its box from left to right, the colour of the
    box's border, and the letter in it."""

    name: str
    fills: tuple[str, ...]
    edge: str | None = None
    letter: str = ""


def legend(traces: Sequence[Trace]) -> list[LegendEntry]:
    """The legend of a drawing of these traces."""
    used = {span.action.op for trace in traces for span in drawn(trace)}
    entries = [
        LegendEntry(
            LOOKS[op].name, (LOOKS[op].colour,), letter=op.value[0] if op in COMPUTE else ""
        )
        for op in Op
        if op in used
    ]
    entries.append(LegendEntry("idle", ("#ffffff",), edge="#b9c3cd"))
    stages = {(i, s.rank, s.action.stage) for i, trace in enumerate(traces) for s in trace.spans}
    if len(stages) > len({place[:2] for place in stages}):
        ends = shade(LOOKS[Op.FORWARD].colour, 0, 2), shade(LOOKS[Op.FORWARD].colour, 1, 2)
        entries.append(LegendEntry("a rank's first, last stage", ends))
    if any(trace.overlapped_pairs for trace in traces):
        entries.append(LegendEntry("overlapped pair", ("#ffffff",), edge=FRAME))
    return entries


def arrange(step: Drawable, *, unit: str | None = None, memory: bool = True) -> Drawing:
    """Lay out a step, from its first computation on.

    A simulation's memory is in the unit of its costs, a trace's in activations. Times are in
    ``unit``, by default the trace's, and seconds are drawn as milliseconds. Without ``memory``,
    boxes take the height of its outline too.
    """
    trace = trace_of(step)
    spans, unit = drawn(trace), unit or trace.unit
    origin = min((s.start for s in trace.spans if s.action.op in COMPUTE), default=0.0)
    top = _TOP if all(s.action.op in COMPUTE for s in spans) else _TOP_BELOW_STRIPS
    foot = _FOOT if memory else _FOOT_ALONE
    axes = _Axes(origin=origin, scale=1e3 if unit == "s" else 1.0, top=top, foot=foot)
    if isinstance(step, Trace):
        causes, curves = StepCauses(step), _activations(step)
    else:
        causes, curves = step.causes, step.memory
    path = causes.critical_path()
    peaks = tuple(max((held for _, held in curve), default=0.0) for curve in curves)
    pair_of = trace.pair_of()
    pairs: defaultdict[tuple[int, Overlap], list[Span]] = defaultdict(list)
    for span in spans if pair_of else ():
        if span.action in pair_of:
            pairs[span.rank, pair_of[span.action]].append(span)
    end = axes.x(max((s.end for s in spans), default=origin))
    boxes = _boxes(trace, spans, axes, causes.cause, path, pairs.values())
    middle = (axes.top + axes.foot) / 2
    # All columns have equal length, so the last box of the path has a line to itself.
    lines = {
        "xs": [[axes.x(a.end), axes.x(b.start)] for a, b in pairwise(path)] + [[]] * bool(path),
        "ys": [[a.rank + middle, b.rank + middle] for a, b in pairwise(path)] + [[]] * bool(path),
    }
    return Drawing(
        boxes=_columns(_BOX_COLUMNS, boxes),
        overlapped_pairs=_columns(_FRAME_COLUMNS, map(axes.frame, pairs.values())),
        path=_columns(_FRAME_COLUMNS, (axes.frame([span]) for span in path)) | lines,
        memory=_outline(curves, axes, end, max(peaks, default=0.0)),
        peaks=peaks,
        end=end,
        axis_label="time, ms" if unit == "s" else "time, in units of cost",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """Positions in a drawing."""

    origin: float  # the time of the trace at x = 0
    scale: float  # length of one unit of the trace's time
    top: float  # top and bottom of boxes in their lane
    foot: float

    def x(self, time: float) -> float:
        return (time - self.origin) * self.scale

    def y(self, rank: int, op: Op, part: int = 0, parts: int = 1) -> tuple[float, float]:
        """Top and bottom of one of the ``parts`` that share the height."""
        if op not in COMPUTE:
            top, foot = _RELOADS if op is Op.RELOAD else _OFFLOADS
            return rank + top, rank + foot
        height = (self.foot - self.top) / parts
        return rank + self.top + part * height, rank + self.top + (part + 1) * height

    def frame(self, spans: Sequence[Span]) -> tuple[float, ...]:
        """A frame around spans of one rank."""
        left, right = min(s.start for s in spans), max(s.end for s in spans)
        return self.x(left), self.x(right), *self.y(spans[0].rank, spans[0].action.op)


def _columns(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Columns:
    columns: Columns = {name: [] for name in names}
    return columns | {
        name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=False)
    }


def _boxes(
    trace: Trace,
    spans: Sequence[Span],
    axes: _Axes,
    cause_of: Callable[[Span], Span | None],
    path: Iterable[Span],
    pairs: Iterable[Sequence[Span]],
) -> Iterator[tuple[Any, ...]]:
    """One row of ``_BOX_COLUMNS`` per span."""
    # Spans are told apart by identity: to hash thousands of them by value would take longer than
    # all else. Equal colours, heights and words are made once per rank, op and stage.
    on_path = set(map(id, path))
    pair_of = {id(span): pair for pair in pairs for span in pair}
    looks = {
        (rank, op, stage): (op in COMPUTE, colour, ink(colour), op.value[0], LOOKS[op].name)
        for (rank, op, stage), colour in shades(trace).items()
    }
    heights = {(rank, op): axes.y(rank, op) for rank, op, _ in looks}
    # Per rank, the end of its last computation.
    free: dict[int, float] = {}
    for span in spans:
        act, rank, waited, paired = span.action, span.rank, "nothing", ""
        left, right, name = axes.x(span.start), axes.x(span.end), str(act)
        height = heights[rank, act.op]
        computes, fill, text_colour, letter, kind = looks[rank, act.op, act.stage]
        number, label = "" if act.microbatch is None else str(act.microbatch), ""
        if computes:
            label, cause = letter + number, cause_of(span)
            if cause is not None and cause.rank == rank:
                waited = f"its rank, busy with {cause.action}"
            elif cause is not None:
                idle = left - free.get(rank, 0.0)
                waited = f"{cause.action} of rank {cause.rank}, idle for {amount(idle)}"
            free[rank] = right
        if id(span) in pair_of:
            pair, middle = pair_of[id(span)], (span.start + span.end) / 2
            if any(other.start < middle < other.end for other in pair if other is not span):
                height = axes.y(rank, act.op, pair.index(span), len(pair))
            others = ", ".join(str(other.action) for other in pair if other.action != act)
            paired = f"paired with {others}" if others else ""
        yield (
            left, right, *height, right - left, fill, text_colour, label, rank, name, kind,
            act.stage, number, waited, paired, 1.0 if id(span) in on_path else _PALE,
        )  # fmt: skip


def _activations(trace: Trace) -> tuple[Curve, ...]:
    """Per rank, the number of activations in flight over time."""
    ranks: list[list[Span]] = [[] for _ in range(trace.num_ranks)]
    for span in trace.spans:
        ranks[span.rank].append(span)
    num_stages = 1 + max((s.action.stage for s in trace.spans), default=0)
    memory = StageMemory.of(Costs(), num_stages)
    steps, starts, ends = (
        [[getattr(span, name) for span in spans] for spans in ranks]
        for name in ("action", "start", "end")
    )
    return memory_curves(steps, memory, starts, ends)


def _outline(curves: Sequence[Curve], axes: _Axes, end: float, highest: float) -> Columns:
    """The memory of all ranks as one outline, which draws fast; ``highest`` fills the height."""
    points = list[tuple[float, float]]()
    for rank, curve in enumerate(curves):
        if not curve or highest <= 0:
            continue
        height = (_MEMORY_FOOT - _MEMORY_TOP) / highest
        level = foot = rank + _MEMORY_FOOT
        points.append((axes.x(curve[0][0]), foot))
        for time, held in curve:
            before, level = level, foot - held * height
            points += [(axes.x(time), before), (axes.x(time), level)]
        points += [(end, level), (end, foot), (math.nan, math.nan)]
    return {"x": [x for x, _ in points], "y": [y for _, y in points]}
