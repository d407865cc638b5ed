"""Weights that a checkpointed region is given, and not the parameters themselves.

The region is run again in I, and has to save what it saved in the forward: else the forward's
backward is given other tensors, of which torch compares shapes alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from penstock import Pipeline
from penstock.stage.weight_grad import DeferredGrads
from tests.compare import plain_step
from tests.stage.deferral_cases import (
    Calls,
    assert_same,
    gradients,
    outputs_of,
    plain,
    some_grads,
    split,
    weight,
    x,
)

Region = Callable[[Tensor, Tensor], Tensor]

# On square matrices, so that shapes tell nothing.
REGIONS: dict[str, Region] = {
    "on the left": lambda t, w: w @ t,
    "addmm": lambda t, w: torch.addmm(w, t, w),
    "einsum": lambda t, w: torch.einsum("ij,jk->ik", t, w),
    "linear": lambda t, w: F.linear(F.linear(t, w).tanh(), w.T),
    "scale": lambda t, w: t * w,
    "norm": lambda t, w: F.layer_norm(t, (4,), w[0], w[1]),
    "rows": lambda t, w: w[torch.tensor([0, 2, 2, 3])] @ t,
    "also as an activation": lambda t, w: F.linear(w, w) + t @ w,
}
# How the region comes by the weight.
GIVEN: dict[str, Callable[[Region, Tensor, Tensor], Tensor]] = {
    "as an argument": lambda region, t, w: checkpoint(region, t, w[:], use_reentrant=False),
    "computed, as an argument": lambda region, t, w: checkpoint(
        region, t, torch.stack([w, w * 2]).unbind()[1], use_reentrant=False
    ),
    "by closure": lambda region, t, w: by_closure(region, t, w * 2),
    "through hooks": lambda region, t, w: through_hooks(region, t, w),
    "within another region": lambda region, t, w: checkpoint(
        lambda u, v: checkpoint(region, u, v.T, use_reentrant=False), t, w[:], use_reentrant=False
    ),
}


def by_closure(region: Region, t: Tensor, w: Tensor) -> Tensor:
    inside: Tensor = checkpoint(lambda u: region(u, w), t, use_reentrant=False)
    return inside + t @ w


def through_hooks(region: Region, t: Tensor, w: Tensor) -> Tensor:
    """As around a stage whose activations are offloaded: the parameter comes back as another."""
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
        whole: Tensor = checkpoint(region, t, w, use_reentrant=False)
        return whole


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("region", REGIONS)
def test_a_region_is_recomputed_as_it_was_computed(region: str, given: str) -> None:
    module = Calls(lambda m, t: GIVEN[given](REGIONS[region], t * 2, m.w), w=weight(4, 4))
    inputs = (x(4, 4),)
    assert_same(split(module, inputs, 2), plain(module, inputs, 2), exact=False)


def test_setting_a_gradient_changes_no_weight() -> None:
    """As the first microbatch's I does to hold back what comes past the deferral."""
    module = Calls(lambda m, t: by_closure(REGIONS["on the left"], t * 2, m.w.T), w=weight(4, 4))
    inputs = (x(4, 4),)
    expected = plain(module, inputs)
    work = DeferredGrads()
    with work:
        outputs = outputs_of(module(*inputs))
    with work:
        module.w.grad = None
        torch.autograd.backward(outputs, some_grads(outputs))
    work.accumulate()
    assert_same(gradients(module, inputs), expected, exact=False)


class Selective(nn.Module):
    """A block whose checkpoint saves matrix products, or all but its elementwise operations."""

    def __init__(self, saved: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.saved = saved

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        aten = torch.ops.aten
        if self.saved == "products":
            saves = op in (aten.mm.default, aten.addmm.default)
        else:
            saves = op not in (aten.mul.Tensor, aten.sin.default, aten.add.Tensor)
        return CheckpointPolicy.PREFER_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def block(self, t: Tensor) -> Tensor:
        h = self.norm(t)
        q, k, v = (layer(h).view(-1, 2, 3) for layer in (self.q, self.k, self.v))
        return ((q * k).sin() + v).flatten(1)

    def forward(self, t: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, self.policy)
        out: Tensor = checkpoint(self.block, t, use_reentrant=False, context_fn=contexts)
        return out


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "interleaved-zb", "dualpipev"])
@pytest.mark.parametrize("saved", ["products", "views too"])
def test_a_policy_saves_what_the_forward_computes(schedule: str, saved: str) -> None:
    """No operation of the deferral takes the place of one that the policy has counted."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Selective(saved) for _ in range(4)))
    plain_model = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn=F.mse_loss, schedule=schedule, ranks=2, n_microbatches=4)
    inputs, target = torch.randn(8, 6), torch.randn(8, 6)
    for _ in range(2):
        pipe.step(inputs, target=target)
        plain_step(plain_model, F.mse_loss, inputs, target=target, n_microbatches=4)
        for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
