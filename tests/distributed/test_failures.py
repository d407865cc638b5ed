"""What fails on one rank, inside a step, is told on every rank: soon, and with the first cause."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import PipelineStage, Schedule1F1B, build, get_schedule_class
from penstock.runtime.failure import report_uncaught
from penstock.schedule.placement import Placement
from tests.distributed.attempts import SOON_S, Attempt, Run, played

DIM = 4
NUM_MICROBATCHES = 4
CPU = torch.device("cpu")


class Boom(Exception):
    """The failure of the user's code."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure, and where it is planted.

    Args:
        schedule: which schedule runs.
        place: what fails: "forward", "backward" (a hook on the output), "hook" (on a parameter's
            accumulated gradient), "loss", or "shape" (an output of another shape than before).
        stage: in which stage.
        microbatch: at which microbatch.
        at_step: in which step, from 0; the ones before pass.
        evaluates: whether the steps are evaluations.
    """

    schedule: str
    place: str
    stage: int
    microbatch: int = 1
    at_step: int = 0
    evaluates: bool = False

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        placement = placement_of(self.schedule, group.size())
        bomb = Bomb(self.at_step * NUM_MICROBATCHES + self.microbatch)
        stages = []
        for index in placement.stages_of(rank):
            module = Faulty(self.place, bomb) if index == self.stage else nn.Linear(DIM, DIM)
            stages.append(PipelineStage(module, index, placement.num_stages, CPU, group=group))
        cls: Any = get_schedule_class(self.schedule)
        schedule = cls(
            stages if placement.num_stages > placement.num_ranks else stages[0],
            NUM_MICROBATCHES,
            FaultyLoss(bomb) if self.place == "loss" else nn.functional.mse_loss,
        )
        batch = torch.ones(8, DIM)
        args = (batch,) if 0 in placement.stages_of(rank) else ()

        def step() -> None:
            run = schedule.eval if self.evaluates else schedule.step
            run(*args, target=batch)

        return [step] * (self.at_step + 2)

    def __str__(self) -> str:
        when = f"step{self.at_step}" if not self.evaluates else "eval"
        return f"{self.schedule}-{self.place}-stage{self.stage}-{when}"


class Bomb:
    """Raises at its ``after``-th call, from 0."""

    def __init__(self, after: int) -> None:
        self._left = after

    def tick(self, *_: object) -> None:
        self._left -= 1
        if self._left < 0:
            raise Boom("it burst")


class Faulty(nn.Module):
    """A linear layer with a bomb in it."""

    def __init__(self, place: str, bomb: Bomb) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.place = place
        self.bomb = bomb
        if place == "hook":
            self.inner.weight.register_post_accumulate_grad_hook(bomb.tick)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        match self.place:
            case "forward":
                self.bomb.tick()
            case "backward":
                out.register_hook(self.bomb.tick)
            case "shape":
                try:
                    self.bomb.tick()
                except Boom:
                    return torch.cat([out, out])
        return out


class FaultyLoss:
    """Mean squared error, with a bomb in it."""

    def __init__(self, bomb: Bomb) -> None:
        self.bomb = bomb

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.bomb.tick()
        return nn.functional.mse_loss(output, target)


def placement_of(schedule: str, num_ranks: int) -> Placement:
    return build(schedule, ranks=num_ranks, microbatches=NUM_MICROBATCHES).placement


SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zbv")
PLACES = ("forward", "backward", "hook")


def faults(num_ranks: int) -> Iterator[Fault]:
    """With 3 ranks every schedule × place × stage; with others two schedules × place once."""
    stages = itertools.count()
    for schedule in SCHEDULES if num_ranks == 3 else ("1f1b", "zbv"):
        num_stages = placement_of(schedule, num_ranks).num_stages
        for place in PLACES:
            if num_ranks == 3:
                for stage in sorted({0, num_stages // 2, num_stages - 1}):
                    yield Fault(schedule=schedule, place=place, stage=stage)
            else:
                yield Fault(schedule=schedule, place=place, stage=next(stages) % num_stages)
        if num_ranks == 3 or schedule == "1f1b":
            yield from rarer_faults(schedule, num_stages)


def rarer_faults(schedule: str, num_stages: int) -> Iterator[Fault]:
    """In the loss, in shapes, in a later step, at the very end of a step, in evaluation."""
    middle, last = num_stages // 2, num_stages - 1
    yield Fault(schedule=schedule, place="loss", stage=last)
    yield Fault(schedule=schedule, place="shape", stage=last - 1)
    yield Fault(schedule=schedule, place="forward", stage=middle, at_step=2)
    # By then the other ranks may have nothing left to do, and nobody to wait for.
    yield Fault(schedule=schedule, place="hook", stage=0, at_step=2, microbatch=3)
    yield Fault(schedule=schedule, place="forward", stage=middle, evaluates=True)
    yield Fault(schedule=schedule, place="loss", stage=last, evaluates=True)


ALL = {num_ranks: tuple(faults(num_ranks)) for num_ranks in (2, 3, 4)}


def params() -> list[Any]:
    return [
        pytest.param(num_ranks, fault, id=f"{num_ranks}-{fault}")
        for num_ranks, planted in ALL.items()
        for fault in planted
    ]


@pytest.mark.parametrize(("num_ranks", "fault"), params())
def test_every_rank_raises_with_the_first_cause(num_ranks: int, fault: Fault) -> None:
    by_rank = played(ALL[num_ranks], num_ranks)[fault]
    culprit = placement_of(fault.schedule, num_ranks).rank_of(fault.stage)
    for rank, attempts in enumerate(by_rank):
        *whole, broken, after = attempts
        assert [a.kind for a in whole] == [None] * fault.at_step
        assert broken.elapsed_s < SOON_S
        if fault.place == "shape":
            assert broken.kind == "BoundaryError", broken.message
            assert f"output 0 is float32[{4},{DIM}]" in broken.message
            assert "expected" in broken.message and f"[{2},{DIM}]" in broken.message
        else:
            assert broken.kind == ("StageError" if rank == culprit else "PeerError")
            assert "it burst" in broken.message
        assert_names_place(broken, fault, culprit)
        if rank != culprit:
            # The user's own code, once, but where the library itself found the mistake.
            times = int(fault.place != "shape")
            assert broken.message.count("Traceback (most recent call last)") == times
            assert broken.message.count("in tick") == times, broken.message
        elif fault.place != "shape":
            assert broken.cause == "Boom('it burst')"
        assert_refuses(after)


def assert_names_place(broken: Attempt, fault: Fault, culprit: int) -> None:
    rank, stage, microbatch, action = broken.where
    assert (rank, stage, microbatch) == (culprit, fault.stage, fault.microbatch), broken.message
    forward = fault.place in ("forward", "loss", "shape")
    # Nobody waits for the first stage's input gradients: its whole backward is in W.
    backward = "BW" if fault.stage == 0 else "BI"
    ops = "F" if forward else {"backward": backward, "hook": "BW"}[fault.place]
    assert action in {f"{stage}{op}{microbatch}" for op in ops}
    place = f"rank {rank}, stage {stage}, microbatch {microbatch}, action {action}"
    assert broken.message.count(place) >= 1


def assert_refuses(after: Attempt) -> None:
    """A step after a failure raises at once, and says why."""
    assert after.kind == "PeerError"
    assert "an earlier step failed" in after.message
    assert "start several processes again, from a checkpoint" in after.message
    assert after.elapsed_s < 0.5


@dataclass(frozen=True, kw_only=True)
class Together:
    """Both ranks of two fail before either has heard from the other."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        module = Faulty("forward", Bomb(1)) if rank == 0 else nn.Linear(DIM, DIM)
        loss = FaultyLoss(Bomb(0)) if rank else nn.functional.mse_loss
        schedule = get_schedule_class("gpipe")(
            PipelineStage(module, rank, 2, CPU, group=group),  # type: ignore[arg-type]
            2,
            loss,
        )
        batch = torch.ones(4, DIM)
        return [lambda: schedule.step(*((batch,) if rank == 0 else ()), target=batch)]


def test_of_two_failures_one_is_first_on_every_rank() -> None:
    case = Together()
    (zero,), (one,) = played((case,), 2)[case]
    assert zero.where == one.where
    first = zero.where[0]
    assert [zero.kind, one.kind] == ["StageError" if r == first else "PeerError" for r in (0, 1)]
    assert zero.where[3] in ("0F1", "1F0")


@dataclass(frozen=True, kw_only=True)
class Again:
    """After a failure, another schedule over the same group, and one over another group."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        failing = Faulty("forward", Bomb(1)) if rank == 1 else nn.Linear(DIM, DIM)
        another = dist.new_group(list(range(group.size())))

        def step(module: nn.Module, over: dist.ProcessGroup) -> None:
            stage = PipelineStage(module, rank, group.size(), CPU, group=over)
            batch = torch.ones(4, DIM)
            schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
            schedule.step(*((batch,) if rank == 0 else ()), target=batch)

        modules = (failing, nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
        groups = (group, group, another)
        return [partial(step, *each) for each in zip(modules, groups, strict=True)]


def test_after_a_failure_another_group_serves() -> None:
    for first, again, anew in played((Again(),), 3)[Again()]:
        assert "it burst" in first.message
        assert again.kind == "PeerError"
        assert "or an earlier failure over this process group broke it" in again.message
        assert anew.kind is None, anew.message


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Two schedules over one group; one fails, and both have stepped before."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        def stepping(module: nn.Module) -> Run:
            stage = PipelineStage(module, rank, group.size(), CPU, group=group)
            batch = torch.ones(4, DIM)
            schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
            return lambda: schedule.step(*((batch,) if rank == 0 else ()), target=batch)

        failing = stepping(Faulty("forward", Bomb(3)) if rank == 1 else nn.Linear(DIM, DIM))
        other = stepping(nn.Linear(DIM, DIM))
        return [failing, other, failing, other]


def test_a_schedule_next_to_a_failed_one_says_so() -> None:
    for *whole, failed, other in played((Beside(),), 2)[Beside()]:
        assert [each.kind for each in whole] == [None, None]
        assert "it burst" in failed.message
        assert "or an earlier failure over this process group broke it" in other.message


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Between two steps, an exception that nobody catches ends rank 1."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        stage = PipelineStage(nn.Linear(DIM, DIM), rank, group.size(), CPU, group=group)
        schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
        batch = torch.ones(4, DIM)

        def step() -> None:
            schedule.step(*((batch,) if rank == 0 else ()), target=batch)

        def end() -> None:
            try:
                raise Boom("the optimizer burst")
            except Boom as error:
                sys.last_value = error  # as Python itself does, before it runs what is due at exit
                report_uncaught()
                del sys.last_value

        return [step, end if rank == 1 else step]


def test_the_error_that_ends_a_process_between_steps_reaches_its_peers() -> None:
    (_, waited), (_, ended) = played((Ended(),), 2)[Ended()]
    assert ended.kind is None, ended.message
    assert waited.kind == "PeerError"
    assert waited.where[0] == 1
    assert waited.message.startswith("rank 1: Boom: the optimizer burst")
    assert "in end\n" in waited.message
    assert waited.elapsed_s < SOON_S
