"""A timeline as one HTML file that needs no network: zoom, hover, memory, critical path.

A measured step is laid over a simulated one on the same time axis, with a table of what each
action did in the one and in the other. This module knows how a page is put together; what the
plot does is the affair of ``penstock.view.timeline``.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.schedule.messages import numbers_of
from penstock.trace import Trace
from penstock.view.boxes import Drawable, trace_of
from penstock.view.style import (
    PAGE_CSS,
    figures_html,
    figures_of,
    heading_html,
    legend_html,
)

if TYPE_CHECKING:
    from bokeh.models.ui import UIElement

__all__ = ["save_page"]


def save_page(
    shown: Drawable,
    path: str | PathLike[str],
    *,
    beside: Drawable | None = None,
    names: tuple[str, str] = ("measured", "simulated"),
    title: str | None = None,
) -> None:
    """Write a page; its folder is made if there is none.

    Args:
        shown: the step to draw. Of a simulation, memory is drawn as its costs count it; of a
            trace, as activations held.
        path: the file, best ``*.html``.
        beside: a second step, drawn below on the same time axis, in the unit of the first.
        names: what to call the two.
        title: the page's; the schedule's name if None.

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
    traces = [trace_of(step) for step in steps]
    named = traces[0].name if title is None else title
    document = Document(title=named)
    document.add_root(_content(steps, names, named))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(file_html(document, resources=INLINE, title=named), encoding="utf-8")


def _content(steps: Sequence[Drawable], names: tuple[str, str], title: str) -> UIElement:
    from bokeh.layouts import column, row
    from bokeh.models import GlobalInlineStyleSheet
    from bokeh.models.widgets.markups import Div

    from penstock.view.differences import Differences
    from penstock.view.timeline import Timeline, toggles

    traces = [trace_of(step) for step in steps]
    several = len(traces) > 1
    unit = traces[0].unit
    differences = Differences(one=traces[0], other=traces[1], names=names) if several else None
    timelines: list[Timeline] = []
    ends = []
    for step, trace, name in zip(steps, traces, names, strict=False):
        shared = timelines[0].x_range if timelines else None
        timeline = Timeline(
            num_ranks=trace.num_ranks,
            name="beside" if timelines else "timeline",
            x_range=shared,
        )
        drawn = timeline.show(
            step,
            unit=unit,
            differences=None if differences is None else differences.texts,
            title=name if several else "",
        )
        timelines.append(timeline)
        ends.append(drawn.end)
    timelines[0].set_end(max(ends))
    stretched: dict[str, Any] = {"sizing_mode": "stretch_width"}
    parts: list[UIElement] = [
        Div(text=heading_html(title, _subtitle(traces[0])), **stretched),
        Div(text=figures_html(figures_of(steps, names)), **stretched),
        row(*toggles(timelines), Div(text=legend_html(traces), **stretched), **stretched),
        *(timeline.plot for timeline in timelines),
    ]
    if differences is not None:
        parts.append(differences.table())
    look = GlobalInlineStyleSheet(css=PAGE_CSS)
    return column(*parts, spacing=12, stylesheets=[look], **stretched)


def _subtitle(trace: Trace) -> str:
    stages = len({span.action.stage for span in trace.spans})
    microbatches = len({span.action.microbatch for span in trace.spans} - {None})
    return numbers_of(rank=trace.num_ranks, stage=stages, microbatch=microbatches)
