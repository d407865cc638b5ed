"""The HTML and CSS of the page and the playground; escapes all external text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from penstock.schedule.action import Op
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation
from penstock.trace import Trace
from penstock.view.layout import Drawable, drawn, trace_of
from penstock.view.palette import (
    FRAME,
    amount,
    colour_of,
    ink,
    letter_of,
    name_of,
    shade,
    time_text,
)

__all__ = [
    "PAGE_CSS",
    "comparison_html",
    "error_html",
    "figures_html",
    "figures_of",
    "heading_html",
    "legend_html",
]

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

PAGE_CSS = f"""
  html, body {{ margin: 0; background: #f6f8fa; font-family: {_FONT}; color: #1c2733; }}
  body {{ padding: 18px 24px; box-sizing: border-box; }}
"""

_CARD = "background:#fff;border:1px solid #dde3e9;border-radius:8px;padding:8px 14px"
_HEAD = "text-align:left;font-weight:500;color:#66727f;padding:4px 14px 6px 0;white-space:nowrap"
_CELL = "padding:3px 14px 3px 0;white-space:nowrap"
_COLUMNS = ("schedule", "stages per rank", "makespan", "bubble", "span bubble", "peak held")


def heading_html(title: str, subtitle: str) -> str:
    """A heading with a subtitle."""
    return (
        f'<div style="font-family:{_FONT};color:#1c2733;line-height:1.35">'
        f'<span style="font-size:22px;font-weight:650">{escape(title)}</span>'
        f'<span style="font-size:14px;color:#66727f;margin-left:12px">{escape(subtitle)}</span>'
        "</div>"
    )


def error_html(message: str) -> str:
    """An error message in place of a drawing."""
    return (
        f'<div role="alert" style="font:14px {_FONT};color:#8a1c2c;background:#fdeeee;'
        'border:1px solid #f1c4c4;border-radius:8px;padding:10px 14px;white-space:pre-wrap">'
        f"{escape(message)}</div>"
    )


def figures_html(figures: Sequence[tuple[str, str]]) -> str:
    """A row of cards, each with a heading and a figure."""
    cards = "".join(
        f'<div style="{_CARD};min-width:104px;box-sizing:border-box">'
        f'<div style="font-size:11.5px;color:#66727f">{escape(name)}</div>'
        f'<div style="font-size:17px;font-weight:600">{escape(value)}</div></div>'
        for name, value in figures
    )
    return (
        f'<div style="display:flex;flex-wrap:wrap;gap:10px;font-family:{_FONT};color:#1c2733">'
        f"{cards}</div>"
    )


def figures_of(
    steps: Sequence[Drawable], names: tuple[str, str] = ("", ""), *, limit: float | None = None
) -> list[tuple[str, str]]:
    """The figures of a step, for ``figures_html``.

    Args:
        steps: one step, or two to compare, in the unit of the first.
        names: names of the two steps.
        limit: memory limit of a rank; None for none.
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
        figures.append(("peak held", amount(peak) + over))
        if first.bounds is not None:
            figures.append(("makespan lower bound", amount(first.bounds.makespan)))
        figures.append(("messages", str(first.messages)))
    if len(traces) > 1 and traces[1].makespan:
        ratio = traces[0].makespan / traces[1].makespan
        figures.append((f"{names[0]} ÷ {names[1]}", f"{ratio:.3f}"))
    return figures


def legend_html(traces: Sequence[Trace]) -> str:
    """The legend of the colours used in a drawing of these traces."""
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
    if any(map(_has_several_stages, traces)):
        colour = colour_of(Op.FORWARD)
        first, last = shade(colour, 0, 2), shade(colour, 1, 2)
        look = f"background:linear-gradient(90deg,{first} 50%,{last} 50%)"
        chips.append(_chip("a rank's first, last stage", look))
    if any(trace.overlapped_pairs for trace in traces):
        chips.append(_chip("run as one block", f"background:#fff;border:2px solid {FRAME}"))
    chips.append(_chip("memory held", "background:#e6c68b"))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 16px;align-items:center;min-height:31px;'
        f'font:13px {_FONT};color:#3a4652">{"".join(chips)}</div>'
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


def _has_several_stages(trace: Trace) -> bool:
    """True if a rank holds several stages."""
    held = {(span.rank, span.action.stage) for span in trace.spans}
    return len(held) > len({rank for rank, _ in held})


def comparison_html(
    outcomes: Mapping[str, Simulation | str], *, memory: float | None, chosen: str
) -> str:
    """A table of schedules with a bar per figure, smallest bubble first.

    Args:
        outcomes: by schedule name, its simulated step, or the reason why it has none.
        memory: memory limit of a rank, above which a peak is red; None for none.
        chosen: name of the schedule that is drawn, in bold.
    """
    results = [each for each in outcomes.values() if isinstance(each, Simulation)]
    most = max((max(each.peak_bytes) for each in results), default=0.0)
    widest = max((each.bubble_ratio for each in results), default=0.0)

    def order(name: str) -> float:
        outcome = outcomes[name]
        return outcome.bubble_ratio if isinstance(outcome, Simulation) else 2.0

    def row(name: str) -> str:
        outcome, weight = outcomes[name], 650 if name == chosen else 400
        head = f'<td style="{_CELL};font-weight:{weight}">{escape(name)}</td>'
        if isinstance(outcome, str):
            style = f"{_CELL};color:#8a97a3;white-space:normal"
            return f'<tr>{head}<td colspan="5" style="{style}">{escape(outcome)}</td></tr>'
        peak = max(outcome.peak_bytes)
        over = memory is not None and peak > memory
        cells = (
            str(outcome.program.num_stages // outcome.program.num_ranks),
            amount(outcome.makespan),
            _bar(f"{outcome.bubble_ratio:.1%}", outcome.bubble_ratio, widest, "#4f86d9"),
            f"{outcome.span_bubble_ratio:.1%}",
            _bar(amount(peak), peak, most, "#d64545" if over else "#d9a441"),
        )
        shown = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
        return f"<tr>{head}{shown}</tr>"

    head = "".join(f'<th style="{_HEAD}">{name}</th>' for name in _COLUMNS)
    body = "".join(map(row, sorted(outcomes, key=order)))
    return (
        f'<div style="{_CARD}">'
        f'<table style="border-collapse:collapse;font:13px {_FONT};color:#1c2733">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _bar(text: str, value: float, most: float, colour: str) -> str:
    width = 110 * value / most if most > 0 else 0
    return (
        '<span style="display:inline-flex;align-items:center;gap:8px">'
        f'<span style="display:inline-block;width:52px;text-align:right">{text}</span>'
        f'<span style="display:inline-block;height:11px;border-radius:2px;width:{width:.1f}px;'
        f'background:{colour}"></span></span>'
    )
