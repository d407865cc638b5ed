"""The figures of a simulated step, as JSON and as words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from penstock.cli.terminal import number, percent
from penstock.schedule.messages import number_of
from penstock.simulate.result import Simulation

_ROUNDING = 1e-9

__all__ = ["figures_json", "figures_text", "over_limit", "peaks_text", "ranges"]


def figures_json(result: Simulation) -> str:
    """One JSON object: makespan, span, their bubble ratios, and the peak of each rank; in bytes,
    too, where the costs say how large an activation is."""
    figures: dict[str, object] = {
        "makespan": result.makespan,
        "span": result.span,
        "bubble_ratio": result.bubble_ratio,
        "span_bubble_ratio": result.span_bubble_ratio,
        "peak_in_flight": list(result.peak_in_flight),
    }
    if result.costs.activation_bytes is not None:
        figures["peak_bytes"] = list(result.peak_bytes)
    return json.dumps(figures, allow_nan=False)


def peaks_text(result: Simulation) -> str:
    """What ranks hold at most, in a line."""
    text = f"peak activations per rank: {ranges(result.peak_in_flight)}"
    if result.costs.activation_bytes is not None:
        text += f"; bytes: {ranges(result.peak_bytes)}"
    return text


def figures_text(result: Simulation) -> str:
    """The same in a line or two."""
    return (
        f"makespan [bold]{number(result.makespan)}[/], bubble [bold]{percent(result.bubble_ratio)}"
        f"[/]; span {number(result.span)}, bubble {percent(result.span_bubble_ratio)}; "
        + number_of(result.messages, "message")
    )


def over_limit(peaks: Sequence[float], limit: float | None) -> str | None:
    """Which ranks hold more than a limit, in words; None where none does.

    Example:
        >>> over_limit((4, 3, 2, 1), 2)
        'over the memory limit of 2 on ranks 0, 1'
    """
    if limit is None:
        return None
    # Sums of shares, such as thirds, are larger than their whole by a rounding.
    over = [rank for rank, peak in enumerate(peaks) if peak > limit * (1 + _ROUNDING)]
    if not over:
        return None
    ranks = "rank" if len(over) == 1 else "ranks"
    return f"over the memory limit of {number(limit)} on {ranks} {', '.join(map(str, over))}"


def ranges(values: tuple[float, ...]) -> str:
    """Per-rank numbers, runs of equal ones drawn together.

    Example:
        >>> ranges((4, 3, 2, 1)), ranges((8, 8, 8, 8)), ranges((8,) * 16)
        ('4,3,2,1', '8,8,8,8', '8 on all')
        >>> ranges((7,) * 30 + (6, 6))
        '7 on 30, 6 on 2'
    """
    if len(values) <= 4 or len(set(values)) == len(values) <= 8:
        return ",".join(map(number, values))
    if len(set(values)) == 1:
        return f"{number(values[0])} on all"
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    if len(runs) > 6:
        return f"{number(min(values))} to {number(max(values))}"
    return ", ".join(f"{number(value)} on {count}" for value, count in runs)
