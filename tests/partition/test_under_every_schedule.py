"""One model with all that crosses, by module and captured, under every schedule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import Pipe, Pipeline, PipelineStage, draw_step_seed, microbatch_rng, pipeline
from penstock.schedule.registry import family
from tests.agreement import BIDIRECTIONAL, ROUNDING, TRAINING
from tests.compare import assert_same, plain_step, snapshot
from tests.partition.capturing import cuts_before

DIM, WORDS, RANKS, MICROBATCHES = 4, 7, 2, 4


class Block(nn.Module):
    """Takes a mask and a table beside what it computes with; one has a batch norm."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BD: Tensor, keep_BD: Tensor, scale: float) -> Tensor:
        return self.drop(torch.tanh(self.norm(self.linear(x_BD))) * keep_BD * scale)


class Everything(nn.Module):
    """A skip, a tie, root inputs, side values, batch norms and a loss of its own."""

    def __init__(self, num_blocks: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, ids: Tensor, *, labels: Tensor, weight: Tensor, mask: Tensor | None = None
    ) -> dict[str, Any]:
        keep = (ids > 0).to(weight.dtype)[:, None]
        x = first = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x, keep if mask is None else mask, 0.5)
            if i == len(self.blocks) // 2:
                x = x + first * weight
        logits = self.head(x + first)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "none": None}


def batch(rows: int = 4 * MICROBATCHES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "ids": torch.randint(WORDS, (rows,), generator=generator),
        "labels": torch.randint(WORDS, (rows,), generator=generator),
        "weight": torch.randn(rows, DIM, generator=generator),
    }


def own(output: Any, target: object = None) -> Tensor:
    loss: Tensor = output["loss"]
    return loss


def example() -> dict[str, Tensor]:
    return {name: value[:4] for name, value in batch().items()}


def by_module(model: nn.Module, schedule: str, **options: Any) -> Pipeline:
    num = family(schedule).default_virtual
    return Pipeline(
        model, example=example(), schedule=schedule, ranks=RANKS, virtual=num,
        n_microbatches=MICROBATCHES, **options,
    )  # fmt: skip


CUTS: dict[tuple[Any, ...], Pipe] = {}


def _cut(model: Any, names: tuple[str, ...]) -> Pipe:
    """Made once of all models that are alike."""
    key = repr(model), model.blocks[0].norm.training, names
    if key not in CUTS:
        CUTS[key] = pipeline(copy.deepcopy(model), (), example(), cuts_before(*names))
    return CUTS[key]


def captured(model: Any, schedule: str, **options: Any) -> Pipeline:
    num = family(schedule).default_virtual
    program = penstock.build(schedule, ranks=RANKS, microbatches=MICROBATCHES, virtual=num)
    place, stages = program.placement, program.placement.num_model_stages
    at = [len(model.blocks) * i // stages for i in range(1, stages)]
    cut = copy.deepcopy(_cut(model, tuple(f"blocks.{i}" for i in at)))
    made = [
        PipelineStage(
            cut.get_stage_module(place.model_stage(i)), i, program.num_stages, torch.device("cpu")
        )
        for i in range(program.num_stages)
    ]
    return Pipeline(made, schedule=program, loss_fn=own, **options)


@pytest.mark.parametrize("way", [by_module, captured])
@pytest.mark.parametrize("schedule", [*TRAINING, *BIDIRECTIONAL])
def test_all_that_crosses(schedule: str, way: Any) -> None:
    model = Everything(RANKS * family(schedule).default_virtual)
    if schedule in BIDIRECTIONAL:  # two copies of a batch norm see half of the batch each
        for block in model.blocks:
            block.norm.eval()
    plain = copy.deepcopy(model)
    pipe = way(model, schedule)
    for _ in range(2):
        given = batch()
        loss = pipe.step(given.pop("ids"), **given)
        expected = plain_step(plain, own, n_microbatches=MICROBATCHES, **batch())
        torch.testing.assert_close(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)


@pytest.mark.parametrize("way", [by_module, captured])
@pytest.mark.parametrize("schedule", [*TRAINING, *BIDIRECTIONAL])
def test_the_masks_of_dropout(schedule: str, way: Any) -> None:
    model = Everything(RANKS * family(schedule).default_virtual, 0.4)
    for block in model.blocks:
        block.norm = nn.Identity()
    plain = copy.deepcopy(model)
    pipe = way(model, schedule, microbatch_rng=True)
    torch.manual_seed(5)
    given = batch()
    pipe.step(given.pop("ids"), **given)
    torch.manual_seed(5)
    seed, losses = draw_step_seed(), []
    for number in range(MICROBATCHES):
        part = {name: value.chunk(MICROBATCHES)[number] for name, value in batch().items()}
        with microbatch_rng(seed, number):
            loss = plain(**part)["loss"]
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    torch.testing.assert_close(pipe.losses, losses)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)
