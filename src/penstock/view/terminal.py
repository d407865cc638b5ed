"""The text timeline in colour, for terminals and notebooks."""

from __future__ import annotations

import io

from rich.console import Console
from rich.style import Style
from rich.text import Text

from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.simulate.simulation import simulate
from penstock.trace import Trace
from penstock.view.palette import ink, shades
from penstock.view.text import SMALLEST_WIDTH, grid

__all__ = ["html_of", "timeline"]

_HTML_WIDTH = 140
_HTML = '<pre style="font-family: monospace; line-height: 1.4">{code}</pre>'
_IDLE = Style(dim=True)


def timeline(trace: Trace, *, width: int) -> Text:
    """The lines of ``penstock.view.text.to_text``, each cell in the colour of its op and stage.

    Args:
        trace: measured or simulated.
        width: longest line allowed, in characters; at least 20 are taken.
    """
    styles = {
        place: Style(color=ink(shade), bgcolor=shade) for place, shade in shades(trace).items()
    }
    drawing = Text(end="", no_wrap=True)
    for head, lane in grid(trace, width=max(SMALLEST_WIDTH, width)):
        line = Text(head)
        for span, text in lane:
            style = _IDLE if span is None else styles[span.rank, span.action.op, span.action.stage]
            line.append(text, style)
        line.rstrip()
        drawing.append_text(line).append("\n")
    return drawing


def html_of(program: Program) -> str:
    """A program for notebooks: its timeline at unit costs, or the reason why it has none."""
    console = Console(record=True, width=_HTML_WIDTH, file=io.StringIO())
    console.print(repr(program), markup=False, highlight=False)
    try:
        console.print(timeline(simulate(program).trace, width=_HTML_WIDTH), end="")
    except ScheduleError as error:
        console.print(str(error), markup=False, highlight=False)
    return console.export_html(inline_styles=True, code_format=_HTML)
