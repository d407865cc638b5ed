"""Programs beside those of torch.distributed.pipelining, where both define the same schedule."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as peer

from penstock.schedule.action import Op
from penstock.schedule.program import Program
from penstock.schedule.registry import build


def theirs(name: str, *, ranks: int, microbatches: int, virtual: int) -> list[list[str]]:
    """Each rank's computations as torch orders them, in torch's text."""
    mocks: list[Any] = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=ranks * virtual,
            group_rank=0,
            group_size=ranks,
            submod=None,
            is_first=stage == 0,
            is_last=stage == ranks * virtual - 1,
            has_backward=True,
        )
        for stage in range(virtual)
    ]
    single = virtual == 1 and name in ("ScheduleGPipe", "Schedule1F1B")
    # A loss marks the schedule as one that trains.
    schedule = getattr(peer, name)(
        mocks[0] if single else mocks, microbatches, loss_fn=lambda *_: None
    )
    orders = schedule.pipeline_order
    return [
        [
            str(each)
            for step in orders[rank]
            if step is not None
            for each in (step.sub_actions or (step,))
            if each.microbatch_index is not None
        ]
        for rank in range(ranks)
    ]


def ours(program: Program) -> list[list[str]]:
    return [[str(part) for step in steps for part in step.parts] for steps in program.ranks]


def without_weights(ranks: list[list[str]]) -> list[list[str]]:
    return [[text for text in actions if Op.WEIGHT_GRAD.value not in text] for actions in ranks]


@pytest.mark.parametrize(
    ("theirs_name", "virtual"),
    [
        ("Schedule1F1B", 1),
        ("ScheduleGPipe", 1),
        ("ScheduleInterleaved1F1B", 2),
        ("ScheduleInterleaved1F1B", 3),
        ("ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (3, 9)])
def test_the_same_actions_in_the_same_order(
    theirs_name: str, virtual: int, ranks: int, microbatches: int
) -> None:
    program = build(theirs_name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    sizes = {"ranks": ranks, "microbatches": microbatches, "virtual": virtual}
    mine, other = ours(program), theirs(theirs_name, **sizes)
    if theirs_name == "Schedule1F1B":
        # torch shows the last rank's forwards counted from 1 (it runs them by a separate loop).
        mine.pop(), other.pop()
    assert mine == other


@pytest.mark.parametrize(
    ("theirs_name", "virtual"),
    [("ScheduleZBVZeroBubble", 2), ("ScheduleInterleavedZeroBubble", 2)],
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12), (3, 9)])
def test_the_same_forwards_and_input_gradients_in_the_same_order(
    theirs_name: str, virtual: int, ranks: int, microbatches: int
) -> None:
    """Weight gradients fill what is idle; when exactly is each library's own affair."""
    program = build(theirs_name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    sizes = {"ranks": ranks, "microbatches": microbatches, "virtual": virtual}
    assert without_weights(ours(program)) == without_weights(theirs(theirs_name, **sizes))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 7)])
def test_looped_bfs_differs_only_in_the_order_of_microbatches_on_the_way_back(
    ranks: int, microbatches: int
) -> None:
    """Ours sums gradients in the order in which one device does; torch's in the reverse."""
    program = build("looped-bfs", ranks=ranks, microbatches=microbatches, virtual=2)
    for mine, other in zip(
        ours(program),
        theirs("ScheduleLoopedBFS", ranks=ranks, microbatches=microbatches, virtual=2),
        strict=True,
    ):
        turned = [
            text[: text.index("B") + 1] + str(microbatches - 1 - int(text[text.index("B") + 1 :]))
            if "B" in text
            else text
            for text in other
        ]
        assert mine == turned
