"""Print results: consoles, tables, warnings, numbers, and the figures of a simulated step.

Everything is printed through Rich. This module reads no option and simulates nothing.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from penstock.schedule.wording import number_of, runs_of
from penstock.simulate.memory import exceeds
from penstock.simulate.simulation import Simulation
from penstock.view.palette import amount

__all__ = [
    "console", "escape_unencodable", "figures_json", "figures_text", "over_limit", "peaks_text",
    "per_rank", "plain", "print_table", "seconds_text", "table", "warn",
]  # fmt: skip

# The width for piped output, which Rich would wrap at 80 columns.
_PIPED_WIDTH = 140
# The space between two columns of a table, in characters: usually, and where that is too wide.
_GAP, _NARROW_GAP = 3, 2


def escape_unencodable() -> None:
    """Escape characters that a stream can't encode, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def console(*, error: bool = False) -> Console:
    """A console for results; with ``error``, for errors and progress."""
    stream = sys.stderr if error else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    width = _PIPED_WIDTH if piped else None
    return Console(stderr=error, width=width, highlight=False, emoji=False)


def warn(message: str | None) -> None:
    """Print a line on standard error, in yellow; nothing for None."""
    if message is not None:
        console(error=True).print(f"[yellow]{plain(message)}[/]", soft_wrap=True)


def plain(text: str) -> str:
    """External text with Rich's markup and control characters escaped."""
    shown = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    return escape("".join(shown))


def table(*columns: str, numbers: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table; columns in ``numbers`` are aligned to the right, the first never wraps."""
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in columns:
        justify = "right" if column in numbers else "left"
        made.add_column(column, justify=justify, overflow="fold", no_wrap=column == columns[0])  # type: ignore[arg-type]
    return made


def print_table(shown: Table) -> None:
    """Print a table made by ``table``; numbers never wrap, even on a narrow console, where
    columns stand closer together."""
    to = console()
    for column in shown.columns:
        unwrapped = column.no_wrap or column.justify == "right"
        kept = (*str(column.header).split(), *(column.cells if unwrapped else ()))
        column.min_width = max((to.measure(text).maximum for text in kept), default=0)
    least, gap = sum(column.min_width or 0 for column in shown.columns), _GAP
    if least + gap * len(shown.columns) > to.width:
        shown.padding, shown.show_edge, gap = (0, _NARROW_GAP - 1, 0, 0), False, _NARROW_GAP
        for column in shown.columns:
            column.width = column.min_width if column.justify == "right" else None
    to.width = max(to.width, least + gap * len(shown.columns))
    to.print(shown, crop=False)


def figures_json(result: Simulation) -> str:
    """The figures of a simulated step as one JSON object."""
    names = ["makespan", "span", "bubble_ratio", "span_bubble_ratio", "peak_in_flight"]
    names += ["peak_bytes"] * (result.costs.activation_bytes is not None)
    return json.dumps({name: getattr(result, name) for name in names}, allow_nan=False)


def figures_text(result: Simulation) -> str:
    """The times of a simulated step in a line, with Rich's markup."""
    return (
        f"makespan [bold]{amount(result.makespan)}[/], bubble [bold]{result.bubble_ratio:.2%}"
        f"[/]; span {amount(result.span)}, bubble {result.span_bubble_ratio:.2%}; "
        + number_of(result.messages, "message")
    )


def peaks_text(result: Simulation) -> str:
    """The peak memory of each rank in a line."""
    text = f"peak activations per rank: {per_rank(result.peak_in_flight)}"
    if result.costs.activation_bytes is not None:
        text += f"; bytes: {per_rank(result.peak_bytes)}"
    elif result.peak_bytes != result.peak_in_flight:  # as by weight_grad_bytes, or slow copies
        text += f"; memory in activations: {per_rank(result.peak_bytes)}"
    return text


def over_limit(peaks: Sequence[float], limit: float | None) -> str | None:
    """A line about the ranks that exceed a memory limit; None if no rank does."""
    over = [rank for rank, peak in enumerate(peaks) if exceeds(peak, limit)]
    if limit is None or not over:
        return None
    ranks = "rank" if len(over) == 1 else "ranks"
    return f"over the memory limit of {amount(limit)} on {ranks} {runs_of(over)}"


def per_rank(values: tuple[float, ...], *, most: int = 80) -> str:
    """Format one number per rank; those of many ranks, or longer than ``most``, as a range.

    Examples:
        >>> per_rank((4, 3, 2, 1)), per_rank((8,) * 16), per_rank((7,) * 15 + (6,))
        ('4,3,2,1', '8 on all', '6 to 7')
    """
    if len(values) > 4 and len(set(values)) == 1:
        return f"{amount(values[0])} on all"
    text = ",".join(map(amount, values))
    if len(values) > 8 or len(text) > most:
        return f"{amount(min(values))} to {amount(max(values))}"
    return text


def seconds_text(seconds: float) -> str:
    """Format a duration with three digits, as ``12.3 ms``."""
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
