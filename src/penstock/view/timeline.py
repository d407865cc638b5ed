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
    HoverTool,
    InlineStyleSheet,
    Range1d,
)
from bokeh.models.annotations import Title
from bokeh.models.renderers import GlyphRenderer
from bokeh.models.widgets.buttons import Toggle

from penstock.view.boxes import Drawable, Drawing, arrange, trace_of
from penstock.view.palette import FRAME
from penstock.view.plot import empty_plot, peaks_axis, set_lanes, set_peaks, set_range
from penstock.view.scripts import LABELS, SHOW_MEMORY, SHOW_PATH, TOOLTIP
from penstock.view.style import axis_label

__all__ = ["Timeline", "toggles"]

_MEMORY, _PATH = "#d9a441", "#c2255c"

_BUTTON_CSS = """
.bk-btn { background: #fff; border-color: #cbd3db; color: #3a4652; border-radius: 6px; }
.bk-btn.bk-active { background: #e3ecfa; border-color: #4f86d9; color: #1f4f96; box-shadow: none; }
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
        self.plot = empty_plot(self._title, self.x_range)
        self.boxes = ColumnDataSource({"left": []})
        self.block_frames = ColumnDataSource({"left": []})
        self.path_boxes = ColumnDataSource({"left": []})
        self.memory_outline = ColumnDataSource({"x": [], "y": []})
        self.labels = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []})
        self._peaks = peaks_axis(self.plot)
        self._num_lanes = 0
        self._draw()
        self._follow()
        self._set_lanes(num_ranks)
        self.plot.name = name
        for part in ("boxes", "labels", "memory", "path", "frame"):
            getattr(self, part).name = f"{name} {part}"

    def _draw(self) -> None:
        """Lay the glyphs over each other."""
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

    def _follow(self) -> None:
        """Tell what the mouse points at, and set labels anew where there is more room or less."""
        self.plot.add_tools(
            HoverTool(renderers=[self.box], tooltips=TOOLTIP, point_policy="follow_mouse")
        )
        plot, box = self.plot, self.box.glyph
        parts = {
            "plot": plot,
            "x": plot.x_range,
            "y": plot.y_range,
            "boxes": self.boxes,
            "labels": self.labels,
            "box": box,
            "path": self.path.glyph,
            "frame": self.frame.glyph,
        }
        label = CustomJS(args=parts, code=LABELS)
        changes: list[tuple[Any, tuple[str, ...]]] = [
            (plot.x_range, ("start", "end")),
            (plot.y_range, ("start", "end")),
            (plot, ("inner_width", "inner_height")),
            (self.boxes, ("data",)),
            (box, ("bottom", "fill_alpha")),
        ]
        for model, names in changes:
            for name in names:
                model.js_on_change(name, label)

    def show(
        self,
        step: Drawable,
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
        set_peaks(self._peaks, drawing.peaks)
        self._title.text = title
        self.plot.xaxis.axis_label = axis_label(unit or trace.unit)
        self.set_end(drawing.end)
        self.block_frames.data = _packed(drawing.blocks)
        self.path_boxes.data = drawing.path
        self.memory_outline.data = _packed(drawing.memory)
        # Last: labels and edges are set as these arrive.
        self.boxes.data = _packed(drawing.boxes)
        return drawing

    def set_end(self, end: float) -> None:
        """Let the time axis reach from 0 to ``end``, and zoom out as far."""
        end = end or 1.0
        set_range(self.x_range, 0, end * 1.005, bounds=(-0.02 * end, end * 1.05))
        self.x_range.min_interval = end / 2000

    @property
    def show_memory(self) -> CustomJS:
        """What a toggle for the memory lanes does in the browser."""
        parts = {
            "memory": self.memory,
            "box": self.box.glyph,
            "path": self.path.glyph,
            "frame": self.frame.glyph,
        }
        return CustomJS(args=parts, code=SHOW_MEMORY)

    @property
    def show_path(self) -> CustomJS:
        """What a toggle for the critical path does in the browser."""
        parts = {
            "boxes": self.path,
            "lines": self.path_lines,
            "box": self.box.glyph,
            "frame": self.frame.glyph,
        }
        return CustomJS(args=parts, code=SHOW_PATH)

    def _set_lanes(self, num_ranks: int) -> None:
        if num_ranks != self._num_lanes:
            self._num_lanes = num_ranks
            set_lanes(self.plot, self._peaks, num_ranks)


def _packed(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Numbers as arrays: they travel in binary, where a list is written out one by one."""
    return {
        name: np.array(column) if column and isinstance(column[0], float) else column
        for name, column in columns.items()
    }


def toggles(timelines: Sequence[Timeline]) -> tuple[Toggle, Toggle]:
    """Buttons for the critical path and for the memory lanes of all these plots."""
    look = InlineStyleSheet(css=_BUTTON_CSS)
    path = Toggle(label="critical path", name="toggle path", width=112, stylesheets=[look])
    memory = Toggle(label="memory", active=True, name="toggle memory", width=84, stylesheets=[look])
    for timeline in timelines:
        path.js_on_change("active", timeline.show_path)
        memory.js_on_change("active", timeline.show_memory)
    return path, memory
