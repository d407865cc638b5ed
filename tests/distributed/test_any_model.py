"""Models that know nothing of pipelines, over two processes."""

from __future__ import annotations

import pytest

from tests.distributed import any_model
from tests.processes import run_ranks
from tests.real_models import REAL_MODELS

# GPT-2 ties its head to its embedding, on the other rank; T5 also its two embeddings.
PLANS = [("llama", "1f1b"), ("llama", "interleaved-zb"), ("gpt2", "1f1b"), ("t5", "zbv")]

# An auxiliary loss from all stages, running statistics, skips over stages, pictures, tied words.
OTHERS = [
    ("bert", "1f1b"),
    ("mixtral", "zbv"),
    ("resnet50", "interleaved-1f1b"),
    ("unet", "1f1b"),
    ("vit", "interleaved-zb"),
]


@pytest.mark.parametrize("plans", [PLANS, OTHERS], ids=["decoders", "others"])
def test_trains_over_two_processes(plans: list[tuple[str, str]]) -> None:
    held = [o.result() for o in run_ranks(any_model.train, 2, plans, timeout_s=120)]
    for (name, _), first, second in zip(plans, *held, strict=True):
        wanted = {each for each, _ in REAL_MODELS[name].model().named_parameters()}
        assert {*first, *second} == wanted
        assert first and second


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_layers_that_both_ranks_call_get_the_gradients_of_both(schedule: str) -> None:
    first, second = (o.result() for o in run_ranks(any_model.train_twice, 2, schedule))
    assert first[2:] == [
        "blocks.0.0.weight",
        "blocks.0.0.bias",
        "blocks.1.0.weight",
        "blocks.1.0.bias",
    ]
    assert second[:4] == [
        "blocks.2.0.weight",
        "blocks.2.0.bias",
        "blocks.3.0.weight",
        "blocks.3.0.bias",
    ]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp in bfloat16"])
def test_wrapped_stages(kind: str) -> None:
    for outcome in run_ranks(any_model.wrapped, 1, kind):
        outcome.result()


def test_sharded_stages_with_recurrent_layers() -> None:
    run_ranks(any_model.recurrent, 1)[0].result()


def test_states_balance_and_models_without_memory() -> None:
    outcomes = [o.result() for o in run_ranks(any_model.others, 2, timeout_s=120)]
    model = REAL_MODELS["llama"].model()
    for outcome in outcomes:  # what fails on the first rank is told on every one
        assert outcome["refused"].startswith("PartitionError: 'auto' measures the model")
    balanced = [name for outcome in outcomes for name in outcome["balanced"]]
    assert sorted(balanced) == sorted(name for name, _ in model.named_parameters())
    assert sum(outcome["parameters"] for outcome in outcomes) == any_model.whole_size(model)
    assert all(outcome["parameters"] for outcome in outcomes)
