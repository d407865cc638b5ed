"""Slots of activations: never shared at a time, and as few as activations in flight."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from penstock import analyze_pipeline_activation_liveness as analyze
from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.registry import build, schedules
from penstock.schedule.text import parse_csv
from penstock.simulate.memory import peak_in_flight

NAMES = [each.name for each in schedules() if each.name not in ("forward-only", "inference")]


def steps_with(program: Program, rank: int, stage: int, microbatch: int) -> list[int]:
    """From the forward to the last action of a microbatch, by looking at every step."""
    names = {f"{stage}{op}{microbatch}" for op in "FBIW"}
    return [
        place
        for place, step in enumerate(program.ranks[rank])
        if names & {str(act) for act in step.parts}
    ]


@pytest.mark.parametrize("name", NAMES)
def test_activations_that_share_a_slot_never_meet(name: str) -> None:
    program = lower(build(name, ranks=4, microbatches=8))
    if not program.has_backward:
        return
    for rank in range(4):
        stages = program.placement.stages_of(rank)
        found = analyze(program, pp_rank=rank, stage_indices=stages, granularity="stage_microbatch")
        for key, lifetime in found.lifetimes.items():
            places = steps_with(program, rank, *key)
            assert lifetime == (places[0], places[-1])
        for one, other in itertools.combinations(found.lifetimes, 2):
            (first, last), (begun, ended) = found.lifetimes[one], found.lifetimes[other]
            meet = begun <= last and first <= ended
            assert not meet or found.slot_for(*one) != found.slot_for(*other)
        assert {*found.slot_by_stage_and_microbatch.values()} == {*range(found.num_slots)}
        alive = Counter(p for a, b in found.lifetimes.values() for p in range(a, b + 1))
        assert found.num_slots == max(alive.values())
        if not program.overlapped_pairs and Op.OFFLOAD not in {a.op for a in program.actions()}:
            assert found.num_slots == peak_in_flight(program)[rank]


def test_one_slot_for_all_stages_of_a_microbatch() -> None:
    program = parse_csv("0F0,1F0,0F1,1F1,1B0,1B1,0B0,0B1")
    found = analyze(program, pp_rank=0, stage_indices=[0, 1], granularity="microbatch")
    assert found.lifetimes == {(0, 0): (0, 6), (0, 1): (2, 7), (1, 0): (0, 6), (1, 1): (2, 7)}
    assert found.num_slots == 2
    assert [found.slot_for(s, m) for s in (0, 1) for m in (0, 1)] == [0, 1, 0, 1]
    of_one = analyze(program, pp_rank=0, stage_indices=[1], granularity="microbatch")
    assert of_one.lifetimes == {(1, 0): (1, 4), (1, 1): (3, 5)}
    with pytest.raises(ScheduleError, match=r"stage 0, microbatch 1 is not among the stages \[1\]"):
        of_one.slot_for(0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pp_rank": 2}, r"stages of rank 2, which has \[\]"),
        ({"stage_indices": []}, "expected distinct stages of rank 0"),
        ({"stage_indices": [0, 0]}, "expected distinct stages"),
        ({"stage_indices": [1]}, r"which has \[0\]"),
        ({"granularity": "stage"}, "'microbatch' or 'stage_microbatch'"),
        ({"schedule": build("forward-only", ranks=1, microbatches=2)}, "has no backward"),
    ],
)
def test_what_can_not_be_analyzed(changes: dict[str, object], message: str) -> None:
    given = {
        "schedule": build("1f1b", ranks=2, microbatches=4),
        "pp_rank": 0,
        "stage_indices": [0],
        "granularity": "microbatch",
    }
    with pytest.raises(ValueError, match=message):
        analyze(**(given | changes))  # type: ignore[arg-type]
