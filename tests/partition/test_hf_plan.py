"""The pipeline plans that models of transformers bring along: used where they fit."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import PartitionError, Pipeline
from penstock.partition.blocks import find_blocks, find_trunks, leaf_modules
from penstock.partition.forward.by_module import split_by_module
from penstock.partition.huggingface import planned_trunks
from penstock.partition.profile import profile
from penstock.testing.compare import assert_same, plain_step, snapshot
from tests.agreement import ROUNDING
from tests.real_models import REAL_MODELS, RealModel, own_loss

PLANNED = ("llama", "mistral", "qwen2", "gemma", "phi", "mixtral", "gpt-neox")
DIM = 6


def agrees(model: nn.Module, case: RealModel, **options: Any) -> Pipeline:
    """A pipeline of the model, after a step like the plain model's."""
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=case.example(), n_microbatches=2, **options)
    batch = case.example(rows=4, seed=1)
    loss = pipe.step(**batch)
    expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert torch.equal(loss, expected.loss)
    # A shared parameter's gradients are summed by stage.
    config: Any = getattr(model, "config", None)
    tied = config is not None and config.tie_word_embeddings
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING if tied else None)
    return pipe


def test_which_models_bring_a_plan() -> None:
    """A version of transformers in which others do is to be looked at."""
    assert tuple(name for name, c in REAL_MODELS.items() if planned_trunks(c.model())) == tuple(
        name for name in REAL_MODELS if name in PLANNED
    )


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_names_the_trunk(name: str, caplog: pytest.LogCaptureFixture) -> None:
    case = REAL_MODELS[name]
    model = case.model()
    [trunk] = planned_trunks(model)
    assert case.trunk == tuple(f"{trunk}.{i}" for i in range(len(case.trunk)))
    assert find_blocks(model) == list(case.trunk)
    with caplog.at_level(logging.INFO, logger="penstock.partition"):
        agrees(model, case, ranks=2)
    told = "\n".join(caplog.messages)
    assert f"since its own plan has {len(case.trunk)} blocks in {trunk};" in told
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


class Decoys(nn.Module):
    """A model of transformers beside lists of modules that are no trunk: adapters by task."""

    def __init__(self, llm: Any, dim: int) -> None:
        super().__init__()
        self.llm = llm
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)) for _ in range(6)
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        llm: Any = self.llm
        embedded = llm.get_input_embeddings()(input_ids)
        given = embedded + torch.stack([each(embedded) for each in self.adapters]).mean(0)
        return llm(inputs_embeds=given, attention_mask=attention_mask, labels=labels)


def test_a_trunk_that_would_be_found_otherwise() -> None:
    """By structure the adapters are a trunk too; they run side by side, not in a row."""
    case = REAL_MODELS["llama"]
    model = Decoys(case.model(), dim=32)
    assert find_trunks(model) == {"llm.model.layers", "adapters"}
    assert find_blocks(model) == [f"llm.model.layers.{i}" for i in range(4)]
    assert [unit.name for unit in leaf_modules(model) if unit.trunk is None][-1] == "adapters.5"
    pipe = agrees(model, case, ranks=2)
    first = {name for name, _ in pipe.stages[0].submod.named_parameters()}
    assert {name.split(".")[1] for name in first if name.startswith("adapters")} == set("012345")
    measured = profile(model, case.example(), runs=1)
    assert "".join(block.kind.value for block in measured.blocks) == "EttttL"


class Wrapped(nn.Module):
    """Answers for the model that it wraps, as those with adapters do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, **inputs: Tensor) -> Any:
        return self.inner(**inputs)


def test_the_plan_of_a_model_in_a_wrapper(caplog: pytest.LogCaptureFixture) -> None:
    """Its names are those in the model, wherever that stands."""
    case = REAL_MODELS["llama"]
    model = Wrapped(Wrapped(case.model()))
    assert planned_trunks(model) == ("inner.inner.model.layers",)
    with caplog.at_level(logging.INFO, logger="penstock.partition"):
        agrees(model, case, ranks=2)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


class Shuffled(nn.Module):
    """Defined in another order than it runs in, with a plan."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, 3)
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.embed = nn.Linear(DIM, DIM)
        self._pp_plan = {
            "head": (["hidden"], ["logits"]),
            "layers": (["hidden"], ["hidden"]),
            "norm": (["hidden"], ["hidden"]),
            "embed": (["input"], ["hidden"]),
        }

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).tanh()
        y: Tensor = self.head(self.norm(x))
        return y


def test_without_an_example_the_order_is_that_of_definition() -> None:
    model = Shuffled()
    assert planned_trunks(model) == ("layers",)
    assert split_by_module(model, [2, 2]).names[0][:2] == ("head", "norm")
    pipe = Pipeline(model, split=[2, 2], loss_fn=F.mse_loss, n_microbatches=1)
    with pytest.raises(PartitionError, match="name modules in the order of their calls"):
        pipe.step(torch.ones(2, DIM), target=torch.ones(2, 3))


def test_the_order_of_the_run_counts() -> None:
    model = Shuffled()
    pipe = Pipeline(
        model, example=(torch.ones(2, DIM),), ranks=2, loss_fn=F.mse_loss, n_microbatches=2
    )
    names = [name for name, _ in pipe.stages[0].submod.named_parameters()]
    assert any(name.startswith("embed") for name in names)


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": ([], [])},  # which the model lacks
        {"layers": None},  # no list
        {"layers": None, "embed": None, "head": None, "side": ([], [])},  # few parameters
    ],
)
def test_a_plan_that_does_not_fit_is_ignored(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Shuffled()
    model.side = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    plan: dict[str, Any] = model._pp_plan | change
    model._pp_plan = {name: entry for name, entry in plan.items() if entry is not None}
    with caplog.at_level(logging.INFO, logger="penstock.partition"):
        Pipeline(model, example=(torch.ones(2, DIM),), ranks=2, loss_fn=F.mse_loss)
    assert "since it has 4 repeated blocks" in caplog.text
    assert find_blocks(model) == [f"layers.{i}" for i in range(4)]
