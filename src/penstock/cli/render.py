"""``penstock render`` and ``playground``: pictures, pages and Perfetto files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import settings as given
from penstock.cli.output import over_limit, stdout, warn
from penstock.cli.settings import Settings
from penstock.cli.sources import complete, load
from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation, simulate
from penstock.trace import Trace

__all__ = ["playground", "render", "write_drawing"]

_PICTURES = (".png", ".svg", ".pdf")
_KINDS = ".html (a page), .png, .svg or .pdf (a picture), .json (for https://ui.perfetto.dev)"


def render(
    source: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, a program's file (*.csv, *.json), or a saved trace (*.json).",
            autocompletion=complete,
        ),
    ],
    *,
    ranks: given.Ranks = None,
    microbatches: given.Microbatches = None,
    virtual: given.Virtual = None,
    option: given.Option = None,
    memory: given.Memory = None,
    forward: given.Forward = "1",
    input_grad: given.InputGrad = "1",
    weight_grad: given.WeightGrad = "1",
    latency: given.Latency = "0",
    overlap: given.OverlapTime = None,
    cost: given.OtherCosts = None,
    jitter: given.Jitter = 0.0,
    jitter_seed: given.JitterSeed = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file: {_KINDS}.")],
    alone: Annotated[
        bool, typer.Option("--alone", help="Draw a measured step without the simulated one.")
    ] = False,
) -> None:
    """Draw a step. A measured step is drawn beside the simulation of its program.

    Ranks that hold more than --memory are listed.
    """
    settings = Settings(
        ranks=ranks, microbatches=microbatches, virtual=virtual, option=option, memory=memory,
        forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency,
        overlap=overlap, cost=cost, jitter=jitter, jitter_seed=jitter_seed,
    )  # fmt: skip
    if output.suffix.lower() not in (".html", ".json", *_PICTURES):
        raise PenstockError(f"{output}: don't know how to write {output.suffix!r}; take {_KINDS}")
    found = load(source, settings)
    if isinstance(found, Trace):
        if not any(span.action.op in COMPUTE for span in found.spans):
            raise ScheduleError(f"{source}: a trace without a computation: nothing to draw")
        settings.refuse_for_trace(source)
        simulated = None if alone or found.unit != "s" else _simulated(found, source)
        peaks = None
        if settings.memory is not None:
            peaks = (simulated or _simulated(found, source)).peak_bytes
        write_drawing(found, output, simulated)
    else:
        result = settings.simulate(check(found))
        peaks = result.peak_bytes
        write_drawing(result, output)
    stdout().print(f"wrote {output}", markup=False, soft_wrap=True)
    over = None if peaks is None else over_limit(peaks, settings.memory)
    if over is not None:
        warn(over)


def _simulated(measured: Trace, source: str) -> Simulation:
    """Simulate the program of a measured step with its measured costs."""
    from penstock.simulate.measured import costs_of, program_of

    try:
        program = program_of(measured)
        return simulate(program, costs_of(measured, program.num_stages))
    except ScheduleError as error:
        why = " ".join(str(error).split())
        raise ScheduleError(
            f"{source}: not a whole step, which can't be simulated ({why}); --alone, without "
            "--memory, draws it"
        ) from error


def write_drawing(step: Trace | Simulation, output: Path, beside: Simulation | None = None) -> None:
    """Write a page, a picture or a Perfetto file, by the file's suffix."""
    # These imports are slow, and each file type needs only one.
    trace = step if isinstance(step, Trace) else step.trace
    if output.suffix.lower() == ".html":
        from penstock.view.page import save_page

        save_page(step, output, beside=beside)
    elif output.suffix.lower() == ".json":
        from penstock.view.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from dataclasses import replace

        from penstock.view.picture import draw, title_of

        if beside is None:
            draw(trace, output)
        else:
            traces = [trace, replace(beside.trace, unit=trace.unit)]
            names = ("measured", "simulated")
            titles = [f"{n}: {title_of(t)}" for n, t in zip(names, traces, strict=True)]
            draw(traces, output, titles=titles)


def playground(
    *,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for any free port.")] = 5006,
    browser: Annotated[bool, typer.Option(help="Open it in the browser.")] = True,
) -> None:
    """Try schedules out on a page with sliders, served on 127.0.0.1 until Ctrl-C."""
    try:
        from penstock.view.playground import serve
    except ImportError as error:
        raise PenstockError(
            "the playground needs Bokeh, which is not installed: pip install 'penstock[view]'"
        ) from error

    def ready(url: str) -> None:
        stdout().print(f"the playground is at [bold]{url}[/] (Ctrl-C ends it)", soft_wrap=True)

    serve(port=port, browser=browser, ready=ready)
