"""``penstock search``: the best program for given costs and memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output as out
from penstock.cli.render import refuse_suffix, write_drawing
from penstock.cli.settings import Settings, option, with_options
from penstock.schedule.text import save_csv
from penstock.schedule.wording import number_of
from penstock.schedule.workload import Objective
from penstock.view.palette import amount

if TYPE_CHECKING:
    from penstock.search.state import SearchResult

__all__ = ["search"]

_SUFFIXES = (".csv", ".html", ".png", ".svg", ".pdf")
_FILE = "The file: {} (a program), {} (a page), {}, {} or {} (a picture).".format(*_SUFFIXES)
_OBJECTIVE = "The time to minimize: span if no barrier precedes the optimizer."
_RECOMPUTE = (
    "Allow stages to recompute their forward instead of holding activations; it takes "
    "--cost recompute=..., or as long as F."
)
_OFFLOAD = (
    "Allow stages to offload activations to the host; needs --cost offload=... and "
    "--cost reload=...."
)


@partial(with_options, omit=("option",))
def search(
    *,
    settings: Settings,
    objective: Annotated[Objective, option(_OBJECTIVE)] = "makespan",
    time_limit: Annotated[float, option("Time limit of the search, in seconds.")] = 10.0,
    seed: Annotated[int, option("Seed of random choices.")] = 0,
    recompute: Annotated[bool, option(_RECOMPUTE)] = False,
    offload: Annotated[bool, option(_OFFLOAD)] = False,
    output: Annotated[Path | None, option(_FILE, "--output", "-o")] = None,
) -> None:
    """Search for the best program of one copy of the model within --memory, and prove a bound."""
    from penstock.search.engine import search as find

    if output is not None:
        refuse_suffix(output, _SUFFIXES)
    with out.console(error=True).status(f"searching, {time_limit:g} s at most"):
        found = find(
            settings.costs(), **settings.sizes(), memory_limit=settings.memory,
            objective=objective, time_limit_s=time_limit, seed=seed, recompute=recompute,
            offload=offload,
        )  # fmt: skip
    # Without a memory limit, recomputation and offload can't make a program faster.
    _print(found, among_all=settings.memory is None or recompute or offload)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.suffix.lower() == ".csv":
            save_csv(found.program, output)
        else:
            write_drawing(found.simulation, output)
        typer.echo(f"wrote {output}")


def _print(found: SearchResult, *, among_all: bool) -> None:
    console = out.console()
    others = "" if among_all else "without recomputation or offload, "
    virtual = found.program.num_stages // found.program.num_ranks
    shape = " in loops" * (virtual > 1) + " or waves" * (virtual % 2 == 0)
    stages = f"{number_of(virtual, 'stage')} per rank{shape}"
    others += f"no program of one copy of the model with {stages} is"
    bound = f"{others} below {amount(found.bound)}: a gap of {found.gap:.2%} at most"
    proof = f"[bold green]{others} better[/]" if found.is_proven else bound
    best = f"[bold]{found.objective} {amount(found.value)}[/], {proof}; found by {found.method}"
    for line in (best, out.figures_text(found.simulation), out.peaks_text(found.simulation)):
        console.print(line, soft_wrap=True)
