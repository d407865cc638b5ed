"""Ties are seen from parameters being one object, whatever their names."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.partition.ties import find_ties


def test_no_ties() -> None:
    assert find_ties([nn.Linear(2, 2), nn.Linear(2, 2)]) == ()
    assert find_ties([]) == ()


def test_a_parameter_in_three_stages_is_one_tie() -> None:
    first, second, third = (nn.Linear(2, 2) for _ in range(3))
    second.weight = third.weight = first.weight
    third.bias = second.bias
    assert find_ties([first, second, third]) == (
        {0: "weight", 1: "weight", 2: "weight"},
        {1: "bias", 2: "bias"},
    )


def test_a_shared_module_ties_all_of_its_parameters() -> None:
    norm = nn.LayerNorm(2)
    stages = [nn.Sequential(nn.Linear(2, 2), norm), nn.Sequential(norm)]
    assert find_ties(stages) == ({0: "1.weight", 1: "0.weight"}, {0: "1.bias", 1: "0.bias"})


def test_a_tie_within_a_stage_is_none_between_stages() -> None:
    embed, head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
    head.weight = embed.weight
    assert find_ties([nn.Sequential(embed, head), nn.Linear(4, 4)]) == ()
    # Under several names in a stage, it goes by the first.
    other = nn.Linear(4, 4, bias=False)
    other.weight = embed.weight
    assert find_ties([nn.Sequential(embed, head), other]) == ({0: "0.weight", 1: "weight"},)


def test_ties_are_found_on_the_meta_device() -> None:
    with torch.device("meta"):
        embed, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight = embed.weight
    assert find_ties([embed, head]) == ({0: "weight", 1: "weight"},)


@pytest.mark.parametrize("form", ["a sequence", "a list", "stages", "a schedule"])
def test_running_statistics_are_not_shared(form: str) -> None:
    norm = nn.BatchNorm1d(4)
    layers = [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm]

    def pipeline() -> Any:
        halves = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
        stages: Any = [penstock.PipelineStage(half, i, 2, "cpu") for i, half in enumerate(halves)]  # type: ignore[arg-type]
        loss_fn = nn.functional.mse_loss
        if form == "a schedule":
            return penstock.ScheduleInterleaved1F1B(stages, 2, loss_fn)
        models = {"a sequence": nn.Sequential(*layers), "a list": halves, "stages": stages}
        return penstock.Pipeline(models[form], loss_fn=loss_fn, n_microbatches=2, ranks=2)

    with pytest.raises(
        penstock.errors.PartitionError, match=r"BatchNorm1d (0\.)?1 of stage 0 is that of stage 1"
    ):
        pipeline()
    norm.eval()
    assert pipeline().eval(torch.ones(4, 4)).shape == (4, 4)


class Counts(nn.Module):
    """Writes into a buffer, or puts another in its place; or leaves it alone."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.register_buffer("scale", torch.ones(4))
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "in place":
            self.scale.mul_(1.1)
        elif self.way == "another":
            self.scale = self.scale * 1.1
        y: torch.Tensor = self.linear(x) + self.scale
        return y


@pytest.mark.parametrize("way", ["in place", "another", "none"])
@pytest.mark.parametrize("made", ["pipeline", "pipeline of stages", "schedule"])
def test_buffers_that_several_stages_write_are_refused(way: str, made: str) -> None:
    layer = Counts(way)
    halves: list[Any] = [nn.Sequential(nn.Linear(4, 4), layer), nn.Sequential(layer)]
    if made != "pipeline":
        halves = [penstock.PipelineStage(half, i, 2, "cpu") for i, half in enumerate(halves)]  # type: ignore[arg-type]
    loss_fn = nn.functional.mse_loss
    pipe: Any
    if made == "schedule":
        pipe = penstock.ScheduleInterleaved1F1B(halves, 2, loss_fn)
    else:
        pipe = penstock.Pipeline(halves, loss_fn=loss_fn, n_microbatches=2, ranks=2)
    told = r"scale of stage 0 is that of stage 1 too, and is written.*own layer"
    refused = pytest.raises(penstock.errors.PartitionError, match=told)
    with refused if way != "none" else contextlib.nullcontext():
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
