"""``penstock split``: measure a model, cut it into balanced stages, show them, write the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.asked import Asked
from penstock.cli.output import stdout
from penstock.cli.split_table import show
from penstock.cli.splitting import SplitRequest, measured_costs
from penstock.cli.values import parse_bytes
from penstock.errors import PartitionError
from penstock.partition.balance.layout import Layout
from penstock.partition.balance.terms import SplitObjective

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
        Path | None, typer.Option("--output", "-o", help="Write the plan: *.toml.")
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
    rule: Annotated[str | None, typer.Option(help="Not supported.", hidden=True)] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Balance for this schedule's ranks, which may hold several stages."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-r", help="On how many ranks --schedule runs.")
    ] = None,
    objective: Annotated[
        SplitObjective,
        typer.Option(help="The slowest stage or rank (max), or a step's length (step)."),
    ] = SplitObjective.BOTTLENECK,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="Microbatches per step.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="The most that a rank may hold, such as 16GB.")
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
    request = SplitRequest.read(layout=layout, rule=rule, num_stages=stages)
    if not request.is_balanced and (
        memory_limit or bandwidth or objective is not SplitObjective.BOTTLENECK
    ):
        raise PartitionError(
            "--memory-limit, --bandwidth and --objective are for balancing; leave them out with "
            "--layout"
        )
    if ranks is not None and schedule is None:
        raise PartitionError("--ranks says on how many ranks a --schedule runs; name one")
    if output is not None and output.suffix != ".toml":
        raise PartitionError(f"{output}: a plan is a .toml file; name it so")
    program = None if schedule is None else request.program(schedule, ranks, microbatches)
    terms = request.terms(
        program,
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
    counts, made = request.counts(measured, terms, program)
    made = f"{made}; measured on {measured.machine}, with {measured.example}"
    plan = measured.plan(counts, made=made)
    if output is not None:
        plan.save(output)
    if as_json:
        typer.echo(json.dumps(plan.to_dict(), indent=2))
        return
    show(plan, measured, str(Layout.of(measured.blocks, counts)), terms)
    if output is not None:
        stdout().print(f"wrote {output}", markup=False, soft_wrap=True)
