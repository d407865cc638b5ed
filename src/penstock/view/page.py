"""A timeline as one HTML file that needs no network: zoom, hover, memory, critical path.

A measured step can be drawn above a simulated one on the same time axis, with a table of the
differences, action by action. The playground shares the HTML parts; they escape external text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule.action import Op
from penstock.schedule.messages import numbers_of
from penstock.schedule.rules import COMPUTE
from penstock.simulate.measured import Difference, compare_traces
from penstock.simulate.simulation import Simulation
from penstock.trace import Trace
from penstock.view.layout import Drawable, ops_drawn, trace_of
from penstock.view.palette import (
    FONT,
    FRAME,
    amount,
    colour_of,
    ink,
    letter_of,
    name_of,
    shade,
    time_text,
)

__all__ = [
    "CARD", "figures_html", "figures_of", "heading_html", "legend_html",
    "save_page", "tag",
]  # fmt: skip

CARD = "background:#fff;border:1px solid #dde3e9;border-radius:8px;padding:8px 14px"
_SQUARE = (
    "display:inline-block;width:16px;height:16px;border-radius:3px;box-sizing:border-box;"
    "font-size:10.5px;line-height:16px;text-align:center"
)
_LEGEND = (
    "display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;min-height:31px;"
    f"font:13px {FONT};color:#3a4652"
)


def save_page(
    shown: Drawable,
    path: str | PathLike[str],
    *,
    beside: Drawable | None = None,
    names: tuple[str, str] = ("measured", "simulated"),
    title: str | None = None,
) -> None:
    """Write a page; its folder is created if needed.

    Args:
        shown: the step to draw. A simulation's memory is in the unit of its costs, a trace's memory
            in activations.
        path: the file, usually ``*.html``.
        beside: a second step, drawn below on the same time axis, in the unit of the first.
        names: names of the two steps.
        title: title of the page; the schedule's name if None.

    Raises:
        PenstockError: Bokeh is not installed.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from penstock import build, simulate
        >>> step = simulate(build("zbv", ranks=2, microbatches=4))
        >>> with TemporaryDirectory() as folder:
        ...     save_page(step, f"{folder}/zbv.html")
        ...     "cdn.bokeh.org" in Path(folder, "zbv.html").read_text()
        False
    """
    try:
        from bokeh.document import Document
        from bokeh.embed import file_html
        from bokeh.resources import INLINE
    except ImportError as error:
        raise PenstockError(
            "pages need Bokeh, which is not installed: pip install 'penstock[view]'"
        ) from error
    steps = [shown] if beside is None else [shown, beside]
    title = trace_of(shown).name if title is None else title
    document = Document(title=title)
    document.add_root(_content(steps, names, title))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(file_html(document, resources=INLINE, title=title), encoding="utf-8")


def _content(steps: Sequence[Drawable], names: tuple[str, str], title: str) -> Any:
    from penstock.view import timeline as plots

    traces = [trace_of(step) for step in steps]
    unit, several = traces[0].unit, len(traces) > 1
    rows = compare_traces(*traces) if several else ()
    rows = tuple(row for row in rows if row.action.op in COMPUTE)
    texts = {str(each.action): _tooltip(each, names, unit) for each in rows}
    timelines: list[plots.Timeline] = []
    ends = []
    for step, trace, name in zip(steps, traces, names, strict=False):
        timeline = plots.Timeline(
            num_ranks=trace.num_ranks,
            name="beside" if timelines else "timeline",
            x_range=timelines[0].x_range if timelines else None,
        )
        drawing = timeline.show(step, unit=unit, differences=texts, title=name if several else "")
        ends.append(drawing.end)
        timelines.append(timeline)
    timelines[0].set_end(max(ends))
    actions = [span.action for span in traces[0].spans]
    sizes = numbers_of(
        rank=traces[0].num_ranks,
        stage=len({act.stage for act in actions}),
        microbatch=len({act.microbatch for act in actions} - {None}),
    )
    shown = heading_html(title, sizes), figures_html(figures_of(steps, names)), legend_html(traces)
    heading, figures, legend = (plots.bk.Div(text=text, **plots.STRETCHED) for text in shown)
    return plots.page_of(
        heading,
        figures,
        plots.toggle_row(timelines, legend),
        *(timeline.plot for timeline in timelines),
        *([plots.differences_table(rows, names, unit)] if several else []),
    )


def _tooltip(row: Difference, names: tuple[str, str], unit: str) -> str:
    def signed(value: float) -> str:
        return f"{'+' if value >= 0 else '−'}{time_text(abs(value), unit)}"

    later, longer = signed(row.later), signed(row.longer)
    return f"{names[0]} − {names[1]}: starts {later}, lasts {longer}"


# --- parts in HTML ------------------------------------------------------------------------------


def tag(name: str, style: str, *inner: str) -> str:
    """An element with a style; ``name`` may have further attributes."""
    return f'<{name} style="{style}">{"".join(inner)}</{name.split()[0]}>'


def heading_html(title: str, subtitle: str) -> str:
    """A heading with a subtitle."""
    return tag(
        "div",
        f"font-family:{FONT};color:#1c2733;line-height:1.35",
        tag("span", "font-size:22px;font-weight:650", escape(title)),
        tag("span", "font-size:14px;color:#66727f;margin-left:12px", escape(subtitle)),
    )


def figures_html(figures: Sequence[tuple[str, str]]) -> str:
    """A row of cards, each with a heading and a figure."""
    cards = [
        tag(
            "div",
            f"{CARD};min-width:104px;box-sizing:border-box",
            tag("div", "font-size:11.5px;color:#66727f", escape(name)),
            tag("div", "font-size:17px;font-weight:600", escape(value)),
        )
        for name, value in figures
    ]
    return tag(
        "div", f"display:flex;flex-wrap:wrap;gap:10px;font-family:{FONT};color:#1c2733", *cards
    )


def figures_of(
    steps: Sequence[Drawable], names: tuple[str, str] = ("", ""), *, limit: float | None = None
) -> list[tuple[str, str]]:
    """The figures of a step, for ``figures_html``.

    Args:
        steps: one step, or two to compare, in the unit of the first.
        names: names of the two steps.
        limit: memory limit of a rank; None for none.
    """
    traces, first = [trace_of(step) for step in steps], steps[0]
    unit = traces[0].unit
    of = f", {names[0]} | {names[1]}" if len(traces) > 1 else ""
    texts = {
        "makespan": [time_text(trace.makespan, unit) for trace in traces],
        "bubble": [f"{trace.bubble_ratio:.2%}" for trace in traces],
        "span": [time_text(trace.span, unit) for trace in traces],
        "span bubble": [f"{trace.span_bubble_ratio:.2%}" for trace in traces],
    }
    figures = [(f"{name}{of}", " | ".join(values)) for name, values in texts.items()]
    if isinstance(first, Simulation):
        peak = max(first.peak_bytes)
        over = " (over the limit)" if limit is not None and peak > limit else ""
        figures.append(("peak held", amount(peak) + over))
        if first.bounds is not None:
            figures.append(("makespan lower bound", amount(first.bounds.makespan)))
        figures.append(("messages", str(first.messages)))
    if len(traces) > 1 and traces[1].makespan:
        ratio = traces[0].makespan / traces[1].makespan
        figures.append((f"{names[0]} ÷ {names[1]}", f"{ratio:.3f}"))
    return figures


def legend_html(traces: Sequence[Trace]) -> str:
    """The legend of the colours used in a drawing of these traces."""
    chips = [
        (
            name_of(op),
            f"background:{colour_of(op)};color:{ink(colour_of(op))}",
            letter_of(op) if op in COMPUTE else "",
        )
        for op in ops_drawn(traces)
    ]
    chips.append(("idle", "background:#fff;border:1px solid #b9c3cd", ""))
    for trace in traces:
        stages = {(span.rank, span.action.stage) for span in trace.spans}
        if len(stages) > len({rank for rank, _ in stages}):
            first, last = (shade(colour_of(Op.FORWARD), step, 2) for step in (0, 1))
            look = f"background:linear-gradient(90deg,{first} 50%,{last} 50%)"
            chips.append(("a rank's first, last stage", look, ""))
            break
    if any(trace.overlapped_pairs for trace in traces):
        chips.append(("run as one block", f"background:#fff;border:2px solid {FRAME}", ""))
    chips.append(("memory held", "background:#e6c68b", ""))
    shown = [
        tag(
            "span",
            "display:inline-flex;align-items:center;gap:6px",
            tag("span", f"{_SQUARE};{look}", letter),
            escape(name),
        )
        for name, look, letter in chips
    ]
    return tag("div", _LEGEND, *shown)
