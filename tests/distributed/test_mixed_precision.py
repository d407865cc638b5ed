"""Stages that FSDP2 shards with a mixed precision policy, beside the same model sharded alone.

mesh (replica, stage) of 2 × 2      ranks 0 1    a pipeline, with the first half of a batch
                                    ranks 2 3    another one, with the second half
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from penstock import PartitionError, Pipeline
from tests.processes import run_ranks

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

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh() * scale
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


# --- stages cut by module --------------------------------------------------------------------


class Net(nn.Module):
    """Cut by module. On every stage it computes with the dtype that its embedding returns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_STAGES))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        third = torch.full((DIM,), 1 / 3, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, third)
        logits = self.head(x)
        return {"loss": nn.functional.mse_loss(logits.float(), target.float()), "logits": logits}


def shard_by_block(module: nn.Module, replicas: DeviceMesh) -> Any:
    return shard([*(m for m in module.modules() if isinstance(m, Block)), module], replicas)[-1]


def compare_with_sharding_alone(rank: int, num_ranks: int) -> dict[str, tuple[float, int]]:
    """By schedule, the largest relative difference of a gradient, and the number of gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replicas, n = mesh["replica"], 4
    x, target = batch(replicas.get_local_rank(), 2 * n)
    plain = shard_by_block(Net(), replicas)
    for i, (part, wanted) in enumerate(zip(x.chunk(n), target.chunk(n), strict=True)):
        plain.set_requires_gradient_sync(i == n - 1)
        (plain(part, wanted)["loss"] / n).backward()
    theirs = dict(plain.named_parameters())
    found = {}
    for name in ("1f1b", "interleaved-1f1b", "zbv"):
        pipe = Pipeline(
            Net(),
            example=(x[:2], target[:2]),
            schedule=name,
            n_microbatches=n,
            group=mesh["stage"].get_group(),
            timeout_s=60,
        )
        if name != "1f1b":  # the shapes are known, in float32, when it is sharded
            pipe.eval(x, target)
        for stage in pipe.stages:
            shard_by_block(stage.submod, replicas)
        pipe.step(x, target)
        mine = list(pipe.named_parameters())
        differences = [relative_difference(p.grad, theirs[name].grad) for name, p in mine]
        found[name] = max(differences), len(differences)
    return found


def test_stages_cut_by_module_train_as_the_model_sharded_alone() -> None:
    outcomes = [o.result() for o in run_ranks(compare_with_sharding_alone, 4, timeout_s=120)]
    for name in ("1f1b", "interleaved-1f1b", "zbv"):
        assert all(outcome[name][0] <= 1e-6 for outcome in outcomes), name
        # The parameters of both ranks are the model's.
        assert [sum(o[name][1] for o in outcomes[i : i + 2]) for i in (0, 2)] == [20, 20]


class Widening(Net):
    """Its blocks pass on float32, which the wrapper of the next stage would round."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: output.float())


def round_between_stages(rank: int, num_ranks: int) -> str:
    mesh = init_device_mesh("cpu", (1,))
    x, target = batch(0, 4)
    example = x[:2], target[:2]
    pipe = Pipeline(Widening(), example=example, schedule="zbv", ranks=1, n_microbatches=2)
    for stage in pipe.stages:
        shard_by_block(stage.submod, mesh)
    with pytest.raises(PartitionError) as caught:
        pipe.step(x, target)
    return str(caught.value)


def test_a_value_that_a_wrapper_would_round_between_stages_is_refused() -> None:
    (outcome,) = run_ranks(round_between_stages, 1)
    message = outcome.result()
    assert "output 0 of blocks.1 is torch.float32, but the wrapper of the next stage" in message
    assert "MixedPrecisionPolicy(cast_forward_inputs=False)" in message
