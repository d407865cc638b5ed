"""A trace as columns of numbers and texts: what pages draw, whatever they draw it with.

This module knows neither Bokeh nor the command line; how a lane is divided, ``lanes.py`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from penstock.schedule.action import Action, Overlap
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation
from penstock.trace import Span, Trace
from penstock.view.causes import critical_path, makers, waited_for
from penstock.view.lanes import (
    Clock,
    LaneLayout,
    MemoryLine,
    drawn,
    layout_of,
    memory_lines,
    outline,
)
from penstock.view.palette import ink, letter_of, name_of, shades

__all__ = ["Columns", "Drawable", "Drawing", "amount", "arrange", "bound_figures", "trace_of"]

Drawable: TypeAlias = Trace | Simulation
"""One step: what ran when, measured or simulated."""

Columns: TypeAlias = dict[str, list[Any]]
"""Columns of equal length, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What a page draws of one trace; columns of equal length, by name.

    Args:
        boxes: what ranks compute, and what runs beside it; ``alpha`` pales what is not on the
            critical path.
        blocks: frames around what is one block.
        path: the boxes of the critical path, and lines from one to the next.
        memory: one outline for all ranks, parted by NaN.
        peaks: per rank, the most it held.
        end: the time at which the last span ends.
    """

    boxes: Columns
    blocks: Columns
    path: Columns
    memory: Columns
    peaks: tuple[float, ...]
    end: float


def arrange(
    step: Drawable, *, unit: str | None = None, differences: dict[str, str] | None = None
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
    spans = drawn(trace)
    lines: Sequence[MemoryLine]
    if isinstance(step, Trace):
        lines, causes = memory_lines(step), waited_for(step)
        path = critical_path(step, causes)
    else:
        lines, causes, path = step.memory, _causes(step, spans), step.critical_path
    peaks = tuple(max((value for _, value in line), default=0.0) for line in lines)
    clock = Clock(origin=origin, scale=1e3 if (unit or trace.unit) == "s" else 1.0)
    end = clock.at(max((s.end for s in spans), default=origin))
    layout = layout_of(spans)
    blocks = _blocks(trace, spans)
    rows = _Rows(
        colours=shades(trace),
        causes=causes,
        path=frozenset(path),
        block_of={span: block for block in blocks for span in block},
        differences=differences or {},
        clock=clock,
        layout=layout,
    )
    return Drawing(
        boxes=_columns(_BOXES, rows.of(spans)),
        blocks=_columns(_FRAMES, (_frame(block, clock, layout) for block in blocks)),
        path=_path(path, clock, layout),
        memory=outline(lines, clock, end, max(peaks, default=0.0)),
        peaks=peaks,
        end=end,
    )


def trace_of(step: Drawable) -> Trace:
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


def _blocks(trace: Trace, spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """The spans of each block that ran."""
    block_of = trace.block_of()
    found: dict[tuple[int, Overlap], list[Span]] = {}
    for span in spans if block_of else ():
        block = block_of.get(span.action)
        if block is not None:
            found.setdefault((span.rank, block), []).append(span)
    return [tuple(parts) for parts in found.values()]


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


def bound_figures(result: Simulation) -> list[tuple[str, str]]:
    """What the figures of a step say of its bound: nothing where there is none."""
    bounds = result.bounds
    return (
        [] if bounds is None else [("no program of these stages is below", amount(bounds.makespan))]
    )


_FRAMES = ("left", "right", "top", "foot", "top_alone", "foot_alone")
_BOXES = (
    *_FRAMES, "lasts", "fill", "ink", "label", "rank", "action", "kind", "stage", "microbatch",
    "waited", "block", "beside", "alpha",
)  # fmt: skip


def _columns(names: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> Columns:
    columns = list(zip(*rows, strict=True)) or ((),) * len(names)
    return {name: list(column) for name, column in zip(names, columns, strict=True)}


def _placed(rank: int, places: tuple[float, ...]) -> tuple[float, ...]:
    """Places in a lane, in that rank's."""
    return tuple(rank + place for place in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """All that boxes are made of, beside their spans."""

    colours: dict[tuple[int, Any, int], str]
    causes: dict[Span, Span]
    path: frozenset[Span]
    block_of: dict[Span, tuple[Span, ...]]
    differences: dict[str, str]
    clock: Clock
    layout: LaneLayout

    def of(self, spans: Sequence[Span]) -> Iterable[tuple[Any, ...]]:
        """A row per span, with its columns as ``_BOXES`` names them."""
        inks = {colour: ink(colour) for colour in set(self.colours.values())}
        at = self.clock.at
        free: dict[int, float] = {}
        for span in spans:
            act, computes = span.action, span.action.op in COMPUTE
            fill = self.colours[span.rank, act.op, act.stage]
            number = "" if act.microbatch is None else str(act.microbatch)
            left, right, name = at(span.start), at(span.end), str(act)
            block = self.block_of.get(span, ())
            yield (
                left, right, *_placed(span.rank, self.layout.of(act.op, _share(span, block))),
                right - left, fill, inks[fill], letter_of(act.op) + number if computes else "",
                span.rank, name, name_of(act.op), act.stage, number,
                self._waited(span, free.get(span.rank)), _beside(act, block),
                self.differences.get(name, ""), 1.0 if span in self.path else 0.3,
            )  # fmt: skip
            if computes:
                free[span.rank] = span.end

    def _waited(self, span: Span, free: float | None) -> str:
        cause = self.causes.get(span)
        if cause is None or span.action.op not in COMPUTE:
            return "nothing"
        if cause.rank == span.rank:
            return f"its rank, busy with {cause.action}"
        idle = self.clock.scale * (span.start - (self.clock.origin if free is None else free))
        return f"{cause.action} of rank {cause.rank}, idle for {amount(idle)}"


def _share(span: Span, block: Sequence[Span]) -> tuple[int, int]:
    """Which part of a box's height: all of it, but where parts of a block ran at one time."""
    middle = (span.start + span.end) / 2
    if any(other.start < middle < other.end for other in block if other is not span):
        return block.index(span), len(block)
    return 0, 1


def _beside(act: Action, block: Sequence[Span]) -> str:
    others = ", ".join(str(span.action) for span in block if span.action != act)
    return f"one block with {others}" if others else ""


def _frame(block: Sequence[Span], clock: Clock, layout: LaneLayout) -> tuple[float, ...]:
    left, right = min(s.start for s in block), max(s.end for s in block)
    places = _placed(block[0].rank, layout.of(block[0].action.op))
    return clock.at(left), clock.at(right), *places


def _path(path: Sequence[Span], clock: Clock, layout: LaneLayout) -> Columns:
    frames = _columns(_FRAMES, (_frame((span,), clock, layout) for span in path))
    middle = layout.middle
    # From each box to the next one; the last leads nowhere.
    rest: list[list[float]] = [[]] * bool(path)
    xs = [[clock.at(a.end), clock.at(b.start)] for a, b in pairwise(path)]
    ys = [[a.rank + middle, b.rank + middle] for a, b in pairwise(path)]
    return frames | {"xs": xs + rest, "ys": ys + rest}
