"""What ``split="auto"`` measures and weighs: the loss counts, and a rank's stages together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import Pipeline, auto
from penstock.partition import profile as profiling
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.for_program import balance_for
from penstock.partition.profile import measure_model
from tests.partition.odd_models import DIM, NetBase

CPU = torch.device("cpu")
PAUSE_S = 0.02
X = torch.randn(6, DIM, generator=torch.Generator().manual_seed(0))


class Shaped(nn.Module):
    """A row of layers, and an output of a given shape behind the batch's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, torch.Size(shape).numel())
        self.shape = shape

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"scores": self.head(x).unflatten(1, self.shape)}


def tokens(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def as_pair(scores: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.mse_loss(scores, target), 3


def alone(scores: Tensor) -> Tensor:
    return scores.square().mean()


def not_looked_at(scores: Tensor, target: Any) -> Tensor:
    assert target is None
    return scores.mean()


CASES: list[tuple[Callable[..., Any], tuple[int, ...], Any]] = [
    (F.cross_entropy, (5,), torch.zeros(6, dtype=torch.int64)),
    (tokens, (4, 5), torch.zeros(6, 4, dtype=torch.int64)),
    (F.cross_entropy, (5, 3, 2), torch.zeros(6, 3, 2, dtype=torch.int64)),
    (F.mse_loss, (5,), torch.zeros(6, 5)),
    (as_pair, (5,), torch.zeros(6, 5)),
    (F.binary_cross_entropy_with_logits, (1,), torch.zeros(6, 1)),
    (not_looked_at, (5,), None),
]


@pytest.mark.parametrize(("loss_fn", "shape", "target"), CASES)
def test_a_target_is_substituted(
    loss_fn: Callable[..., Any], shape: tuple[int, ...], target: Any
) -> None:
    """The loss takes its time, and that is the last block's."""
    given: list[Any] = []

    def slow(output: dict[str, Tensor], target: Any) -> Any:
        loss = loss_fn(output["scores"], target)
        time.sleep(PAUSE_S)
        given.append(target)
        return loss

    measured = measure_model(Shaped(*shape), (X,), device=CPU, loss_fn=slow)
    times = [block.forward_s for block in measured.blocks]
    assert times[-1] >= PAUSE_S > max(times[:-1])
    torch.testing.assert_close(given[-1], target)


def test_memory_saved_by_the_loss_counts_once() -> None:
    def loss_fn(output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output["scores"], target)

    def alike(output: dict[str, Tensor]) -> Tensor:
        return loss_fn(output, torch.zeros(6, 5))

    one, other = (
        measure_model(Shaped(5), (X,), device=CPU, loss_fn=each) for each in (loss_fn, alike)
    )
    assert one.blocks[-1].activation_bytes == other.blocks[-1].activation_bytes > 0


def test_a_loss_without_a_target_is_called_without() -> None:
    def slow(output: dict[str, Tensor]) -> Tensor:
        time.sleep(PAUSE_S)
        return alone(output["scores"])

    measured = measure_model(Shaped(5), (X,), device=CPU, loss_fn=slow)
    assert measured.blocks[-1].forward_s >= PAUSE_S


def test_a_loss_that_takes_no_stand_in_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def picky(output: Any, target: Any) -> Tensor:
        raise ValueError("not this one")

    with caplog.at_level(logging.WARNING, logger="penstock.partition.profile"):
        measured = measure_model(Shaped(5), (X,), device=CPU, loss_fn=picky)
    assert measured.blocks[-1].forward_s > 0
    assert ["so the last stage is measured without it" in text for text in caplog.messages] == [
        True
    ]


class Counting(nn.Module):
    """A loss that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output["scores"], target)


def test_a_loss_that_is_a_module_is_left_unchanged() -> None:
    loss_fn = Counting()
    measure_model(Shaped(5), (X,), device=CPU, loss_fn=loss_fn)
    assert loss_fn.calls == 0


# --- in a pipeline -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "auto"])
def test_a_slow_loss_makes_the_last_stage_small(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "SEARCH_S", 0.5)

    def slow(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(PAUSE_S)
        return F.mse_loss(output, target)

    options: dict[str, Any] = {"split": "auto", "example": (X[:3],), "ranks": 2}
    pipe = Pipeline(NetBase(), loss_fn=slow, schedule=schedule, n_microbatches=2, **options)
    held = [{name.split(".")[0] for name, _ in s.submod.named_parameters()} for s in pipe.stages]
    assert held == [{"embed", "blocks"}, {"head"}]
    assert pipe.step(X, target=X) > 0


class Row(nn.Module):
    """9 layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zbv", 2), ("interleaved-zb", 2)])
def test_the_stages_of_a_rank_are_weighed_together(
    schedule: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head takes as long as seven layers: the other stage of its rank is a small one."""
    names = [*(f"layers.{i}" for i in range(9)), "head"]
    long = {name: 7.0 if name == "head" else 1.0 for name in names}
    blocks = [
        BlockCosts(modules=(name,), forward_s=x, input_grad_s=x, weight_grad_s=x)
        for name, x in long.items()
    ]
    costs = Profile(blocks=tuple(blocks))
    monkeypatch.setattr(auto, "measure_model", lambda *args, **options: costs)
    pipe = Pipeline(
        Row(),
        schedule=schedule,
        split="auto",
        example=(torch.ones(1, 2),),
        ranks=ranks,
        loss_fn=F.mse_loss,
        n_microbatches=8,
    )
    held = [{n.rpartition(".")[0] for n, _ in s.submod.named_parameters()} for s in pipe.stages]
    assert tuple(map(len, held)) == balance_for(costs, pipe.program)
    counts = list(map(len, held))
    if ranks == 4:
        assert counts == [3, 3, 3, 1]
        return
    [with_head] = {pipe.program.placement.rank_of(i) for i, h in enumerate(held) if "head" in h}
    mine = pipe.program.placement.stages_of(with_head)
    assert sum(counts[i] for i in mine) < sum(counts) / ranks


def test_an_example_is_measured_on_the_device_wherever_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(profiling, "profile", lambda model, example, loss_fn: given.append(example))
    meta = torch.device("meta")
    for tensor in (X, X.to(meta)):
        measure_model([nn.Linear(DIM, DIM, device=meta)], (tensor, X), device=meta)
    assert given[0][0].device == given[0][1].device == meta
    assert given[1][1] is X  # such as lengths, as in a step


def test_a_layer_in_two_places_is_measured_in_both_on_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[list[nn.Module]] = []
    monkeypatch.setattr(
        profiling, "profile", lambda given, example, loss_fn: measured.append(given)
    )
    layer = nn.Linear(DIM, DIM)
    measure_model([layer, nn.ReLU(), layer], X, device=torch.device("meta"))
    [[first, _, last]] = measured
    assert first is last is not layer
