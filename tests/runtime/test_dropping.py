"""A pipeline that is dropped is gone at once: its weights, its groups, its threads.

Who waits for the garbage collector holds a model's memory meanwhile, and at the end of a process
gloo's threads, which abort it if they come too late.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from weakref import ref

import pytest
import torch
from torch import nn

from penstock import Pipeline
from tests.processes import run_ranks


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def alive_after_dropping(schedule: str, num_ranks: int) -> list[str]:
    layers = [nn.Linear(4, 4) for _ in range(2 * num_ranks)]
    pipe = Pipeline(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        n_microbatches=4,
        ranks=num_ranks,
    )
    for _ in range(2):
        pipe.step(torch.ones(8, 4), target=torch.ones(8, 4))
    pipe.eval(torch.ones(8, 4))
    pipe.trace()
    engine = pipe._schedule.engine
    made = (pipe, engine, *engine.transports, *pipe.stages, *(s.submod for s in pipe.stages))
    refs = [(type(each).__name__, ref(each)) for each in made]
    del pipe, engine, made, layers
    return [name for name, each in refs if each() is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe", "po-h"])
def test_in_one_process(schedule: str) -> None:
    assert alive_after_dropping(schedule, 2) == []


def alive_over_processes(rank: int, num_ranks: int) -> tuple[list[str], list[str]]:
    gc.disable()
    alive = alive_after_dropping("zbv", num_ranks)
    return alive, [thread.name for thread in threading.enumerate() if "penstock" in thread.name]


def test_over_processes() -> None:
    for outcome in run_ranks(alive_over_processes, 2):
        assert outcome.result() == ([], [])
