"""A trace as a picture (PNG, SVG, PDF): one lane per rank, time to the right, colours per op.

Matplotlib is imported when a picture is drawn. No global state of it is touched, and the same
trace gives the same file, byte for byte. This module knows nothing of how times came about.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.trace import Span, Trace
from penstock.view.palette import COLOURS, ink, name_of, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

# Inches.
_MARGIN = 0.9
_LANE_HEIGHT = 0.34
_TITLE_HEIGHT = 0.62
_FOOT_HEIGHT = 0.45
_DIGIT_WIDTH = 0.075
_FONT = 7.5


def draw(
    traces: Trace | Sequence[Trace],
    path: str | PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    width: float = 11.0,
    dpi: int = 150,
) -> None:
    """Draw timelines, one above the other over one time axis, and save them.

    Args:
        traces: one or several, all in the same unit.
        path: the file; its ending says which format. Its folder is made if there is none.
        titles: one per trace; the schedule's name and its bubble ratio if None.
        width: in inches.
        dpi: pixels per inch, for PNG.

    Raises:
        PenstockError: Matplotlib is not installed.
        ValueError: no trace, traces in several units, or not one title per trace.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> trace = Trace(name="none yet", num_ranks=2, unit="s", spans=())
        >>> with TemporaryDirectory() as folder:
        ...     draw(trace, f"{folder}/timeline.svg")
        ...     "rank 1" in Path(folder, "timeline.svg").read_text()
        True
    """
    shown = (traces,) if isinstance(traces, Trace) else tuple(traces)
    if not shown or len({trace.unit for trace in shown}) > 1:
        units = sorted({trace.unit for trace in shown})
        raise ValueError(f"draw takes one or more traces in one unit, and was given {units}")
    named = [_title(trace) for trace in shown] if titles is None else list(titles)
    if len(named) != len(shown):
        raise ValueError(f"{len(named)} titles for {len(shown)} traces")
    figure, panels = _panels(shown, width)
    for axes, trace, title in zip(panels, shown, named, strict=True):
        _draw_lanes(axes, trace, width)
        axes.set_title(title, loc="left", fontsize=9.5)
    unit = "s" if shown[0].unit == "s" else "units of cost"
    panels[-1].set_xlabel(f"time, {unit}", fontsize=8.5)
    _draw_legend(figure, shown)
    _save(figure, Path(path), dpi)


def _title(trace: Trace) -> str:
    return (
        f"{trace.name}, {trace.num_ranks} ranks: makespan {trace.makespan:.4g}, "
        f"bubble {trace.bubble_ratio:.1%}"
    )


def _panels(traces: Sequence[Trace], width: float) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PenstockError(
            "pictures need Matplotlib, which is not installed: pip install 'penstock[view]'"
        ) from error
    heights = [trace.num_ranks * _LANE_HEIGHT + _TITLE_HEIGHT for trace in traces]
    total = sum(heights) + _FOOT_HEIGHT
    figure = Figure(figsize=(width, total))
    end = max(trace.makespan for trace in traces) or 1.0
    panels = []
    top = total
    for trace, height in zip(traces, heights, strict=True):
        top -= height
        frame = (
            _MARGIN / width,
            (top + 0.25) / total,
            1 - (_MARGIN + 0.2) / width,
            trace.num_ranks * _LANE_HEIGHT / total,
        )
        axes: Axes = figure.add_axes(frame)
        axes.set_xlim(0, end)
        axes.set_ylim(trace.num_ranks, 0)
        panels.append(axes)
    return figure, panels


def _draw_lanes(axes: Axes, trace: Trace, width: float) -> None:
    colours = shades(trace)
    spans = [span for rank in range(trace.num_ranks) for span in trace.compute(rank)]
    origin = min((span.start for span in spans), default=0.0)
    inches = (width - _MARGIN - 0.2) / axes.get_xlim()[1]
    boxes: dict[str, list[Span]] = {}
    for span in spans:
        boxes.setdefault(colours[span.rank, span.action.op, span.action.stage], []).append(span)
    for colour in sorted(boxes):
        _draw_boxes(axes, boxes[colour], origin, colour)
    for span in spans:
        label = str(span.action.microbatch)
        if (span.end - span.start) * inches >= len(label) * _DIGIT_WIDTH + 0.04:
            axes.text(
                (span.start + span.end) / 2 - origin,
                span.rank + 0.5,
                label,
                ha="center",
                va="center_baseline",
                fontsize=_FONT,
                color=ink(colours[span.rank, span.action.op, span.action.stage]),
            )
    axes.set_yticks([rank + 0.5 for rank in range(trace.num_ranks)])
    axes.set_yticklabels([f"rank {rank}" for rank in range(trace.num_ranks)])
    axes.tick_params(labelsize=8, length=0, axis="y")
    axes.tick_params(labelsize=8, axis="x")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_boxes(axes: Axes, spans: Sequence[Span], origin: float, colour: str) -> None:
    """One collection per colour: thousands of boxes stay quick to draw."""
    from matplotlib.collections import PolyCollection

    corners = []
    for span in spans:
        left, right = span.start - origin, span.end - origin
        low, high = span.rank + 0.06, span.rank + 0.94
        corners.append([(left, low), (right, low), (right, high), (left, high)])
    axes.add_collection(
        PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=0.5),
        autolim=False,
    )


def _draw_legend(figure: Figure, traces: Sequence[Trace]) -> None:
    from matplotlib.patches import Patch

    used = {span.action.op for trace in traces for span in trace.spans}
    patches: list[Any] = [
        Patch(facecolor=colour, label=name_of(op)) for op, colour in COLOURS.items() if op in used
    ]
    patches.append(Patch(facecolor="white", edgecolor="#bbbbbb", label="idle"))
    figure.legend(handles=patches, loc="lower right", ncols=len(patches), fontsize=8, frameon=False)


def _save(figure: Figure, path: Path, dpi: int) -> None:
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and with names drawn from a fixed salt, equal pictures are equal files.
    metadata = {"Date": None} if path.suffix == ".svg" else None
    with matplotlib.rc_context({"svg.hashsalt": "penstock", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=dpi, metadata=metadata)
