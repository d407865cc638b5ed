"""``penstock render``: a picture, a page or a Perfetto file of a schedule, a program or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.setting import Setting, takes_setting
from penstock.cli.sources import load
from penstock.cli.terminal import stdout
from penstock.errors import PenstockError
from penstock.schedule.check import check
from penstock.simulate.engine import simulate
from penstock.simulate.result import Simulation
from penstock.trace import Trace

__all__ = ["render"]

_PICTURES = (".png", ".svg", ".pdf")
_KINDS = ".html (a page), .png, .svg or .pdf (a picture), .json (for https://ui.perfetto.dev)"


@takes_setting
def render(
    source: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, a program's file (*.csv, *.json), or a saved trace (*.json)."
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file: {_KINDS}.")],
    alone: Annotated[
        bool, typer.Option("--alone", help="Lay no simulated step beside a measured one.")
    ] = False,
    setting: Setting,
) -> None:
    """Draw a step. A measured one is laid beside the same program, simulated."""
    if output.suffix not in (".html", ".json", *_PICTURES):
        raise PenstockError(f"{output}: don't know how to write {output.suffix!r}; take {_KINDS}")
    found = load(source, setting)
    if isinstance(found, Trace):
        beside = None if alone or found.unit != "s" else _simulated(found)
        _write(found, beside, output)
    else:
        _write(setting.play(check(found)), None, output)
    stdout().print(f"wrote {output}", markup=False, soft_wrap=True)


def _simulated(measured: Trace) -> Simulation:
    """The program that ran, with what its actions cost."""
    from penstock.simulate.measured import costs_of, program_of

    program = program_of(measured)
    return simulate(program, costs_of(measured, program.num_stages))


def _write(step: Trace | Simulation, beside: Simulation | None, output: Path) -> None:
    """The imports are heavy, and one of them is needed."""
    trace = step if isinstance(step, Trace) else step.trace
    if output.suffix == ".html":
        from penstock.view.page import save_page

        save_page(step, output, beside=beside)
    elif output.suffix == ".json":
        from penstock.view.perfetto import save_perfetto

        save_perfetto(trace, output)
    else:
        from dataclasses import replace

        from penstock.view.picture import draw

        traces = [trace] if beside is None else [trace, replace(beside.trace, unit=trace.unit)]
        draw(traces, output)
