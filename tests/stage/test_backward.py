"""The backward split along the graph: the gradients of autograd, and of torch where it is right."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed.pipelining._backward as peer
from torch import Tensor, nn

from penstock.compat.backward import stage_backward, stage_backward_input, stage_backward_weight
from penstock.errors import StageError
from tests.stage.deferral_cases import (
    Block,
    Case,
    Gradients,
    Stops,
    assert_same,
    fresh,
    gradients,
    module_cases,
    outputs_of,
    plain,
    some_grads,
)

CASES = module_cases()


def walked(module: nn.Module, inputs: tuple[Tensor, ...], steps: int = 1) -> Gradients:
    """The gradients of F, I and W, split along the graph, all microbatches in flight at once."""
    module = copy.deepcopy(module)
    inputs = fresh(inputs)
    left = []
    for _ in range(steps):
        torch.manual_seed(1)
        outputs = outputs_of(module(*inputs))
        grads, groups = stage_backward_input(
            outputs, some_grads(outputs), inputs, module.parameters()
        )
        assert [g is None for g in grads] == [not x.requires_grad for x in inputs]
        left.append(groups)
    assert all(p.grad is None for p in module.parameters())
    for groups in left:
        stage_backward_weight(module.parameters(), groups)
    return gradients(module, inputs)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_of_plain_autograd(case: Case) -> None:
    module, inputs = case.make()
    assert_same(walked(module, inputs, steps=2), plain(module, inputs, steps=2), exact=False)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_full_backward(case: Case) -> None:
    module, inputs = case.make()
    expected = plain(module, inputs)
    module, inputs = copy.deepcopy(module), fresh(inputs)
    torch.manual_seed(1)
    outputs = outputs_of(module(*inputs))
    grads = stage_backward(outputs, some_grads(outputs), inputs)
    assert all(x.grad is None for x in inputs)
    found = {name: p.grad for name, p in module.named_parameters()}
    found |= {f"input {i}": grad for i, grad in enumerate(grads)}
    assert_same(found, expected)


def test_the_same_as_torch_on_a_block() -> None:
    module, x = Block(8, 2), torch.randn(2, 3, 8, requires_grad=True)
    expected = copy.deepcopy(module)
    out, grad = expected(x), torch.randn(2, 3, 8)
    (x_grad,), groups = peer.stage_backward_input([out], [grad], [x], expected.parameters())
    peer.stage_backward_weight(expected.parameters(), groups)
    x.grad = None
    out = module(x)
    (ours,), groups = stage_backward_input([out], [grad], [x], module.parameters())
    assert torch.equal(ours, x_grad)
    assert out.grad_fn is None
    stage_backward_weight(module.parameters(), groups)
    for got, wanted in zip(module.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got.grad, wanted.grad)


def test_hooks_run_once_with_w() -> None:
    module, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    seen = []
    module.weight.register_hook(lambda grad: seen.append("tensor") or grad * 2)
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    grad = torch.randn(2, 3)
    torch.autograd.backward([module(module(x))], [grad])
    expected, module.weight.grad = module.weight.grad, None
    seen.clear()
    _, groups = stage_backward_input([module(module(x))], [grad], [x], module.parameters())
    assert seen == []
    stage_backward_weight(module.parameters(), groups)
    assert seen == ["tensor", "accumulated"]
    torch.testing.assert_close(module.weight.grad, expected)


def test_a_loss_needs_no_gradient() -> None:
    module, x = nn.Linear(3, 1), torch.randn(1, 3, requires_grad=True)
    (full,) = stage_backward(module(x).sum(), None, [x])
    weight_grad, module.weight.grad = module.weight.grad, None
    (split,), groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    assert torch.equal(full, split)
    assert torch.equal(module.weight.grad, weight_grad)


def test_outputs_without_a_gradient_take_no_part() -> None:
    x = torch.randn(3, requires_grad=True)
    a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    outputs = {"a": x * a, "rest": [x * b, 3, None]}
    (grad,) = stage_backward(outputs, {"a": torch.ones(3), "rest": [None, None, None]}, [x])
    assert torch.equal(grad, a)
    assert b.grad is None
    (grad,), groups = stage_backward_input([x * a, x * b], [None, torch.ones(3)], [x], [a, b])
    assert torch.equal(grad, b)
    a.grad = None
    stage_backward_weight([a, b], groups)
    assert a.grad is None
    assert torch.equal(b.grad, x)


def test_outputs_nested_at_will() -> None:
    x = torch.ones(3, requires_grad=True)
    outputs = {"a": [x * 2, (x.sum(), None)], "b": x.detach(), "c": (x * 3,), "d": {"e": x * 5}}
    # Of one number a missing gradient stands for one; else there is none.
    given = {"a": [torch.ones(3), (None, None)], "b": torch.ones(3), "c": None, "d": None}
    (grad,) = stage_backward(outputs, given, [x])
    assert torch.equal(grad, torch.full((3,), 3.0)) and x.grad is None


def test_gradients_of_another_structure_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    said = "must have the outputs' structure, .* of "
    with pytest.raises(StageError, match=said + r"a dict .*\['a'\], got a dict .*\['b'\]"):
        stage_backward({"a": x * 2}, {"b": torch.ones(3)}, [x])
    with pytest.raises(StageError, match=said + "a Tensor, got a float"):
        stage_backward(x * 2, 1.0, [x])
    with pytest.raises(StageError, match=said + r"a tuple .*\[0, 1\], got a list .*\[0\]"):
        stage_backward((x * 2, x), [torch.ones(3)], [x])
    with pytest.raises(StageError, match=said + r"a list .*\[0\], got a tuple .*\[\]"):
        stage_backward_input([x * 2], (), [x], [])


def test_weight_gradients_are_computed_once() -> None:
    module, x = nn.Linear(3, 1), torch.randn(1, 3, requires_grad=True)
    _, groups = stage_backward_input([module(x)], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    with pytest.raises(StageError, match="computed already"):
        stage_backward_weight(module.parameters(), groups)


def test_a_gradient_may_stop_on_its_way() -> None:
    module, x = nn.Linear(3, 1), torch.randn(1, 3, requires_grad=True)
    grads, groups = stage_backward_input([Stops.apply(module(x))], None, [x], module.parameters())
    assert (grads, stage_backward_weight(module.parameters(), groups)) == ((None,), (None, None))


def test_the_same_input_twice_gets_its_gradient_once() -> None:
    x = torch.ones(3, requires_grad=True)
    grads, _ = stage_backward_input([x * 2], None, [x, x], [])
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(x.grad, torch.full((3,), 2.0))
