"""The command itself: its subcommands, and how errors are shown.

A subcommand is a function in a file of its own, and a line in the table below. This module knows
nothing of what subcommands do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.check import check
from penstock.cli.compare import compare
from penstock.cli.playground import playground
from penstock.cli.render import render
from penstock.cli.schedules import schedules
from penstock.cli.search import search
from penstock.cli.simulate import simulate
from penstock.cli.split import split
from penstock.cli.terminal import plain, stderr, stdout, write_anything
from penstock.cli.values import in_options
from penstock.errors import PenstockError

__all__ = ["app", "main"]

app = typer.Typer(
    name="penstock",
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

# Whatever Typer has against a command line: it keeps the class under several roofs, by version.
_Misused: Any = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Tell the version.")] = False,
) -> None:
    """Plan pipeline-parallel training: build, check, simulate, search and draw schedules."""
    if version:
        from importlib.metadata import version as installed

        stdout().print(f"penstock {installed('penstock')}", markup=False)
        raise typer.Exit
    if context.invoked_subcommand is None:
        stdout().print(context.get_help(), end="", markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and end the process with its exit code.

    What went wrong for a reason that the user can mend is told in one message, without a
    traceback: exit code 2.

    Args:
        arguments: what stands behind ``penstock`` on the command line; None for this process's.
    """
    write_anything()
    try:
        code = app(arguments, prog_name="penstock", standalone_mode=False)
    except _Misused as error:
        command = error.ctx.command_path if error.ctx is not None else "penstock"
        _fail(f"{error.format_message().rstrip('.')}; {command} --help tells more")
    except (PenstockError, OSError) as error:
        _fail(_message(error))
    except MemoryError:
        _fail("that is more than this machine's memory holds; take fewer ranks or microbatches")
    except typer.Abort:
        sys.exit(130)
    sys.exit(code)


def _fail(message: str) -> None:
    stderr().print(f"[bold red]error:[/] {plain(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def _message(error: PenstockError | OSError) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return in_options(str(error))
