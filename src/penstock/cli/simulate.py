"""``penstock simulate``: a schedule's timeline and figures."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.completion import sources
from penstock.cli.figures import figures_json, figures_text, over_limit, peaks_text
from penstock.cli.setting import Setting, takes_setting
from penstock.cli.sources import load_program
from penstock.cli.terminal import stdout, warn
from penstock.schedule.messages import numbers_of
from penstock.simulate.result import Simulation

__all__ = ["simulate"]


@takes_setting()
def simulate(
    schedule: Annotated[
        str,
        typer.Argument(
            help="A schedule's name, or a program's file (*.csv, *.json).", autocompletion=sources
        ),
    ],
    *,
    json: Annotated[bool, typer.Option("--json", help="The figures alone, as JSON.")] = False,
    setting: Setting,
) -> None:
    """Simulate a step: its timeline in colour, its bubble, its peak memory."""
    program = load_program(schedule, setting)
    result = setting.play(program)
    if json:
        stdout().print(figures_json(result), markup=False, soft_wrap=True)
    else:
        _draw(result)
    # In activations, unless the costs say how large one is: as `bytes` then.
    over = over_limit(result.peak_bytes, setting.memory)
    if over is not None:
        warn(over)


def _draw(result: Simulation) -> None:
    from penstock.view.terminal import legend, timeline

    program, console = result.program, stdout()
    coloured = console.color_system is not None
    shaded = console.color_system in ("256", "truecolor")
    pieces = f" of {program.num_splits} pieces" if program.num_splits > 1 else ""
    sizes = numbers_of(
        rank=program.num_ranks,
        stage=program.num_stages,
        microbatch=program.num_whole_microbatches,
    )
    console.print(f"[bold]{program.name}[/], {sizes}{pieces}\n")
    drawn = timeline(result.trace, width=console.width, colour=coloured, shaded=shaded)
    console.print(drawn, end="")
    if coloured:
        console.print(legend(result.trace, shaded=shaded))
    console.print(f"\n{figures_text(result)}", soft_wrap=True)
    console.print(peaks_text(result), soft_wrap=True)
