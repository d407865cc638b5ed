"""Every real model, cut by module: loss, gradients and buffers of the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from penstock import Pipeline
from penstock.schedule.registry import family
from tests.agreement import ROUNDING
from tests.compare import Tolerance, assert_same, plain_step, snapshot
from tests.real_models import REAL_MODELS, own_loss

# (schedule, ranks), with two and four stages; and others, for a model of each kind.
PLANS = [("1f1b", 2), ("1f1b", 4), ("zbv", 2)]
MORE_PLANS = [("zbv", 1), ("interleaved-zb", 2)]
KINDS = ("llama", "mixtral", "bert", "t5", "unet")
NUM_MICROBATCHES = 2
# transformers says of some models that their config names no loss; torch's export warns likewise.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def tolerance_for(model: torch.nn.Module) -> Tolerance | None:
    """Tied weights sum their uses per stage here, per microbatch in the plain loop; else none."""
    names = list(model.named_parameters(remove_duplicate=False))
    return None if len(names) == len(list(model.parameters())) else ROUNDING


@pytest.mark.parametrize("name", REAL_MODELS)
def test_trains_as_the_plain_model(name: str) -> None:
    """The two lines that a user writes."""
    case = REAL_MODELS[name]
    batch = case.example(rows=5, seed=1)  # microbatches of different sizes, and other padding
    original = case.model()
    plain = copy.deepcopy(original)
    expected = plain_step(
        plain, lambda output, _: own_loss(output), n_microbatches=NUM_MICROBATCHES, **batch
    )
    for schedule, ranks in PLANS + (MORE_PLANS if name in KINDS else []):
        model = copy.deepcopy(original)
        pipe = Pipeline(
            model,
            example=case.example(),
            schedule=schedule,
            ranks=ranks,
            n_microbatches=NUM_MICROBATCHES,
            split=case.split(ranks * family(schedule).default_virtual),
        )
        loss = pipe.step(**batch)
        assert loss is not None
        assert torch.equal(loss, expected.loss), (schedule, ranks)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=tolerance_for(plain))
        assert dict(pipe.named_parameters()).keys() == dict(model.named_parameters()).keys()
        assert pipe.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", REAL_MODELS)
def test_evaluates_as_the_plain_model(name: str) -> None:
    """In evaluation mode and without labels, where the model takes such; the whole output."""
    case = REAL_MODELS[name]
    batch: dict[str, Any] = case.example(rows=4, seed=2)
    model = case.model()
    options: Any = {"ranks": 3, "split": case.split(3), "n_microbatches": 2}
    pipe = Pipeline(model, example=case.example(), **options).train(False)
    if name in ("t5", "bart"):
        batch["decoder_input_ids"] = batch.pop("labels")
    elif name not in ("resnet50", "unet"):
        del batch["labels"]
    output = pipe.eval(**batch)
    model.eval()
    halves = [
        {key: value[rows] for key, value in batch.items()} for rows in (slice(2), slice(2, 4))
    ]
    with torch.no_grad():
        expected = torch.cat([logits(model(**half)) for half in halves])
    assert torch.equal(logits(output), expected)


def logits(output: Any) -> torch.Tensor:
    found: torch.Tensor = output["logits"]
    return found
