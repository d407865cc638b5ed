"""The words and looks that the page and the playground share, as HTML and CSS.

This module knows no Bokeh; texts that come from outside are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.schedule.action import Op
from penstock.schedule.rules import TRANSFERS
from penstock.trace import Trace
from penstock.view.boxes import amount
from penstock.view.palette import colour_of, name_of

__all__ = [
    "FONT",
    "PAGE_CSS",
    "error_html",
    "figures_html",
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


def legend_html(traces: Sequence[Trace]) -> str:
    """The colours of what traces show."""
    used = {span.action.op for trace in traces for span in trace.spans}
    shown = [op for op in Op if op in used - TRANSFERS]
    chips = [(colour_of(op), "none", name_of(op)) for op in shown]
    chips.append(("#ffffff", "1px solid #b9c3cd", "idle"))
    chips.append(("#e6c68b", "none", "memory held"))
    parts = "".join(
        f'<span style="display:inline-flex;align-items:center;gap:6px">'
        f'<span style="width:14px;height:14px;border-radius:3px;background:{colour};'
        f'border:{border};box-sizing:border-box"></span>{escape(name)}</span>'
        for colour, border, name in chips
    )
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:16px;align-items:center;height:31px;'
        f'font:13px {FONT};color:#3a4652">{parts}</div>'
    )


def error_html(message: str) -> str:
    """What can't be shown, and why."""
    return (
        f'<div role="alert" style="font:14px {FONT};color:#8a1c2c;background:#fdeeee;'
        'border:1px solid #f1c4c4;border-radius:8px;padding:10px 14px;white-space:pre-wrap">'
        f"{escape(message)}</div>"
    )


def time_text(value: float, unit: str) -> str:
    """A time with its unit, where it has one.

    Example:
        >>> time_text(0.0123456, "s"), time_text(51.0, "1")
        ('12.35 ms', '51')
    """
    return f"{value * 1e3:.4g} ms" if unit == "s" else amount(value)
