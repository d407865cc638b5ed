"""Ranks that are in different calls over one process group: an error on each, soon, not a hang."""

from __future__ import annotations

import time
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import Pipeline
from penstock.runtime import failure
from penstock.training import checkpoint
from penstock.training.clip import clip_grad_norm_
from tests.distributed.attempts import DIM, SOON_S, Run, played
from tests.processes import run_ranks


@dataclass(frozen=True)
class OutOfTurn:
    """Rank 1 makes ``call`` while rank 0 steps.

    Args:
        call: what it calls.
        steps: how many steps both pipelines have taken before.
    """

    call: str
    steps: int = 1

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        failure.OTHER_CALLS_S = 0.3
        batch = torch.ones(4, DIM)

        def pipeline() -> Pipeline:
            layers = [nn.Linear(DIM, DIM) for _ in range(2)]
            return Pipeline(
                layers, loss_fn=nn.functional.mse_loss, n_microbatches=2, group=group, timeout_s=20
            )

        student, teacher = pipeline(), pipeline()
        calls = {
            "step": lambda: student.step(batch, target=batch),
            "step of another": lambda: teacher.step(batch, target=batch),
            "eval of another": lambda: teacher.eval(batch),
            "trace": student.trace,
            "clip": lambda: clip_grad_norm_(student.parameters(), 1.0, group=group),
            "save": lambda: checkpoint.save("nowhere", student, group=group),
        }
        before = [calls["step"], calls["step of another"]] * self.steps
        return [*before, calls[self.call if rank == 1 else "step"]]


OTHERS = ("step of another", "eval of another", "trace", "clip", "save")
CASES = (*map(OutOfTurn, OTHERS), OutOfTurn("trace", steps=0), OutOfTurn("clip", steps=0))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.call}-{case.steps}")
def test_calls_that_differ_end_on_every_rank(case: OutOfTurn) -> None:
    told = []
    for *whole, last in played(CASES, 2)[case]:
        assert [each.message for each in whole] == [""] * 2 * case.steps
        assert last.kind == "ScheduleError", last.message
        assert last.elapsed_s < SOON_S
        assert "in the same order on every rank" in last.message
        told.append(last.message.partition("\n")[0])
    assert told[0] == told[1]


@dataclass(frozen=True)
class FailedElsewhere:
    """Rank 1's step fails by itself, while rank 0 clips gradients."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        failure.OTHER_CALLS_S = 0.3
        layers = [nn.Linear(DIM, DIM) for _ in range(2)]
        pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, n_microbatches=2, group=group)
        if rank == 0:
            return [lambda: clip_grad_norm_(pipe.parameters(), 1.0, group=group)]
        stop = mock.Mock(side_effect=KeyboardInterrupt("stopped"))
        pipe._schedule.splitter.split = stop  # type: ignore[method-assign]
        return [lambda: pipe.step(torch.ones(4, DIM), target=torch.ones(4, DIM))]


@dataclass(frozen=True)
class MistakenElsewhere:
    """Rank 1's step has a mistake, while rank 0 clips gradients."""

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        layers = [nn.Linear(DIM, DIM) for _ in range(2)]
        pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, n_microbatches=2, group=group)
        if rank == 0:
            return [lambda: clip_grad_norm_(pipe.parameters(), 1.0, group=group)]
        return [lambda: pipe.step(torch.ones(4, DIM), target=torch.ones(3, DIM), target_mbs=[])]


def test_a_mistake_in_another_call_is_the_cause() -> None:
    case = MistakenElsewhere()
    waited, failed = (told[0] for told in played((case,), 2)[case])
    assert waited.kind == failed.kind == "ScheduleError"
    assert "rank 0 in clip_grad_norm_(); rank 1 in the first step()" in failed.message
    assert failed.cause is not None and "target_mbs was given beside a batch" in failed.cause


def test_errors_in_another_call_are_raised() -> None:
    waited, failed = (told[0] for told in played((FailedElsewhere(),), 2)[FailedElsewhere()])
    assert failed.kind == "KeyboardInterrupt"
    assert waited.elapsed_s < SOON_S
    assert waited.kind == "PeerError"
    assert waited.where[0] == 1
    assert failed.message in waited.message


@dataclass(frozen=True)
class SavedInVain:
    """Saving fails on rank 1 alone, or on both ranks."""

    culprits: tuple[int, ...]

    def __call__(self, rank: int, group: dist.ProcessGroup) -> list[Run]:
        layers = [nn.Linear(DIM, DIM) for _ in range(2)]
        pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, n_microbatches=2, group=group)

        def burst(*_: object) -> None:
            raise KeyError("it burst")

        if rank in self.culprits:
            pipe.stages[0].submod.register_state_dict_post_hook(burst)

        def clip_late() -> None:
            time.sleep(1.0 * rank)  # so that the other one waits, and looks
            clip_grad_norm_(pipe.parameters(), 1.0, group=group)

        return [lambda: checkpoint.save("nowhere", pipe, group=group), clip_late]


def test_errors_of_saving_are_raised() -> None:
    (waited, _), (failed, _) = played((SavedInVain((1,)),), 2)[SavedInVain((1,))]
    assert failed.kind == "KeyError"
    assert waited.kind == "PeerError"
    assert waited.message.startswith("rank 1: KeyError: 'it burst'")
    assert waited.elapsed_s < SOON_S


def test_an_error_on_all_ranks_leaves_the_pipeline_usable() -> None:
    for failed, later in played((SavedInVain((0, 1)),), 2)[SavedInVain((0, 1))]:
        assert failed.kind in ("KeyError", "PeerError")
        assert "it burst" in failed.message
        assert later.kind is None, later.message


def join_again(rank: int, num_ranks: int) -> list[str]:
    """A step in a group of two ranks, and again in one of the same name and other ranks."""
    names = list[str]()
    for ranks in ([0, 1], [1, 2]):
        if 0 not in ranks:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
            port = [0 if server is None else server.port]
            dist.broadcast_object_list(port)
            store = dist.TCPStore("127.0.0.1", port[0]) if server is None else server
            dist.barrier()
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        group = dist.new_group(ranks)
        if rank in ranks:
            layers = [nn.Linear(DIM, DIM) for _ in ranks]
            pipe = Pipeline(layers, loss_fn=nn.functional.mse_loss, n_microbatches=2, group=group)
            pipe.step(torch.ones(4, DIM), target=torch.ones(4, DIM))
            names.append(group.group_name)
    return names


def test_a_later_group_may_have_the_name_of_another() -> None:
    _, names, _ = (outcome.result() for outcome in run_ranks(join_again, 3))
    assert names[0] == names[1]
