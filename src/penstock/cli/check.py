"""``penstock check``: prove that a program is right, or say all that is wrong with it."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.setting import Setting
from penstock.cli.sources import is_file, load
from penstock.cli.terminal import stdout
from penstock.errors import ScheduleError
from penstock.schedule.check import Channels
from penstock.schedule.check import check as prove
from penstock.schedule.messages import number_of, numbers_of
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE
from penstock.trace import Trace

__all__ = ["check"]


def check(
    file: Annotated[str, typer.Argument(help="A program as CSV, in torch's form, or as JSON.")],
    *,
    per_pair: Annotated[
        bool,
        typer.Option("--per-pair", help="One channel per pair of ranks, as NCCL's, not two."),
    ] = False,
) -> None:
    """Prove that a program is right; else list its problems, with exit code 1."""
    if not is_file(file):
        raise ScheduleError(
            f"{file!r} is no file; check takes a program as *.csv or *.json, and any other with "
            f"its folder, as ./{file}"
        )
    model = Channels(per_pair=per_pair)
    program = load(file, Setting())
    if isinstance(program, Trace):
        raise ScheduleError(f"{file}: a trace of what ran; check takes a program")
    console = stdout()
    try:
        checked = prove(program, model)
        if not program.has_transfers:
            # Where they are inserted is proven, too: that is what runs.
            prove(lower(checked, channels=model), model)
    except ScheduleError as error:
        console.print(f"[bold red]wrong[/] {_summary(program)}", soft_wrap=True)
        console.print(str(error), markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(f"[bold green]ok[/] {_summary(program)}", soft_wrap=True)


def _summary(program: Program) -> str:
    actions = list(program.actions())
    computes = sum(act.op in COMPUTE for act in actions)
    transfers = "with its transfers" if program.has_transfers else "transfers to be inserted"
    sizes = numbers_of(
        rank=program.num_ranks,
        stage=program.num_stages,
        microbatch=program.num_microbatches,
        action=len(actions),
    )
    return f"{program.name}: {sizes} ({number_of(computes, 'computation')}), {transfers}"
