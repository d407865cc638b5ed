"""What ``penstock split`` is asked for, and the split that comes of it.

    model ──measured──► costs per block ──layout or balance──► counts ──► plan

This module shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.asked import Asked
from penstock.cli.models import failed, load_model
from penstock.cli.output import progress_bar
from penstock.errors import PartitionError, PenstockError
from penstock.partition.balance.balance import balanced
from penstock.partition.balance.costs import Profile
from penstock.partition.balance.for_program import balance_for
from penstock.partition.balance.layout import Layout
from penstock.partition.balance.terms import SplitObjective, Terms
from penstock.partition.plan import rules_refused
from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.schedule.resolve import choose_program
from penstock.schedule.rules import WEIGHT_GRADS

__all__ = ["SplitRequest", "measured_costs"]


def stage_flights(program: Program) -> list[int]:
    """The most microbatches that each of the model's stages holds at once.

    Example:
        >>> from penstock.schedule.registry import build
        >>> stage_flights(build("1f1b", ranks=3, microbatches=8))
        [3, 2, 1]
    """
    held = [0] * program.placement.num_stages
    most = [0] * program.placement.num_model_stages
    for steps in program.ranks:
        for action in (part for step in steps for part in step.parts):
            stage = action.stage
            held[stage] += (action.op is Op.FORWARD) - (action.op in WEIGHT_GRADS)
            model_stage = program.placement.model_stage(stage)
            most[model_stage] = max(most[model_stage], held[stage])
    return most


# --- where to cut ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """Where to cut, read before anything is measured.

    Args:
        num_stages: how many stages; None where a layout says it.
        layout: a layout string; None to balance.

    Raises:
        PartitionError: there are too many of these, or too few.
    """

    num_stages: int | None
    layout: Layout | None = None

    @classmethod
    def read(cls, *, layout: str | None, rule: str | None, num_stages: int | None) -> SplitRequest:
        """The request in the words of the command line."""
        if rule is not None:
            raise rules_refused(rule)
        return cls(
            num_stages=num_stages,
            layout=None if layout is None else Layout.parse(layout),
        )

    def __post_init__(self) -> None:
        if self.layout is None and self.num_stages is None:
            raise PartitionError("say how many stages: --stages 4, or a --layout that has them")
        if self.layout is not None and self.num_stages not in (None, len(self.layout.stages)):
            raise PartitionError(
                f"--stages {self.num_stages}, but the layout has {len(self.layout.stages)}; leave "
                "--stages out"
            )

    @property
    def is_balanced(self) -> bool:
        """Whether costs decide."""
        return self.layout is None

    def program(self, schedule: str, ranks: int | None, microbatches: int | None) -> Program:
        """The program of a schedule for so many stages."""
        return choose_program(
            schedule,
            num_stages=self.num_stages,
            n_microbatches=microbatches,
            ranks=ranks,
            virtual=None,
            world=None,
        )

    def terms(self, program: Program | None, **asked: Any) -> Terms:
        """What balancing is to reckon with.

        Args:
            program: of the schedule that the split is for; None for one stage on each rank.
            asked: the terms that do not follow from it.
        """
        num_stages = self.num_stages if self.layout is None else len(self.layout.stages)
        assert num_stages is not None, "only a layout says it itself"
        if program is not None:
            asked |= {"placement": program.placement, "in_flight": stage_flights(program)}
        return Terms(num_stages=num_stages, **asked)

    def counts(
        self, measured: Profile, terms: Terms, program: Program | None
    ) -> tuple[Sequence[int], str]:
        """The number of blocks per stage of a model with these costs, and how they were found."""
        if self.layout is not None:
            return self.layout.counts(measured.blocks), f"layout {self.layout}"
        free = terms.memory_limit is None and terms.bandwidth is None and not terms.latency_s
        if program is not None and free and terms.objective is SplitObjective.BOTTLENECK:
            found = balance_for(measured, program)  # there is nothing but the blocks' times
        else:
            found = balanced(measured, terms)
        aim = "the slowest stage" if program is None else program.name
        if terms.objective is SplitObjective.STEP:
            aim = "a step's length"
        return found.counts, f"balanced for {aim}"


# --- the costs ---------------------------------------------------------------------------------


def measured_costs(asked: Asked, file: Path | None, runs: int) -> Profile:
    """The model's costs: from the file where there is one, else measured, and kept there.

    Raises:
        PartitionError: there is no such model, or it fails.
    """
    if file is not None and file.exists():
        return Profile.load(file)
    from penstock.partition.balance.profile import profile
    from penstock.partition.balance.sample import repeat_layers

    loaded = load_model(asked)
    try:
        with bar() as progress:
            measured = profile(loaded.model, loaded.example, runs=runs, progress=progress)
    except PenstockError:
        raise
    except Exception as error:  # whatever the user's model raises
        raise failed(f"{asked.name}: its model, run on its example,", error) from error
    if loaded.trunks:
        measured = repeat_layers(measured, loaded.trunks)
    if file is not None:
        measured.save(file)
    return measured


@contextmanager
def bar() -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on standard error, gone when it is done."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    measuring, what = TextColumn("measuring"), TextColumn("{task.description}")
    with progress_bar(measuring, BarColumn(), MofNCompleteColumn(), what) as shown:
        task = shown.add_task("")
        yield lambda done, total, what: shown.update(
            task, completed=done, total=total, description=what
        )
