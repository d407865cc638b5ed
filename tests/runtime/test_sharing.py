"""Parameters in several places of one process: ties by name, and what must not go wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import PartitionError, Pipeline, PipelineStage, StageError
from penstock.parallel.shared_params import shared_params_of
from penstock.training.clip import clip_grad_norm_
from tests.agreement import ROUNDING, Twins
from tests.models import token_loss, tokens

CPU = torch.device("cpu")


def counts(param: Tensor) -> bool | None:
    """Whether norms over ranks count a parameter here; None if no pipeline holds it."""
    owner = shared_params_of(param)
    return None if owner is None else owner.counts_here(param)


TIE = [{0: "weight", 3: "weight"}]


def make_stages(modules: Sequence[nn.Module]) -> list[PipelineStage]:
    return [PipelineStage(m, i, len(modules), CPU) for i, m in enumerate(modules)]


def make_modules(sparse: bool = False) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Embedding(11, 6, sparse=sparse),
        nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
        nn.Linear(6, 6),
        nn.Linear(6, 11, bias=False),
    ]


def plain_grads(batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The gradients of the tied model in one piece."""
    modules: Any = make_modules()
    modules[3].weight = modules[0].weight
    model = nn.Sequential(*modules)
    for inputs, target in batches:
        for mb, wanted in zip(inputs.chunk(4), target.chunk(4), strict=True):
            (token_loss(model(mb), wanted) / 4).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-zb", "dualpipev"])
def test_a_tie_by_name_between_two_objects(schedule: str, sparse: bool) -> None:
    modules: Any = make_modules(sparse)
    with torch.no_grad():
        modules[3].weight.fill_(9.0)  # overwritten by the first place's value
    ranks = 4 if schedule == "1f1b" else 2
    pipe = Pipeline(
        make_stages(modules),
        loss_fn=token_loss,
        schedule=schedule,
        n_microbatches=4,
        ranks=ranks,
        shared=TIE,
    )
    batches = [tokens(8, step) for step in range(3)]
    for inputs, target in batches:
        pipe.step(inputs, target=target)
    expected = plain_grads(batches)
    first, last = modules[0].weight, modules[3].weight
    assert torch.equal(first, last)
    torch.testing.assert_close(first.grad, expected["0.weight"])
    assert torch.equal(first.grad, last.grad)
    assert first.grad.data_ptr() != last.grad.data_ptr()
    torch.testing.assert_close(modules[2].weight.grad, expected["2.weight"])


def test_clipping_counts_one_of_two_objects() -> None:
    modules = make_modules()
    pipe = Pipeline(make_stages(modules), loss_fn=token_loss, n_microbatches=4, ranks=4, shared=TIE)
    inputs, target = tokens(8, 0)
    pipe.step(inputs, target=target)
    norm = clip_grad_norm_([p for m in modules for p in m.parameters()], 0.1)
    expected = plain_grads([(inputs, target)])
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(list(expected.values())))
    torch.testing.assert_close(modules[0].weight.grad, modules[3].weight.grad)


def test_memory_that_is_no_longer_shared_counts_again() -> None:
    modules = make_modules()
    weight: Any = modules[3].weight
    pipes = [
        Pipeline(make_stages(modules), loss_fn=token_loss, n_microbatches=4, ranks=4, shared=TIE)
    ]
    assert counts(weight) is False
    pipes += [Pipeline(make_stages(modules), loss_fn=token_loss, n_microbatches=4, ranks=4)]
    assert counts(weight) is True
    pipes.clear()
    gc.collect()
    assert counts(weight) is None  # of no pipeline


def test_a_frozen_place_takes_no_gradient() -> None:
    modules: Any = make_modules()
    modules[3].weight.requires_grad_(False)
    pipe = Pipeline(make_stages(modules), loss_fn=token_loss, n_microbatches=4, ranks=4, shared=TIE)
    inputs, target = tokens(8, 0)
    pipe.step(inputs, target=target)
    assert modules[3].weight.grad is None
    assert modules[0].weight.grad is not None


def test_a_place_that_is_not_used_keeps_no_gradient_of_its_own() -> None:
    """Both places without one: None, which an optimizer passes over, and not zeros."""

    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.spare = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return out

    modules = [Idle(), Idle()]
    pipe = Pipeline(
        make_stages(modules),
        loss_fn=F.mse_loss,
        n_microbatches=2,
        ranks=2,
        shared=[{0: "spare", 1: "spare"}],
    )
    pipe.step(torch.ones(4, 6), target=torch.ones(4, 6))
    assert [module.spare.grad for module in modules] == [None, None]


def test_a_wrapped_module_keeps_the_names_within() -> None:
    class Wrapper(nn.Module):
        """As torch.compile wraps."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self._orig_mod = inner

        def forward(self, *args: Any) -> Any:
            return self._orig_mod(*args)

    modules = make_modules()
    stages = make_stages([Wrapper(module) for module in modules])
    pipe = Pipeline(stages, loss_fn=token_loss, n_microbatches=4, ranks=4, shared=TIE)
    inputs, target = tokens(8, 0)
    pipe.step(inputs, target=target)
    # And where the module is replaced between steps.
    stages[3].submod = modules[3]
    pipe.step(inputs, target=target)
    expected = plain_grads([(inputs, target)] * 2)
    torch.testing.assert_close(modules[3].weight.grad, expected["0.weight"])


@pytest.mark.parametrize(
    ("ties", "told"),
    [
        ([{0: "weight"}], "to its name there, with two stages or more"),
        ([((0, "weight"), (3, "weight"))], "expected a dict, from each stage that holds"),
        ([{0: "weight", 9: "weight"}], "names stage 9; there are stages 0 to 3"),
        ([{0: "weight", 1: "nope"}], "stage 1 has neither a parameter nor a module 'nope'; its"),
        ([{0: "weight", 3: "weight"}, {0: "weight", 2: "weight"}], "named by two of the ties"),
    ],
)
def test_ties_that_can_not_be_are_refused(ties: list[Any], told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        Pipeline(make_stages(make_modules()), loss_fn=token_loss, ranks=4, shared=ties)


def test_places_of_different_shapes_are_refused_before_the_first_step() -> None:
    pipe = Pipeline(
        make_stages(make_modules()),
        loss_fn=token_loss,
        n_microbatches=2,
        ranks=4,
        shared=[{2: "weight", 3: "weight"}],
    )
    inputs, target = tokens(4, 0)
    with pytest.raises(PartitionError, match=r"weight of stage 2 \(float32\[6,6\]\) .*differ"):
        pipe.step(inputs, target=target)


def test_one_object_is_left_to_autograd() -> None:
    modules: Any = make_modules()
    modules[3].weight = modules[0].weight
    model = nn.Sequential(*modules)
    both = Twins(
        copy.deepcopy(model),
        token_loss,
        schedule="1f1b",
        ranks=4,
        n_microbatches=4,
        tolerance=ROUNDING,
    )
    inputs, target = tokens(8, 0)
    both.step(inputs, target=target)
    assert all(counts(param) for param in both.pipe.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_an_optimizer_in_the_backward_of_a_tied_parameter_is_refused(schedule: str) -> None:
    """Each stage's backward would step it with a part of the gradient."""
    modules: Any = make_modules()
    modules[3].weight = modules[0].weight
    pipe = Pipeline(modules, loss_fn=token_loss, schedule=schedule, n_microbatches=4)
    inputs, target = tokens(8, 0)
    next(modules[1].parameters()).register_post_accumulate_grad_hook(lambda _: None)
    pipe.step(inputs, target=target)
    modules[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(StageError, match=r"weight of stage 0 is shared .* post-accumulate-grad"):
        pipe.step(inputs, target=target)


def test_a_hook_on_the_gradient_of_a_tied_parameter() -> None:
    """Each stage calls it with its own part: a factor is right."""
    modules = nn.Sequential(*make_modules())
    modules[3].weight = modules[0].weight
    both = Twins(modules, token_loss, tolerance=ROUNDING, ranks=2, n_microbatches=2)
    for model in (both.plain, modules):
        model.get_parameter("0.weight").register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
    for step in range(2):
        inputs, target = tokens(8, step)
        both.step(inputs, target=target)


def test_a_tie_that_the_model_has_anyway_may_be_named() -> None:
    modules: Any = make_modules()
    modules[3].weight = modules[0].weight
    tie = [{0: "0.weight", 1: "3.weight"}]
    pipe = Pipeline(
        nn.Sequential(*modules), loss_fn=token_loss, ranks=2, split=[2, 2], shared=tie,
        n_microbatches=2,
    )  # fmt: skip
    inputs, target = tokens(4, 0)
    pipe.step(inputs, target=target)
    assert len(list(pipe.named_parameters())) == 5
