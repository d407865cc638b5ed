"""One pipeline of two replicas fails: the other, which waits in a reduction, raises as well."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from penstock import PipelineStage, Schedule1F1B
from tests.distributed.attempts import DIM, SOON_S, At, Attempt, attempt
from tests.distributed.replicas import CPU, WRAPS, make_meshes
from tests.processes import Outcome, run_ranks

# The processes of a 2 × 2 mesh: pipelines (0, 2) and (1, 3), replicas (0, 1) and (2, 3).
NUM_PROCESSES = 4
PIPELINE_OF = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def make_step(module: nn.Module, wrap: str, timeout_s: float) -> Callable[[], object]:
    pipeline, replicas = make_meshes()
    rank = pipeline.get_local_rank()
    stage = PipelineStage(WRAPS[wrap](module, replicas), rank, 2, CPU, group=pipeline.get_group())
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss, timeout_s=timeout_s)
    batch = torch.ones(8, DIM)
    return lambda: schedule.step(*((batch,) if rank == 0 else ()), target=batch)


def boom() -> None:
    raise ValueError("it burst")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail_in_one(
    process: int, num: int, culprit: int, how: str, wrap: str, after: int
) -> list[tuple[object, ...]]:
    acts = {"raise": boom, "die": kill, "sleep": lambda: time.sleep(4)}
    act = acts[how] if process == culprit else lambda: None
    step = make_step(At(act, after), wrap, timeout_s=1.0 if how == "sleep" else 60)
    return [tuple(attempt(step)) for _ in range(after // 4 + 2)]


# The wrapper, who fails, and after how many forwards: in the first step, or in a later one.
RAISED = [("ddp", 1, 1), ("ddp", 2, 6), ("fsdp", 2, 1), ("fsdp", 1, 6), ("replicate", 0, 6)]
# Process 0 holds the store that the others learn causes from.
KILLED = [(wrap, *case) for case in [(3, 1), (0, 5)] for wrap in ("ddp", "fsdp")]
SILENT = [("ddp", 1, 1), ("fsdp", 1, 1)]


@functools.cache
def outcomes_by_launch() -> dict[tuple[Any, ...], list[Outcome]]:
    """The outcomes of all cases, two at a time: the processes mostly wait."""
    by_way = {"raise": RAISED, "die": KILLED, "sleep": SILENT}
    launches = [
        (culprit, how, wrap, after)
        for how, cases in by_way.items()
        for wrap, culprit, after in cases
    ]
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda each: run_ranks(fail_in_one, NUM_PROCESSES, *each), launches)
        return dict(zip(launches, outcomes, strict=True))


@pytest.mark.parametrize(("wrap", "culprit", "after"), RAISED)
def test_an_error_in_one_replica_is_raised_in_the_others(
    wrap: str, culprit: int, after: int
) -> None:
    outcomes = outcomes_by_launch()[culprit, "raise", wrap, after]
    for process, outcome in enumerate(outcomes):
        *whole, broken, again = (Attempt(*told) for told in outcome.result())
        assert [a.kind for a in whole] == [None] * (after // 4)
        assert broken.elapsed_s < SOON_S, broken.message
        assert broken.kind == ("StageError" if process == culprit else "PeerError")
        assert "ValueError: it burst" in broken.message
        stage = PIPELINE_OF[culprit].index(culprit)
        assert broken.where == (stage, stage, after % 4, f"{stage}F{after % 4}")
        elsewhere = f"in another replica's pipeline (processes {culprit % 2}, {culprit % 2 + 2})"
        assert (elsewhere in broken.message) == (process % 2 != culprit % 2)
        assert (again.kind, again.elapsed_s < 0.5) == ("PeerError", True)


@pytest.mark.parametrize(("wrap", "culprit", "after"), KILLED)
def test_a_replica_that_is_killed_is_noticed_by_all(wrap: str, culprit: int, after: int) -> None:
    outcomes = outcomes_by_launch()[culprit, "die", wrap, after]
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    for process, outcome in enumerate(outcomes):
        if process == culprit:
            continue
        *whole, broken, again = (Attempt(*told) for told in outcome.result())
        assert [a.kind for a in whole] == [None] * (after // 4)
        assert broken.elapsed_s < SOON_S, broken.message
        assert broken.kind == again.kind == "PeerError", broken.message
        assert "died" in broken.message


@pytest.mark.parametrize(("wrap", "culprit", "after"), SILENT)
def test_a_silent_replica_is_not_waited_for_beyond_the_deadline(
    wrap: str, culprit: int, after: int
) -> None:
    outcomes = outcomes_by_launch()[culprit, "sleep", wrap, after]
    for process, outcome in enumerate(outcomes):
        broken, _ = (Attempt(*told) for told in outcome.result())
        assert broken.kind == "PeerError"
        assert "within 1 s" in broken.message
        assert broken.elapsed_s < (SOON_S if process != culprit else 10)


class NoReduction:
    """In place of FSDP's reduction: one that torch refuses, as gloo does some."""

    def allocate(self, size: tuple[int, ...], **like: Any) -> torch.Tensor:
        return torch.empty(*size, **like)

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError("no such reduction")


def reduce_badly(process: int, num: int) -> tuple[object, ...]:
    module = nn.Linear(DIM, DIM)
    step = make_step(module, "fsdp", timeout_s=60)
    assert isinstance(module, FSDPModule)
    module.set_custom_reduce_scatter(NoReduction())
    return tuple(attempt(step))


def test_a_reduction_that_torch_refuses_is_not_a_dead_replica() -> None:
    outcomes = [Attempt(*outcome.result()) for outcome in run_ranks(reduce_badly, NUM_PROCESSES)]
    assert "StageError" in {broken.kind for broken in outcomes}
    for broken in outcomes:
        assert "REDUCE_GRAD: RuntimeError: no such reduction" in broken.message
        assert "died" not in broken.message


def lag(process: int, num: int, culprit: int) -> tuple[object, ...] | None:
    """The processes of one pipeline never come to their step."""
    step = make_step(nn.Linear(DIM, DIM), "ddp", timeout_s=0.5)
    step()
    told = None
    if process % 2 != culprit:
        told = tuple(attempt(step))
    dist.barrier()
    return told


def test_a_pipeline_that_does_not_step_is_not_waited_for_without_end() -> None:
    outcomes = run_ranks(lag, NUM_PROCESSES, 1)
    for process in (0, 2):
        broken = Attempt(*outcomes[process].result())
        assert broken.kind == "PeerError"
        assert "no word from" in broken.message and "within 0.5 s" in broken.message
        assert broken.elapsed_s < SOON_S
