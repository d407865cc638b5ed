"""Print results: consoles, tables, warnings, and the figures of a simulated step.

Everything is printed through Rich. This module reads no option and simulates nothing.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from penstock.cli.values import number, percent
from penstock.schedule.messages import number_of
from penstock.simulate.simulation import Simulation

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = [
    "escape_unencodable",
    "figures_json",
    "figures_text",
    "over_limit",
    "peaks_text",
    "per_rank",
    "plain",
    "print_table",
    "progress_bar",
    "stderr",
    "stdout",
    "table",
    "warn",
]

# The width for piped output, which Rich would wrap at 80 columns.
_PIPED_WIDTH = 140
# The space between two columns of a table, in characters.
_GAP = 3
_ROUNDING = 1e-9


def escape_unencodable() -> None:
    """Escape characters that a stream can't encode, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    """A console for results."""
    return _console(error=False)


def stderr() -> Console:
    """A console for errors and progress."""
    return _console(error=True)


def _console(*, error: bool) -> Console:
    stream = sys.stderr if error else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    width = _PIPED_WIDTH if piped else None
    return Console(stderr=error, width=width, highlight=False, emoji=False)


def warn(message: str) -> None:
    """Print a line on standard error, in yellow."""
    stderr().print(f"[yellow]{plain(message)}[/]", soft_wrap=True)


def plain(text: str) -> str:
    """Escape Rich's markup and control characters in external text.

    Example:
        >>> print(plain("[a].csv: '0F0\\x1b'"))
        \\[a].csv: '0F0\\x1b'
    """
    from rich.markup import escape

    shown = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    return escape("".join(shown))


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A transient progress bar on standard error, drawn on a terminal only."""
    from rich.progress import Progress  # lazy, since few subcommands need it

    console = stderr()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def table(*columns: str, numbers: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table; columns in ``numbers`` are aligned to the right."""
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            # The first column names the row, and is never wrapped.
            no_wrap=column == columns[0],
        )
    return made


def print_table(shown: Table, console: Console) -> None:
    """Print a table made by ``table``.

    On a narrow console headings and texts wrap. Numbers and the first column never wrap, even if
    lines exceed the console's width.
    """
    for column in shown.columns:
        whole = column.no_wrap or column.justify == "right"
        kept = (*str(column.header).split(), *(column.cells if whole else ()))
        column.min_width = max((console.measure(text).maximum for text in kept), default=0)
    least = sum((column.min_width or 0) + _GAP for column in shown.columns)
    width, console.width = console.width, max(console.width, least)
    console.print(shown, crop=False)
    console.width = width


def figures_json(result: Simulation) -> str:
    """The figures of a simulated step as one JSON object.

    Peaks are in activations, and in bytes too if the costs give the size of an activation.
    """
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


def figures_text(result: Simulation) -> str:
    """The times of a simulated step in a line, with Rich's markup."""
    return (
        f"makespan [bold]{number(result.makespan)}[/], bubble [bold]{percent(result.bubble_ratio)}"
        f"[/]; span {number(result.span)}, bubble {percent(result.span_bubble_ratio)}; "
        + number_of(result.messages, "message")
    )


def peaks_text(result: Simulation) -> str:
    """The peak memory of each rank in a line."""
    text = f"peak activations per rank: {per_rank(result.peak_in_flight)}"
    if result.costs.activation_bytes is not None:
        text += f"; bytes: {per_rank(result.peak_bytes)}"
    return text


def over_limit(peaks: Sequence[float], limit: float | None) -> str | None:
    """Name the ranks that exceed a memory limit; None if no rank does.

    Example:
        >>> over_limit((4, 3, 2, 1), 2)
        'over the memory limit of 2 on ranks 0, 1'
    """
    if limit is None:
        return None
    # Sums of fractions, such as thirds, may exceed the limit by a rounding error.
    over = [rank for rank, peak in enumerate(peaks) if peak > limit * (1 + _ROUNDING)]
    if not over:
        return None
    ranks = "rank" if len(over) == 1 else "ranks"
    return f"over the memory limit of {number(limit)} on {ranks} {', '.join(map(str, over))}"


def per_rank(values: tuple[float, ...]) -> str:
    """Format one number per rank; runs of equal numbers are joined.

    Example:
        >>> per_rank((4, 3, 2, 1)), per_rank((8, 8, 8, 8)), per_rank((8,) * 16)
        ('4,3,2,1', '8,8,8,8', '8 on all')
        >>> per_rank((7,) * 30 + (6, 6))
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
