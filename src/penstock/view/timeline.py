"""The timeline as a Bokeh plot: zoom, hover, a memory lane per rank, the critical path.

One plot serves the page and the playground: it starts empty, and ``show`` fills it repeatedly. This
module imports Bokeh, so import it lazily.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.layouts import column, row
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    FixedTicker,
    GlobalInlineStyleSheet,
    HoverTool,
    InlineStyleSheet,
    LinearAxis,
    Range1d,
)
from bokeh.models.annotations import Title
from bokeh.models.renderers import GlyphRenderer
from bokeh.models.ui import UIElement
from bokeh.models.widgets.buttons import Toggle
from bokeh.models.widgets.markups import Div
from bokeh.models.widgets.tables import (
    DataTable,
    HTMLTemplateFormatter,
    NumberFormatter,
    StringFormatter,
    TableColumn,
)
from bokeh.plotting import figure

from penstock.simulate.measured import Difference
from penstock.view.layout import Drawable, Drawing, arrange, trace_of
from penstock.view.palette import FONT, FRAME, amount, axis_label, name_of

__all__ = ["STRETCHED", "Timeline", "differences_table", "page_of", "toggle_row"]

STRETCHED: dict[str, Any] = {"sizing_mode": "stretch_width"}

_PAGE_CSS = f"""
  html, body {{ margin: 0; background: #f6f8fa; font-family: {FONT}; color: #1c2733; }}
  body {{ padding: 18px 24px; box-sizing: border-box; }}
"""
_MEMORY, _PATH, _PEAK = "#d9a441", "#c2255c", "#8a5f10"
_LANES_HEIGHT, _AXES_HEIGHT = 900, 62
_SMALLEST_LANE, _LARGEST_LANE = 13, 58

_BUTTON_CSS = """
.bk-btn { background: #fff; border-color: #cbd3db; color: #3a4652; border-radius: 6px; }
.bk-btn.bk-active { background: #e3ecfa; border-color: #4f86d9; color: #1f4f96; box-shadow: none; }
"""

_SIGNED = """<span style="color:<%= value > 0 ? '#b3261e' : '#1b7a3d' %>;float:right">
<%= (value > 0 ? '+' : '') + value.toFixed(3) %></span>"""

_TOOLTIP = """
<div class="tooltip" style="font:12px system-ui,sans-serif;color:#1c2733;max-width:340px">
  <div style="margin-bottom:3px"><b style="font-size:13px">@action</b>
    <span style="color:#66727f">@kind</span></div>
  <div>rank <b>@rank</b> &middot; stage <b>@stage</b> &middot; microbatch <b>@microbatch</b></div>
  <div>start <b>@left{0.[0000]}</b> &middot; end <b>@right{0.[0000]}</b>
    &middot; lasts <b>@lasts{0.[0000]}</b></div>
  <div>waited for <b>@waited</b></div>
  <div>@block</div>
  <div style="color:#c2255c">@beside</div>
</div>
"""

# Label boxes with their microbatch if it fits, and with the letter of the op if most have room.
# This depends on the zoom, so the browser decides. White edges would wash out boxes of a few
# pixels, and frames would hide them.
_SET_LABELS = """
const lane_height = plot.inner_height / Math.abs(y.end - y.start)
const per_px = (x.end - x.start) / plot.inner_width
const d = boxes.data
const n = d.left.length
let total = 0, longest = 0
for (let i = 0; i < n; i++) {
  total += d.lasts[i]
  longest = Math.max(longest, d.label[i].length)
}
const width = (letters) => letters * 6.4 + 3
const usual_px = n > 0 ? total / n / per_px : 0
const with_letter = usual_px > width(longest)
const found = {x: [], y: [], text: [], ink: []}
if (plot.inner_width > 0 && lane_height * 0.4 >= 8) {
  const top = Math.min(y.start, y.end), foot = Math.max(y.start, y.end)
  const highs = d[box.top.field], lows = d[box.bottom.field]
  const pale = box.fill_alpha.field == "alpha"
  for (let i = 0; i < n && found.x.length < 3000; i++) {
    const label = d.label[i], number = label.slice(1)
    if (label.length == 0 || d.right[i] < x.start || d.left[i] > x.end) continue
    if (lows[i] < top || highs[i] > foot) continue
    const px = (d.right[i] - d.left[i]) / per_px
    if (px < width(number.length)) continue
    const lettered = with_letter && px >= width(label.length)
    const left = Math.max(d.left[i], x.start), right = Math.min(d.right[i], x.end)
    found.x.push((left + right) / 2)
    found.y.push((highs[i] + lows[i]) / 2)
    found.text.push(lettered ? label : number)
    found.ink.push(pale && d.alpha[i] < 1 ? "#8793a0" : d.ink[i])
  }
}
labels.data = found
const edge = n == 0 || usual_px > 6 ? 0.6 : 0
if (box.line_width.value != edge) {
  box.line_width = {value: edge}
  path.line_width = {value: edge > 0 ? 2 : 0}
  frame.line_width = {value: edge > 0 ? 1.6 : 0}
}
"""

_SHOW_MEMORY = """
memory.visible = this.active
for (const glyph of [box, path, frame]) {
  glyph.top = {field: this.active ? "top" : "top_alone"}
  glyph.bottom = {field: this.active ? "foot" : "foot_alone"}
}
"""

_SHOW_PATH = """
path_boxes.visible = path_lines.visible = this.active
box.fill_alpha = this.active ? {field: "alpha"} : {value: 1}
frame.line_alpha = {value: this.active ? 0.25 : 1}
"""


class Timeline:
    """A plot with a lane per rank.

    Args:
        num_ranks: the initial number of lanes.
        name: name of the plot, and prefix of the names of its parts, as in "timeline boxes".
        x_range: the time axis of another plot, to share it.
    """

    def __init__(
        self, *, num_ranks: int, name: str = "timeline", x_range: Range1d | None = None
    ) -> None:
        self.x_range = Range1d(start=0, end=1) if x_range is None else x_range
        self._title = Title(text_font_size="13px")
        self.plot = _empty_plot(self._title, self.x_range)
        self.boxes = ColumnDataSource({"left": []})
        self.block_frames = ColumnDataSource({"left": []})
        self.path_boxes = ColumnDataSource({"left": []})
        self.memory_outline = ColumnDataSource({"x": [], "y": []})
        self.labels = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []})
        self._peaks = _add_peaks_axis(self.plot)
        self._num_lanes = 0
        self._add_glyphs()
        self._add_callbacks()
        self._set_lanes(num_ranks)
        self.plot.name = name
        for part in ("boxes", "labels", "memory", "path", "frame"):
            getattr(self, part).name = f"{name} {part}"

    def _add_glyphs(self) -> None:
        self.memory = self.plot.patch(
            "x", "y", source=self.memory_outline, fill_color=_MEMORY, fill_alpha=0.55,
            line_color=_MEMORY, line_width=0.6,
        )  # fmt: skip
        self.box = self._quads(
            self.boxes, fill_color="fill", line_color="white", line_width=0.6,
            hover_line_color="#1c2733",
        )  # fmt: skip
        self.frame = self._quads(
            self.block_frames, fill_color=None, line_color=FRAME, line_width=1.6
        )
        self.path = self._quads(
            self.path_boxes, fill_color=None, line_color=_PATH, line_width=2, visible=False
        )
        self.path_lines = self.plot.multi_line(
            "xs", "ys", source=self.path_boxes, line_color=_PATH, line_width=1.4, visible=False
        )
        self.plot.text(
            "x", "y", text="text", source=self.labels, text_color="ink", text_align="center",
            text_baseline="middle", text_font_size="10px", text_font=value("system-ui, sans-serif"),
        )  # fmt: skip

    def _quads(self, source: ColumnDataSource, **look: Any) -> GlyphRenderer[Any]:
        return self.plot.quad(
            left="left", right="right", top="top", bottom="foot", source=source, **look
        )

    def _add_callbacks(self) -> None:
        """Add the tooltip, the updates of labels, and the effects of ``toggles``."""
        plot, box = self.plot, self.box.glyph
        plot.add_tools(
            HoverTool(renderers=[self.box], tooltips=_TOOLTIP, point_policy="follow_mouse")
        )
        glyphs = {"box": box, "path": self.path.glyph, "frame": self.frame.glyph}
        set_labels = CustomJS(
            args=glyphs | {
                "plot": plot, "x": plot.x_range, "y": plot.y_range, "boxes": self.boxes,
                "labels": self.labels,
            },
            code=_SET_LABELS,
        )  # fmt: skip
        changes: list[tuple[Any, tuple[str, ...]]] = [
            (plot.x_range, ("start", "end")),
            (plot.y_range, ("start", "end")),
            (plot, ("inner_width", "inner_height")),
            (self.boxes, ("data",)),
            (box, ("bottom", "fill_alpha")),
        ]
        for model, names in changes:
            for name in names:
                model.js_on_change(name, set_labels)
        self.show_memory = CustomJS(args=glyphs | {"memory": self.memory}, code=_SHOW_MEMORY)
        paths = {"path_boxes": self.path, "path_lines": self.path_lines}
        self.show_path = CustomJS(args=glyphs | paths, code=_SHOW_PATH)

    def show(
        self,
        step: Drawable,
        *,
        unit: str | None = None,
        differences: dict[str, str] | None = None,
        title: str = "",
    ) -> Drawing:
        """Replace the drawn step; return its layout. Arguments are those of ``arrange``."""
        trace = trace_of(step)
        drawing = arrange(step, unit=unit, differences=differences)
        self._set_lanes(trace.num_ranks)
        self._peaks.major_label_overrides = {
            rank + 0.5: amount(peak) for rank, peak in enumerate(drawing.peaks)
        }
        self._title.text = title
        self.plot.xaxis.axis_label = axis_label(unit or trace.unit)
        self.set_end(drawing.end)
        self.block_frames.data = _packed(drawing.blocks)
        self.path_boxes.data = drawing.path
        self.memory_outline.data = _packed(drawing.memory)
        # Set last, since this triggers the update of labels.
        self.boxes.data = _packed(drawing.boxes)
        return drawing

    def set_end(self, end: float) -> None:
        """Set the range of the time axis, from 0, and the limit of zooming out."""
        end = end or 1.0
        _set_range(self.x_range, 0, end * 1.005, bounds=(-0.02 * end, end * 1.05))
        self.x_range.min_interval = end / 2000

    def _set_lanes(self, num_ranks: int) -> None:
        """Set the number of lanes, and the height of the plot."""
        if num_ranks == self._num_lanes:
            return
        self._num_lanes, plot = num_ranks, self.plot
        lane = min(_LARGEST_LANE, max(_SMALLEST_LANE, _LANES_HEIGHT // num_ranks))
        plot.height = lane * num_ranks + _AXES_HEIGHT
        # Reversed, so that rank 0 is on top.
        _set_range(plot.y_range, num_ranks, 0, bounds=(0, num_ranks))
        names: dict[Any, Any] = {rank + 0.5: f"rank {rank}" for rank in range(num_ranks)}
        for axis in (plot.yaxis[0], self._peaks):
            axis.ticker = FixedTicker(ticks=list(names))
            axis.major_label_text_font_size = "11px" if lane >= 16 else "9px"
        plot.yaxis[0].major_label_overrides = names
        plot.ygrid[0].ticker = FixedTicker(ticks=list(range(num_ranks + 1)))


def _empty_plot(title: Title, x_range: Range1d) -> figure:
    """An empty plot; the wheel zooms the time axis, and dragging pans it."""
    plot = figure(
        title=title,
        sizing_mode="stretch_width",
        height=300,
        x_range=x_range,
        y_range=Range1d(start=1, end=0),
        tools="xpan,xwheel_zoom,box_zoom,ywheel_zoom,reset,save",
        active_drag="xpan",
        active_scroll="xwheel_zoom",
        toolbar_location="above",
    )
    plot.toolbar.logo = None
    plot.xgrid.visible = False
    plot.ygrid.grid_line_color = "#e8ecf0"
    plot.outline_line_color = None
    plot.min_border_right = 10
    plot.axis.axis_line_color = "#aab4be"
    plot.axis.axis_label_text_font_style = "normal"
    plot.axis.axis_label_text_font_size = "11px"
    plot.yaxis.major_tick_line_color = None
    plot.yaxis.minor_tick_line_color = None
    plot.yaxis.axis_line_color = None
    return plot


def _add_peaks_axis(plot: figure) -> LinearAxis:
    """Add an axis on the right for the peak memory of each rank."""
    axis = LinearAxis(
        axis_label="peak held",
        axis_line_color=None,
        major_tick_line_color=None,
        minor_tick_line_color=None,
        major_label_text_color=_PEAK,
        axis_label_text_color=_PEAK,
        axis_label_text_font_style="normal",
    )
    plot.add_layout(axis, "right")
    return axis


def _set_range(axis: Any, start: float, end: float, *, bounds: tuple[float, float]) -> None:
    """Set the range of an axis; clears its old bounds first, since they would clip the range."""
    axis.bounds = None
    axis.update(start=start, end=end, reset_start=start, reset_end=end)
    axis.bounds = bounds


def _packed(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Columns with numbers as arrays, which Bokeh sends in binary instead of as text."""
    return {
        name: np.array(column) if column and isinstance(column[0], float) else column
        for name, column in columns.items()
    }


def toggle_row(timelines: Sequence[Timeline], legend: Div) -> UIElement:
    """Buttons that show the critical path and the memory in these plots, beside the legend."""
    look = InlineStyleSheet(css=_BUTTON_CSS)
    path = Toggle(label="critical path", name="toggle path", width=112, stylesheets=[look])
    memory = Toggle(label="memory", active=True, name="toggle memory", width=84, stylesheets=[look])
    for timeline in timelines:
        path.js_on_change("active", timeline.show_path)
        memory.js_on_change("active", timeline.show_memory)
    return row(path, memory, legend, **STRETCHED)


def page_of(*parts: Any, arrange: Callable[..., Any] = column, spacing: int = 12) -> UIElement:
    """A page of these parts, in a column or a row."""
    look = GlobalInlineStyleSheet(css=_PAGE_CSS)
    page: UIElement = arrange(*parts, spacing=spacing, stylesheets=[look], **STRETCHED)
    return page


def differences_table(rows: Sequence[Difference], names: tuple[str, str], unit: str) -> DataTable:
    """A sortable table of the differences of actions between two steps."""
    scale, suffix = (1e3, ", ms") if unit == "s" else (1.0, "")
    text, count = StringFormatter(), NumberFormatter(text_align="right")
    number = NumberFormatter(format="0,0.000", text_align="right")
    signed = HTMLTemplateFormatter(template=_SIGNED)
    source: dict[str, list[Any]] = {
        "action": [str(row.action) for row in rows],
        "kind": [name_of(row.action.op) for row in rows],
        "rank": [row.rank for row in rows],
    }
    shown = [("action", "action", text), ("kind", "kind", text), ("rank", "rank", count)]
    times: tuple[tuple[str, str, Any, Callable[[Difference], float]], ...] = (
        ("start", f"start {names[0]}", number, lambda row: row.measured.start),
        ("start_other", f"start {names[1]}", number, lambda row: row.simulated.start),
        ("later", "later by", signed, lambda row: row.later),
        ("lasts", f"lasts {names[0]}", number, lambda row: row.measured.end - row.measured.start),
        (
            "lasts_other", f"lasts {names[1]}", number,
            lambda row: row.simulated.end - row.simulated.start,
        ),
        ("longer", "longer by", signed, lambda row: row.longer),
    )  # fmt: skip
    for field, title, formatter, value_of in times:
        source[field] = [value_of(row) * scale for row in rows]
        shown.append((field, title + suffix, formatter))
    return DataTable(
        source=ColumnDataSource(source),
        columns=[TableColumn(field=f, title=title, formatter=look) for f, title, look in shown],
        index_position=None, reorderable=False, height=340, sizing_mode="stretch_width",
        name="differences",
    )  # fmt: skip
