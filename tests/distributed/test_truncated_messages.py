"""A process that ends or is stopped in the middle of a large message: gloo wakes nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage, ScheduleGPipe
from tests.distributed.attempts import DIM, SOON_S, Attempt, attempt
from tests.processes import run_ranks

CPU = torch.device("cpu")
# 64 MB, for which a loopback takes some 50 ms.
NUM_ROWS = (16 << 20) // DIM
TIMEOUT_S = 2.0


class Widen(nn.Module):
    """Makes a large tensor of a small one; acts when its first one is on its way."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            time.sleep(0.005)
            self.act()
        return x[:1].expand(NUM_ROWS, DIM).clone()


class Narrow(nn.Module):
    """Makes a small tensor of a large one."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:2].clone()


def end_in_a_message(
    rank: int, num_ranks: int, culprit: int, how: signal.Signals
) -> tuple[object, ...]:
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(num_ranks)]
    torch.distributed.all_gather(pids, torch.tensor([os.getpid()]))
    ended = int(pids[culprit])
    module = Narrow() if rank else Widen(lambda: os.kill(ended, how))
    stage = PipelineStage(module, rank, num_ranks, CPU)
    schedule = ScheduleGPipe(stage, 2, timeout_s=TIMEOUT_S)
    batch = torch.ones(4, DIM)
    told = attempt(lambda: schedule.eval(*((batch,) if rank == 0 else ())))
    with contextlib.suppress(ProcessLookupError):
        os.kill(ended, signal.SIGKILL)
    return tuple(told)


@pytest.mark.parametrize(
    ("culprit", "how"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
def test_waiting_for_a_truncated_message_raises(culprit: int, how: signal.Signals) -> None:
    told = Attempt(*run_ranks(end_in_a_message, 2, culprit, how)[1 - culprit].result())
    assert told.kind == "PeerError"
    if how == signal.SIGKILL:
        assert "died" in told.message
        assert told.elapsed_s < SOON_S
    else:
        assert f"no word from rank {culprit} within 2 s" in told.message
        assert told.elapsed_s < TIMEOUT_S + SOON_S
