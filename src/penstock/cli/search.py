"""``penstock search``: the best program for given costs and memory."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import settings as given
from penstock.cli.output import figures_text, peaks_text, print_table, progress_bar, stdout, table
from penstock.cli.render import write_drawing
from penstock.cli.settings import Settings
from penstock.cli.values import number, percent
from penstock.errors import PenstockError
from penstock.schedule.text import save_csv, to_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from penstock.search.result import Progress, SearchResult

__all__ = ["search"]

_KINDS = (".csv", ".json", ".html", ".png", ".svg", ".pdf")


class SearchObjective(Enum):
    """The time to minimize."""

    MAKESPAN = "makespan"
    SPAN = "span"


def search(
    *,
    ranks: given.Ranks = None,
    microbatches: given.Microbatches = None,
    virtual: given.Virtual = None,
    memory: given.Memory = None,
    forward: given.Forward = "1",
    input_grad: given.InputGrad = "1",
    weight_grad: given.WeightGrad = "1",
    latency: given.Latency = "0",
    overlap: given.OverlapTime = None,
    cost: given.OtherCosts = None,
    objective: Annotated[
        SearchObjective,
        typer.Option(help="The time to minimize: span if no barrier precedes the optimizer."),
    ] = SearchObjective.MAKESPAN,
    time_limit: Annotated[float, typer.Option(help="Time limit of the search, in seconds.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of random choices.")] = 0,
    pareto: Annotated[bool, typer.Option(help="Also search time against memory.")] = False,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Allow stages to recompute their forward instead of holding activations; it takes "
            "--cost recompute=..., or as long as F."
        ),
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            help="Allow stages to offload activations to the host; needs --cost offload=... "
            "and --cost reload=..., or activation_bytes and offload_bandwidth."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the program (.csv, .json) or its page or picture there."
        ),
    ] = None,
) -> None:
    """Search for the best program of one copy of the model within --memory, and prove a bound."""
    from penstock.search.engine import search as find

    settings = Settings(
        ranks=ranks, microbatches=microbatches, virtual=virtual, memory=memory, forward=forward,
        input_grad=input_grad, weight_grad=weight_grad, latency=latency, overlap=overlap, cost=cost,
    )  # fmt: skip
    if output is not None and output.suffix.lower() not in _KINDS:
        raise PenstockError(
            f"{output}: don't know how to write {output.suffix!r}; take .csv or .json for the "
            "program, .html for its page, .png, .svg or .pdf for a picture"
        )
    with _bar() as bar:
        task = bar.add_task("search", total=1.0, best="")

        def show(progress: Progress) -> None:
            best = "" if progress.value is None else f"best {number(progress.value)}, "
            bar.update(
                task, completed=progress.share, description=progress.method,
                best=f"{best}none is below {number(progress.bound)}",
            )  # fmt: skip

        found = find(
            settings.costs(),
            ranks=settings.num_ranks,
            microbatches=settings.num_microbatches,
            virtual=virtual,
            memory_limit=memory,
            objective=objective.value,
            time_limit_s=time_limit,
            seed=seed,
            recompute=recompute,
            offload=offload,
            pareto=pareto,
            progress=show,
        )
        bar.update(task, completed=1.0)
    # Without a memory limit, recomputation and offload can't make a program faster.
    _print(found, among_all=memory is None or recompute or offload)
    if output is not None:
        _write(found, output)
        stdout().print(f"wrote {output}", markup=False, soft_wrap=True)


def _bar() -> Bar:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    method, best = TextColumn("{task.description}"), TextColumn("{task.fields[best]}")
    return progress_bar(method, BarColumn(), best, TimeElapsedColumn())


def _print(found: SearchResult, *, among_all: bool) -> None:
    console = stdout()
    among = "" if among_all else "without recomputation or offload, "
    proof = (
        f"[bold green]{among}no program of one copy of the model is better[/]"
        if found.is_proven
        else f"{among}no program of one copy of the model is below {number(found.bound)}: "
        f"a gap of {percent(found.gap)} at most"
    )
    console.print(
        f"[bold]{found.objective} {number(found.value)}[/], {proof}; found by {found.method}",
        soft_wrap=True,
    )
    console.print(figures_text(found.simulation), soft_wrap=True)
    console.print(peaks_text(found.simulation), soft_wrap=True)
    if found.pareto:
        shown = table("peak", found.objective, "found by", numbers=("peak", found.objective))
        for point in found.pareto:
            shown.add_row(number(point.peak), number(point.value), point.method)
        print_table(shown, console)


def _write(found: SearchResult, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    kind = output.suffix.lower()
    if kind == ".csv":
        save_csv(found.program, output)
    elif kind == ".json":
        output.write_text(to_json(found.program), encoding="utf-8")
    else:
        write_drawing(found.simulation, output)
