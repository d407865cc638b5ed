"""A step over processes under torch's profiler: a range per computation, and no crash."""

from __future__ import annotations

import torch
from torch import nn

from penstock import Pipeline
from penstock.schedule.rules import COMPUTE
from penstock.testing.processes import run_ranks


def profile(rank: int, num_ranks: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    mse = nn.functional.mse_loss
    pipe = Pipeline(model, loss_fn=mse, schedule="zbv", n_microbatches=4)
    inputs = torch.randn(8, 8)
    with torch.profiler.profile() as profiler:
        pipe.step(inputs, target=inputs)
    found = {e.name for e in profiler.events() if e.name.startswith("penstock.")}
    steps = pipe.program.ranks[rank]
    return found == {f"penstock.{a}" for s in steps for a in s.parts if a.op in COMPUTE}


def test_each_computation_has_a_range() -> None:
    assert [outcome.result() for outcome in run_ranks(profile, 2)] == [True, True]
