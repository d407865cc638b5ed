"""Two directions over processes, stages cut by hand: what both ends need, and what replicas add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import PipelineStage, ScheduleChimera, ScheduleDualPipe
from penstock.errors import PenstockError
from tests.compare import plain_step
from tests.distributed.launches import results_of
from tests.distributed.replicas import WRAPS, batch, make_layers, make_meshes, whole
from tests.processes import run_ranks

CPU = torch.device("cpu")
MICROBATCHES = 4
CLASSES = {"dualpipe": ScheduleDualPipe, "chimera": ScheduleChimera}
mse = nn.functional.mse_loss


def make_schedule(
    name: str, modules: list[nn.Module], rank: int, group: dist.ProcessGroup | None
) -> Any:
    """A rank's schedule: its stage of the way down, and that of the way up."""
    stages = [
        PipelineStage(module, index, 4, CPU, group=group)
        for module, index in zip(modules, (rank, 3 - rank), strict=True)
    ]
    return CLASSES[name](stages, MICROBATCHES, mse, timeout_s=20)


def train_replicated(rank: int, num_ranks: int, name: str, wrap: str) -> dict[str, Tensor]:
    """Two steps of two pipelines; the gradients of this rank's two stages."""
    pipeline, replicas = make_meshes()
    place = pipeline.get_local_rank()
    layers = make_layers(2)
    modules = [WRAPS[wrap](layers[i], replicas) for i in (place, 1 - place)]
    schedule = make_schedule(name, modules, place, pipeline.get_group())
    for step in range(2):
        inputs, target = batch(step, replicas.get_local_rank())
        schedule.step(inputs, target=target)
    return {
        f"{index}.{number}": whole(param.grad)
        for index, module in zip((place, 1 - place), modules, strict=True)
        for number, param in enumerate(module.parameters())
        if param.grad is not None
    }


REPLICATED = (
    *(("dualpipe", wrap) for wrap in ("ddp", "fsdp")),
    *(("chimera", wrap) for wrap in ("replicate", "fsdp")),
)


@pytest.mark.parametrize(("name", "wrap"), REPLICATED)
def test_replicas_of_copies_have_the_mean_gradient(name: str, wrap: str) -> None:
    model = nn.Sequential(*make_layers(2))
    for step in range(2):
        for replica in range(2):
            inputs, target = batch(step, replica)
            plain_step(model, mse, inputs, target=target, n_microbatches=MICROBATCHES)
    expected = {
        f"{index}.{number}": param.grad / 2
        for index, layer in enumerate(model)
        for number, param in enumerate(layer.parameters())
        if param.grad is not None
    }
    grads = results_of(train_replicated, 4, REPLICATED, (name, wrap))
    for each in grads:
        assert each.keys() == expected.keys()
        for key, grad in each.items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6, msg=key)
            assert torch.equal(grad, grads[0][key])


def wrong(rank: int, num_ranks: int, fault: str) -> str:
    """The message of what goes wrong on one of the two ends."""
    schedule = make_schedule("chimera", [nn.Linear(4, 4), nn.Linear(4, 4)], rank, None)
    inputs, options = torch.ones(8, 4), {"target": torch.ones(8, 4), "return_outputs": True}
    try:
        if rank == 1 and fault == "no inputs":
            schedule.step(target=options["target"])
        elif rank == 1 and fault == "other inputs":
            schedule.step(torch.ones(4, 4), **options)
        elif rank == 0 and fault == "no target":
            schedule.step(inputs)
        elif rank == 1 and fault == "outputs":
            schedule.step(inputs, **{**options, "return_outputs": False})
        else:
            schedule.step(inputs, **options)
    except PenstockError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("no inputs", "no inputs: the rank of the first stage passes them"),
        ("other inputs", "the inputs on rank 1 have other shapes than those on rank 0"),
        ("no target", "no target, where the loss is computed"),
        ("outputs", "the first call (rank 0: step() with outputs"),
    ],
)
def test_an_error_at_one_end_is_raised_at_both(fault: str, told: str) -> None:
    for outcome in run_ranks(wrong, 2, fault):
        assert told in outcome.result()


def outputs(rank: int, num_ranks: int) -> tuple[Any, list[Any]]:
    """The outputs of a model that returns a tree, and metrics."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Tree()]
    schedule = make_schedule("chimera", [layers[rank], layers[1 - rank]], rank, None)
    return schedule.eval(torch.arange(20.0).view(5, 4)), schedule.metrics


class Tree(nn.Module):
    """Gives several values."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"sum": x.sum(1), "rows": (x, None), "name": "tree"}


def test_outputs_of_both_ends_are_merged_on_both() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), Tree()
    with torch.no_grad():
        expected = last(first(torch.arange(20.0).view(5, 4)))
    for outcome in run_ranks(outputs, 2):
        out, _ = outcome.result()
        assert out["name"] == "tree" and out["rows"][1] is None
        torch.testing.assert_close(out["sum"], expected["sum"])
        torch.testing.assert_close(out["rows"][0], expected["rows"][0])
