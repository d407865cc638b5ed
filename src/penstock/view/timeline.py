"""The timeline as a Bokeh plot: zoom, hover, a memory lane per rank, the critical path.

One plot serves the page and the playground: it is made empty, and ``show`` fills it, as often as
one likes. Bokeh is imported with this module, and this module only where it is needed. It knows
nothing of where the plot ends up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJS,
    FixedTicker,
    HoverTool,
    InlineStyleSheet,
    LinearAxis,
    Range1d,
)
from bokeh.models.annotations import Title
from bokeh.models.widgets.buttons import Toggle
from bokeh.plotting import figure

from penstock.view.boxes import Drawing, Step, amount, arrange, trace_of

__all__ = ["Timeline", "toggles"]

_LANES_HEIGHT = 900
_SMALLEST_LANE, _LARGEST_LANE = 13, 58
_AXES_HEIGHT = 62
_MEMORY, _PATH = "#d9a441", "#c2255c"

_BUTTON_CSS = """
.bk-btn { background: #fff; border-color: #cbd3db; color: #3a4652; border-radius: 6px; }
.bk-btn.bk-active { background: #e3ecfa; border-color: #4f86d9; color: #1f4f96; box-shadow: none; }
"""

_TOOLTIP = """
<div class="told" style="font:12px system-ui,sans-serif;color:#1c2733;max-width:340px">
  <div style="margin-bottom:3px"><b style="font-size:13px">@action</b>
    <span style="color:#66727f">@kind</span></div>
  <div>rank <b>@rank</b> &middot; stage <b>@stage</b> &middot; microbatch <b>@microbatch</b></div>
  <div>start <b>@left{0.[0000]}</b> &middot; end <b>@right{0.[0000]}</b>
    &middot; lasts <b>@lasts{0.[0000]}</b></div>
  <div>waited for <b>@waited</b></div>
  <div style="color:#c2255c">@beside</div>
</div>
"""

# Boxes get a number where they are wide enough to hold it. That depends on the zoom, so that it is
# decided in the browser.
_LABELS = """
const plot_width = plot.inner_width
const lane_height = plot.inner_height / Math.abs(y.end - y.start)
const per_px = (x.end - x.start) / plot_width
const d = boxes.data
const found = {x: [], y: [], text: [], ink: []}
const n = d.left.length
if (plot_width > 0 && lane_height * 0.5 >= 8) {
  const top = Math.min(y.start, y.end), foot = Math.max(y.start, y.end)
  const lows = box.bottom.field == "foot_alone" ? d.foot_alone : d.foot
  const pale = box.fill_alpha.field == "alpha"
  for (let i = 0; i < n && found.x.length < 3000; i++) {
    const label = d.label[i]
    if (label.length == 0 || d.right[i] < x.start || d.left[i] > x.end) continue
    if (lows[i] < top || d.top[i] > foot) continue
    if (d.right[i] - d.left[i] < (label.length * 6.4 + 3) * per_px) continue
    const left = Math.max(d.left[i], x.start), right = Math.min(d.right[i], x.end)
    found.x.push((left + right) / 2)
    found.y.push((d.top[i] + lows[i]) / 2)
    found.text.push(label)
    found.ink.push(pale && d.alpha[i] < 1 ? "#8793a0" : d.ink[i])
  }
}
labels.data = found
// White edges would wash out boxes of a few pixels.
const edge = n * per_px == 0 || d.lasts.reduce((a, b) => a + b, 0) / n > 6 * per_px ? 0.6 : 0
if (box.line_width.value != edge) {
  box.line_width = {value: edge}
  path.line_width = {value: edge > 0 ? 2 : 0}
}
"""

_SHOW_MEMORY = """
memory.visible = this.active
const foot = {field: this.active ? "foot" : "foot_alone"}
box.bottom = foot
path.bottom = foot
"""


class Timeline:
    """A plot with a lane per rank.

    Args:
        num_ranks: lanes to begin with.
        name: by which its parts are found in a document, as in "timeline boxes".
        x_range: the time axis, where it is shared with another plot.
    """

    def __init__(
        self,
        *,
        num_ranks: int,
        name: str = "timeline",
        x_range: Range1d | None = None,
    ) -> None:
        self.x_range = Range1d(start=0, end=1) if x_range is None else x_range
        self._title = Title(text_font_size="13px")
        self.plot = _plot(self._title, self.x_range)
        self.boxes = ColumnDataSource({"left": []})
        self.path_boxes = ColumnDataSource({"left": []})
        self.memory_outline = ColumnDataSource({"x": [], "y": []})
        self.labels = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []})
        self._peaks = LinearAxis(
            axis_label="peak held",
            axis_line_color=None,
            major_tick_line_color=None,
            major_label_text_color="#a5771c",
            axis_label_text_color="#a5771c",
            axis_label_text_font_style="normal",
        )
        self.plot.add_layout(self._peaks, "right")
        self._num_lanes = 0
        self._draw()
        self._set_lanes(num_ranks)
        self.plot.name = name
        for part in ("boxes", "labels", "memory", "path"):
            getattr(self, part).name = f"{name} {part}"

    def _draw(self) -> None:
        self.memory = self.plot.patch(
            "x", "y", source=self.memory_outline, fill_color=_MEMORY, fill_alpha=0.55,
            line_color=_MEMORY, line_width=0.6,
        )  # fmt: skip
        self.box = self.plot.quad(
            left="left", right="right", top="top", bottom="foot", source=self.boxes,
            fill_color="fill", line_color="white", line_width=0.6, hover_line_color="#1c2733",
        )  # fmt: skip
        self.path = self.plot.quad(
            left="left", right="right", top="top", bottom="foot", source=self.path_boxes,
            fill_color=None, line_color=_PATH, line_width=2, visible=False,
        )  # fmt: skip
        self.path_lines = self.plot.multi_line(
            "xs", "ys", source=self.path_boxes, line_color=_PATH, line_width=1.4, visible=False
        )
        self.plot.text(
            "x", "y", text="text", source=self.labels, text_color="ink", text_align="center",
            text_baseline="middle", text_font_size="10px", text_font=value("system-ui, sans-serif"),
        )  # fmt: skip
        self.plot.add_tools(
            HoverTool(renderers=[self.box], tooltips=_TOOLTIP, point_policy="follow_mouse")
        )
        self.label = CustomJS(
            args={
                "plot": self.plot,
                "x": self.plot.x_range,
                "y": self.plot.y_range,
                "boxes": self.boxes,
                "labels": self.labels,
                "box": self.box.glyph,
                "path": self.path.glyph,
            },
            code=_LABELS,
        )
        for axis in (self.plot.x_range, self.plot.y_range):
            axis.js_on_change("start", self.label)
            axis.js_on_change("end", self.label)
        self.plot.js_on_change("inner_width", self.label)
        self.plot.js_on_change("inner_height", self.label)
        self.boxes.js_on_change("data", self.label)
        self.box.glyph.js_on_change("bottom", self.label)
        self.box.glyph.js_on_change("fill_alpha", self.label)

    def show(
        self,
        step: Step,
        *,
        unit: str | None = None,
        differences: dict[str, str] | None = None,
        title: str = "",
    ) -> Drawing:
        """Draw a step in place of what was drawn before.

        Args:
            step: measured or simulated.
            unit: as ``arrange`` takes it.
            differences: as ``arrange`` takes it.
            title: above the plot.

        Returns:
            What was drawn.
        """
        trace = trace_of(step)
        drawing = arrange(step, unit=unit, differences=differences)
        self._set_lanes(trace.num_ranks)
        self._set_peaks(drawing.peaks)
        self._title.text = title
        self.plot.xaxis.axis_label = (
            "time, ms" if (unit or trace.unit) == "s" else "time, in units of cost"
        )
        self.set_end(drawing.end)
        self.boxes.data = {name: _packed(column) for name, column in drawing.boxes.items()}
        self.path_boxes.data = drawing.path
        self.memory_outline.data = {n: _packed(column) for n, column in drawing.memory.items()}
        return drawing

    def set_end(self, end: float) -> None:
        """Let the time axis reach from 0 to ``end``, and zoom out as far."""
        end = end or 1.0
        _set_range(self.x_range, 0, end * 1.005, bounds=(-0.02 * end, end * 1.05))
        self.x_range.min_interval = end / 2000

    @property
    def show_memory(self) -> CustomJS:
        """What a toggle for the memory lanes does in the browser."""
        parts = {"memory": self.memory, "box": self.box.glyph, "path": self.path.glyph}
        return CustomJS(args=parts, code=_SHOW_MEMORY)

    @property
    def show_path(self) -> CustomJS:
        """What a toggle for the critical path does in the browser: all else pales."""
        return CustomJS(
            args={"boxes": self.path, "lines": self.path_lines, "box": self.box.glyph},
            code="boxes.visible = lines.visible = this.active\n"
            "box.fill_alpha = this.active ? {field: 'alpha'} : {value: 1}",
        )

    def _set_lanes(self, num_ranks: int) -> None:
        if num_ranks == self._num_lanes:
            return
        self._num_lanes = num_ranks
        plot = self.plot
        lane = min(_LARGEST_LANE, max(_SMALLEST_LANE, _LANES_HEIGHT // num_ranks))
        plot.height = lane * num_ranks + _AXES_HEIGHT
        # Downwards: rank 0 on top.
        _set_range(plot.y_range, num_ranks, 0, bounds=(0, num_ranks))
        ticks = [rank + 0.5 for rank in range(num_ranks)]
        plot.yaxis[0].update(ticker=FixedTicker(ticks=ticks))
        plot.yaxis[0].major_label_overrides = {
            rank + 0.5: f"rank {rank}" for rank in range(num_ranks)
        }
        size = "11px" if lane >= 16 else "9px"
        plot.yaxis[0].major_label_text_font_size = size
        self._peaks.major_label_text_font_size = size
        self._peaks.update(ticker=FixedTicker(ticks=ticks))
        plot.ygrid[0].update(ticker=FixedTicker(ticks=list(range(num_ranks + 1))))

    def _set_peaks(self, peaks: Sequence[float]) -> None:
        self._peaks.major_label_overrides = {
            rank + 0.5: amount(peak) for rank, peak in enumerate(peaks)
        }


def _set_range(axis: Any, start: float, end: float, *, bounds: tuple[float, float]) -> None:
    """Move an axis; the old bounds are taken away first, or they would hold it back."""
    axis.bounds = None
    axis.update(start=start, end=end, reset_start=start, reset_end=end)
    axis.bounds = bounds


def _packed(column: list[Any]) -> Any:
    """Numbers as an array: it travels in binary, where a list is written out one by one."""
    if column and isinstance(column[0], float):
        return np.array(column)
    return column


def _plot(title: Title, x_range: Range1d) -> figure:
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


def toggles(timelines: Sequence[Timeline]) -> tuple[Toggle, Toggle]:
    """Buttons for the critical path and for the memory lanes of all these plots."""
    look = InlineStyleSheet(css=_BUTTON_CSS)
    path = Toggle(label="critical path", name="toggle path", width=112, stylesheets=[look])
    memory = Toggle(label="memory", active=True, name="toggle memory", width=84, stylesheets=[look])
    for timeline in timelines:
        path.js_on_change("active", timeline.show_path)
        memory.js_on_change("active", timeline.show_memory)
    return path, memory
