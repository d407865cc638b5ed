"""Several schedules in one setting, as a table of HTML with a bar per figure.

This module simulates and lays out; it knows no Bokeh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from penstock.simulate.simulation import Simulation
from penstock.view.boxes import amount
from penstock.view.style import FONT

__all__ = ["Row", "table_html"]

_COLUMNS = ("schedule", "stages per rank", "makespan", "bubble", "span bubble", "peak held")
_HEAD = "text-align:left;font-weight:500;color:#66727f;padding:4px 14px 6px 0;white-space:nowrap"
_CELL = "padding:3px 14px 3px 0;white-space:nowrap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule of a comparison.

    Args:
        name: the schedule's.
        outcome: what its step came to, or why there is none.
    """

    name: str
    outcome: Simulation | str


def table_html(rows: Sequence[Row], *, memory: float | None, chosen: str) -> str:
    """The comparison.

    Args:
        rows: the schedules, in any order; the one with the smallest bubble is shown first.
        memory: the most that a rank may hold; a peak above it is shown in red. None for any.
        chosen: the name of the schedule that is drawn; shown in bold.
    """
    results = [row.outcome for row in rows if isinstance(row.outcome, Simulation)]
    most = max((max(each.peak_bytes) for each in results), default=0.0)
    widest = max((each.bubble_ratio for each in results), default=0.0)

    def order(row: Row) -> float:
        return row.outcome.bubble_ratio if isinstance(row.outcome, Simulation) else 2.0

    head = "".join(f'<th style="{_HEAD}">{name}</th>' for name in _COLUMNS)
    body = "".join(_line(row, memory, chosen, widest, most) for row in sorted(rows, key=order))
    return (
        '<div style="background:#fff;border:1px solid #dde3e9;border-radius:8px;padding:8px 14px">'
        f'<table style="border-collapse:collapse;font:13px {FONT};color:#1c2733">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _line(row: Row, memory: float | None, chosen: str, widest: float, most: float) -> str:
    weight = 650 if row.name == chosen else 400
    name = f'<td style="{_CELL};font-weight:{weight}">{escape(row.name)}</td>'
    if isinstance(row.outcome, str):
        why = f'<td colspan="5" style="{_CELL};color:#8a97a3;white-space:normal">'
        return f"<tr>{name}{why}{escape(row.outcome)}</td></tr>"
    result = row.outcome
    peak = max(result.peak_bytes)
    over = memory is not None and peak > memory
    virtual = result.program.num_stages // result.program.num_ranks
    cells = [
        str(virtual),
        amount(result.makespan),
        _bar(f"{result.bubble_ratio:.1%}", result.bubble_ratio, widest, "#4f86d9"),
        f"{result.span_bubble_ratio:.1%}",
        _bar(amount(peak), peak, most, "#d64545" if over else "#d9a441"),
    ]
    shown = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    return f"<tr>{name}{shown}</tr>"


def _bar(text: str, value: float, most: float, colour: str) -> str:
    width = 110 * value / most if most > 0 else 0
    return (
        '<span style="display:inline-flex;align-items:center;gap:8px">'
        f'<span style="display:inline-block;width:52px;text-align:right">{text}</span>'
        f'<span style="display:inline-block;height:11px;border-radius:2px;width:{width:.1f}px;'
        f'background:{colour}"></span></span>'
    )
