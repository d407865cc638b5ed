"""The training that each launcher of this folder starts, a process per rank.

    torchrun --nproc-per-node 2 examples/cluster/train.py
    python examples/cluster/train.py                          both ranks in this process

A launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or makes torch's process
group itself. Set STEPS for another number of steps.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import penstock

WIDTH, ROWS, MICROBATCHES = 64, 32, 8


def model() -> nn.Sequential:
    """Five blocks and a head; the same weights on every rank, of which each keeps its own."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 1))


def train(steps: int) -> list[float]:
    """Train for some steps; returns the losses, on every rank."""
    pipe = penstock.Pipeline(
        model(),
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        n_microbatches=MICROBATCHES,
        ranks=int(os.environ.get("WORLD_SIZE", "2")),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(ROWS, WIDTH, generator=generator)
        target = inputs[:, :8].sum(1, keepdim=True)
        optimizer.zero_grad()
        loss = pipe.step(inputs, target=target)
        optimizer.step()
        assert loss is not None
        losses.append(loss.item())
    return losses


@record  # writes what failed first to the launcher's error file
def main() -> None:
    losses = train(int(os.environ.get("STEPS", "20")))
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
