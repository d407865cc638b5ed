"""The private corners of torch that cutting models stands on do what we think, on this torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from penstock._torch_compat import (
    by_positions,
    has_backward_hooks,
    has_no_forward,
    is_data_dependent,
    is_random,
    is_shared,
    mutated_arguments,
    same_storage,
    shallow_copy_module,
)

aten = torch.ops.aten


def test_tags_of_operations() -> None:
    x = torch.ones(2)
    assert is_data_dependent(aten._local_scalar_dense.default, (x,))
    assert is_data_dependent(aten.nonzero.default, (x,))
    assert not is_data_dependent(aten.add.Tensor, (x, x))
    assert is_data_dependent(aten.index.Tensor, (x, [x > 0]))
    assert not is_data_dependent(aten.index.Tensor, (x, [None, x.long()]))


def test_masks_as_positions() -> None:
    x = torch.rand(2, 3, 4)
    mask, rows, many = x[..., 0] > 0.5, torch.tensor([1, 0]), torch.rand(()) > 0
    two = torch.tensor([True, False, True])
    for indices in ([mask], [None, two], [rows, two], [two.new_zeros(2)], [rows, None, rows]):
        known = by_positions(aten.index.Tensor, (x, indices), lambda _: True)
        assert not is_data_dependent(aten.index.Tensor, known)
        on_meta = [None if index is None else index.to("meta") for index in known[1]]
        expected = aten.index.Tensor(x, indices)
        assert torch.equal(aten.index.Tensor(*known), expected)
        assert aten.index.Tensor(x.to("meta"), on_meta).shape == expected.shape
    for index in (mask, many):
        unknown = by_positions(aten.index.Tensor, (x, [index]), lambda tensor: tensor is many)
        assert unknown[1][0] is index  # one without dimensions is none of any positions


def test_calls_that_draw_random_numbers() -> None:
    x = torch.ones(1, 1, 2, 2)
    assert is_random(aten.bernoulli_.float, (x,), {})
    assert is_random(aten.native_dropout.default, (x, 0.5, True), {})
    assert not is_random(aten.add.Tensor, (x, x), {})
    attention = aten._scaled_dot_product_flash_attention.default
    assert is_random(attention, (x, x, x, 0.5), {})
    assert is_random(attention, (x, x, x), {"dropout_p": 0.5})
    assert not is_random(attention, (x, x, x, 0.0), {})
    assert not is_random(attention, (x, x, x), {})


def test_arguments_that_are_written() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert mutated_arguments(aten.add.Tensor, (x, y), {}) == []
    assert mutated_arguments(aten.add_.Tensor, (x, y), {})[0] is x
    assert mutated_arguments(aten.add.out, (x, y), {"out": y})[0] is y
    assert mutated_arguments(aten._foreach_add_.Scalar, ([x, y], 1), {})[1] is y
    assert mutated_arguments(aten.split.Tensor, (x, 1), {}) == []
    assert mutated_arguments(torch.relu, (x,), {}) == []  # has no schema


def test_memory_on_the_meta_device() -> None:
    x = torch.empty(2, 3, device="meta")
    assert same_storage(x, x[:, 1:]) and not same_storage(x, torch.empty_like(x))
    assert is_shared(x[0]) and not is_shared(torch.empty(2, device="meta"))


def test_containers_without_a_forward() -> None:
    assert has_no_forward(nn.ModuleList()) and has_no_forward(nn.ModuleDict())
    assert has_no_forward(nn.Module())
    assert not has_no_forward(nn.Identity())
    patched = nn.Module()
    patched.forward = F.relu  # type: ignore[method-assign]
    assert not has_no_forward(patched)


def test_a_copied_shell_is_changed_apart() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_forward_hook(lambda *_: None)
    copy = shallow_copy_module(module)
    assert type(copy) is nn.Sequential and copy[0] is module[0]
    del copy._modules["0"]
    copy._forward_hooks.clear()
    assert len(module) == 1 and len(module._forward_hooks) == 1


def test_backward_hooks_are_seen() -> None:
    module = nn.Linear(1, 1)
    assert not has_backward_hooks(module)
    handle = module.register_full_backward_pre_hook(lambda *_: None)
    assert has_backward_hooks(module)
    handle.remove()
    assert not has_backward_hooks(module)
