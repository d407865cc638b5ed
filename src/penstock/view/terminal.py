"""A timeline as coloured text for Rich, from the cells of ``penstock.view.text``."""

from __future__ import annotations

import io

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, HOST_TRANSFERS
from penstock.simulate.simulation import simulate
from penstock.trace import Trace
from penstock.view.layout import drawn
from penstock.view.palette import LOOKS, ink, shades
from penstock.view.text import grid, to_text

__all__ = ["html_of", "legend", "timeline"]

_HTML_WIDTH = 140
_HTML = '<pre style="font-family: monospace; line-height: 1.4">{code}</pre>'


def timeline(trace: Trace, *, width: int, colour: bool = True, shaded: bool = True) -> Text:
    """The timeline: one line per rank, followed by its offloads and reloads.

    Args:
        trace: measured or simulated.
        width: longest line allowed, at least 20.
        colour: True if the terminal has colours; if False, the text equals ``to_text``'s.
        shaded: True if the terminal has more than 16 colours, for one shade per stage of a rank.
    """
    if not colour:
        return Text(to_text(trace, width=width), end="", no_wrap=True)
    styles = _styles(trace, shaded=shaded)
    drawing = Text(end="", no_wrap=True)
    for head, lane in grid(trace, width=width, brief=True):
        drawing.append(head)
        for span, text in lane:
            style = None if span is None else styles[span.rank, span.action.op, span.action.stage]
            drawing.append(text, style)
        drawing.append("\n")
    return drawing


def legend(trace: Trace, *, shaded: bool = True) -> Text:
    """A legend of the colours in a timeline drawn with the same ``shaded``."""
    styles = _styles(trace, shaded=shaded)
    first: dict[str, Style] = {}
    for span in drawn(trace):
        if span.action.op in COMPUTE | HOST_TRANSFERS:
            style = styles[span.rank, span.action.op, span.action.stage]
            first.setdefault(LOOKS[span.action.op].name, style)
    text = Text("\n")
    for name, style in first.items():
        text.append("  ", style).append(f" {name}   ")
    if trace.overlapped_pairs:
        text.append("+ joins a block   ")
    return text


def html_of(program: Program) -> str:
    """A program for notebooks: its timeline at unit costs, or the reason why it has none."""
    console = Console(record=True, width=_HTML_WIDTH, file=io.StringIO())
    console.print(repr(program), markup=False, highlight=False)
    try:
        trace = simulate(program).trace
    except ScheduleError as error:
        console.print(str(error), markup=False, highlight=False)
    else:
        console.print(timeline(trace, width=_HTML_WIDTH), legend(trace), sep="")
    return console.export_html(inline_styles=True, code_format=_HTML)


def _styles(trace: Trace, *, shaded: bool) -> dict[tuple[int, Op, int], Style]:
    """The style of each rank, op and stage."""
    looks = {place: (shade, ink(shade)) for place, shade in shades(trace).items()}
    if not shaded:
        looks = {place: LOOKS[place[1]].ansi for place in looks}
    return {place: Style(color=text, bgcolor=back) for place, (back, text) in looks.items()}
