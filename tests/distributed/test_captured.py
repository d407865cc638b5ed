"""A captured model over processes: inputs at rank 0 alone or on every rank, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import SplitPoint, pipeline
from tests.distributed.launches import results_of

DIM, NUM = 6, 4


class Skipping(nn.Module):
    """A skip over two stages, and a mask that only the last one needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, *, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = torch.tanh(self.layers[0](x))
        y = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first))))
        y = self.layers[3](y + first) * mask
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, DIM, generator=generator),
        "mask": torch.arange(DIM) % 2 * torch.ones(rows, 1),
        "labels": torch.randn(rows, DIM, generator=generator),
    }


def own_loss(output: dict[str, Tensor]) -> Tensor:
    return output["loss"]


def train(rank: int, num_ranks: int, schedule: str, everywhere: bool) -> dict[str, Any]:
    names = [f"layers.{i}" for i in range(1, 4)]
    cut = pipeline(model(), (), batch(2), dict.fromkeys(names, SplitPoint.BEGINNING))
    program = penstock.build(schedule, ranks=num_ranks, microbatches=NUM, virtual=4 // num_ranks)
    mine = program.placement.stages_of(rank)
    stages = [cut.build_stage(i, torch.device("cpu")) for i in mine]
    played = penstock.ScheduleProgram(stages, program, lambda output: output[0])
    given = batch(8) if everywhere or 0 in mine else {}
    losses: list[Tensor] = []
    played.step(**given, losses=losses)
    grads = {n: p.grad for stage in stages for n, p in stage.submod.named_parameters()}
    return {"grads": grads, "losses": losses}


CASES = (("interleaved-1f1b", False), ("zbv", True), ("zbv", False))


@pytest.mark.parametrize(("schedule", "everywhere"), CASES)
def test_inputs_at_the_first_rank_or_on_all(schedule: str, everywhere: bool) -> None:
    plain = model()
    losses = []
    whole = batch(8)
    for i in range(NUM):
        loss = own_loss(plain(**{k: v[2 * i : 2 * i + 2] for k, v in whole.items()}))
        (loss / NUM).backward()
        losses.append(loss.detach())
    told = results_of(train, 2, CASES, (schedule, everywhere))
    grads = {name: grad for each in told for name, grad in each["grads"].items()}
    assert set(grads) == {name for name, _ in plain.named_parameters()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-8)
    for each in told:
        torch.testing.assert_close(each["losses"], losses, rtol=0, atol=0)
