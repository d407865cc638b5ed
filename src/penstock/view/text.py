"""A trace as plain text, for terminals and docstrings.

    rank 0  F0 F1 .. .. .. .. B0 -- .. B1 --          one lane per rank, one cell per moment
    rank 1  .. F0 B0 -- F1 B1 -- .. .. .. ..          "--" goes on with what stands left of it

Where ranks hold several stages, labels name them, as in ``2F0``. Where there is no room for
labels, each cell is the letter of its op. Only what is computed is shown.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from penstock.schedule.action import Action
from penstock.trace import Span, Trace

__all__ = ["to_text"]

_SMALLEST_WIDTH = 20
# Times are sums of costs: two that differ by less than this share of a cell are one.
_ROUNDING = 1e-9


def to_text(trace: Trace, *, width: int = 120) -> str:
    """The timeline of a trace.

    Args:
        trace: measured or simulated.
        width: the longest line allowed, in characters, at least 20.

    Returns:
        A line per rank, each ended by a line break. A cell shows what the rank was computing at
        the cell's middle.

    Raises:
        ValueError: ``width`` is too small.

    Example:
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
    if width < _SMALLEST_WIDTH:
        raise ValueError(f"width is {width}, expected at least {_SMALLEST_WIDTH}")
    lanes = [trace.compute(rank) for rank in range(trace.num_ranks)]
    heads = [f"rank {rank}" for rank in range(trace.num_ranks)]
    margin = max(map(len, heads), default=0) + 2
    room = width - margin
    spans = [span for lane in lanes for span in lane]
    origin = min((span.start for span in spans), default=0.0)
    cell = min((s.end - s.start for s in spans if s.end > s.start), default=trace.makespan or 1.0)
    several = any(s.action.stage >= trace.num_ranks for s in spans)
    label_width = max((len(_label(s.action, several)) for s in spans), default=1)
    count = _num_cells(trace.makespan, cell)
    labelled = count * (label_width + 1) - 1 <= room
    if not labelled and count > room:
        count = room
        cell = trace.makespan / count
    lines = []
    for head, lane in zip(heads, lanes, strict=True):
        cells = [_at(lane, origin + (i + 0.5) * cell) for i in range(count)]
        if labelled:
            row = " ".join(_labels(cells, several, label_width))
        else:
            row = "".join("." if span is None else span.action.op.value for span in cells)
        lines.append(f"{head:<{margin}}{row}".rstrip() + "\n")
    return "".join(lines)


def _num_cells(makespan: float, cell: float) -> int:
    return math.ceil(makespan / cell - _ROUNDING)


def _label(act: Action, stages: bool) -> str:
    """``F3``; with its stage ``2F3``."""
    return f"{act.stage if stages else ''}{act.op.value}{act.microbatch}"


def _at(lane: tuple[Span, ...], time: float) -> Span | None:
    """What ran at ``time`` on a lane ordered by start."""
    index = bisect_right(lane, time, key=lambda span: span.start) - 1
    return lane[index] if index >= 0 and time < lane[index].end else None


def _labels(cells: list[Span | None], stages: bool, width: int) -> list[str]:
    texts = []
    before = None
    for span in cells:
        if span is None:
            texts.append("." * width)
        elif span is before:
            texts.append("-" * width)
        else:
            texts.append(_label(span.action, stages).ljust(width))
        before = span
    return texts
