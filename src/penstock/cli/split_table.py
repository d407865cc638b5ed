"""The table that ``penstock split`` shows: what each stage holds, takes and sends."""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.cli.output import print_table, stdout, table
from penstock.cli.values import bytes_text, percent, seconds_text
from penstock.partition.balance.costs import Profile
from penstock.partition.balance.terms import Terms
from penstock.partition.plan import Plan
from penstock.schedule.messages import numbers_of

__all__ = ["show"]

NUMBERS = ("stage", "rank", "parameters", "time", "share", "activations", "holds", "sends")


def show(plan: Plan, measured: Profile, layout: str, terms: Terms) -> None:
    """Show a plan.

    Args:
        plan: which modules make which stage, with their costs.
        measured: the costs of the blocks.
        layout: the split as a layout string.
        terms: what balancing reckoned with.
    """
    rows = rows_of(plan, terms)
    title = f"{plan.model}: {numbers_of(block=len(measured.blocks), stage=plan.num_stages)}"
    shown = table(*rows[0], numbers=NUMBERS, title=title)
    for row in rows:
        shown.add_row(*row.values())
    console = stdout()
    print_table(shown, console)
    console.print(pace_of(plan, terms), soft_wrap=True)
    console.print(f"layout {layout}", markup=False, soft_wrap=True)
    console.print(plan.made, markup=False, soft_wrap=True, style="dim")


def rows_of(plan: Plan, terms: Terms) -> list[dict[str, str]]:
    """The rows, by column."""
    rows = []
    flights = terms.flights
    total_s = sum(costs.time_s for costs in plan.costs)
    for stage, (names, costs) in enumerate(zip(plan.stages, plan.costs, strict=True)):
        row = {"stage": f"[bold]{stage}[/]"}
        if terms.placement is not None:
            row["rank"] = ranks_text(terms, stage)
        row |= {
            "modules": "\n".join(ranged(names)),
            "parameters": f"{costs.parameters:,}",
            "time": seconds_text(costs.time_s),
            "share": percent(costs.time_s / total_s),
            "activations": bytes_text(costs.activation_bytes),
        }
        if terms.memory_limit is not None:
            row["holds"] = bytes_text(terms.held_bytes(costs, flights[stage]))
        row["sends"] = bytes_text(costs.sent_bytes) if costs.sends else ""
        row["across"] = "\n".join(counted(costs.sends))
        rows.append(row)
    return rows


def ranks_text(terms: Terms, stage: int) -> str:
    """The rank that holds a stage; several where the model is there several times."""
    placement = terms.placement
    assert placement is not None, "there is a schedule"
    copies = range(stage, placement.num_stages, placement.num_model_stages)
    return ", ".join(str(placement.rank_of(each)) for each in copies)


def pace_of(plan: Plan, terms: Terms) -> str:
    """What the split comes to: the slowest stage, or rank, beside the mean of all."""
    what, times = "stage", [costs.time_s for costs in plan.costs]
    placement = terms.placement
    if placement is not None:
        what, by_stage = "rank", times
        times = [
            sum(by_stage[placement.model_stage(stage)] for stage in placement.stages_of(rank))
            / placement.copies
            for rank in range(placement.num_ranks)
        ]
    mean_s = sum(times) / len(times)
    return (
        f"slowest {what} [bold]{seconds_text(max(times))}[/] per microbatch, forward and backward; "
        f"{percent(max(times) / mean_s - 1)} above the mean of all {what}s"
    )


def ranged(names: Sequence[str]) -> list[str]:
    """Names, runs of numbered ones drawn together.

    Example:
        >>> ranged(["wte", "h.0", "h.1", "h.2", "ln"])
        ['wte', 'h.0-2', 'ln']
    """
    runs: list[list[str]] = []
    for name in names:
        if runs and follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}" for run in runs]


def follows(before: str, name: str) -> bool:
    """Whether ``name`` is the layer after ``before``."""
    one, two = (re.fullmatch(r"(.*\.|)(\d+)", each) for each in (before, name))
    return bool(one and two and one[1] == two[1] and int(two[2]) == int(one[2]) + 1)


def counted(lines: Sequence[str]) -> list[str]:
    """Lines, equal ones counted.

    Example:
        >>> counted(["float32[2,8]", "float32[4]", "float32[2,8]"])
        ['2 × float32[2,8]', 'float32[4]']
    """
    times = {line: lines.count(line) for line in lines}
    return [f"{number} × {line}" if number > 1 else line for line, number in times.items()]
