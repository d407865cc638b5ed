"""The indices of a rank's stages, by the schedule's class."""

from __future__ import annotations

import pytest

import penstock
from penstock import PipelineSchedule, ScheduleError, build

CLASSES = [
    cls
    for cls in (getattr(penstock, name) for name in penstock.__all__)
    if isinstance(cls, type) and issubclass(cls, PipelineSchedule) and cls.schedule_name is not None
]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_stage_lies_where_the_program_has_it(
    cls: type[PipelineSchedule], num_ranks: int
) -> None:
    assert cls.schedule_name is not None
    placement = build(cls.schedule_name, ranks=num_ranks, microbatches=8).placement
    ids = [cls.stage_ids(rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert ids == [placement.stages_of(rank) for rank in range(num_ranks)]
    assert sorted(stage for stages in ids for stage in stages) == list(range(placement.num_stages))


def test_one_process_is_one_rank() -> None:
    assert penstock.Schedule1F1B.stage_ids() == (0,)
    assert penstock.ScheduleInterleaved1F1B.stage_ids(virtual=3) == (0, 1, 2)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 4 of 4 ranks does not exist"):
        penstock.Schedule1F1B.stage_ids(4, num_ranks=4)
    with pytest.raises(ScheduleError, match=r"takes even P.*nearest that do are ranks=4"):
        penstock.ScheduleDualPipe.stage_ids(0, num_ranks=3)
    with pytest.raises(ScheduleError, match=r"use its program\.placement\.stages_of\(rank\)"):
        penstock.ScheduleProgram.stage_ids(0, num_ranks=2)
