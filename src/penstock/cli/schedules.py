"""``penstock schedules``: all there are, with their rules."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import print_table, stdout, table
from penstock.schedule.catalog import family
from penstock.schedule.catalog import schedules as families
from penstock.schedule.family import Family

__all__ = ["schedules"]


def schedules(
    name: Annotated[
        str | None,
        typer.Argument(help="One to tell all about.", show_default=False),
    ] = None,
    *,
    names: Annotated[bool, typer.Option("--names", help="Their names alone.")] = False,
) -> None:
    """List all schedules: how stages lie on ranks, what options there are, where it is from.

    With a NAME: all about one, its timeline drawn.
    """
    console = stdout()
    if name is not None:
        each = family(name)
        console.print(each.doc or each.summary, markup=False, highlight=False, soft_wrap=True)
        return
    if names:
        for each in families():
            console.print(each.name, markup=False)
        return
    shown = table("schedule", "stages, ranks P, microbatches M", "what it is")
    for each in families():
        shown.add_row(
            f"[bold]{each.name}[/]", _rules(each), f"{each.summary} [dim]{each.source}[/]"
        )
    print_table(shown, console)


def _rules(each: Family) -> str:
    where = "rank" if each.copies == 1 else "rank and direction"
    rules = [f"{each.arrangement.value}, {each.virtuals_text} per {where}"]
    if each.rule:
        rules.append(each.rule)
    if each.options:
        rules.append(", ".join(f"{name}=" for name in each.options))
    return "; ".join(rules)
