"""A trace as coloured text, for Rich: the same cells as ``penstock.view.text``, as boxes.

This module knows no command line: it makes renderables, and others print them.
"""

from __future__ import annotations

from functools import cache

from rich.style import Style
from rich.text import Text

from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE, COPIES
from penstock.trace import Trace
from penstock.view.lanes import drawn
from penstock.view.palette import ANSI, ink, name_of, shades
from penstock.view.text import grid, to_text

__all__ = ["legend", "timeline"]


def timeline(trace: Trace, *, width: int, colour: bool = True, shaded: bool = True) -> Text:
    """The timeline, a line per rank, and below it what it copies to the host and back.

    Args:
        trace: measured or simulated.
        width: the longest line allowed, at least 20.
        colour: whether the terminal has colours; else it is ``to_text``'s.
        shaded: whether it has more than 16, so that a rank's stages have shades of their own.
    """
    if not colour:
        return Text(to_text(trace, width=width), end="", no_wrap=True)
    cells = grid(trace, width=width, brief=True)
    boxes = _boxes(trace, shaded=shaded)
    text = Text(end="", no_wrap=True)
    for head, row in zip(cells.heads, cells.rows, strict=True):
        text.append(head)
        for cell in row:
            blank = " " * len(cell.text)
            if cell.span is None:
                text.append(blank)
                continue
            act = cell.span.action
            label = cell.text if cell.begins and cells.labelled else blank
            if cell.joins:
                label = "+" + label[1:]
            text.append(label, boxes[cell.span.rank, act.op, act.stage])
        text.append("\n")
    return text


def legend(trace: Trace, *, shaded: bool = True) -> Text:
    """A line with the colours of what the timeline shows, which is as ``shaded`` as this."""
    boxes = _boxes(trace, shaded=shaded)
    first: dict[str, Style] = {}
    for span in drawn(trace):
        if span.action.op in COMPUTE | COPIES:
            box = boxes[span.rank, span.action.op, span.action.stage]
            first.setdefault(name_of(span.action.op), box)
    text = Text("\n")
    for name, box in first.items():
        text.append("  ", box)
        text.append(f" {name}   ")
    if trace.blocks:
        text.append("+ joins a block   ")
    return text


def _boxes(trace: Trace, *, shaded: bool) -> dict[tuple[int, Op, int], Style]:
    """How the boxes of each rank, op and stage look."""
    found = {}
    for (rank, op, stage), shade in shades(trace).items():
        few = None if shaded else ANSI.get(op)
        colour, text = (shade, ink(shade)) if few is None else few
        found[rank, op, stage] = _box(colour, text)
    return found


@cache
def _box(colour: str, text: str) -> Style:
    return Style(color=text, bgcolor=colour)
