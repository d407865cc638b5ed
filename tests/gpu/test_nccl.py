"""One rank per device, over NCCL: the gradients of the plain loop, and no rank that hangs."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.schedule.registry import family
from tests.agreement import Twins
from tests.compare import Tolerance
from tests.crossings import CROSSINGS, crossing_model
from tests.distributed.sharing import tied_gpt
from tests.gpu.device import GPU, train, twins
from tests.models import features, gpt, token_loss, tokens
from tests.processes import run_ranks

RANKS = 2
pytestmark = [
    *GPU,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} CUDA devices"),
    pytest.mark.timeout(300),
]


def make_group(rank: int, num_ranks: int) -> dist.ProcessGroup:
    torch.cuda.set_device(rank)
    return dist.new_group(list(range(num_ranks)), backend="nccl", timeout=timedelta(seconds=60))


SCHEDULES = (
    *("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb"),
    *("zbv", "dualpipev", "dualpipe", "chimera"),
)


def train_rank(rank: int, num_ranks: int, schedule: str) -> None:
    group = make_group(rank, num_ranks)
    each = family(schedule)
    _, microbatches = each.nearest(num_ranks, 8)
    both = twins(
        gpt(max(3, num_ranks * each.default_virtual)),
        token_loss,
        schedule,
        n_microbatches=microbatches,
        group=group,
        timeout_s=60.0,
    )
    train(both, tokens, rows=2 * microbatches)
    torch.cuda.synchronize()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_on_devices_of_their_own_train_right(schedule: str) -> None:
    for outcome in run_ranks(train_rank, RANKS, schedule, timeout_s=200):
        outcome.result()


def train_tied(rank: int, num_ranks: int) -> None:
    both = twins(
        tied_gpt(4),
        token_loss,
        "1f1b",
        n_microbatches=4,
        group=make_group(rank, num_ranks),
        timeout_s=60.0,
    )
    train(both, tokens, rows=8)


def test_shared_parameters_are_summed_between_devices() -> None:
    for outcome in run_ranks(train_tied, RANKS, timeout_s=200):
        outcome.result()


def cross(rank: int, num_ranks: int, names: list[str]) -> None:
    """Also numbers that NCCL has no name for. In single precision, as what crosses is written."""
    group = make_group(rank, num_ranks)
    for name in names:
        both = Twins(
            crossing_model(name).cuda(),
            nn.functional.mse_loss,
            schedule="1f1b",
            n_microbatches=3,
            tolerance=Tolerance(relative=1e-5),
            device=torch.device("cuda", rank),
            group=group,
            timeout_s=60.0,
        )
        inputs, target = (t.cuda() for t in features(6, 0))
        with torch.device("cuda"):  # where what crosses makes its own tensors
            both.step(inputs, target=target)


def test_whatever_crosses_between_processes_crosses_between_devices() -> None:
    for outcome in run_ranks(cross, RANKS, list(CROSSINGS), timeout_s=280):
        outcome.result()


class Failing(nn.Module):
    """Raises at its third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("on purpose")
        return x


def fail(rank: int, num_ranks: int) -> tuple[str, float]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), Failing()))
    pipe = Pipeline(
        model.cuda(rank),
        loss_fn=nn.functional.mse_loss,
        n_microbatches=8,
        device=torch.device("cuda", rank),
        group=make_group(rank, num_ranks),
        timeout_s=30.0,
    )
    batch = torch.ones(16, 6, device=pipe.device)
    begin = time.monotonic()
    try:
        pipe.step(batch, target=batch)
    except PenstockError as error:
        torch.cuda.synchronize()  # nothing on the device may wait for what never comes
        return str(error), time.monotonic() - begin
    raise AssertionError("nothing was raised")


def test_a_failure_reaches_all_ranks_and_leaves_no_device_waiting() -> None:
    for outcome in run_ranks(fail, RANKS, timeout_s=120):
        message, elapsed_s = outcome.result()
        assert "rank 1, stage 1, microbatch 2" in message and "on purpose" in message
        assert elapsed_s < 15


def be_slow(rank: int, num_ranks: int) -> tuple[str, float]:
    """Rank 1 takes longer than its peer waits, whose host is in the user's code meanwhile."""

    class Slow(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if rank == 0:
                torch.cuda.synchronize()  # from the second backward on, it waits for a message
            elif self.calls == 2:
                time.sleep(20)
            return x

    model = nn.Sequential(nn.Linear(6, 6), Slow(), nn.Linear(6, 6), Slow())
    pipe = Pipeline(
        model.cuda(rank),
        loss_fn=nn.functional.mse_loss,
        split=[2, 2],
        n_microbatches=8,
        device=torch.device("cuda", rank),
        group=make_group(rank, num_ranks),
        timeout_s=3.0,
    )
    batch = torch.ones(16, 6, device=pipe.device)
    begin = time.monotonic()
    try:
        pipe.step(batch, target=batch)
    except PenstockError as error:
        return str(error), time.monotonic() - begin
    raise AssertionError("nothing was raised")


def test_a_wait_of_the_device_has_a_deadline() -> None:
    first, _ = run_ranks(be_slow, RANKS, timeout_s=120)
    message, elapsed_s = first.result()
    assert "no word from rank 1 within 3 s" in message
    assert elapsed_s < 15


def make_many(rank: int, num_ranks: int) -> list[int]:
    """The memory that is in use on the device, in bytes, after each of several pipelines."""
    group, used = make_group(rank, num_ranks), []
    for _ in range(6):
        pipe = Pipeline(
            nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).cuda(rank),
            loss_fn=nn.functional.mse_loss,
            n_microbatches=4,
            device=torch.device("cuda", rank),
            group=group,
        )
        batch = torch.ones(8, 6, device=pipe.device)
        pipe.step(batch, target=batch)
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    return used


def test_pipelines_over_one_group_share_its_communicators() -> None:
    for outcome in run_ranks(make_many, RANKS, timeout_s=120):
        used = outcome.result()
        assert used[-1] - used[1] < 8 << 20, used
