"""A trace as a picture (PNG, SVG, PDF): one lane per rank, time to the right, colours per op.

Matplotlib is imported when a picture is drawn, and its global state is not touched. Equal traces
give equal files, byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.errors import PenstockError
from penstock.schedule.wording import number_of
from penstock.trace import Trace
from penstock.view.layout import Columns, Drawable, Drawing, arrange, legend, trace_of
from penstock.view.palette import FRAME, time_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "title_of"]

# Inches.
_MARGIN = 0.9
_LANE_HEIGHT = 0.34
_TITLE_HEIGHT = 0.62
_FOOT_HEIGHT = 0.45
_DIGIT_WIDTH = 0.075
_FONT = 7.5
# White edges would wash out boxes of a few pixels.
_NARROW = 0.05
_EDGE = 0.5  # in points

_Corners: TypeAlias = tuple[tuple[float, float], ...]


def draw(
    traces: Drawable | Sequence[Drawable],
    path: str | PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    width: float = 11.0,
    dpi: int = 150,
) -> None:
    """Draw timelines, one above the other over one time axis, and save them.

    Args:
        traces: one or several traces or simulations, all in the same unit.
        path: the file; its suffix sets the format. Its folder is created if needed.
        titles: one per trace; None for ``title_of`` each.
        width: in inches.
        dpi: pixels per inch, for PNG.

    Raises:
        PenstockError: Matplotlib is not installed.
        ValueError: no trace, traces in several units, or not one title per trace.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> trace = Trace(name="none yet", num_ranks=2, unit="s", spans=())
        >>> with TemporaryDirectory() as folder:
        ...     draw(trace, f"{folder}/timeline.svg")
        ...     "rank 1" in Path(folder, "timeline.svg").read_text()
        True
    """
    shown = tuple(map(trace_of, [traces] if isinstance(traces, Drawable) else traces))
    if not shown or len({trace.unit for trace in shown}) > 1:
        units = sorted({trace.unit for trace in shown})
        raise ValueError(f"draw takes one or more traces in one unit, and was given {units}")
    titles = [title_of(trace) for trace in shown] if titles is None else titles
    if len(titles) != len(shown):
        raise ValueError(f"{len(titles)} titles for {len(shown)} traces")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PenstockError(
            "pictures need Matplotlib, which is not installed: pip install 'penstock[view]'"
        ) from error
    drawings = [arrange(trace, memory=False) for trace in shown]
    end = max(drawing.end for drawing in drawings) or 1.0
    top = height = _FOOT_HEIGHT + sum(t.num_ranks * _LANE_HEIGHT + _TITLE_HEIGHT for t in shown)
    figure = Figure(figsize=(width, height))
    for trace, drawing, title in zip(shown, drawings, titles, strict=True):
        top -= trace.num_ranks * _LANE_HEIGHT + _TITLE_HEIGHT
        axes = _add_panel(figure, trace.num_ranks, top)
        axes.set_xlim(0, end)
        _draw_lanes(axes, drawing, (width - _MARGIN - 0.2) / end)
        axes.set_title(title, loc="left", fontsize=9.5)
    axes.set_xlabel(drawings[0].axis_label, fontsize=8.5)
    _draw_legend(figure, shown)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # No date, and ids from a fixed salt, so that equal pictures give equal files.
    date = {".svg": "Date", ".svgz": "Date", ".pdf": "CreationDate"}.get(target.suffix.lower())
    metadata = None if date is None else {date: None}
    with matplotlib.rc_context({"svg.hashsalt": "penstock", "svg.fonttype": "none"}):
        figure.savefig(target, dpi=dpi, metadata=metadata)


def title_of(trace: Trace) -> str:
    """The title of a timeline: schedule name, makespan and bubble ratio."""
    return (
        f"{trace.name}, {number_of(trace.num_ranks, 'rank')}: makespan "
        f"{time_text(trace.makespan, trace.unit)}, bubble {trace.bubble_ratio:.1%}"
    )


def _add_panel(figure: Figure, num_ranks: int, bottom: float) -> Axes:
    """Add axes with a lane per rank, ``bottom`` inches above the figure's foot."""
    width, height = figure.get_size_inches()
    left, right = _MARGIN / width, 1 - 0.2 / width
    axes: Axes = figure.add_axes(
        (left, (bottom + 0.25) / height, right - left, num_ranks * _LANE_HEIGHT / height)
    )
    axes.set_ylim(num_ranks, 0)
    names = [f"rank {rank}" for rank in range(num_ranks)]
    axes.set_yticks([rank + 0.5 for rank in range(num_ranks)], names)
    axes.tick_params(labelsize=8, length=0, axis="y")
    axes.tick_params(labelsize=8, axis="x")
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _draw_lanes(axes: Axes, drawing: Drawing, inches: float) -> None:
    """Draw the boxes of a step; ``inches`` is the width of one unit of time."""
    from matplotlib.collections import PolyCollection

    boxes = drawing.boxes
    usual = inches * sum(boxes["lasts"]) / max(1, len(boxes["lasts"]))
    edge = _EDGE if usual > _NARROW else 0.0
    looks: dict[tuple[str, float], list[_Corners]] = {}
    for colour, label, each in zip(boxes["fill"], boxes["label"], _corners(boxes), strict=True):
        # A box without a label is a strip, too thin for an edge.
        looks.setdefault((colour, edge if label else 0.0), []).append(each)
    collections = [
        PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=width)
        for (colour, width), corners in sorted(looks.items())
    ]
    frame: Any = {"facecolors": "none", "edgecolors": FRAME, "linewidths": 2 * edge}
    collections.append(PolyCollection(_corners(drawing.overlapped_pairs), **frame))
    for collection in collections:
        axes.add_collection(collection, autolim=False)
    _draw_labels(axes, boxes, inches)


def _corners(columns: Columns) -> list[_Corners]:
    sides = zip(*(columns[name] for name in ("left", "right", "top", "foot")), strict=True)
    return [((le, to), (ri, to), (ri, fo), (le, fo)) for le, ri, to, fo in sides]


def _draw_labels(axes: Axes, boxes: Columns, inches: float) -> None:
    """Label boxes with their microbatch if it fits, and with their op if most boxes have room."""
    names = ("left", "right", "top", "foot", "label", "ink")
    rows = [row for row in zip(*(boxes[name] for name in names), strict=True) if row[4]]

    def fits(left: float, right: float, text: str) -> bool:
        return (right - left) * inches >= len(text) * _DIGIT_WIDTH + 0.04

    fitting = [fits(left, right, label) for left, right, _, _, label, _ in rows]
    with_letters = sum(fitting) > 0.9 * len(rows)
    for (left, right, top, foot, label, ink), is_fit in zip(rows, fitting, strict=True):
        shown = label if with_letters and is_fit else label[1:]
        if fits(left, right, shown):
            x, y = (left + right) / 2, (top + foot) / 2
            axes.text(x, y, shown, ha="center", va="center_baseline", fontsize=_FONT, color=ink)


def _draw_legend(figure: Figure, traces: Sequence[Trace]) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    entries: dict[str, Any] = {
        each.name: tuple(Patch(facecolor=fill, edgecolor=each.edge) for fill in each.fills)
        for each in legend(traces)
    }
    figure.legend(
        list(entries.values()), list(entries), loc="lower right", ncols=len(entries), fontsize=8,
        frameon=False, handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
    )  # fmt: skip
