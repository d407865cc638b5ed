"""The private corners of torch: present, and doing what the deferral takes them to do."""

from __future__ import annotations

import torch
import torch.nn.attention.flex_attention
import torch.nn.functional as F

from penstock._torch_compat import (
    autocast_enabled,
    deferrable_now,
    observe_at_node,
    observe_grad,
    observed,
    pytree_node,
    run_backward,
    saved_tensor_hooks_active,
    without_override_check,
)


def test_an_observer_sees_what_the_operation_receives() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[torch.Tensor] = []
    y = x * 2
    observe_grad(y, seen.append)
    assert observed(y)
    first = y.register_hook(lambda grad: grad * 3)
    y.register_hook(lambda grad: grad * 5)
    first.remove()
    y.sum().backward()
    assert torch.equal(seen[0], torch.full((2,), 5.0))
    assert not observed(x)


def test_an_observer_at_the_node_comes_after_the_node_s_own_hooks() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[torch.Tensor] = []
    y = x * 2
    observe_grad(y, seen.append)
    observe_at_node(y)
    y.register_hook(lambda grad: grad * 3)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 5,))
    y.sum().backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((2,), 15.0))


def test_accumulating_runs_every_hook() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    seen: list[str] = []
    leaf.register_hook(lambda grad: grad * 2)
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    for _ in range(2):
        run_backward((leaf,), (torch.ones(2, dtype=torch.float64),))
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full((2,), 4.0))
    assert seen == ["accumulated"] * 2


def test_states_are_seen() -> None:
    assert deferrable_now() and not autocast_enabled() and not saved_tensor_hooks_active()
    states: list[bool] = []

    def look(t: torch.Tensor) -> torch.Tensor:
        states.append(deferrable_now())
        return t.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2, 2))
    with torch.autograd.forward_ad.dual_level():
        look(torch.ones(2))
    with torch.no_grad():
        look(torch.ones(2))
    assert states == [True, False, False, False, False]
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_enabled()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert saved_tensor_hooks_active()


def test_the_twin_of_a_function_lets_a_mode_see_inside() -> None:
    seen: list[object] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, bias = torch.randn(3, 2, 4), torch.zeros(12)
    twin = without_override_check(F.multi_head_attention_forward)
    assert twin is not None
    arguments = (x, x, x, 4, 2, torch.randn(12, 4), bias, None, None, False, 0.0)
    out = (torch.randn(4, 4), torch.zeros(4))
    with Watch():
        got, _ = twin(*arguments, *out)
    assert F.linear in seen
    assert F.multi_head_attention_forward not in seen
    wanted, _ = F.multi_head_attention_forward(*arguments, *out)
    assert torch.equal(got, wanted)
    assert without_override_check(torch.add) is None


def test_classes_of_torch_s_pytree_are_opened_and_made() -> None:
    class Held:
        def __init__(self, value: object) -> None:
            self.value = value

    class Holds(Held):
        pass

    torch.utils._pytree.register_pytree_node(
        Held, lambda held: ([held.value], "as a list"), lambda values, context: Held(values)
    )
    node = pytree_node(Held)
    assert node is not None
    children, context = node[0](Held(3))
    assert (children, context) == ([3], "as a list")
    assert node[1](tuple(children), context).value == [3]
    assert pytree_node(Holds) is None
    assert pytree_node(torch.Size) is None
    assert pytree_node(torch.nn.attention.flex_attention.BlockMask) is None
