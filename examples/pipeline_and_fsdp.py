"""Pipeline stages whose parameters are sharded over replicas: FSDP2 within a pipeline.

    torchrun --nproc-per-node 4 examples/pipeline_and_fsdp.py

             stage 0, 3    stage 1, 2        ZB-V over 2 ranks, 2 replicas of it:
    replica 0   rank 0        rank 1         each takes half of the batch, and the
    replica 1   rank 2        rank 3         gradients are averaged once per step

Set in the environment: SCHEDULE (zbv), MICROBATCHES (4), STEPS (20), PIPELINE (2, ranks per
replica). Ends by comparing the loss with that of a plain loop in one process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from gpt import Config, cross_entropy, gpt, load_bytes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock

SCHEDULE = os.environ.get("SCHEDULE", "zbv")
MICROBATCHES = int(os.environ.get("MICROBATCHES", "4"))
STEPS = int(os.environ.get("STEPS", "20"))
PIPELINE = int(os.environ.get("PIPELINE", "2"))
BATCH, LENGTH = 16, 64
CONFIG = Config(num_blocks=8, dim=64, max_length=LENGTH)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Pieces of the text and, for each of their bytes, the next one; the same on every rank."""
    text = load_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def train(mesh: DeviceMesh) -> list[float]:
    """The pipelined, sharded training.

    Args:
        mesh: processes by ``replica`` and ``stage``.

    Returns:
        The loss of each step, over all replicas.
    """
    torch.manual_seed(0)
    replica, replicas = mesh["replica"].get_local_rank(), mesh["replica"].size()
    pipe = penstock.Pipeline(
        gpt(CONFIG),
        loss_fn=cross_entropy,
        schedule=SCHEDULE,
        n_microbatches=MICROBATCHES,
        device=mesh.device_type,
        group=mesh["stage"].get_group(),
    )
    for stage in pipe.stages:
        for layer in stage.submod.children():
            fully_shard(layer, mesh=mesh["replica"])
        fully_shard(stage.submod, mesh=mesh["replica"])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)  # after sharding: its parameters
    losses = []
    for step in range(STEPS):
        inputs, target = (x.chunk(replicas)[replica].to(pipe.device) for x in batch(step))
        optimizer.zero_grad()
        loss = pipe.step(inputs, target=target)
        optimizer.step()
        assert loss is not None, "a pipeline with a loss function returns the loss"
        dist.all_reduce(loss, dist.ReduceOp.SUM, group=mesh["replica"].get_group())
        losses.append(loss.item() / replicas)
    return losses


def train_plainly() -> list[float]:
    """The same in one process, without Penstock."""
    torch.manual_seed(0)
    model = gpt(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        inputs, target = batch(step)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = int(os.environ["WORLD_SIZE"])
    mesh = init_device_mesh(
        device, (world // PIPELINE, PIPELINE), mesh_dim_names=("replica", "stage")
    )
    losses = train(mesh)
    if dist.get_rank() == 0:
        plain = train_plainly()
        print(f"{SCHEDULE}: {PIPELINE} ranks x {world // PIPELINE} replicas, {STEPS} steps")
        print(f"loss, first step  {losses[0]:.4f}   plain loop {plain[0]:.4f}")
        print(f"loss, last step   {losses[-1]:.4f}   plain loop {plain[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
