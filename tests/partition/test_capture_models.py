"""The models that people train, captured: loss and gradients are the plain model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock import SplitPoint, pipeline
from tests.compare import Tolerance, assert_same, plain_step, snapshot
from tests.partition.capturing import Pair, cuts_before
from tests.real_models import REAL_MODELS, own_loss

# Residual streams and tied weights sum several gradients, each model in its own order.
SUMMED = Tolerance(relative=5e-6, absolute=1e-8)
MICROBATCHES = 4


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_real_model_in_stages_is_the_model(name: str) -> None:
    real = REAL_MODELS[name]
    model = real.model()
    model(**real.example())  # running statistics of its own
    example = {key: value[:2] for key, value in real.example().items()}
    pair = Pair(
        model, (), example, spec=cuts_before(*(real.split(4) or real.trunk[1:])), tolerance=SUMMED
    )
    assert pair.cut.num_stages == 4
    batch = real.example(rows=2 * MICROBATCHES, seed=1)
    # Weight gradients are deferred in zbv, and two stages of a V lie on each rank.
    for schedule in ("zbv", "1f1b") if name == "gpt2" else ("zbv",):
        pair.train(own_loss, schedule=schedule, n_microbatches=MICROBATCHES, **batch)
    batch = real.example(rows=6, seed=2)
    with torch.no_grad():
        got, expected = pair.cut.eval().split_gm(**batch), model.eval()(**batch)
    torch.testing.assert_close(own_loss(got), own_loss(expected), rtol=0, atol=0)
    torch.testing.assert_close(got["logits"], expected["logits"], rtol=0, atol=0)


def test_the_auxiliary_loss_of_the_routers_reaches_the_total() -> None:
    """Without it the gates of Mixtral would have other gradients: the test above sees it."""
    real = REAL_MODELS["mixtral"]
    model = real.model()
    gate = "model.layers.0.mlp.gate.weight"
    grads = []
    for coefficient in (0.1, 0.0):
        again = copy.deepcopy(model)
        again.router_aux_loss_coef = coefficient
        plain_step(again, own_loss, n_microbatches=1, **real.example())
        grads.append(again.get_parameter(gate).grad)
    assert grads[0] is not None and grads[1] is not None
    assert not torch.allclose(grads[0], grads[1])


def test_pipes_of_dropout_train() -> None:
    """A model with dropout is captured with it, and its outputs differ from call to call."""
    real = REAL_MODELS["gpt2"]
    model = real.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    cut = pipeline(model, (), real.example(rows=2), {"transformer.h.2": SplitPoint.BEGINNING})
    batch = real.example(rows=2, seed=3)
    assert not torch.equal(own_loss(cut.split_gm(**batch)), own_loss(cut.split_gm(**batch)))
    torch.manual_seed(0)
    loss = own_loss(cut.split_gm(**batch))
    loss.backward()
    grads = snapshot(model)
    model.zero_grad()
    torch.manual_seed(0)
    own_loss(model(**batch)).backward()
    assert_same(snapshot(model), grads, tolerance=SUMMED)
