"""Training over real processes and gloo: the gradients of one device, bit by bit.

One set of processes plays many pipelines, since starting it takes most of the time.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from penstock.schedule.registry import family
from tests.agreement import TRAINING
from tests.compare import plain_step
from tests.crossings import CROSSINGS
from tests.distributed import workers
from tests.distributed.workers import Plan
from tests.models import CASES, features
from tests.processes import run_ranks


def results(work: Any, ranks: int, *args: Any) -> list[Any]:
    """What each rank returns."""
    return [outcome.result() for outcome in run_ranks(work, ranks, *args, timeout_s=200)]


# All play in one process in tests/runtime; over real ones, two ranks play all, and other numbers
# of ranks those that differ in how stages lie and in what is sent when. There, too, all models are
# trained with all schedules; here those with buffers and states over two ranks.
TELLING = (
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "interleaved-zb",
    "zbv",
    "v-half",
    "hanayo",
    "dualpipev",
    "po-h",
)


def schedules(ranks: int) -> tuple[str, ...]:
    """Those that so many ranks play."""
    return TRAINING if ranks == 2 else TELLING


def plans(ranks: int) -> list[Plan]:
    """Schedules with several models, stages and microbatches, and all inputs or fewest."""
    made = []
    for number, schedule in enumerate(schedules(ranks)):
        each = family(schedule)
        virtuals = [
            virtual
            for virtual in {1: (1, 2), 2: (1, 2), 3: (1, 2, 3), 4: (1, 2)}[ranks]
            if each.virtuals is None or virtual in each.virtuals
        ]
        for i, virtual in enumerate(virtuals):
            for j, mbs in enumerate((ranks - 1 or 3, ranks + 1)):
                # Of several numbers of stages, each with one of microbatches, in turn.
                if len(virtuals) == 1 or (number + i + j) % 2 == 0:
                    all_inputs = (j if len(virtuals) == 1 else i) % 2 == 0
                    made.append(Plan("mlp", schedule, virtual, mbs, all_inputs))
        made.append(Plan("gpt", schedule, each.default_virtual, 3, False))
        if ranks == 2 and schedule in TELLING:
            made.append(Plan("convnet", schedule, each.default_virtual, 4, True))
            made.append(Plan("lstm", schedule, each.default_virtual, 2, True))
    for virtual in (1, 2, 3):
        made.append(Plan("mlp", "forward-only", virtual, 3, virtual == 2))
    made.append(Plan("gpt", "forward-only", 2, 3, False))
    return made


@functools.cache
def trained(ranks: int) -> dict[Plan, list[str]]:
    """Each plan, trained in one set of processes: what was wrong with it, by rank."""
    every = plans(ranks)
    told = results(workers.train, ranks, [tuple(plan) for plan in every])
    return {plan: [told[rank][i] for rank in range(ranks)] for i, plan in enumerate(every)}


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(ranks, name) for ranks in (1, 2, 3, 4) for name in (*schedules(ranks), "forward-only")],
)
def test_schedules_run_as_one_device_does(ranks: int, schedule: str) -> None:
    played = {plan: told for plan, told in trained(ranks).items() if plan.schedule == schedule}
    assert len(played) >= 3
    for plan, told in played.items():
        for rank, wrong in enumerate(told):
            assert not wrong, f"{plan}, rank {rank}: {wrong}"


@pytest.mark.parametrize(
    ("schedule", "ranks", "dynamic_shapes"),
    [("gpipe", 4, False), ("zbv", 2, False), ("zbv", 2, True), ("interleaved-1f1b", 2, True)],
)
def test_boundary_values_are_never_pickled(schedule: str, ranks: int, dynamic_shapes: bool) -> None:
    names = list(CROSSINGS)
    for rank, told in enumerate(results(workers.cross, ranks, names, schedule, dynamic_shapes)):
        for name, wrong in zip(names, told, strict=True):
            assert not wrong, f"{name}, rank {rank}: {wrong}"


@pytest.mark.parametrize("schedules", [("gpipe", "1f1b"), ("zbv", "dualpipev", "interleaved-zb")])
def test_shapes_change_and_parameters_are_frozen_between_steps(schedules: tuple[str, ...]) -> None:
    ranks = 4 // family(schedules[0]).default_virtual
    for told in results(workers.shapes_and_freezing, ranks, list(schedules)):
        for wrong in told:
            assert not wrong, wrong


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("zbv", 2), ("interleaved-1f1b", 2)]
)
def test_unfrozen_from_the_last_layer_down(schedule: str, virtual: int) -> None:
    """What crosses changes on ranks whose first has seen nothing of it."""
    ranks = 4 // virtual
    for wrong in results(workers.unfrozen, ranks, schedule, 4):
        assert not wrong, wrong


def test_boundary_values_change_from_step_to_step() -> None:
    schedules = ["gpipe", "1f1b"]
    for rank, told in enumerate(results(workers.restless, 3, schedules)):
        for schedule, wrong in zip(schedules, told, strict=True):
            assert not wrong, f"{schedule}, rank {rank}: {wrong}"


def test_tensors_given_to_other_ranks_leave_steps_as_quick() -> None:
    told = results(workers.given_tensors, 3)
    for one in told:
        first, *quick, changed, last = one["notes"]
        assert first == changed > 0
        assert not any((*quick, last))
    assert "BoundaryError: " in told[1]["error"]
    assert "for another reason than what is passed to step() or eval()" in told[1]["error"]


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_every_rank_sees_the_same_losses_and_trace(schedule: str) -> None:
    told = results(workers.losses_and_traces, 2, schedule)
    model = CASES["mlp"].make(4)
    inputs, target = features(7, 0)
    expected = plain_step(model, CASES["mlp"].loss_fn, inputs, target=target, n_microbatches=3)
    for one in told:
        assert torch.equal(one["loss"], expected.loss)
        for losses in (one["losses"], one["eval losses with a target"]):
            assert all(map(torch.equal, losses, expected.losses))
            assert len(losses) == 3
        assert one["eval losses"] == 0
        assert one["metrics"] == ([3, 2, 2] if one["last"] else [])
        assert one["eval"] == one["last"]
        assert one["dtypes"] == [torch.bfloat16, torch.float32, torch.bfloat16, torch.int64]
        assert one["spans"] == told[0]["spans"]
        assert 0 < one["bubble_ratio"] < 1
        for rank in range(2):
            ran = [action for r, action, _, _ in one["spans"] if r == rank]
            assert ran == one["program"][rank]
    assert sum(one["last"] for one in told) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("members", [[1, 2], [0, 2]])
def test_a_pipeline_over_some_of_the_ranks(members: list[int], schedule: str) -> None:
    assert results(workers.subgroup, 3, members, schedule) == ["", "", ""]


def test_two_pipelines_side_by_side() -> None:
    """They share no key of the store, no message, and no failure."""
    assert results(workers.side_by_side, 4, ["1f1b", "zbv"]) == [""] * 4


def test_data_parallel_pipelines() -> None:
    schedules = [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)]
    for told in results(workers.replicated, 4, schedules):
        for wrong in told:
            assert not wrong, wrong
