"""``penstock search``: the best program for given costs and memory."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.figures import figures_text, peaks_text
from penstock.cli.render import write_drawing
from penstock.cli.setting import Setting, takes_setting
from penstock.cli.terminal import number, percent, print_table, progress_bar, stdout, table
from penstock.errors import PenstockError
from penstock.schedule.text import save_csv, to_json

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from penstock.search.result import Progress, SearchResult

__all__ = ["search"]

_KINDS = (".csv", ".json", ".html", ".png", ".svg", ".pdf")


class SearchObjective(Enum):
    """What is made small."""

    MAKESPAN = "makespan"
    SPAN = "span"


@takes_setting(without=("option", "jitter", "jitter_seed"))
def search(
    *,
    objective: Annotated[
        SearchObjective,
        typer.Option(help="What is made small: span where no barrier stands before the optimizer."),
    ] = SearchObjective.MAKESPAN,
    time_limit: Annotated[float, typer.Option(help="How long to search, in seconds.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of random choices.")] = 0,
    pareto: Annotated[bool, typer.Option(help="Look for time against memory, too.")] = False,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Let stages run their forward again instead of holding what it keeps; it takes "
            "--cost recompute=..., or what F takes."
        ),
    ] = False,
    offload: Annotated[
        bool,
        typer.Option(
            help="Let stages copy what they hold to the host and back; give --cost offload=... "
            "and --cost reload=..., or activation_bytes and offload_bandwidth."
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write the program (.csv, .json) or its page or picture there."
        ),
    ] = None,
    setting: Setting,
) -> None:
    """Search for the best program of one copy of the model within --memory, and prove how far from
    the best it may be."""
    from penstock.search.engine import search as find

    _refuse_unknown(output)
    with _bar() as bar:
        task = bar.add_task("search", total=1.0, best="")

        def show(progress: Progress) -> None:
            best = "" if progress.value is None else f"best {number(progress.value)}, "
            bar.update(
                task, completed=progress.share, description=progress.method,
                best=f"{best}none is below {number(progress.bound)}",
            )  # fmt: skip

        found = find(
            setting.costs(),
            ranks=setting.num_ranks,
            microbatches=setting.num_microbatches,
            virtual=setting.virtual,
            memory_limit=setting.memory,
            objective=objective.value,
            time_limit_s=time_limit,
            seed=seed,
            recompute=recompute,
            offload=offload,
            pareto=pareto,
            progress=show,
        )
        bar.update(task, completed=1.0)
    # Without a limit nothing is gained by holding less; where that is allowed, the bound knows.
    _tell(found, among_all=setting.memory is None or recompute or offload)
    if output is not None:
        _write(found, output)
        stdout().print(f"wrote {output}", markup=False, soft_wrap=True)


def _bar() -> Bar:
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    what, best = TextColumn("{task.description}"), TextColumn("{task.fields[best]}")
    return progress_bar(what, BarColumn(), best, TimeElapsedColumn())


def _tell(found: SearchResult, *, among_all: bool) -> None:
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


def _refuse_unknown(output: Path | None) -> None:
    """Before the search, not after it."""
    if output is not None and output.suffix.lower() not in _KINDS:
        raise PenstockError(
            f"{output}: don't know how to write {output.suffix!r}; take .csv or .json for the "
            "program, .html for its page, .png, .svg or .pdf for a picture"
        )


def _write(found: SearchResult, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    kind = output.suffix.lower()
    if kind == ".csv":
        save_csv(found.program, output)
    elif kind == ".json":
        output.write_text(to_json(found.program), encoding="utf-8")
    else:
        write_drawing(found.simulation, output)
