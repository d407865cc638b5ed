"""One parameter in two stages: trained right where one rank holds both, refused where not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from penstock import PartitionError, Pipeline
from penstock.testing.compare import plain_step
from penstock.testing.processes import run_ranks

mse = nn.functional.mse_loss


def tied_model(num_layers: int) -> nn.Sequential:
    """Layers of which the first and the last share their weight."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(num_layers)))
    model[-1].weight = model[0].weight
    return model


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.randn(8, 6)


def refuse(rank: int, num_ranks: int) -> str:
    try:
        Pipeline(tied_model(2), loss_fn=mse, schedule="1f1b", n_microbatches=4)
    except PartitionError as error:
        return str(error)
    return "not refused"


def train_on_a_v(rank: int, num_ranks: int) -> dict[str, Any]:
    pipe = Pipeline(tied_model(4), loss_fn=mse, schedule="zbv", n_microbatches=4)
    inputs, target = data()
    pipe.step(inputs, target=target)
    return {name: param.grad for name, param in pipe.named_parameters()}


def test_a_tie_across_ranks_is_refused_on_every_rank() -> None:
    for outcome in run_ranks(refuse, 2):
        message = outcome.result()
        assert "0.weight (rank 0) and 1.weight (rank 1) are one shared parameter" in message
        assert "put both on one rank" in message


def test_a_tie_on_one_rank_gets_the_gradients_of_both_uses() -> None:
    model = copy.deepcopy(tied_model(4))
    inputs, target = data()
    plain_step(model, mse, inputs, target=target, n_microbatches=4)
    expected = {name: param.grad for name, param in model.named_parameters()}
    first, second = (o.result() for o in run_ranks(train_on_a_v, 2))
    assert {**first, **second}.keys() == expected.keys()
    for name, grad in {**first, **second}.items():
        # The two uses of the tied weight are summed per use here, per microbatch there.
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-7, msg=name)
