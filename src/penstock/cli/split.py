"""``penstock split``: measure a model, cut it into balanced stages, show them, write the plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.asked import Asked
from penstock.cli.models import load_model
from penstock.cli.sizes import bytes_text, parse_bytes, seconds_text
from penstock.cli.terminal import percent, stderr, stdout, table
from penstock.errors import PartitionError
from penstock.partition.balance import Objective, balance
from penstock.partition.costs import Profile
from penstock.partition.layout import Layout, Rule
from penstock.partition.plan import Plan, StageCosts

__all__ = ["split"]


def split(
    model: Annotated[
        str,
        typer.Argument(
            help="module:function, which returns (model, example); or a configuration of "
            "transformers (llama, LlamaConfig, LlamaForCausalLM), with random weights."
        ),
    ],
    *,
    stages: Annotated[int | None, typer.Option("--stages", "-s", help="How many stages.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan: *.toml or *.json.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value for the configuration; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Rows of a microbatch.")] = 1,
    length: Annotated[int, typer.Option(help="Tokens per row.")] = 128,
    device: Annotated[str, typer.Option(help="Where to measure.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="The model's dtype.")] = "float32",
    max_size: Annotated[str, typer.Option(help="The most that parameters may take.")] = "4GB",
    sample: Annotated[
        int | None,
        typer.Option(help="Make and measure so many layers; the others cost the same."),
    ] = None,
    runs: Annotated[int, typer.Option(help="Measure so often; the median counts.")] = 5,
    costs: Annotated[
        Path | None,
        typer.Option(help="Read costs from this file where it is; else measure, and write it."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Cut as Megatron's layout says: 'Et*3|(tt|)*29,m|L'.")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Cut by a rule: uniform, parameters or type:regex.")
    ] = None,
    objective: Annotated[
        Objective, typer.Option(help="The slowest stage (max), or a step's length (step).")
    ] = Objective.BOTTLENECK,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches per step.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="The most that a stage may hold, such as 16GB.")
    ] = None,
    state_factor: Annotated[
        float, typer.Option(help="Held per byte of parameters: 4 with gradients and Adam.")
    ] = 4.0,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes per second between stages, such as 10GB.")
    ] = None,
    latency: Annotated[float, typer.Option(help="Seconds that each transfer takes besides.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Measure a model, cut it into balanced stages, and show what each holds and sends."""
    if layout is not None and rule is not None:
        raise PartitionError("--layout and --rule say each where to cut; give one of them")
    if (layout or rule) and (memory_limit or bandwidth or objective is not Objective.BOTTLENECK):
        raise PartitionError(
            "--memory-limit, --bandwidth and --objective are for balancing; leave them out with "
            "--layout or --rule"
        )
    if output is not None and output.suffix not in (".toml", ".json"):
        raise PartitionError(f"{output}: a plan is kept as .toml or .json; name it so")
    cutting = cutting_by(layout, rule, stages)
    terms = Terms(
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        state_factor=state_factor,
        bandwidth=None if bandwidth is None else parse_bytes(bandwidth),
        latency_s=latency,
        objective=objective,
        microbatches=microbatches,
    )
    asked = Asked(
        name=model,
        settings=tuple(settings or ()),
        batch=batch,
        length=length,
        device=device,
        dtype=dtype,
        max_bytes=parse_bytes(max_size),
        sample=sample,
    )
    measured = measured_costs(asked, costs, runs)
    counts, made = cutting(measured, terms)
    made = f"{made}; measured on {measured.machine}, with {measured.example}"
    plan = measured.plan(counts, made=made)
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(plan.to_json(), nl=False)
        return
    show(plan, measured, str(Layout.of(measured.blocks, counts)), terms)
    if output is not None:
        stdout().print(f"wrote {output}", markup=False, soft_wrap=True)


# --- where to cut ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What balancing is to reckon with; see ``balance``."""

    memory_limit: float | None
    state_factor: float
    bandwidth: float | None
    latency_s: float
    objective: Objective
    microbatches: int | None


Cutting = Callable[[Profile, Terms], tuple[Sequence[int], str]]


def cutting_by(layout: str | None, rule: str | None, stages: int | None) -> Cutting:
    """How to cut, read before anything is measured."""
    if layout is not None:
        read = Layout.parse(layout)
        if stages not in (None, len(read.stages)):
            raise PartitionError(
                f"--stages {stages}, but the layout has {len(read.stages)}; leave --stages out"
            )
        return lambda measured, _: (read.counts(measured.blocks), f"layout {read}")
    if stages is None:
        raise PartitionError("say how many stages: --stages 4, or a --layout that has them")
    if rule is not None:
        parsed = Rule.parse(rule)
        return lambda measured, _: (
            parsed.counts(measured.blocks, num_stages=stages),
            f"rule {parsed}",
        )
    return lambda measured, terms: balanced(measured, stages, terms)


def balanced(measured: Profile, stages: int, terms: Terms) -> tuple[Sequence[int], str]:
    """The balanced split."""
    found = balance(
        measured,
        stages,
        terms.memory_limit,
        terms.objective,
        state_factor=terms.state_factor,
        bandwidth=terms.bandwidth,
        latency_s=terms.latency_s,
        microbatches=terms.microbatches,
    )
    aim = "the slowest stage" if terms.objective is Objective.BOTTLENECK else "a step's length"
    return found.counts, f"balanced for {aim}"


# --- the costs ---------------------------------------------------------------------------------


def measured_costs(asked: Asked, file: Path | None, runs: int) -> Profile:
    """The model's costs: from the file where there is one, else measured, and kept there."""
    if file is not None and file.exists():
        return Profile.load(file)
    from penstock.partition.profile import profile
    from penstock.partition.sample import repeat_layers

    loaded = load_model(asked)
    with bar() as progress:
        measured = profile(loaded.model, loaded.example, runs=runs, progress=progress)
    if loaded.trunks:
        measured = repeat_layers(measured, loaded.trunks)
    if file is not None:
        measured.save(file)
    return measured


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
    )
    console = stderr()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task("")
        yield lambda done, total, what: shown.update(
            task, completed=done, total=total, description=what
        )


# --- the table ---------------------------------------------------------------------------------


def show(plan: Plan, measured: Profile, layout: str, terms: Terms) -> None:
    """The table of stages, and what the split comes to."""
    numbers = ("stage", "parameters", "time", "share", "activations", "holds", "sends")
    columns = ["stage", "modules", "parameters", "time", "share", "activations", "sends", "across"]
    if terms.memory_limit is not None:
        columns.insert(6, "holds")
    title = f"{plan.model}: {len(measured.blocks)} blocks, {plan.num_stages} stages"
    shown = table(*columns, numbers=numbers, title=title)
    total_s = sum(costs.time_s for costs in plan.costs)
    for stage, (names, costs) in enumerate(zip(plan.stages, plan.costs, strict=True)):
        row = [
            f"[bold]{stage}[/]",
            "\n".join(ranged(names)),
            f"{costs.parameters:,}",
            seconds_text(costs.time_s),
            percent(costs.time_s / total_s),
            bytes_text(costs.activation_bytes),
            bytes_text(costs.sent_bytes) if costs.sends else "",
            "\n".join(counted(costs.sends)),
        ]
        if terms.memory_limit is not None:
            row.insert(6, bytes_text(held_bytes(costs, stage, plan.num_stages, terms)))
        shown.add_row(*row)
    console = stdout()
    console.print(shown)
    slowest = max(plan.costs, key=lambda costs: costs.time_s)
    mean_s = total_s / plan.num_stages
    console.print(
        f"slowest stage [bold]{seconds_text(slowest.time_s)}[/] per microbatch, forward and "
        f"backward; {percent(slowest.time_s / mean_s - 1)} above the mean of all stages",
        soft_wrap=True,
    )
    console.print(f"layout {layout}", markup=False, soft_wrap=True)
    console.print(plan.made, markup=False, soft_wrap=True, style="dim")


def held_bytes(costs: StageCosts, stage: int, num_stages: int, terms: Terms) -> float:
    """What a stage holds under 1F1B."""
    flight = min(num_stages - stage, terms.microbatches or num_stages)
    return terms.state_factor * costs.parameter_bytes + flight * costs.activation_bytes


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
