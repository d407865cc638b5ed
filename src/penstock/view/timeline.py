"""The timeline as a Bokeh plot: zoom, hover, a memory lane per rank, the critical path.

One plot serves the page and the playground: it starts empty, and ``show`` fills it repeatedly.
Importing this module raises PenstockError if Bokeh is not installed.
"""

from __future__ import annotations

from typing import Any

from penstock.errors import PenstockError
from penstock.view.layout import Columns, Drawing
from penstock.view.palette import FRAME, amount

try:
    import bokeh.models
    import numpy as np
    from bokeh.plotting import figure
except ImportError as error:
    raise PenstockError(
        "pages and the playground need Bokeh, which is not installed: pip install 'penstock[view]'"
    ) from error

__all__ = ["STRETCHED", "Timeline", "bk"]

bk: Any = bokeh.models  # its type hints lack most names
STRETCHED: dict[str, Any] = {"sizing_mode": "stretch_width"}

_MEMORY, _PATH, _PEAK = "#d9a441", "#c2255c", "#8a5f10"
_AXES_HEIGHT = 62
_SMALLEST_LANE, _LARGEST_LANE = 8, 58
# The lowest lanes that have room for a label each.
_LABELLED_LANE = 11

_TOOLTIP = """
<div class="tooltip" style="font:12px system-ui,sans-serif;color:#1c2733;max-width:340px">
  <div style="margin-bottom:3px"><b style="font-size:13px">@action</b>
    <span style="color:#66727f">@kind</span></div>
  <div>rank <b>@rank</b> &middot; stage <b>@stage</b> &middot; microbatch <b>@microbatch</b></div>
  <div>start <b>@left{0.[0000]}</b> &middot; end <b>@right{0.[0000]}</b>
    &middot; lasts <b>@lasts{0.[0000]}</b></div>
  <div>waited for <b>@waited</b></div>
"""
# Shown for steps with overlapped pairs alone; others don't send this column.
_PAIR_LINE = "<div>@pair</div>"

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
  const highs = d.top, lows = d.foot
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
    found.ink.push(pale && d.alpha[i] < 1 ? 0x8793a0ff : d.ink[i])
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

_SHOW_PATH = """
path_boxes.visible = path_lines.visible = this.active
box.fill_alpha = this.active ? {field: "alpha"} : {value: 1}
frame.line_alpha = {value: this.active ? 0.25 : 1}
"""


class Timeline:
    """A plot with a lane per rank; the wheel with Ctrl zooms the time axis, and dragging pans it.

    Args:
        name: name of the plot, and prefix of the names of its parts, as in "timeline boxes".
        x_range: the time axis of another plot, to share it.
        height: of all lanes, in pixels, as far as lanes can be made low. By default 64 ranks fit
            into a window of 1280 × 800.
    """

    def __init__(self, *, name: str = "timeline", x_range: Any = None, height: int = 520) -> None:
        self.height = height
        self.x_range = bk.Range1d(start=0, end=1) if x_range is None else x_range
        self.plot: Any = figure(
            title=bk.Title(text_font_size="13px"), name=name, x_range=self.x_range,
            y_range=bk.Range1d(start=1, end=0), outline_line_color=None, min_border_right=10,
            tools="xpan,xwheel_zoom,box_zoom,ywheel_zoom,reset,save", active_drag="xpan",
            active_scroll="xwheel_zoom", toolbar_location="above", x_axis_location="above",
            **STRETCHED,
        )  # fmt: skip
        plot = self.plot
        # Without Ctrl the wheel scrolls the page, which may be longer than the window.
        for tool in plot.select(bk.WheelZoomTool):
            tool.update(modifiers="ctrl")
        plot.toolbar.logo = None
        plot.xgrid.visible = False
        plot.ygrid.grid_line_color = "#e8ecf0"
        no_ticks = {"major_tick_line_color": None, "minor_tick_line_color": None}
        self._peaks = bk.LinearAxis(
            axis_label="peak held", axis_label_text_color=_PEAK, major_label_text_color=_PEAK,
            axis_label_text_font_style="normal", axis_line_color=None, **no_ticks,
        )  # fmt: skip
        for axis in plot.axis:
            axis.axis_label_text_font_style, axis.axis_label_text_font_size = "normal", "11px"
            axis.axis_line_color = "#aab4be"
        plot.yaxis[0].update(axis_line_color=None, **no_ticks)
        plot.add_layout(self._peaks, "right")
        # A new model, as a ticker, would make Bokeh walk through all of the document.
        for ticking in (plot.ygrid[0], plot.yaxis[0], self._peaks):
            ticking.ticker = bk.FixedTicker(ticks=[])
        self._add_glyphs(name)
        self._add_callbacks()

    def _add_glyphs(self, name: str) -> None:
        plot, path = self.plot, {"line_color": _PATH, "visible": False}
        quad: dict[str, Any] = {"left": "left", "right": "right", "top": "top", "bottom": "foot"}
        self.boxes, self.pair_frames, self.path_boxes, self.memory_outline, self.labels = (
            bk.ColumnDataSource({name: [] for name in names})
            for names in (("left",), ("left",), ("left",), ("x", "y"), ("x", "y", "text", "ink"))
        )
        self.boxes.name, self.labels.name = f"{name} boxes", f"{name} labels"
        plot.patch(
            "x", "y", source=self.memory_outline, fill_color=_MEMORY, fill_alpha=0.55,
            line_color=_MEMORY, line_width=0.6,
        )  # fmt: skip
        self.box = plot.quad(
            source=self.boxes, fill_color="fill", line_color="white", line_width=0.6,
            hover_line_color="#1c2733", **quad,
        )  # fmt: skip
        self.frame = plot.quad(
            source=self.pair_frames, fill_color=None, line_color=FRAME, line_width=1.6,
            name=f"{name} frame", **quad,
        )  # fmt: skip
        self.path = plot.quad(
            source=self.path_boxes, fill_color=None, line_width=2, name=f"{name} path",
            **quad, **path,
        )  # fmt: skip
        self.path_lines = plot.multi_line(
            "xs", "ys", source=self.path_boxes, line_width=1.4, **path
        )
        plot.text(
            "x", "y", text="text", source=self.labels, text_color="ink", text_align="center",
            text_baseline="middle", text_font_size="10px",
            text_font={"value": "system-ui, sans-serif"},
        )  # fmt: skip

    def _add_callbacks(self) -> None:
        """Add the tooltip, the updates of labels, and the effects of the buttons."""
        plot, box = self.plot, self.box.glyph
        self._tip = bk.HoverTool(renderers=[self.box], point_policy="follow_mouse")
        plot.add_tools(self._tip)
        args = {
            "plot": plot, "x": plot.x_range, "y": plot.y_range, "boxes": self.boxes, "box": box,
            "labels": self.labels, "path": self.path.glyph, "frame": self.frame.glyph,
            "path_boxes": self.path, "path_lines": self.path_lines,
        }  # fmt: skip
        set_labels = bk.CustomJS(args=args, code=_SET_LABELS)
        self.show_path = bk.CustomJS(args=args, code=_SHOW_PATH)
        for model, names in (
            (plot.x_range, ("start", "end")),
            (plot.y_range, ("start", "end")),
            (plot, ("inner_width", "inner_height")),
            (self.boxes, ("data",)),
            (box, ("fill_alpha",)),
        ):
            for name in names:
                model.js_on_change(name, set_labels)

    def show(self, drawing: Drawing, *, title: str = "") -> None:
        """Replace the drawn step."""
        plot, num_ranks = self.plot, len(drawing.peaks)
        plot.title.text = title
        plot.xaxis.axis_label = f"{drawing.axis_label}; Ctrl and wheel zoom"
        lane = min(_LARGEST_LANE, max(_SMALLEST_LANE, self.height // num_ranks))
        plot.height = lane * num_ranks + _AXES_HEIGHT
        # Reversed, so that rank 0 is on top.
        _set_range(plot.y_range, num_ranks, 0, bounds=(0, num_ranks))
        plot.ygrid[0].ticker.ticks = list(range(num_ranks + 1))
        names = [f"rank {rank}" for rank in range(num_ranks)]
        for axis, labels in (plot.yaxis[0], names), (self._peaks, map(amount, drawing.peaks)):
            found = {rank + 0.5: label for rank, label in enumerate(labels)}
            axis.major_label_overrides = found
            axis.ticker.ticks = list(found)[:: 1 if lane >= _LABELLED_LANE else 2]
            axis.major_label_text_font_size = "11px" if lane >= 16 else "9px"
        self.set_end(drawing.end)
        self.pair_frames.data = _packed(drawing.overlapped_pairs)
        self.path_boxes.data = drawing.path
        self.memory_outline.data = _packed(drawing.memory)
        boxes, has_pairs = dict(drawing.boxes), any(drawing.boxes["pair"])
        if not has_pairs:
            del boxes["pair"]
        self._tip.tooltips = f"{_TOOLTIP}{_PAIR_LINE if has_pairs else ''}</div>"
        # Set last, since this triggers the update of labels.
        self.boxes.data = _packed(boxes)

    def set_end(self, end: float) -> None:
        """Set the range of the time axis, from 0, and the limit of zooming out."""
        end = end or 1.0
        _set_range(self.x_range, 0, end * 1.005, bounds=(-0.02 * end, end * 1.05))
        self.x_range.min_interval = end / 2000


def _set_range(axis: Any, start: float, end: float, *, bounds: tuple[float, float]) -> None:
    """Set the range of an axis; clears its old bounds first, since they would clip the range."""
    axis.bounds = None
    axis.update(start=start, end=end, reset_start=start, reset_end=end)
    axis.bounds = bounds


def _packed(columns: Columns) -> dict[str, Any]:
    """Columns with numbers and colours as arrays, which Bokeh sends in binary instead of as text,
    item by item."""
    packed = dict[str, Any](columns)
    for name, column in columns.items():
        if column and isinstance(column[0], (float, int)):
            packed[name] = np.array(column)
        elif name in ("fill", "ink"):
            number_of = {colour: int(colour[1:] + "ff", 16) for colour in set(column)}
            packed[name] = np.array([number_of[colour] for colour in column], dtype=np.uint32)
    return packed
