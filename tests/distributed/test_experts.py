"""Expert parallel stages: tokens travel to their experts and back, in every forward and backward.

    pipeline rank 0     expert rank 0 ◄── all-to-all ──► expert rank 1
                              │                               │
    pipeline rank 1     expert rank 0 ◄── all-to-all ──► expert rank 1

Each expert rank has its own rows of the batch, and half of the experts of each layer.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from penstock import PipelineStage, ScheduleProgram, build
from tests.distributed.launches import results_of

DIM, EXPERTS, MICROBATCHES = 6, 4, 6
CPU = torch.device("cpu")


class Experts(nn.Module):
    """A residual layer of which each token passes one expert.

    Without a group it holds all experts; with one, this rank's share of them.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.router = nn.Linear(DIM, EXPERTS, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM, dtype=torch.float64) / DIM)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM, dtype=torch.float64) / DIM)

    def keep_own(self, group: dist.ProcessGroup) -> Experts:
        """Keep the experts of this rank."""
        self.group = group
        mine = slice(*(EXPERTS // group.size() * (group.rank() + i) for i in (0, 1)))
        self.up = nn.Parameter(self.up.detach()[mine].clone())
        self.down = nn.Parameter(self.down.detach()[mine].clone())
        return self

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        tokens = x[order]
        if self.group is None:
            mixed = self.run(tokens, counts.tolist())
        else:
            mixed = self.exchange(tokens, counts)
        return x + scores[:, None] * mixed[order.argsort()]

    def run(self, tokens: Tensor, counts: list[int]) -> Tensor:
        """Tokens in the order of their experts, through them."""
        parts = zip(tokens.split(counts), self.up, self.down, strict=True)
        return torch.cat([(part @ up).relu() @ down for part, up, down in parts])

    def exchange(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """To the ranks of the experts, through these, and back."""
        group = self.group
        assert group is not None
        size = group.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        sent_rows = counts.view(size, -1).sum(1).tolist()
        rows = received.view(size, -1).sum(1).tolist()
        arrived = all_to_all_single_autograd(tokens, rows, sent_rows, group)
        # By sender, and by expert of each: now by expert.
        of_expert = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(received)
        order = of_expert.argsort(stable=True)
        mixed = self.run(arrived[order], received.view(size, -1).sum(0).tolist())
        return all_to_all_single_autograd(mixed[order.argsort()], sent_rows, rows, group)


def train(rank: int, num_ranks: int, name: str) -> None:
    """Two steps; every gradient is that of one process with all experts and rows."""
    mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("pipeline", "expert"))
    pipeline, expert = mesh["pipeline"].get_group(), mesh["expert"].get_group()
    program = build(name, ranks=2, microbatches=MICROBATCHES)
    torch.manual_seed(0)
    plain = [Experts() for _ in range(program.num_stages)]
    reference = nn.Sequential(*copy.deepcopy(plain))
    stages = [
        PipelineStage(plain[i].keep_own(expert), i, program.num_stages, CPU, group=pipeline)
        for i in program.placement.stages_of(pipeline.rank())
    ]
    loss_fn = nn.functional.mse_loss
    schedule = ScheduleProgram(stages, program, loss_fn)
    for step in range(2):
        torch.manual_seed(step)
        x, target = torch.randn(2, expert.size(), 4 * MICROBATCHES, DIM, dtype=torch.float64)
        schedule.step(x[expert.rank()], target=target[expert.rank()])
        for rows, goal in zip(x, target, strict=True):
            loss_fn(reference(rows), goal).backward()
    for stage in stages:
        wanted = reference[stage.stage_index]
        assert isinstance(wanted, Experts)
        found = dict(stage.submod.named_parameters())
        for param in (found["router.weight"], found["router.bias"]):
            dist.all_reduce(param.grad, group=expert)
        torch.testing.assert_close(found["router.weight"].grad, wanted.router.weight.grad)
        torch.testing.assert_close(found["router.bias"].grad, wanted.router.bias.grad)
        mine = slice(*(EXPERTS // expert.size() * (expert.rank() + i) for i in (0, 1)))
        for kind in ("up", "down"):
            grad = wanted.get_parameter(kind).grad
            assert grad is not None
            torch.testing.assert_close(found[kind].grad, grad[mine])


SCHEDULES = ("zb-h1", "zbv", "dualpipev")


@pytest.mark.parametrize("name", SCHEDULES)
def test_expert_parallel_stages_train_as_one_device_does(name: str) -> None:
    assert len(results_of(train, 4, tuple((each,) for each in SCHEDULES), (name,))) == 4
