"""Resolve a program from given numbers of stages, ranks and microbatches.

Given numbers determine the missing ones; contradictory numbers are refused. This module knows no
models.
"""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.messages import number_of
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family

__all__ = ["DEFAULT_MICROBATCHES", "choose_program", "directions_of"]

DEFAULT_MICROBATCHES = 8


def directions_of(schedule: str | Program) -> int:
    """The number of copies of the model under a schedule, given by name or as a program."""
    if isinstance(schedule, Program):
        return schedule.placement.num_directions
    return family(schedule).num_directions


def choose_program(
    schedule: str | Program,
    *,
    num_stages: int | None,
    n_microbatches: int | None,
    ranks: int | None,
    virtual: int | None,
    world: int | None,
) -> Program:
    """Choose the program to run.

    Args:
        schedule: a schedule's name, or the program itself.
        num_stages: number of stages of the model, if given.
        n_microbatches: microbatches per step, if given.
        ranks: number of ranks, if given.
        virtual: stages per rank, if given.
        world: number of processes; None if one process runs all ranks.

    Raises:
        ScheduleError: the numbers contradict each other or are incomplete.

    Example:
        >>> program = choose_program(
        ...     "1f1b", num_stages=2, n_microbatches=4, ranks=None, virtual=None, world=None
        ... )
        >>> program.num_ranks
        2
    """
    if isinstance(schedule, Program):
        _refuse_misfits(schedule, num_stages, n_microbatches, ranks, virtual, world)
        return schedule
    known = ranks if world is None else world
    if virtual is None:
        if num_stages is not None and known and num_stages % known == 0:
            virtual = num_stages // known
        else:
            virtual = family(schedule).default_virtual
    num_ranks = _ranks_for(num_stages, virtual) if known is None else known
    if num_stages is not None and num_stages != num_ranks * virtual:
        raise ScheduleError(
            f"{number_of(num_stages, 'stage')}, but {schedule} on {number_of(num_ranks, 'rank')} "
            f"with {virtual} per rank needs {num_ranks * virtual}; change split, ranks or virtual"
        )
    return build(
        schedule,
        ranks=num_ranks,
        microbatches=DEFAULT_MICROBATCHES if n_microbatches is None else n_microbatches,
        virtual=virtual,
    )


def _refuse_misfits(
    program: Program,
    num_stages: int | None,
    n_microbatches: int | None,
    ranks: int | None,
    virtual: int | None,
    world: int | None,
) -> None:
    """Refuse numbers that differ from those of a given program."""
    given = "the program given as schedule"
    if n_microbatches not in (None, program.num_whole_microbatches):
        raise ScheduleError(
            f"n_microbatches={n_microbatches}, but {given} has {program.num_whole_microbatches}"
        )
    if world not in (None, program.num_ranks):
        raise ScheduleError(
            f"{given} is for {number_of(program.num_ranks, 'rank')}, but there are {world}"
        )
    has_stages = program.placement.num_model_stages
    per_rank = has_stages / program.num_ranks
    for what, asked, has in (
        ("stages", num_stages, has_stages),
        ("ranks", ranks, program.num_ranks),
        ("stages per rank", virtual, int(per_rank) if per_rank.is_integer() else per_rank),
    ):
        if asked not in (None, has):
            raise ScheduleError(f"{asked} {what} are given, but {given} has {has}")


def _ranks_for(num_stages: int | None, virtual: int) -> int:
    if num_stages is None:
        raise ScheduleError("say on how many ranks to run: pass ranks=, or split= with the stages")
    if num_stages % virtual:
        raise ScheduleError(
            f"{number_of(num_stages, 'stage')} can't be laid on ranks {virtual} by {virtual}; "
            "pass a split whose length is a multiple of it"
        )
    return num_stages // virtual
