"""Two processes drive their stages by hand, with the ``dist.P2POp`` lists that stages hand out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import PipelineStage, Schedule1F1B
from tests.distributed.launches import results_of
from tests.processes import run_ranks

DIM = 4
ROWS = 3
NUM_MICROBATCHES = 3
CPU = torch.device("cpu")


class Transposing(nn.Module):
    """Gives its output transposed, as a view: not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, ROWS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x).T, torch.arange(ROWS)


class Untransposing(nn.Module):
    """Takes it, and the row numbers beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(ROWS, DIM)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.linear(x) * (1 + scale[:, None])
        return out


def make_modules(plain: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    if plain:
        return [nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    return [Transposing(), Untransposing()]


def batch(mb: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(mb)
    return (
        torch.randn(ROWS, DIM, generator=generator),
        torch.randn(ROWS, DIM, generator=generator),
    )


def exchange(ops: list[dist.P2POp]) -> None:
    if ops:
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def drive(rank: int, num_ranks: int, plain: bool, split: bool) -> list[Tensor]:
    """All forwards, then all backwards, by hand."""
    crossing: tuple[Tensor, ...] = (torch.empty(ROWS, DIM),)
    if not plain:
        crossing = (torch.empty(ROWS, ROWS), torch.empty(ROWS, dtype=torch.long))
    stage = PipelineStage(
        make_modules(plain)[rank], rank, 2, CPU, input_args=crossing if rank else None
    )
    losses = []
    for mb in range(NUM_MICROBATCHES):
        x, target = batch(mb)
        exchange(stage.get_fwd_recv_ops(mb))
        out = stage.forward_one_chunk(mb, (x,) if rank == 0 else ())
        exchange(stage.get_fwd_send_ops(mb))
        losses.append(nn.functional.mse_loss(out, target) if rank else None)
    for mb in range(NUM_MICROBATCHES):
        exchange(stage.get_bwd_recv_ops(mb))
        stage.backward_one_chunk(mb, loss=losses[mb], full_backward=not split)
        exchange(stage.get_bwd_send_ops(mb))
        if split:
            stage.backward_weight_one_chunk(mb)
    stage.scale_grads(NUM_MICROBATCHES)
    return [p.grad.clone() for p in stage.submod.parameters() if p.grad is not None]


CASES = tuple((plain, split) for plain in (True, False) for split in (False, True))


@pytest.mark.parametrize("split", [False, True], ids=["full", "split"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "transposed"])
def test_gradients_are_those_of_the_plain_model(plain: bool, split: bool) -> None:
    first, last = make_modules(plain)
    for mb in range(NUM_MICROBATCHES):
        x, target = batch(mb)
        out: Any = first(x)
        nn.functional.mse_loss(
            last(*out) if isinstance(out, tuple) else last(out), target
        ).backward()
    driven = results_of(drive, 2, CASES, (plain, split))
    for module, grads in zip((first, last), driven, strict=True):
        expected = [p.grad / NUM_MICROBATCHES for p in module.parameters() if p.grad is not None]
        rtol, atol = (0.0, 0.0) if plain else (1e-6, 1e-7)  # a copied view may round otherwise
        torch.testing.assert_close(grads, expected, rtol=rtol, atol=atol)


def list_operations(rank: int, num_ranks: int) -> list[tuple[str, int, list[int]]]:
    """A looped placement: three stages on each of two ranks; this rank's middle one."""
    example = torch.empty(2, DIM)
    stage = PipelineStage(
        nn.Linear(DIM, DIM), 2 + rank, 6, CPU, input_args=example, output_args=example
    )
    ops = stage.get_fwd_recv_ops(0)
    stage.set_local_fwd_input(torch.ones(2, DIM, requires_grad=True), 0)
    stage.forward_one_chunk(0, ())
    ops += stage.get_fwd_send_ops(0) + stage.get_bwd_recv_ops(0)
    stage.set_local_bwd_input((torch.ones(2, DIM),), 0)
    stage.backward_one_chunk(0)
    ops += stage.get_bwd_send_ops(0)
    assert (stage.group_rank, stage.group_size) == (rank, num_ranks)
    return [(op.op.__name__, op.peer, list(op.tensor.shape)) for op in ops]


def test_peers_are_those_of_a_looped_placement() -> None:
    for rank, outcome in enumerate(run_ranks(list_operations, 2)):
        shape = [2, DIM]
        names = ["irecv", "isend", "irecv", "isend"]
        assert outcome.result() == [(name, 1 - rank, shape) for name in names]


def outputs_meta_after_a_step(rank: int, num_ranks: int) -> list[list[int]]:
    stage = PipelineStage(nn.Linear(DIM, DIM), rank, num_ranks, CPU)
    schedule = Schedule1F1B(stage, 2, nn.functional.mse_loss)
    x = torch.ones(6, DIM)
    schedule.step(*((x,) if rank == 0 else ()), target=x)
    return [list(t.shape) for t in stage.get_outputs_meta()] if rank == 0 else []


def test_a_schedules_step_records_the_shapes_of_a_stage() -> None:
    assert run_ranks(outputs_meta_after_a_step, 2)[0].result() == [[3, DIM]]
