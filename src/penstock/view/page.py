"""A timeline as one HTML file that needs no network: zoom, hover, memory, critical path.

A measured step can be drawn above a simulated one on the same time axis, with a table of the
differences, action by action.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.schedule.messages import numbers_of
from penstock.schedule.rules import COMPUTE
from penstock.simulate.measured import Difference, compare_traces
from penstock.trace import Span, Trace
from penstock.view.html import PAGE_CSS, figures_html, figures_of, heading_html, legend_html
from penstock.view.layout import Drawable, trace_of
from penstock.view.palette import name_of, time_text

if TYPE_CHECKING:
    from bokeh.models.ui import UIElement
    from bokeh.models.widgets.tables import DataTable

__all__ = ["save_page"]

_SIGNED = """<span style="color:<%= value > 0 ? '#b3261e' : '#1b7a3d' %>;float:right">
<%= (value > 0 ? '+' : '') + value.toFixed(3) %></span>"""


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
    named = trace_of(shown).name if title is None else title
    document = Document(title=named)
    document.add_root(_content(steps, names, named))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(file_html(document, resources=INLINE, title=named), encoding="utf-8")


def _content(steps: Sequence[Drawable], names: tuple[str, str], title: str) -> UIElement:
    from bokeh.layouts import column, row
    from bokeh.models import GlobalInlineStyleSheet
    from bokeh.models.widgets.markups import Div

    from penstock.view.timeline import Timeline, toggles

    traces = [trace_of(step) for step in steps]
    unit = traces[0].unit
    rows = _differences(*traces) if len(traces) > 1 else []
    texts = {str(each.action): _tooltip(each, names, unit) for each in rows}
    timelines: list[Timeline] = []
    ends = []
    for step, trace, name in zip(steps, traces, names, strict=False):
        timeline = Timeline(
            num_ranks=trace.num_ranks,
            name="beside" if timelines else "timeline",
            x_range=timelines[0].x_range if timelines else None,
        )
        shown_name = name if len(traces) > 1 else ""
        ends.append(timeline.show(step, unit=unit, differences=texts, title=shown_name).end)
        timelines.append(timeline)
    timelines[0].set_end(max(ends))
    stretched: dict[str, Any] = {"sizing_mode": "stretch_width"}
    parts: list[UIElement] = [
        Div(text=heading_html(title, _subtitle(traces[0])), **stretched),
        Div(text=figures_html(figures_of(steps, names)), **stretched),
        row(*toggles(timelines), Div(text=legend_html(traces), **stretched), **stretched),
        *(timeline.plot for timeline in timelines),
    ]
    if len(traces) > 1:
        parts.append(_differences_table(rows, names, unit))
    look = GlobalInlineStyleSheet(css=PAGE_CSS)
    return column(*parts, spacing=12, stylesheets=[look], **stretched)


def _subtitle(trace: Trace) -> str:
    stages = len({span.action.stage for span in trace.spans})
    microbatches = len({span.action.microbatch for span in trace.spans} - {None})
    return numbers_of(rank=trace.num_ranks, stage=stages, microbatch=microbatches)


def _differences(one: Trace, other: Trace) -> list[Difference]:
    """The differences of all computations in both traces, from the first computation on."""
    return [row for row in compare_traces(one, other) if row.action.op in COMPUTE]


def _tooltip(row: Difference, names: tuple[str, str], unit: str) -> str:
    def signed(value: float) -> str:
        return f"{'+' if value >= 0 else '−'}{time_text(abs(value), unit)}"

    later, longer = signed(row.later), signed(row.longer)
    return f"{names[0]} − {names[1]}: starts {later}, lasts {longer}"


def _differences_table(rows: Sequence[Difference], names: tuple[str, str], unit: str) -> DataTable:
    """A sortable table of all computations."""
    from bokeh.models import ColumnDataSource
    from bokeh.models.widgets.tables import (
        DataTable,
        HTMLTemplateFormatter,
        NumberFormatter,
        StringFormatter,
        TableColumn,
    )

    scale, suffix = (1e3, ", ms") if unit == "s" else (1.0, "")
    first, second = names
    plain, number = StringFormatter(), NumberFormatter(format="0,0.000", text_align="right")
    whole, signed = NumberFormatter(text_align="right"), HTMLTemplateFormatter(template=_SIGNED)
    columns: list[tuple[str, str, Any, list[Any]]] = [
        ("action", "action", plain, [str(row.action) for row in rows]),
        ("kind", "kind", plain, [name_of(row.action.op) for row in rows]),
        ("rank", "rank", whole, [row.rank for row in rows]),
    ]
    times = [
        ("start", f"start {first}", number, [row.measured.start for row in rows]),
        ("start_other", f"start {second}", number, [row.simulated.start for row in rows]),
        ("later", "later by", signed, [row.later for row in rows]),
        ("lasts", f"lasts {first}", number, [_duration(row.measured) for row in rows]),
        ("lasts_other", f"lasts {second}", number, [_duration(row.simulated) for row in rows]),
        ("longer", "longer by", signed, [row.longer for row in rows]),
    ]
    columns += [
        (field, title + suffix, formatter, [time * scale for time in values])
        for field, title, formatter, values in times
    ]
    return DataTable(
        source=ColumnDataSource({field: values for field, _, _, values in columns}),
        columns=[
            TableColumn(field=field, title=title, formatter=formatter)
            for field, title, formatter, _ in columns
        ],
        index_position=None,
        reorderable=False,
        height=340,
        sizing_mode="stretch_width",
        name="differences",
    )


def _duration(span: Span) -> float:
    return span.end - span.start
