"""The forward of one microbatch on a middle rank, from receive to send, once shapes are known."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import PipelineStage, Schedule1F1B
from penstock.schedule.action import Op
from tests.processes import run_ranks

SOURCES = str(Path(penstock.__file__).parent)
MICROBATCH = 3


class Crossings:
    """The files of Penstock that are entered, and the objects of Penstock whose methods run."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.objects: dict[int, object] = {}

    def record(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(SOURCES):
            self.files.add(file.removeprefix(SOURCES))
            owner = frame.f_locals.get("self")
            if type(owner).__module__.startswith("penstock."):
                self.objects[id(owner)] = owner

    def trace(self, run: Callable[[], None]) -> None:
        sys.setprofile(self.record)
        try:
            run()
        finally:
            sys.setprofile(None)


def steady_forward(rank: int, num_ranks: int) -> tuple[list[str], list[str]]:
    """Train for three steps, and return what the forward of the last one crosses."""
    torch.manual_seed(0)
    stage = PipelineStage(nn.Linear(4, 4), rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 6, F.mse_loss)
    inputs, target = torch.ones(12, 4), torch.ones(12, 4)
    for _ in range(2):
        schedule.step(inputs, target=target)
    executor = schedule.engine._train.executor
    crossings = Crossings()
    crossings.files.add("/runtime/executor.py")
    crossings.objects[id(executor)] = executor
    for i, bound in enumerate(executor.actions):
        forward = bound.action.op in (Op.RECV_F, Op.FORWARD, Op.SEND_F)
        if forward and bound.action.microbatch == MICROBATCH:
            executor._runs[i] = partial(crossings.trace, executor._runs[i])
    schedule.step(inputs, target=target)
    names = (type(owner).__name__ for owner in crossings.objects.values())
    return sorted(crossings.files), sorted(names)


def test_a_middle_ranks_forward_crosses_few_files_and_objects() -> None:
    _, middle, _ = run_ranks(steady_forward, 3)
    files, objects = middle.result()
    assert {"/runtime/stage_runner.py", "/runtime/comm/c10d.py", "/stage/stage.py"} <= {*files}
    assert len(files) <= 8, files
    assert len(objects) <= 7, objects
