"""What is known of transformers: seen to work on these versions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from penstock import PartitionError, Pipeline, StageError
from penstock.partition.forward.by_module import NotByModule, split_by_module
from tests.compare import assert_same, plain_step, snapshot
from tests.real_models import REAL_MODELS, own_loss

LLAMA, MIXTRAL = REAL_MODELS["llama"], REAL_MODELS["mixtral"]


def test_the_version() -> None:
    """Elsewhere, look at every line of the adapter, and name the version here."""
    assert transformers.__version__.startswith("5.23")


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_auxiliary_loss_of_parts_on_all_stages(ranks: int) -> None:
    """The routers' logits are collected by hooks within the blocks."""
    model = MIXTRAL.model()
    plain = copy.deepcopy(model)
    batch = MIXTRAL.example(rows=4, seed=3)
    split = MIXTRAL.split(ranks)
    pipe = Pipeline(model, example=MIXTRAL.example(), ranks=ranks, split=split, n_microbatches=2)
    loss = pipe.step(**batch)
    expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert loss is not None and torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain))
    aux = [output.aux_loss for output in expected.outputs]
    outputs: Any = pipe.eval(**batch)
    assert torch.equal(outputs.aux_loss, torch.stack(aux).detach())
    # It matters: without it the loss is another.
    ahead = plain(**batch, output_router_logits=False)
    assert (own_loss(ahead) - own_loss(plain(**batch))).abs() > 1e-3


@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_collected_values_cross(asked: str) -> None:
    case = REAL_MODELS["bert"]
    model = case.model()
    model.set_attn_implementation("eager")
    batch = case.example() | {asked: True}
    split = split_by_module(model, [1, 2, 1], batch)
    out: Any = split.stages[0](**batch)
    for stage in split.stages[1:]:
        out = stage(*out)
    expected = model(**batch)
    name = asked.removeprefix("output_")
    assert len(out[name]) == len(expected[name]) > 3
    assert all(map(torch.equal, out[name], expected[name]))


def test_hooks_stand_once_and_only_where_something_is_collected() -> None:
    """A model that runs by itself afterwards collects each value once."""
    model = MIXTRAL.model()
    split_by_module(model, [1, 1], MIXTRAL.example())
    assert len(model(**MIXTRAL.example()).router_logits) == 2
    plain = LLAMA.model()
    split_by_module(plain, [2, 2], LLAMA.example())
    assert not any(module._forward_hooks for module in plain.modules())


def test_collecting_more_than_the_example_does_is_refused() -> None:
    pipe = Pipeline(LLAMA.model(), example=LLAMA.example(), ranks=2, n_microbatches=2)
    told = r"this call collects outputs of layers .* pass an example= with the same arguments"
    with pytest.raises(PartitionError, match=told):
        pipe.eval(**LLAMA.example(rows=4), output_hidden_states=True)


def test_a_step_without_labels_says_what_is_missing() -> None:
    pipe = Pipeline(LLAMA.model(), example=LLAMA.example(), ranks=2, n_microbatches=2)
    with pytest.raises(StageError, match="computes its own loss from labels, as in example="):
        pipe.step(input_ids=LLAMA.example(rows=4)["input_ids"])


def test_the_cache_is_off_unless_asked_for() -> None:
    """By default a model fills one in training too; the plain model's configuration stays."""
    model = LLAMA.model()
    model.config.use_cache = True
    split = split_by_module(model, [2, 2], LLAMA.example())
    out: Any = split.stages[1](*split.stages[0](**LLAMA.example()))
    assert out.past_key_values is None
    assert model.config.use_cache is True
    assert model(**LLAMA.example()).past_key_values is not None
    with pytest.raises(NotByModule, match=r"writes tensors into the DynamicCache.*use_cache=False"):
        split_by_module(model, [2, 2], LLAMA.example() | {"use_cache": True})


def test_two_lines() -> None:
    """All that a user writes; the loss is the model's own."""
    model = LLAMA.model()
    pipe = Pipeline(model, example=LLAMA.example(), ranks=2, n_microbatches=4)
    loss = pipe.step(**LLAMA.example(rows=8))
    assert loss is not None and loss > 0
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]
    # On one rank as well, and with a loss function of one's own that needs no target.
    alone = Pipeline(LLAMA.model(), example=LLAMA.example(), ranks=1, n_microbatches=4)
    assert torch.equal(alone.step(**LLAMA.example(rows=8)), loss)
    mine = Pipeline(LLAMA.model(), loss_fn=lambda output, _: output.loss, ranks=2, n_microbatches=4)
    assert torch.equal(mine.step(**LLAMA.example(rows=8)), loss)


def test_a_loss_outside_of_the_model() -> None:
    """With a target as in any pipeline; the model is not told of labels."""
    batch = LLAMA.example(rows=4)
    labels = batch.pop("labels")

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            output.logits.flatten(0, 1), target.flatten(), ignore_index=-100
        )

    model = LLAMA.model()
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=batch, loss_fn=loss_fn, ranks=2, n_microbatches=2)
    loss = pipe.step(**batch, target=labels)
    expected = plain_step(plain, loss_fn, n_microbatches=2, target=labels, **batch)
    assert torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain))


def test_a_classifier_that_looks_at_each_rows_last_token(caplog: pytest.LogCaptureFixture) -> None:
    """``logits[rows, last]``: which token that is, is known on every stage, the logits are not."""
    config: Any = LLAMA.model().config
    config.num_labels = 3
    model: Any = transformers.LlamaForSequenceClassification(config).train()
    plain = copy.deepcopy(model)
    batch = LLAMA.example(rows=4) | {"labels": torch.tensor([0, 2, 1, 1])}
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    with caplog.at_level("INFO", logger="penstock.partition"):
        pipe = Pipeline(model, example=batch, schedule="zbv", ranks=2, n_microbatches=2)
    assert "cut by module" in caplog.text
    loss = pipe.step(**batch)
    expected = plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert torch.equal(loss, expected.loss)
    assert_same(snapshot(pipe), snapshot(plain))
    logits = torch.cat([output.logits for output in expected.outputs])
    assert torch.equal(pipe.eval(**batch).logits, logits)


def test_layers_that_are_checkpointed() -> None:
    model = LLAMA.model()
    plain = copy.deepcopy(model)
    model.activation_checkpointing_enable()
    pipe = Pipeline(model, example=LLAMA.example(), schedule="zbv", ranks=2, n_microbatches=2)
    batch = LLAMA.example(rows=4)
    pipe.step(**batch)
    plain_step(plain, lambda out, _: own_loss(out), n_microbatches=2, **batch)
    assert_same(snapshot(pipe), snapshot(plain))


def test_without_transformers_there_is_nothing_to_know(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.partition import huggingface

    monkeypatch.setattr(huggingface, "MODULE", "not.loaded")
    assert huggingface.mark() == {} and huggingface.capture_since({}) == {}
    with pytest.raises(PartitionError, match="failed on the example"):
        split_by_module(MIXTRAL.model(), [1, 1], MIXTRAL.example())
