"""The command ``penstock``: its table of subcommands, and how errors are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli import output as out
from penstock.cli.programs import check, compare, schedules, simulate
from penstock.cli.render import playground, render
from penstock.cli.search import search
from penstock.cli.settings import message_of
from penstock.cli.split import split
from penstock.errors import PenstockError

__all__ = ["app", "main"]

app = typer.Typer(name="penstock", pretty_exceptions_enable=False, rich_markup_mode="rich")

COMMANDS: tuple[Callable[..., None], ...] = (
    schedules, simulate, compare, check, render, search, playground, split,
)  # fmt: skip
for each in COMMANDS:
    app.command(each.__name__)(each)

_command = cache(typer.main.get_command)
# The usage error of Click: its module depends on the version of Typer.
_UsageError: Any = typer.BadParameter.__mro__[1]


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Plan pipeline-parallel training: build, check, simulate, search and draw schedules."""
    if version:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.console().print(context.get_help(), end="", markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and end the process with its exit code.

    An error of the user is printed as one message, without a traceback: exit code 2.

    Args:
        arguments: the command line without ``penstock``; None for this process's.
    """
    out.escape_unencodable()
    try:
        code = _command(app)(arguments, prog_name="penstock", standalone_mode=False)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "penstock"
        _fail(f"{error.format_message().rstrip('.')}; {command} --help tells more")
    except PenstockError as error:
        _fail(message_of(error))
    except OSError as error:
        named = error.strerror and error.filename
        _fail(f"{error.filename}: {error.strerror}" if named else str(error))
    except MemoryError:
        _fail("that is more than this machine's memory holds; take fewer ranks or microbatches")
    except typer.Abort:
        sys.exit(130)
    sys.exit(code)


def _fail(message: str) -> None:
    out.console(error=True).print(
        f"[bold red]error:[/] {out.plain(message)}", highlight=False, soft_wrap=True
    )
    sys.exit(2)
