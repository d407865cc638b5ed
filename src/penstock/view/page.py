"""A timeline as one HTML file that needs no network: zoom, hover, memory, critical path.

A measured step can be drawn above a simulated one on the same time axis. The playground shares the
HTML parts; they escape external text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from bokeh.embed import file_html
from bokeh.resources import INLINE

from penstock.schedule.program import sizes_text
from penstock.schedule.wording import numbers_of
from penstock.simulate.memory import exceeds
from penstock.simulate.simulation import Simulation
from penstock.trace import Trace
from penstock.view import palette
from penstock.view.layout import Drawable, LegendEntry, arrange, legend, trace_of
from penstock.view.palette import amount, time_text
from penstock.view.timeline import STRETCHED, Timeline, bk

__all__ = [
    "div", "figures_html", "figures_of", "heading_html", "legend_html", "legend_row", "page_look",
    "save_page",
]  # fmt: skip

# The steps of a page with two.
_NAMES = "measured", "simulated"

_PAGE_CSS = f"""
  html, body {{ margin: 0; background: #f6f8fa; font-family: {palette.FONT}; color: #1c2733; }}
  body {{ padding: 18px 24px; box-sizing: border-box; }}
"""
_CSS = """
.bk-btn { background: #fff; border-color: #cbd3db; color: #3a4652; border-radius: 6px; }
.bk-btn.bk-active { background: #e3ecfa; border-color: #4f86d9; color: #1f4f96; box-shadow: none; }
.heading { font-size: 22px; font-weight: 650; line-height: 1.35; }
.heading span { font-size: 14px; font-weight: 400; color: #66727f; margin-left: 12px; }
.title { font-size: 13px; font-weight: 600; color: #3a4652; margin-top: 6px; }
.card { background: #fff; border: 1px solid #dde3e9; border-radius: 8px; padding: 8px 14px; }
.error { font-size: 14px; color: #8a1c2c; background: #fdeeee; white-space: pre-wrap; }
.figures { display: flex; flex-wrap: wrap; gap: 10px; font-size: 11.5px; color: #66727f; }
.figures .card { min-width: 104px; box-sizing: border-box; }
.figures b { display: block; font-size: 17px; font-weight: 600; color: #1c2733; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; min-height: 31px; color: #3a4652; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.legend i { width: 16px; height: 16px; border-radius: 3px; box-sizing: border-box;
  font: 10.5px/16px system-ui, sans-serif; text-align: center; }
table, .legend { font-size: 13px; line-height: normal; }
table { border-collapse: collapse; white-space: nowrap; }
th { text-align: left; font-weight: 500; color: #66727f; padding: 4px 14px 6px 0; }
td { padding: 3px 14px 3px 0; }
td[colspan] { color: #8a97a3; white-space: normal; }
td span { display: inline-block; width: 52px; text-align: right; margin-right: 8px; }
td i { display: inline-block; height: 11px; border-radius: 2px; }
"""


def save_page(
    shown: Drawable, path: str | PathLike[str], *, beside: Drawable | None = None
) -> None:
    """Write a page; its folder is created if needed.

    Args:
        shown: the step to draw. A simulation's memory is in the unit of its costs, a trace's memory
            in activations.
        path: the file, usually ``*.html``.
        beside: the simulation of a measured step, drawn below it on the same time axis, in the unit
            of the measured step.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from penstock import build, simulate
        >>> step = simulate(build("zbv", ranks=2, microbatches=4))
        >>> with TemporaryDirectory() as folder:
        ...     save_page(step, f"{folder}/zbv.html")
        ...     "cdn.bokeh.org" in Path(folder, "zbv.html").read_text()
        False
    """
    steps = [shown] if beside is None else [shown, beside]
    traces = [trace_of(step) for step in steps]
    first = traces[0]
    timelines = [Timeline()]
    if beside is not None:
        timelines.append(Timeline(name="beside", x_range=timelines[0].x_range))
    drawings = [arrange(step, unit=first.unit) for step in steps]
    for timeline, drawing, name in zip(timelines, drawings, _NAMES, strict=False):
        timeline.show(drawing, title=name if beside else "")
    timelines[0].set_end(max(drawing.end for drawing in drawings))
    acts = [span.action for span in first.spans]
    stages, microbatches = {act.stage for act in acts}, {act.microbatch for act in acts} - {None}
    sizes = numbers_of(rank=first.num_ranks, stage=len(stages), microbatch=len(microbatches))
    if isinstance(shown, Simulation):
        sizes = sizes_text(shown.program)
    parts = [
        div(heading_html(first.name, sizes)),
        div(figures_html(figures_of(steps))),
        legend_row(timelines, div(legend_html(traces))),
        *(timeline.plot for timeline in timelines),
    ]
    content = bk.Column(*parts, spacing=12, stylesheets=[page_look()], **STRETCHED)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(file_html(content, resources=INLINE, title=first.name), encoding="utf-8")


def legend_row(timelines: Sequence[Timeline], legend: Any) -> Any:
    """A button that shows the critical path in these plots, beside the legend."""
    path = bk.Toggle(label="critical path", name="toggle path", width=112, stylesheets=[_CSS])
    for timeline in timelines:
        path.js_on_change("active", timeline.show_path)
    return bk.Row(path, legend, **STRETCHED)


def div(html: str = "", **options: Any) -> Any:
    """An HTML part of a page, styled for the functions below."""
    font = {"font-family": palette.FONT, "color": "#1c2733"}
    return bk.Div(text=html, stylesheets=[_CSS], styles=font, **STRETCHED, **options)


def page_look() -> Any:
    """The style sheet of a whole page."""
    return bk.GlobalInlineStyleSheet(css=_PAGE_CSS)


def heading_html(title: str, subtitle: str) -> str:
    """A heading with a subtitle."""
    return f'<div class="heading"><b>{escape(title)}</b><span>{escape(subtitle)}</span></div>'


def figures_html(figures: Sequence[tuple[str, str]]) -> str:
    """A row of cards, each with a heading and a figure."""
    cards = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in figures
    )
    return f'<div class="figures">{"".join(cards)}</div>'


def figures_of(steps: Sequence[Drawable], *, limit: float | None = None) -> list[tuple[str, str]]:
    """The figures of a step, or of a measured and a simulated step in the unit of the first;
    ``limit`` is the memory limit of a rank, None for none."""
    first, unit = steps[0], trace_of(steps[0]).unit
    of = f", {' | '.join(_NAMES)}" if len(steps) > 1 else ""
    texts = {
        "makespan": [time_text(step.makespan, unit) for step in steps],
        "bubble": [f"{step.bubble_ratio:.2%}" for step in steps],
        "span": [time_text(step.span, unit) for step in steps],
        "span bubble": [f"{step.span_bubble_ratio:.2%}" for step in steps],
    }
    figures = [(f"{name}{of}", " | ".join(values)) for name, values in texts.items()]
    if isinstance(first, Simulation):
        peak = max(first.peak_bytes)
        over = " (over the limit)" if exceeds(peak, limit) else ""
        figures.append(("peak held", amount(peak) + over))
        figures.append(("makespan lower bound", amount(first.bounds.makespan)))
        figures.append(("messages", str(first.messages)))
    if len(steps) > 1 and steps[1].makespan:
        ratio = steps[0].makespan / steps[1].makespan
        figures.append((" ÷ ".join(_NAMES), f"{ratio:.3f}"))
    return figures


def legend_html(traces: Sequence[Trace]) -> str:
    """The legend of the colours used in a drawing of these traces."""
    chips = ""
    for name, fills, edge, letter in [*legend(traces), LegendEntry("memory held", ("#e6c68b",))]:
        look = f"background:linear-gradient(90deg,{fills[0]} 50%,{fills[-1]} 50%)"
        look += f";color:{palette.ink(fills[0])}" + (f";border:1.5px solid {edge}" if edge else "")
        chips += f'<span><i style="{look}">{letter}</i>{escape(name)}</span>'
    return f'<div class="legend">{chips}</div>'
