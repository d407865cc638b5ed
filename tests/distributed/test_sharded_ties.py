"""Tied parameters of stages that are sharded once their pipeline is there: the plain training."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn import functional as F

from penstock import Pipeline
from penstock.errors import PartitionError
from penstock.stage.dtensor import full_tensor
from penstock.training.checkpoint import load, save
from penstock.training.clip import clip_grad_norm_
from tests.distributed.replicas import WRAPS, make_meshes
from tests.processes import run_ranks

MICROBATCHES = 4
MAX_NORM = 0.05


def make_model(seed: int) -> nn.Sequential:
    """Four layers, of which the last has the first one's weight."""
    torch.manual_seed(seed)
    embed, head = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, nn.Linear(6, 6), nn.LayerNorm(6), head).double()


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    tokens, following = torch.randint(10, (2, 8), generator=generator)
    return tokens, following


def make_pipe(schedule: str, seed: int, wrap: str) -> tuple[Pipeline, torch.optim.AdamW, Any, int]:
    pipeline, replicas = make_meshes()
    group = pipeline.get_group()
    pipe = Pipeline(
        make_model(seed),
        loss_fn=F.cross_entropy,
        schedule=schedule,
        n_microbatches=MICROBATCHES,
        group=group,
        timeout_s=20,
    )
    for stage in pipe.stages:
        stage.submod = WRAPS[wrap](stage.submod, replicas) if wrap else stage.submod
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    return pipe, optimizer, group, replicas.get_local_rank()


def train(
    rank: int, num_ranks: int, schedule: str, wrap: str, path: str
) -> tuple[list[float], dict[str, Tensor]]:
    """The norms of the gradients in four steps, with a fresh pipeline after the first two, and the
    state after all."""
    norms: list[float] = []

    def steps(
        pipe: Pipeline, optimizer: Any, group: Any, replica: int, which: Iterable[int]
    ) -> None:
        for step in which:
            inputs, target = batch(step, replica)
            pipe.zero_grad()
            pipe.step(inputs, target=target)
            norms.append(clip_grad_norm_(pipe.parameters(), MAX_NORM, group=group).item())
            optimizer.step()

    pipe, optimizer, *where = make_pipe(schedule, 0, wrap)
    steps(pipe, optimizer, *where, range(2))
    save(path, pipe, optimizer)
    fresh, its_optimizer, *where = make_pipe(schedule, 1, wrap)
    load(path, fresh, its_optimizer)
    steps(fresh, its_optimizer, *where, range(2, 4))
    return norms, fresh.state_dict(full=True)


def train_plainly() -> tuple[list[float], dict[str, Tensor]]:
    model, norms = make_model(0), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for replica in range(2):
            inputs, target = batch(step, replica)
            (F.cross_entropy(model(inputs), target) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, model.state_dict()


# In 1f1b the places lie on two ranks; in a V on one, and with two copies on both.
@pytest.mark.parametrize(
    ("schedule", "wrap"),
    [("1f1b", "fsdp whole"), ("zbv", "fsdp whole"), ("dualpipe", "replicate")],
)
def test_they_train_as_the_plain_model_also_from_a_checkpoint(
    schedule: str, wrap: str, tmp_path: Path
) -> None:
    expected_norms, expected = train_plainly()
    for outcome in run_ranks(train, 4, schedule, wrap, str(tmp_path)):
        norms, state = outcome.result()
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        assert state.keys() == expected.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)


def clip_over_all(rank: int, num_ranks: int) -> str:
    pipe, *_ = make_pipe("1f1b", 0, "fsdp whole")
    inputs, target = batch(0, 0)
    pipe.step(inputs, target=target)
    with pytest.raises(ValueError, match="pass the pipeline's group") as caught:
        clip_grad_norm_(pipe.parameters(), MAX_NORM)
    return str(caught.value)


def test_a_norm_over_all_replicas_is_refused() -> None:
    for outcome in run_ranks(clip_over_all, 4):
        assert "has 4 ranks, and the pipeline of these parameters 2" in outcome.result()


def shard_otherwise(rank: int, num_ranks: int, other: str) -> str:
    """The tied weight is sharded by rows on one side; on the other by columns, or not at all."""
    pipeline, replicas = make_meshes()
    pipe = Pipeline(
        make_model(0), loss_fn=F.cross_entropy, n_microbatches=MICROBATCHES,
        group=pipeline.get_group(), timeout_s=20,
    )  # fmt: skip
    (stage,) = pipe.stages
    if pipeline.get_local_rank() and other == "whole":
        stage.submod = WRAPS["ddp"](stage.submod, replicas)
    else:
        by_columns = pipeline.get_local_rank() == 1
        fully_shard(
            stage.submod,
            mesh=replicas,
            shard_placement_fn=lambda p: Shard(1 if by_columns and p.ndim > 1 else 0),
        )
    inputs, target = batch(0, 0)
    with pytest.raises(PartitionError) as caught:
        pipe.step(inputs, target=target)
    return str(caught.value)


@pytest.mark.parametrize("other", ["columns", "whole"])
def test_places_that_are_sharded_otherwise_are_refused(other: str) -> None:
    for outcome in run_ranks(shard_otherwise, 4, other):
        assert "can't be shared: shapes, dtypes or shards differ" in outcome.result()


# Alone, in the pipeline of one replica; DDP by the argument, or by no_sync() on the rank of the
# tie's second place alone.
ACCUMULATED = [
    (schedule, *how)
    for schedule in ("1f1b", "zbv", "dualpipe")
    for how in (("", ""), ("ddp", ""), ("ddp", "no_sync"), ("fsdp whole", ""))
]
REDUCES = (True, False, False, True, False, True)


def accumulate(rank: int, num_ranks: int) -> dict[str, dict[str, Tensor]]:
    """The gradients of steps without zeroing, of which some reduce."""
    found = {}
    for schedule, wrap, how in ACCUMULATED:
        pipe, _, _, replica = make_pipe(schedule, 0, wrap)
        for step, reduces in enumerate(REDUCES):
            inputs, target = batch(step, replica)
            options = {} if how else {"finalize_gradients": reduces}
            with contextlib.ExitStack() as suspended:
                if how and not reduces and rank > 1:
                    for stage in pipe.stages:
                        suspended.enter_context(stage.submod.no_sync())
                pipe.step(inputs, target=target, **options)
        grads = {name: full_tensor(param.grad) for name, param in pipe.named_parameters()}
        found[f"{schedule} {wrap} {how}"] = grads
    return found


def test_a_tie_accumulates_over_steps_that_do_not_reduce() -> None:
    def plainly(replicas: Iterable[int]) -> dict[str, Tensor | None]:
        model, count = make_model(0), len([*replicas])
        for step, replica in itertools.product(range(len(REDUCES)), replicas):
            inputs, target = batch(step, replica)
            (F.cross_entropy(model(inputs), target) / count).backward()
        return {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}

    whole, alone = plainly(range(2)), [plainly([replica]) for replica in range(2)]
    for rank, outcome in enumerate(run_ranks(accumulate, 4)):
        for case, grads in outcome.result().items():
            expected = whole if len(case.split()) > 1 else alone[rank % 2]
            assert grads
            for name, grad in grads.items():
                torch.testing.assert_close(grad, expected[name], msg=f"{case}: {name}")
