"""Which tensors have memory in common, so that what is written into one is in the other too.

    h, h                        the same
    h, h[:, :2]                 a part
    q, k, v = qkv.chunk(3)      one allocation, but nothing in common

It looks at addresses alone, never at values: nobody waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["overlapping"]


def overlapping(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The pairs, by their numbers, that have memory in common.

    Example:
        >>> h = torch.zeros(2, 6)
        >>> overlapping([h, h[:, :2], h.clone()])
        ((0, 1),)
        >>> overlapping(h.chunk(3, dim=1)), overlapping(h.chunk(2))
        ((), ())
    """
    plain = [(i, t) for i, t in enumerate(tensors) if type(t) is Tensor and not t.is_meta]
    places = [(i, t, t.untyped_storage().data_ptr()) for i, t in plain if t.numel()]
    return tuple(
        (i, j)
        for at, (i, one, here) in enumerate(places)
        for j, other, there in places[at + 1 :]
        if here == there and _overlap(one, other)
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    if one is other or one.dtype is not other.dtype:
        return True
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    if end <= other_first or other_end <= first:
        return False
    numbers = one.untyped_storage().nbytes() // one.element_size()
    marks = torch.zeros(numbers, dtype=torch.bool, device="cpu")
    try:
        _placed(marks, one).fill_(True)
    except RuntimeError:  # it overlaps itself
        return True
    return bool(_placed(marks, other).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Where its elements begin in their storage, and where they end."""
    first = int(tensor.storage_offset())
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + reach + 1


def _placed(marks: Tensor, tensor: Tensor) -> Tensor:
    """The marks of a tensor's elements, those of an expanded dimension once."""
    sizes = [
        1 if not stride else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return marks.as_strided(sizes, tensor.stride(), tensor.storage_offset())
