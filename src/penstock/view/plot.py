"""An empty Bokeh plot for lanes: its tools, its axes, and how these are moved.

This module knows neither traces nor what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bokeh.models import FixedTicker, LinearAxis, Range1d
from bokeh.models.annotations import Title
from bokeh.plotting import figure

from penstock.view.boxes import amount

__all__ = ["empty_plot", "peaks_axis", "set_lanes", "set_peaks", "set_range"]

_LANES_HEIGHT = 900
_SMALLEST_LANE, _LARGEST_LANE = 13, 58
_AXES_HEIGHT = 62


def empty_plot(title: Title, x_range: Range1d) -> figure:
    """A plot whose wheel zooms into time, and whose drag moves along it."""
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


def peaks_axis(plot: figure) -> LinearAxis:
    """An axis on the plot's right that tells each rank's peak."""
    axis = LinearAxis(
        axis_label="peak held",
        axis_line_color=None,
        major_tick_line_color=None,
        minor_tick_line_color=None,
        major_label_text_color="#8a5f10",
        axis_label_text_color="#8a5f10",
        axis_label_text_font_style="normal",
    )
    plot.add_layout(axis, "right")
    return axis


def set_lanes(plot: figure, peaks: LinearAxis, num_ranks: int) -> None:
    """Give the plot so many lanes, and the height for them."""
    lane = min(_LARGEST_LANE, max(_SMALLEST_LANE, _LANES_HEIGHT // num_ranks))
    plot.height = lane * num_ranks + _AXES_HEIGHT
    # Downwards: rank 0 on top.
    set_range(plot.y_range, num_ranks, 0, bounds=(0, num_ranks))
    ticks = [rank + 0.5 for rank in range(num_ranks)]
    size = "11px" if lane >= 16 else "9px"
    for axis in (plot.yaxis[0], peaks):
        axis.update(ticker=FixedTicker(ticks=ticks), major_label_text_font_size=size)
    plot.yaxis[0].major_label_overrides = {rank + 0.5: f"rank {rank}" for rank in range(num_ranks)}
    plot.ygrid[0].update(ticker=FixedTicker(ticks=list(range(num_ranks + 1))))


def set_peaks(axis: LinearAxis, peaks: Sequence[float]) -> None:
    """Tell each rank's peak."""
    axis.major_label_overrides = {rank + 0.5: amount(peak) for rank, peak in enumerate(peaks)}


def set_range(axis: Any, start: float, end: float, *, bounds: tuple[float, float]) -> None:
    """Move an axis; the old bounds are taken away first, or they would hold it back."""
    axis.bounds = None
    axis.update(start=start, end=end, reset_start=start, reset_end=end)
    axis.bounds = bounds
