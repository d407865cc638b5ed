"""The words and looks that the page and the playground share, as HTML and CSS.

This module knows no Bokeh; texts that come from outside are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation
from penstock.trace import Trace
from penstock.view.boxes import Drawable, amount, bound_figures, trace_of
from penstock.view.lanes import drawn
from penstock.view.palette import FRAME, colour_of, ink, letter_of, name_of, shade

__all__ = [
    "FONT",
    "PAGE_CSS",
    "axis_label",
    "error_html",
    "figures_html",
    "figures_of",
    "heading_html",
    "legend_html",
    "time_text",
]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

PAGE_CSS = f"""
  html, body {{ margin: 0; background: #f6f8fa; font-family: {FONT}; color: #1c2733; }}
  body {{ padding: 18px 24px; box-sizing: border-box; }}
"""

_CARD = (
    "background:#fff;border:1px solid #dde3e9;border-radius:8px;padding:8px 14px;"
    "min-width:104px;box-sizing:border-box"
)


def heading_html(title: str, subtitle: str) -> str:
    """A page's first lines."""
    return (
        f'<div style="font-family:{FONT};color:#1c2733;line-height:1.35">'
        f'<span style="font-size:22px;font-weight:650">{escape(title)}</span>'
        f'<span style="font-size:14px;color:#66727f;margin-left:12px">{escape(subtitle)}</span>'
        "</div>"
    )


def figures_html(figures: Sequence[tuple[str, str]]) -> str:
    """Figures in a row of cards.

    Args:
        figures: for each card its heading and its figure.
    """
    cards = "".join(
        f'<div style="{_CARD}"><div style="font-size:11.5px;color:#66727f">{escape(name)}</div>'
        f'<div style="font-size:17px;font-weight:600">{escape(value)}</div></div>'
        for name, value in figures
    )
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:10px;font-family:{FONT};color:#1c2733">'
        f"{cards}</div>"
    )


def figures_of(
    steps: Sequence[Drawable], names: tuple[str, str] = ("", ""), *, limit: float | None = None
) -> list[tuple[str, str]]:
    """What a step came to, as ``figures_html`` takes it.

    Args:
        steps: one, or two to be told side by side, in the unit of the first.
        names: what to call the two.
        limit: the most that a rank may hold; None for any amount.
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
        figures += [
            ("peak held", amount(peak) + over),
            *bound_figures(first),
            ("messages", str(first.messages)),
        ]
    if len(traces) > 1 and traces[1].makespan:
        ratio = traces[0].makespan / traces[1].makespan
        figures.append((f"{names[0]} ÷ {names[1]}", f"{ratio:.3f}"))
    return figures


def legend_html(traces: Sequence[Trace]) -> str:
    """The colours of what traces show."""
    used = {span.action.op for trace in traces for span in drawn(trace)}
    chips = [
        _chip(
            name_of(op),
            f"background:{colour_of(op)};color:{ink(colour_of(op))}",
            letter_of(op) if op in COMPUTE else "",
        )
        for op in Op
        if op in used
    ]
    chips.append(_chip("idle", "background:#fff;border:1px solid #b9c3cd"))
    if any(_holds_several(trace) for trace in traces):
        colour = colour_of(Op.FORWARD)
        first, last = shade(colour, 0, 2), shade(colour, 1, 2)
        look = f"background:linear-gradient(90deg,{first} 50%,{last} 50%)"
        chips.append(_chip("a rank's first, last stage", look))
    if any(trace.blocks for trace in traces):
        chips.append(_chip("run as one block", f"background:#fff;border:2px solid {FRAME}"))
    chips.append(_chip("memory held", "background:#e6c68b"))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;min-height:31px;'
        f'font:13px {FONT};color:#3a4652">{"".join(chips)}</div>'
    )


def _chip(name: str, look: str, letter: str = "") -> str:
    square = (
        '<span style="display:inline-block;width:16px;height:16px;border-radius:3px;'
        f'box-sizing:border-box;font-size:10.5px;line-height:16px;text-align:center;{look}">'
        f"{letter}</span>"
    )
    return (
        f'<span style="display:inline-flex;align-items:center;gap:6px">{square}'
        f"{escape(name)}</span>"
    )


def _holds_several(trace: Trace) -> bool:
    """Whether a rank holds several stages."""
    held = {(span.rank, span.action.stage) for span in trace.spans}
    return len(held) > len({rank for rank, _ in held})


def error_html(message: str) -> str:
    """What can't be shown, and why."""
    return (
        f'<div role="alert" style="font:14px {FONT};color:#8a1c2c;background:#fdeeee;'
        'border:1px solid #f1c4c4;border-radius:8px;padding:10px 14px;white-space:pre-wrap">'
        f"{escape(message)}</div>"
    )


def axis_label(unit: str) -> str:
    """What a time axis counts, where seconds are drawn as milliseconds."""
    return "time, ms" if unit == "s" else "time, in units of cost"


def time_text(value: float, unit: str) -> str:
    """A time with its unit, where it has one.

    Example:
        >>> time_text(0.0123456, "s"), time_text(51.0, "1")
        ('12.35 ms', '51')
    """
    return f"{value * 1e3:.4g} ms" if unit == "s" else amount(value)
