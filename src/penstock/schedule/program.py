"""A program: for each rank, the steps that it takes, in order.

A program says what runs when; it holds no module, tensor or process group. ``CheckedProgram``
is made by ``penstock.schedule.check.check`` alone, and is the only kind that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Overlap, Step
from penstock.schedule.placement import Placement
from penstock.schedule.rules import BACKWARDS, SENDS

__all__ = ["Program", "CheckedProgram", "refuse_no_program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The steps of every rank.

    Args:
        name: the schedule's canonical name, such as ``"1f1b"``.
        placement: which rank holds which stage.
        num_microbatches: microbatches per step. Where sequences are split, each piece of one is
            a microbatch of its own: piece i of the batch's microbatch m has the number
            m · num_splits + i.
        ranks: for each rank, its steps in order.
        num_splits: into how many pieces each sequence is split, for models that look back along
            it and never ahead; 1 where sequences are whole.
    """

    name: str
    placement: Placement
    num_microbatches: int
    ranks: tuple[tuple[Step, ...], ...]
    num_splits: int = 1

    @property
    def num_whole_microbatches(self) -> int:
        """Microbatches that the batch is split into, before their sequences are."""
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
    def blocks(self) -> tuple[Overlap, ...]:
        """The overlapped pairs, rank by rank."""
        return tuple(s for steps in self.ranks for s in steps if isinstance(s, Overlap))

    @property
    def has_transfers(self) -> bool:
        """Whether the program spells out its sends and receives."""
        # Overlapped pairs hold computations only; looking into none is several times faster.
        ops = {s.op for steps in self.ranks for s in steps if isinstance(s, Action)}
        return not SENDS.isdisjoint(ops)

    @property
    def has_backward(self) -> bool:
        """Whether the program computes gradients."""
        return any(act.op in BACKWARDS for act in self.actions())

    def with_ranks(self, ranks: tuple[tuple[Step, ...], ...]) -> Program:
        """The same schedule with other steps; to be checked anew."""
        return Program(
            name=self.name,
            placement=self.placement,
            num_microbatches=self.num_microbatches,
            ranks=ranks,
            num_splits=self.num_splits,
        )

    def actions(self) -> Iterator[Action]:
        """Every action, rank by rank, overlapped blocks taken apart."""
        for steps in self.ranks:
            for step in steps:
                yield from step.parts


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedProgram(Program):
    """A program that ``check`` found free of problems; the only kind that the runtime runs."""


def refuse_no_program(value: object, caller: str) -> None:
    """Refuse what was given in place of a program.

    Args:
        value: what was given.
        caller: what takes it, for the message.

    Raises:
        ScheduleError: it is no ``Program``.
    """
    if not isinstance(value, Program):
        name = value if isinstance(value, str) else "1f1b"
        raise ScheduleError(
            f"{caller} takes a program, not {value!r}; penstock.build({name!r}, ranks=..., "
            "microbatches=...) makes that of a schedule"
        )
