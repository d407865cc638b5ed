"""Programs: for each rank, its steps in order; no module, tensor or process group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from importlib import import_module

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, Overlap, Step
from penstock.schedule.placement import Placement
from penstock.schedule.rules import BACKWARDS, SENDS
from penstock.schedule.wording import numbers_of

__all__ = ["Program", "CheckedProgram", "refuse_no_program", "refuse_present", "sizes_text"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Program:
    """The steps of every rank.

    Args:
        name: the schedule's name.
        placement: the rank of every stage.
        num_microbatches: microbatches per step. If sequences are split, chunk i of the batch's
            microbatch m counts as microbatch m · num_splits + i.
        ranks: for each rank, its steps in order.
        num_splits: the number of chunks per sequence, for causal models; 1 for unsplit sequences.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    num_splits: int = 1

    @property
    def num_whole_microbatches(self) -> int:
        """Number of microbatches in the batch, before sequences are split."""
        return self.num_microbatches // self.num_splits

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    @property
    def overlapped_pairs(self) -> tuple[Overlap, ...]:
        """The overlapped pairs, rank by rank."""
        return tuple(s for steps in self.ranks for s in steps if isinstance(s, Overlap))

    @property
    def has_transfers(self) -> bool:
        """True if the program has explicit sends and receives."""
        return any(act.op in SENDS for act in self.actions())

    @property
    def has_backward(self) -> bool:
        """True if the program computes gradients."""
        return any(act.op in BACKWARDS for act in self.actions())

    def with_ranks(self, ranks: Iterable[Iterable[Step]]) -> Program:
        """A copy with other steps, not checked."""
        values = {each.name: getattr(self, each.name) for each in fields(Program)}
        return Program(**{**values, "ranks": tuple(map(tuple, ranks))})

    def actions(self) -> Iterator[Action]:
        """Every action, rank by rank, with overlapped pairs taken apart."""
        for steps in self.ranks:
            for step in steps:
                yield from step.parts

    def __repr__(self) -> str:
        """The sizes in a line, such as ``<Program 1f1b: 2 ranks, 2 stages, 4 microbatches>``."""
        return f"<{type(self).__name__} {self.name}: {sizes_text(self)}>"

    def _repr_html_(self) -> str:
        """The timeline at unit costs, for notebooks."""
        # By name, since views import programs.
        html: str = import_module("penstock.view.terminal").html_of(self)
        return html


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedProgram(Program):
    """A program without problems, made only by ``check``; the only kind that the runtime runs."""


def sizes_text(program: Program) -> str:
    """The sizes of a program, such as ``4 ranks, 8 stages, 16 microbatches``."""
    microbatches = program.num_whole_microbatches
    return numbers_of(rank=program.num_ranks, stage=program.num_stages, microbatch=microbatches)


def refuse_no_program(value: object, caller: str) -> None:
    """Raise a ScheduleError that names ``caller`` if a value is not a ``Program``."""
    if not isinstance(value, Program):
        name = value if isinstance(value, str) else "1f1b"
        raise ScheduleError(
            f"{caller} takes a program, not {value!r}; penstock.build({name!r}, ranks=..., "
            "microbatches=...) makes that of a schedule"
        )


def refuse_present(program: Program, ops: frozenset[Op], caller: str) -> None:
    """Raise a ScheduleError if a program already has actions that a pass would insert."""
    refuse_no_program(program, caller)
    names = sorted({act.op.value for act in program.actions() if act.op in ops})
    if names:
        raise ScheduleError(
            f"program {program.name!r} has {' and '.join(names)} already; take these actions out, "
            f"or leave {caller} out"
        )
