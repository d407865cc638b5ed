"""What tests on a device share: the mark that skips them without one, and a pair of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.schedule.program import Program
from tests.agreement import Twins
from tests.compare import Tolerance

__all__ = ["DEVICE", "GPU", "SUMS", "on_device", "train", "twins"]

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")

# In double precision, in which sums in any order agree to this: kernels add in orders of their own.
SUMS = Tolerance(relative=1e-10, absolute=1e-13)


def on_device(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A batch on the current device, in double precision where it is floating point."""
    inputs, target = (t.double() if t.is_floating_point() else t for t in batch)
    return inputs.to(DEVICE), target.to(DEVICE)


def twins(model: nn.Sequential, loss_fn: Any, program: Program | str, **options: Any) -> Twins:
    """A pipeline and the plain model, both on the current device."""
    return Twins(
        model.double().to(DEVICE),
        loss_fn,
        schedule=program,
        tolerance=SUMS,
        device=DEVICE,
        **options,
    )


def train(both: Twins, batch: Any, *, rows: int, steps: int = 3) -> None:
    """Steps on both, gradients piling up; each is compared."""
    for step in range(steps):
        inputs, target = on_device(batch(rows, step))
        both.step(inputs, target=target)
