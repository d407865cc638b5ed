"""Stages that FSDP2 shards with a mixed precision policy, beside the same model sharded alone.

mesh (replica, stage) of 2 × 2      ranks 0 1    a pipeline, with the first half of a batch
                                    ranks 2 3    another one, with the second half
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock import Pipeline
from penstock.testing.processes import run_ranks

DIM, NUM_STAGES = 16, 4
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SPLIT_SCHEDULES = ("zb-h1", "interleaved-zb", "zbv")


class Block(nn.Module):
    """Weights of three kinds: of products, of a norm, and a factor in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.RMSNorm(DIM)
        self.gain = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return (x.float() + y.float() * self.gain).to(x.dtype)


def make_blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block() for _ in range(NUM_STAGES)]


def shard(modules: list[nn.Module], replicas: DeviceMesh) -> list[nn.Module]:
    return [fully_shard(module, mesh=replicas, mp_policy=POLICY) for module in modules]


def batch(replica: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(replica)
    x, target = torch.randn(2, rows, DIM, generator=generator)
    return x, target


def plain_sharded_loop(modules: list[nn.Module], x: Tensor, target: Tensor, n: int) -> None:
    """As a user of FSDP2 accumulates gradients over microbatches."""
    for i, (part, wanted) in enumerate(zip(x.chunk(n), target.chunk(n), strict=True)):
        for module in modules:
            module.set_requires_gradient_sync(i == n - 1)  # type: ignore[operator]
            part = module(part)
        (nn.functional.mse_loss(part, wanted) / n).backward()


def largest_differences(rank: int, num_ranks: int) -> dict[tuple[str, int], float]:
    """By schedule and microbatches, the largest relative difference of a gradient."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replicas = mesh["replica"]
    found = {}
    for n in (1, 4, 32):
        x, target = batch(replicas.get_local_rank(), 2 * n)
        plain = shard(make_blocks(), replicas)
        plain_sharded_loop(plain, x, target, n)
        for name in SPLIT_SCHEDULES:
            blocks = shard(make_blocks(), replicas)
            layers = (
                blocks if name != "zb-h1" else [nn.Sequential(*blocks[i : i + 2]) for i in (0, 2)]
            )
            pipe = Pipeline(
                layers,
                loss_fn=nn.functional.mse_loss,
                schedule=name,
                n_microbatches=n,
                group=mesh["stage"].get_group(),
                timeout_s=60,
            )
            loss = pipe.step(x, target=target)
            assert loss.isfinite()
            pairs = [
                (mine.grad, theirs.grad)
                for block, other in zip(blocks, plain, strict=True)
                for mine, theirs in zip(block.parameters(), other.parameters(), strict=True)
                if mine.grad is not None
            ]
            assert len(pairs) == 4 * NUM_STAGES // 2
            found[name, n] = max(map(relative_difference, *zip(*pairs, strict=True)))
    return found


def relative_difference(mine: Any, theirs: Any) -> float:
    mine, theirs = mine.to_local(), theirs.to_local()
    return float((mine - theirs).abs().max() / theirs.abs().max())


def test_split_backwards_add_up_in_the_dtype_of_the_reduction() -> None:
    for outcome in run_ranks(largest_differences, 4, timeout_s=120):
        found = outcome.result()
        assert len(found) == 9
        assert all(difference <= 1e-6 for difference in found.values()), found
