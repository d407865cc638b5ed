"""``penstock schedules``: all there are, with their rules."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.terminal import stdout, table
from penstock.schedule.catalog import schedules as families

__all__ = ["schedules"]


def schedules(
    *, names: Annotated[bool, typer.Option("--names", help="Their names alone.")] = False
) -> None:
    """List all schedules: how stages lie on ranks, what options there are, where it is from."""
    console = stdout()
    if names:
        for each in families():
            console.print(each.name, markup=False)
        return
    shown = table(
        "schedule",
        "stages lie",
        "per rank",
        "ranks P, microbatches M",
        "options",
        "what it is",
        "source",
    )
    for each in families():
        shown.add_row(
            f"[bold]{each.name}[/]",
            each.arrangement.value,
            each.virtuals_text,
            each.rule or "any",
            ", ".join(each.options),
            each.summary,
            each.source,
        )
    console.print(shown)
