"""What passes over activations ask of a program before they change it."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.program import Program

__all__ = ["refuse_kept_otherwise", "stages_of"]


def stages_of(program: Program, stages: Iterable[int] | None) -> frozenset[int]:
    """The stages that are meant, all if None.

    Raises:
        ScheduleError: a stage that the program does not have, or no stages at all.
    """
    if stages is None:
        return frozenset(range(program.num_stages))
    if not isinstance(stages, Iterable):
        raise ScheduleError(f"stages={stages!r}: expected numbers of stages, such as [0, 2]")
    chosen = frozenset(stages)
    strange = sorted(chosen - set(range(program.num_stages)))
    if strange:
        raise ScheduleError(
            f"program {program.name!r} has no stages {strange}; its stages are 0 to "
            f"{program.num_stages - 1}"
        )
    return chosen


def refuse_kept_otherwise(program: Program, stages: frozenset[int]) -> None:
    """Refuse stages whose activations are recomputed or offloaded already.

    Raises:
        ScheduleError: there are some.
    """
    ops = (Op.RECOMPUTE, Op.OFFLOAD)
    taken = sorted({a.stage for a in program.actions() if a.op in ops and a.stage in stages})
    if taken:
        raise ScheduleError(
            f"program {program.name!r}: stages {taken} are recomputed or offloaded already; "
            "pass stages= to choose others"
        )
