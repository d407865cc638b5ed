"""``penstock render``: a picture, a page or a Perfetto file of a schedule, a program or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.completion import sources
from penstock.cli.figures import over_limit
from penstock.cli.setting import Setting, takes_setting
from penstock.cli.sources import load
from penstock.cli.terminal import stdout, warn
from penstock.errors import PenstockError, ScheduleError
from penstock.schedule.check import check
from penstock.schedule.rules import COMPUTE
from penstock.simulate.engine import simulate
from penstock.simulate.result import Simulation
from penstock.trace import Trace

__all__ = ["render", "write_drawing"]

_PICTURES = (".png", ".svg", ".pdf")
_KINDS = ".html (a page), .png, .svg or .pdf (a picture), .json (for https://ui.perfetto.dev)"


@takes_setting()
def render(
    source: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, a program's file (*.csv, *.json), or a saved trace (*.json).",
            autocompletion=sources,
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file: {_KINDS}.")],
    alone: Annotated[
        bool, typer.Option("--alone", help="Lay no simulated step beside a measured one.")
    ] = False,
    setting: Setting,
) -> None:
    """Draw a step. A measured one is laid beside the same program, simulated.

    Ranks that hold more than --memory are told.
    """
    if output.suffix.lower() not in (".html", ".json", *_PICTURES):
        raise PenstockError(f"{output}: don't know how to write {output.suffix!r}; take {_KINDS}")
    found = load(source, setting)
    if isinstance(found, Trace):
        if not any(span.action.op in COMPUTE for span in found.spans):
            raise ScheduleError(f"{source}: a trace without a computation: nothing to draw")
        setting.refuse_beside_trace(source)
        beside = None if alone or found.unit != "s" else _simulated(found, source)
        peaks = None if setting.memory is None else (beside or _simulated(found, source)).peak_bytes
        write_drawing(found, output, beside)
    else:
        result = setting.play(check(found))
        peaks = result.peak_bytes
        write_drawing(result, output)
    stdout().print(f"wrote {output}", markup=False, soft_wrap=True)
    over = None if peaks is None else over_limit(peaks, setting.memory)
    if over is not None:
        warn(over)


def _simulated(measured: Trace, source: str) -> Simulation:
    """The program that ran, with what its actions cost."""
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
    """Write a page, a picture or a Perfetto file, as the file's ending says.

    Args:
        step: what to draw.
        output: the file.
        beside: a simulation to be laid beside it.
    """
    # The imports are heavy, and one of them is needed.
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
