"""Where subcommands write: Rich's consoles, and how wide they are."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

__all__ = [
    "number",
    "percent",
    "plain",
    "print_table",
    "progress_bar",
    "stderr",
    "stdout",
    "table",
    "warn",
    "write_anything",
]

# A pipe has no width of its own: what is written into one is not folded at Rich's 80 columns.
_PIPED_WIDTH = 140
# What lies between two columns of a table.
_BETWEEN = 3


def write_anything() -> None:
    """Let both streams write what their encoding lacks as an escape, rather than fail."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def stdout() -> Console:
    """For what was asked for."""
    return _console(error=False)


def stderr() -> Console:
    """For errors and progress."""
    return _console(error=True)


def progress_bar(*columns: ProgressColumn) -> Progress:
    """A bar on standard error, gone when it is done; none is drawn where that is no terminal."""
    from rich.progress import Progress  # few need it

    console = stderr()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _console(*, error: bool) -> Console:
    stream = sys.stderr if error else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    width = _PIPED_WIDTH if piped else None
    return Console(stderr=error, width=width, highlight=False, emoji=False)


def table(*columns: str, numbers: Sequence[str] = (), title: str | None = None) -> Table:
    """An empty table in the one style that all subcommands use.

    Args:
        columns: the headings.
        numbers: which of them head numbers, aligned to the right.
        title: a line above it.
    """
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in numbers else "left",
            overflow="fold",
            # What a line is about is not broken.
            no_wrap=column == columns[0],
        )
    return made


def print_table(shown: Table, console: Console) -> None:
    """Print a table of ``table``, with all its rows.

    Where it is wider than the console, headings and texts are broken between words or folded, but
    neither numbers nor what a line is about: lines are longer then where nothing else helps.
    """
    for column in shown.columns:
        whole = column.no_wrap or column.justify == "right"
        kept = (*str(column.header).split(), *(column.cells if whole else ()))
        column.min_width = max((console.measure(text).maximum for text in kept), default=0)
    least = sum((column.min_width or 0) + _BETWEEN for column in shown.columns)
    width, console.width = console.width, max(console.width, least)
    console.print(shown, crop=False)
    console.width = width


def number(value: float) -> str:
    """A time or an amount, short.

    Example:
        >>> number(51.0), number(0.1 + 0.2), number(1234567.0)
        ('51', '0.3', '1234567')
    """
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def percent(ratio: float) -> str:
    """A ratio in per cent, with two digits behind the point.

    Example:
        >>> percent(0.2727)
        '27.27%'
    """
    return f"{ratio:.2%}"


def plain(text: str) -> str:
    """A text from outside, for a console: brackets are no markup, control characters harmless.

    Example:
        >>> print(plain("[a].csv: '0F0\\x1b'"))
        \\[a].csv: '0F0\\x1b'
    """
    from rich.markup import escape

    shown = (each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
    return escape("".join(shown))


def warn(message: str) -> None:
    """One line on standard error, in yellow."""
    stderr().print(f"[yellow]{plain(message)}[/]", soft_wrap=True)
