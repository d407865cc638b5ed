"""One message of many tensors: the same values come out, whatever their dtypes and shapes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.comm.flat import flat_meta, flatten_tensors, unflatten_tensors

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex128,
)
SHAPES = ((), (0,), (1,), (3,), (2, 3), (1, 0, 2))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    size = torch.Size(shape).numel()
    values = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float64).view(shape).to(dtype)


@given(st.lists(st.tuples(tensors(), st.booleans()), min_size=1, max_size=8))
def test_what_was_flattened_comes_out(given_tensors: list[tuple[Tensor, bool]]) -> None:
    likes = [tensor for tensor, _ in given_tensors]
    sent = [tensor if present else None for tensor, present in given_tensors]
    flat = flatten_tensors(sent, likes)
    meta = flat_meta(likes)
    assert (flat.shape, flat.dtype) == (meta.shape, meta.dtype)
    for tensor, found in zip(sent, unflatten_tensors(flat, likes), strict=True):
        if tensor is None:
            assert found is None
        else:
            assert found is not None
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found, tensor)


def test_what_is_not_contiguous_is_sent_as_it_reads() -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    (found,) = unflatten_tensors(flatten_tensors([tensor], [tensor]), [tensor])
    assert found is not None and torch.equal(found, tensor)
