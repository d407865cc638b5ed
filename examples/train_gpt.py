"""Train a small GPT on Paradise Lost, over pipeline stages.

    torchrun --nproc-per-node 2 examples/train_gpt.py      a process per rank
    python examples/train_gpt.py                           all ranks in this process

Set in the environment: SCHEDULE (1f1b), MICROBATCHES (8), STEPS (120), RANKS (2; torchrun's number
of processes overrides it), OUT (runs/gpt). With ``--check`` it only says whether its model can be
trained by the schedule. The training itself is ``train``; the rest measures it,
compares it with a plain loop, and shows what came out.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from gpt import Config, cross_entropy, gpt, load_bytes
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timings import draw_beside, measured_costs
from torch import Tensor

import penstock
from penstock.schedule.registry import family
from penstock.training.checkpoint import save
from penstock.view.perfetto import save_perfetto

BATCH = 32
LENGTH = 64
LEARNING_RATE = 3e-3
TRACE_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for."""

    schedule: str = os.environ.get("SCHEDULE", "1f1b")
    microbatches: int = int(os.environ.get("MICROBATCHES", "8"))
    steps: int = int(os.environ.get("STEPS", "120"))
    ranks: int = int(os.environ.get("WORLD_SIZE", os.environ.get("RANKS", "2")))
    out: Path = Path(os.environ.get("OUT", "runs/gpt"))

    @property
    def num_stages(self) -> int:
        return self.ranks * family(self.schedule).default_virtual

    @property
    def model(self) -> Config:
        # Eight blocks, or as many more as it takes for every stage to hold equally many.
        whole = -(-8 // self.num_stages) * self.num_stages
        return Config(num_blocks=whole, dim=96, max_length=LENGTH)

    @property
    def split(self) -> list[int]:
        """Layers per stage: the blocks dealt evenly, the embedding first, the head last."""
        counts = [self.model.num_blocks // self.num_stages] * self.num_stages
        counts[0] += 1
        counts[-1] += 1
        return counts


@dataclass(slots=True)
class Run:
    """What a training came to."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    traces: list[penstock.Trace] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return BATCH * LENGTH / median(self.step_s)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the text and, for each of their bytes, the next one; the same on every rank."""
    text = load_bytes()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        pieces = text[starts + torch.arange(LENGTH + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def train(settings: Settings, progress: Progress) -> tuple[penstock.Pipeline, Run]:
    """The pipelined training. What a script of one's own needs is the marked lines."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(  # <─
        gpt(settings.model),
        loss_fn=cross_entropy,
        schedule=settings.schedule,
        n_microbatches=settings.microbatches,
        ranks=settings.ranks,
        split=settings.split,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE)  # <─
    run = Run()
    bar = progress.add_task("pipeline", total=settings.steps, told="")
    for inputs, target in batches(settings.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = pipe.step(inputs, target=target)  # <─
        optimizer.step()  # <─
        note(run, loss, start)
        if len(run.losses) % TRACE_EVERY == 0 or len(run.losses) == settings.steps:
            run.traces.append(pipe.trace())
        show(progress, bar, run)
    save(settings.out / "checkpoint", pipe, optimizer)
    return pipe, run


def train_plainly(settings: Settings, progress: Progress) -> Run:
    """The same training in one process, without Penstock: what it is compared with."""
    torch.manual_seed(0)
    model = gpt(settings.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run = Run()
    n = settings.microbatches
    bar = progress.add_task("plain loop", total=settings.steps, told="")
    for inputs, target in batches(settings.steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        losses = []
        for x, y in zip(inputs.tensor_split(n), target.tensor_split(n), strict=True):
            losses.append(cross_entropy(model(x), y))
            (losses[-1] / n).backward()
        optimizer.step()
        note(run, torch.stack(losses).mean(), start)
        show(progress, bar, run)
    return run


def note(run: Run, loss: Tensor | None, start: float) -> None:
    assert loss is not None, "a pipeline with a loss function returns the loss"
    run.losses.append(loss.item())
    run.step_s.append(time.perf_counter() - start)


def show(progress: Progress, bar: object, run: Run) -> None:
    """Move the bar on; where there is no terminal to draw it, say a line now and then."""
    told = f"loss {run.losses[-1]:.3f} {run.tokens_per_s:,.0f} tokens/s"
    if run.traces:
        told += f" bubble {run.traces[-1].bubble_ratio:.0%}"
    progress.update(bar, advance=1, told=told)  # type: ignore[arg-type]
    if not progress.disable and not progress.console.is_terminal:
        step = len(run.losses)
        if step == 1 or step % 25 == 0:
            print(f"{progress.tasks[-1].description}, step {step}: {told}", flush=True)


def peak_megabytes() -> float:
    """The most memory that this process has held."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6


def over_ranks(value: float) -> list[float]:
    """Every process's value, by rank."""
    if not dist.is_initialized():
        return [value]
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def report(
    console: Console,
    settings: Settings,
    pipelined: Run,
    plain: Run,
    program: penstock.Program,
    peaks: list[float],
) -> None:
    """The table at the end, and the files."""
    costs = measured_costs(pipelined.traces, program.num_stages)
    simulation = penstock.simulate(program, costs)
    measured = sorted(pipelined.traces, key=lambda trace: trace.bubble_ratio)
    typical = measured[len(measured) // 2]
    save_perfetto(typical, settings.out / "trace.json")
    draw_beside(typical, simulation.trace, settings.out / "timeline.png")
    table = Table(
        title=f"{program.name}: {settings.ranks} ranks, {settings.microbatches} microbatches"
    )
    table.add_column("")
    table.add_column("pipeline", justify="right")
    table.add_column("beside it", justify="right")
    ours, theirs = pipelined.losses[-1], plain.losses[-1]
    apart = "the same to the last bit" if ours == theirs else f"{abs(ours / theirs - 1):.1e} apart"
    table.add_row(
        "loss, first step", f"{pipelined.losses[0]:.6f}", f"{plain.losses[0]:.6f} plain loop"
    )
    table.add_row("loss, last step", f"{ours:.6f}", f"{theirs:.6f} plain loop")
    table.add_row("", "", apart)
    table.add_row(
        "tokens/s",
        f"{pipelined.tokens_per_s:,.0f}",
        f"{plain.tokens_per_s:,.0f} plain loop, 1 process",
    )
    bubble = "bubble" if len(peaks) > 1 else "bubble, ranks taking turns"
    table.add_row(bubble, f"{typical.bubble_ratio:.1%}", f"{simulation.bubble_ratio:.1%} simulated")
    for rank, peak in enumerate(peaks):
        name = f"peak memory, rank {rank}" if len(peaks) > 1 else "peak memory, all ranks"
        table.add_row(name, f"{peak:,.0f} MB", "")
    console.print(table)
    for name, what in (
        ("checkpoint", "the plain model's, for torch.distributed.checkpoint"),
        ("trace.json", "open it at https://ui.perfetto.dev"),
        ("timeline.png", "the measured step above the simulated one"),
    ):
        console.print(f"{settings.out / name}: {what}", highlight=False, soft_wrap=True)


def refuse_schedule(settings: Settings) -> None:
    """End with one line where the model can't be trained by the schedule."""
    name = settings.schedule
    program = penstock.build(name, ranks=settings.ranks, microbatches=settings.microbatches)
    if not program.has_backward:
        sys.exit(f"error: {name} has no backward, and trains nothing; take another SCHEDULE")
    if program.num_splits > 1:
        sys.exit(
            f"error: {name} splits sequences, for which layers take state (docs/sequences.md); "
            "this GPT's do not: take another SCHEDULE"
        )


def main() -> None:
    """Train, compare, report."""
    torch.set_num_threads(1)
    settings = Settings()
    refuse_schedule(settings)
    if "--check" in sys.argv:
        return
    is_first = int(os.environ.get("RANK", "0")) == 0
    console = Console()
    with contextlib.ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn())
        told = TextColumn("{task.fields[told]}")
        progress = Progress(
            *columns, told, TimeElapsedColumn(), console=console, disable=not is_first
        )
        stack.enter_context(progress)
        pipe, pipelined = train(settings, progress)
        peaks = over_ranks(peak_megabytes())
        program = pipe.program
        if dist.is_initialized():
            dist.destroy_process_group()
        # The other ranks are done; their cores are free while the plain loop runs.
        if not is_first:
            return
        plain = train_plainly(settings, progress)
    report(console, settings, pipelined, plain, program, peaks)


if __name__ == "__main__":
    main()
