"""``penstock render`` and ``playground``: pictures, pages and Perfetto files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output as out
from penstock.cli.settings import Settings, load, option, with_options
from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.rules import COMPUTE
from penstock.simulate.simulation import Simulation, simulate
from penstock.trace import Trace

__all__ = ["playground", "refuse_suffix", "render", "write_drawing"]

_SOURCE = "A schedule's name, a program's file (*.csv), or a trace (*.json)."
_SUFFIXES = (".html", ".png", ".svg", ".pdf", ".json")
_FILE = "The file: {} (a page), {}, {} or {} (a picture), {} (for https://ui.perfetto.dev).".format(
    *_SUFFIXES
)


@with_options
def render(
    source: Annotated[str, typer.Argument(help=_SOURCE)],
    *,
    settings: Settings,
    output: Annotated[Path, option(_FILE, "--output", "-o")],
) -> None:
    """Draw a step. The page of a measured step has the simulation of its program below.

    Ranks that hold more than --memory are listed.
    """
    refuse_suffix(output, _SUFFIXES)
    step = load(source, settings)
    simulated: Simulation | None = None
    if isinstance(step, Trace):
        if not any(span.action.op in COMPUTE for span in step.spans):
            raise ScheduleError(f"{source}: a trace without a computation: nothing to draw")
        settings.refuse_for(source, has_run=True)
        simulated = _simulated(step, source)
        write_drawing(step, output, simulated if step.unit == "s" else None)
    else:
        simulated = simulate(check(step), settings.costs())
        write_drawing(simulated, output)
    typer.echo(f"wrote {output}")
    if simulated is not None:
        out.warn(out.over_limit(simulated.peak_bytes, settings.memory))


def _simulated(measured: Trace, source: str) -> Simulation | None:
    """Simulate the program of a measured step with its measured costs; warns and returns None if
    the trace is not of a whole step."""
    from penstock.simulate.measured import costs_from_trace, program_from_trace

    try:
        program = program_from_trace(measured)
        return simulate(program, costs_from_trace(measured, program.num_stages))
    except ScheduleError as error:
        why = " ".join(str(error).split())
        out.warn(f"{source}: not a whole step, so it is not simulated ({why})")
        return None


def refuse_suffix(output: Path, suffixes: Sequence[str]) -> None:
    """Refuse a file with another suffix than these."""
    if output.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}"
        raise PenstockError(f"{output}: don't know how to write {output.suffix!r}; take {known}")


def write_drawing(step: Trace | Simulation, output: Path, beside: Simulation | None = None) -> None:
    """Write a page, a picture or a Perfetto file, by the file's suffix; a page has ``beside`` below
    the step."""
    # These imports are slow, and each file type needs only one.
    trace = step if isinstance(step, Trace) else step.trace
    if output.suffix.lower() == ".html":
        from penstock.view.page import save_page

        save_page(step, output, beside=beside)
    elif output.suffix.lower() == ".json":
        from penstock.view.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from penstock.view.picture import draw

        draw(trace, output)


def playground(
    *,
    port: Annotated[int, option("Port to listen on; 0 for any free port.")] = 5006,
    browser: Annotated[bool, option("Open it in the browser.")] = True,
) -> None:
    """Try schedules out on a page with sliders, served on 127.0.0.1 until Ctrl-C."""
    from penstock.view.playground import serve

    def ready(url: str) -> None:
        out.console().print(f"the playground is at [bold]{url}[/] (Ctrl-C ends it)", soft_wrap=True)

    serve(port=port, browser=browser, ready=ready)
