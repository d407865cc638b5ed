"""Fine-tuning with adapters: trained, gathered and saved by themselves, beside a frozen model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline
from penstock.training.checkpoint import load, save
from tests.compare import assert_same, plain_step, snapshot
from tests.processes import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DIM = 6


class Adapted(nn.Module):
    """A frozen linear layer, and a low-rank update that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, 2, bias=False)
        self.up = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y.tanh()


def made(seed: int) -> nn.Sequential:
    """Adapters of one seed on a model that is always the same; its first half has none."""
    torch.manual_seed(0)
    frozen = [nn.Linear(DIM, DIM).requires_grad_(False) for _ in range(2)]
    model = nn.Sequential(*frozen, Adapted(), Adapted())
    torch.manual_seed(seed)
    for name, param in model.named_parameters():
        if is_adapter(name):
            nn.init.normal_(param)
    return model


def is_adapter(name: str) -> bool:
    return ".down." in name or ".up." in name


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The first rank trains nothing."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW([{"params": trained}], lr=0.1)


def fine_tune(rank: int, num_ranks: int, folder: str, ranks: int | None = None) -> None:
    """Train, save, gather, and go on from what was saved with another schedule."""
    inputs, target = torch.rand(2, 8, DIM, generator=torch.Generator().manual_seed(3))
    plain = made(seed=1)
    models = [made(seed=1), made(seed=2)]
    pipe, other = (
        Pipeline(model, loss_fn=F.mse_loss, schedule=name, ranks=ranks, n_microbatches=4)
        for model, name in zip(models, ("1f1b", "zb-h1"), strict=True)
    )
    optimizers = [optimizer_of(each) for each in (plain, pipe, other)]
    for step in range(3):
        if step == 2:
            save(folder, pipe, optimizers[1], keep=is_adapter)
            load(folder, other, optimizers[2], keep=is_adapter)
            other.step(inputs, target=target)
        loss = pipe.step(inputs, target=target)
        expected = plain_step(plain, F.mse_loss, inputs, target=target, n_microbatches=4)
        assert torch.equal(loss, expected.loss)
        for each in (pipe, *([other] if step == 2 else [])):
            assert_same(snapshot(each), snapshot(plain), partial=ranks is None)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted = {name: value for name, value in plain.state_dict().items() if is_adapter(name)}
    for each in (pipe, other):
        gathered = each.state_dict(full=True, keep=is_adapter)
        assert list(gathered) == list(wanted)
        assert all(torch.equal(gathered[name], wanted[name]) for name in wanted)


def test_in_one_process(tmp_path: Path) -> None:
    fine_tune(0, 1, str(tmp_path), ranks=2)


def test_in_processes(tmp_path: Path) -> None:
    for outcome in run_ranks(fine_tune, 2, str(tmp_path)):
        outcome.result()
