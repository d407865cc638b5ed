"""A timeline as plain text, for terminals and docstrings.

    rank 0  F0 F1 .. .. .. .. B0 -- .. B1 --          a line per rank, a cell per unit of time
    rank 1  .. F0 B0 -- F1 B1 -- .. .. .. ..          "--" continues the cell left of it

If ranks hold several stages, labels include the stage, as in ``2F0``. An overlapped pair is joined
by ``+``, as in ``0F3+1B2``. Without room for labels, a cell shows the letter of its op, or the
``+`` of a pair. Offloads and reloads that take time have lines of their own:

    rank 0    F0 F1 F2 .. .. B0 --
      to host .. O0 -- O1 -- .. ..
      back    .. .. .. .. R0 -- ..
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from penstock.schedule.action import Action, Op
from penstock.trace import Span, Trace
from penstock.view.layout import Drawable, drawn, trace_of

__all__ = ["SMALLEST_WIDTH", "grid", "to_text"]

SMALLEST_WIDTH = 20
# Rounding makes sums of costs differ by less than this share of a cell.
_ROUNDING = 1e-9
_COPIES = {Op.OFFLOAD: "  to host", Op.RELOAD: "  back"}

Lane: TypeAlias = list[tuple[Span | None, str]]
"""The cells of a lane: the span of each, or None where it is idle, and its text."""


def to_text(trace: Drawable, *, width: int = 120) -> str:
    """The timeline of a step.

    Args:
        trace: a ``Trace`` or a ``Simulation``.
        width: longest line allowed, in characters, at least 20.

    Returns:
        One line per rank and per direction of its copies, each ending in a newline. A cell shows
        the action at the middle of its time.

    Raises:
        ValueError: ``width`` is too small.

    Examples:
        >>> from penstock.schedule.action import Op, action
        >>> spans = (
        ...     Span(rank=0, action=action(0, Op.FORWARD, 0), start=0, end=1),
        ...     Span(rank=0, action=action(0, Op.FULL_BACKWARD, 0), start=4, end=6),
        ...     Span(rank=1, action=action(1, Op.FORWARD, 0), start=1, end=2),
        ...     Span(rank=1, action=action(1, Op.FULL_BACKWARD, 0), start=2, end=4),
        ... )
        >>> print(to_text(Trace(name="1f1b", num_ranks=2, unit="1", spans=spans)), end="")
        rank 0  F0 .. .. .. B0 --
        rank 1  .. F0 B0 -- .. ..
    """
    lanes = grid(trace_of(trace), width=width)
    lines = (head + "".join(text for _, text in lane) for head, lane in lanes)
    return "".join(line.rstrip() + "\n" for line in lines)


def grid(trace: Trace, *, width: int) -> list[tuple[str, Lane]]:
    """A timeline in cells of equal time, in lines of at most ``width`` characters: the name of each
    lane, and its cells."""
    if width < SMALLEST_WIDTH:
        raise ValueError(f"width is {width}, expected at least {SMALLEST_WIDTH}")
    lanes, pair_of = list(_lanes(trace)), trace.pair_of()
    spans = [span for rank in range(trace.num_ranks) for span in trace.compute(rank)]
    margin = max((len(head) for head, _ in lanes), default=0) + 2
    room = width - margin
    origin = min((span.start for span in spans), default=0.0)
    length = min((s.end - s.start for s in spans if s.end > s.start), default=trace.makespan or 1.0)
    several = any(s.action.stage >= trace.num_ranks for s in spans)

    def label(act: Action) -> str:
        """``F3``, or ``2F3`` if ranks hold several stages."""
        return f"{act.stage if several else ''}{act.op.value[0]}{act.microbatch}"

    size = max((len(label(s.action)) for _, lane in lanes for s in lane), default=1)
    count = math.ceil(trace.makespan / length - _ROUNDING)
    labelled = count * (size + 1) - 1 <= room
    if not labelled:
        size = 1
        if count > room:
            count = room
            length = trace.makespan / count

    def cells(lane: Sequence[Span]) -> Iterator[tuple[Span | None, str]]:
        before = None
        for i in range(count):
            time = origin + (i + 0.5) * length
            started = bisect_right(lane, time, key=lambda span: span.start)
            # Spans of an overlapped pair may both run now.
            span = next((s for s in reversed(lane[:started][-2:]) if time < s.end), None)
            begins = span is not before
            pair, last = (pair_of.get(s.action) if s else None for s in (span, before))
            # The first cell of a pair's second action.
            joins = begins and pair is not None and pair == last
            before = span
            if span is None:
                text = "." * size
            elif labelled:
                text = label(span.action).ljust(size) if begins else "-" * size
            else:
                text = "+" if joins else span.action.op.value[0]
            yield span, ("+" if joins else " ") * labelled + text

    # Labels begin with a gap.
    margin -= labelled
    return [(head.ljust(margin), list(cells(lane))) for head, lane in lanes]


def _lanes(trace: Trace) -> Iterator[tuple[str, Sequence[Span]]]:
    """The name and the spans of each lane: a rank's computations, followed by its copies."""
    copies = [span for span in drawn(trace) if span.action.op in _COPIES]
    for rank in range(trace.num_ranks):
        yield f"rank {rank}", trace.compute(rank)
        for op, head in _COPIES.items():
            lane = [span for span in copies if (span.rank, span.action.op) == (rank, op)]
            if lane:
                yield head, lane
