"""PlaceholderTensor tensors: right in all but value, and loud where a value is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from penstock import PartitionError
from penstock.partition.forward.placeholder import (
    PlaceholderTensor,
    Provenance,
    ValueKind,
    ValueRef,
    describe_refs,
    refs_of,
)

CPU = torch.device("cpu")


def source(name: str) -> ValueRef:
    return ValueRef(ValueKind.OUTPUT, 0, 0, name)


def absent(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> PlaceholderTensor:
    return PlaceholderTensor(
        torch.empty(shape, dtype=dtype, device="meta"), CPU, Provenance({source(name)})
    )


def test_it_looks_like_the_tensor() -> None:
    x = absent("h", 2, 3)
    assert (x.shape, x.dtype, x.device, x.dim(), len(x)) == ((2, 3), torch.float32, CPU, 2, 2)
    assert x.is_contiguous() and not x.T.is_contiguous() and x.numel() == 6
    assert repr(x) == "PlaceholderTensor((2, 3), torch.float32, from output 0 of h)"


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x, y: x + y, (2, 3)),
        (lambda x, y: torch.cat([x, y, torch.ones(1, 3)]), (5, 3)),
        (lambda x, y: F.linear(x, y), (2, 2)),
        (lambda x, y: F.layer_norm(x, (3,), y[0]), (2, 3)),
        (lambda x, y: torch.where(x > 0, x, y)[None].expand(4, -1, -1), (4, 2, 3)),
        (lambda x, y: F.scaled_dot_product_attention(x[None], y[None], y[None])[0], (2, 3)),
        (lambda x, y: F.cross_entropy(x, y.argmax(1)), ()),
        (lambda x, y: torch.stack(torch.broadcast_tensors(x, y)).softmax(0), (2, 2, 3)),
        (lambda x, y: x.to(torch.bfloat16) @ y.T.bfloat16(), (2, 2)),
        (lambda x, y: x.new_zeros(3).copy_(x[0]) * y, (2, 3)),
        (lambda x, y: x[torch.arange(2), y.argmax(1)] + y[[0, 1], 2], (2,)),
        (lambda x, y: x[torch.tensor([True, False])] + y[:1], (1, 3)),
    ],
)
def test_results_are_placeholders(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    """In the shape that real ones have, and they know what they come from."""
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    real = function(x, y)
    made = function(absent("x", 2, 3), absent("y", 2, 3))
    assert type(made) is PlaceholderTensor and made.shape == real.shape == shape
    assert (made.dtype, made.device, made.stride()) == (real.dtype, CPU, real.stride())
    assert refs_of([made]) == {source("x"), source("y")}
    # One real argument: as well.
    assert refs_of([function(x, absent("y", 2, 3))]) == {source("y")}


def test_the_same_operation_twice_gives_two_tensors() -> None:
    """Of the same shape, which is computed once; a write into one leaves the other as it is."""
    first, second = (absent(name, 2, 3) * 2 for name in "xy")
    first += absent("z", 2, 3)
    assert refs_of([first]) == {source("x"), source("z")} and refs_of([second]) == {source("y")}
    (smaller, _), (other, _) = (torch.var_mean(absent(name, 2, 3), 1) for name in "xy")
    smaller += 1
    assert (smaller.provenance.num_writes, other.provenance.num_writes) == (1, 0)  # type: ignore[attr-defined]


def test_the_same_numbers_of_other_types_give_other_dtypes() -> None:
    counts = absent("x", 2, dtype=torch.int64)
    assert [(counts * n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
    flags = absent("x", 2, dtype=torch.bool)
    assert [(flags * n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]
    torch.set_default_dtype(torch.float64)
    try:
        assert (counts * 1.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    of_strides = absent("x", 3, 2).T, absent("x", 2, 3)
    assert [(x + 1).stride() for x in of_strides] == [(1, 2), (3, 1)]


def test_writes_are_recorded_for_views() -> None:
    x = absent("x", 4, 3)
    row = x[1]
    x[2:] = absent("y", 2, 3)
    assert refs_of([row]) == {source("x"), source("y")}
    assert x.provenance.num_writes == 1
    x += 1
    assert type(x) is PlaceholderTensor


def test_a_tensor_written_with_placeholders_becomes_one() -> None:
    """For everybody who refers to it."""
    total = torch.zeros(3)
    same = total
    result = total.scatter_add_(0, torch.tensor([1]), absent("x", 1))
    assert result is same is total
    assert type(same) is PlaceholderTensor and refs_of([same]) == {source("x")}


@pytest.mark.parametrize(
    "write",
    [
        lambda buffer, x: buffer[0].copy_(x),
        lambda buffer, x: buffer[0].add_(x),
        lambda buffer, x: buffer.view(-1).copy_(x.repeat(2)),
        lambda buffer, x: torch.add(x, x, out=buffer[1]),
    ],
)
def test_a_write_into_a_part_of_a_tensor_is_refused(write: Callable[..., object]) -> None:
    """Others would not notice, and compute with the old value."""
    buffer = torch.zeros(2, 3)
    with pytest.raises(PartitionError, match="writes output 0 of x, which is on another"):
        write(buffer, absent("x", 3))
    assert type(buffer) is Tensor


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: float(x[0, 0]),
        lambda x: x[0, 0].item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: [1, 2][int(x[0, 0])],
        lambda x: "yes" if x.isnan().any() else "no",
    ],
)
def test_its_value_is_refused(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises(PartitionError, match="needs the value of output 0 of h"):
        ask(absent("h", 2, 3))


@pytest.mark.parametrize("ask", [Tensor.tolist, Tensor.numpy])
def test_its_numbers_are_refused_by_torch(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
        ask(absent("h", 2, 3))


def test_many_names_are_cut_short() -> None:
    assert describe_refs(source(f"m{i}") for i in range(6)) == (
        "output 0 of m0, output 0 of m1, output 0 of m2, output 0 of m3 and 2 more"
    )
