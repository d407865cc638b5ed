"""The command itself: its subcommands, and how errors are shown.

A subcommand is a function in a file of its own, and a line in the table below. This module knows
nothing of what subcommands do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer

from penstock.cli.check import check
from penstock.cli.compare import compare
from penstock.cli.playground import playground
from penstock.cli.render import render
from penstock.cli.schedules import schedules
from penstock.cli.search import search
from penstock.cli.simulate import simulate
from penstock.cli.split import split
from penstock.cli.terminal import stderr
from penstock.errors import PenstockError

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
    help="Plan pipeline-parallel training: build, check, simulate, search and draw schedules.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

COMMANDS: tuple[Callable[..., None], ...] = (
    schedules,
    simulate,
    compare,
    check,
    render,
    search,
    playground,
    split,
)
for each in COMMANDS:
    app.command(each.__name__.replace("_", "-"))(each)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and end the process with its exit code.

    What went wrong for a reason that the user can mend is told in one message, without a
    traceback: exit code 2.

    Args:
        arguments: what stands behind ``penstock`` on the command line; None for this process's.
    """
    try:
        app(arguments, prog_name="penstock")
    except (PenstockError, OSError) as error:
        stderr().print(f"[bold red]error:[/] {_plain(error)}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _plain(error: PenstockError | OSError) -> str:
    """The message, with brackets that are no markup."""
    from rich.markup import escape

    if isinstance(error, OSError) and error.strerror and error.filename:
        return escape(f"{error.filename}: {error.strerror}")
    return escape(str(error))
