"""Several tensors as one message: their bytes one after the other, with a mark for those missing.

    ┌────────────┬──────────┬────────┬─────┐
    │ float64 …  │ float32… │ bf16 … │ 101 │    widest dtypes first, so that each stands on a
    └────────────┴──────────┴────────┴─────┘    multiple of its own size; then a byte per tensor

What both ends know (shapes and dtypes, in order) is not sent. It knows nothing of who sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.stage.tensor_meta import TensorMeta

__all__ = ["flat_meta", "flatten_tensors", "unflatten_tensors"]


def flat_meta(likes: Sequence[Tensor]) -> TensorMeta:
    """What a message of tensors like ``likes`` is."""
    size = sum(t.nbytes for t in likes) + len(likes)
    return TensorMeta(shape=torch.Size((size,)), dtype=torch.uint8, requires_grad=False)


def flatten_tensors(tensors: Sequence[Tensor | None], likes: Sequence[Tensor]) -> Tensor:
    """The message that holds ``tensors``.

    Args:
        tensors: what to send; None where there is none.
        likes: for each of them a tensor of its shape, dtype and device.

    Example:
        >>> like = torch.zeros(2, dtype=torch.int16)
        >>> unflatten_tensors(flatten_tensors([None, like + 1], [like, like]), [like, like])
        [None, tensor([1, 1], dtype=torch.int16)]
    """
    flat = torch.zeros(flat_meta(likes).shape, dtype=torch.uint8, device=likes[0].device)
    for place, part in _parts(flat, likes):
        tensor = tensors[place]
        if tensor is not None:
            part.copy_(tensor)
    present = [tensor is not None for tensor in tensors]
    flat[-len(likes) :] = torch.tensor(present, dtype=torch.uint8, device="cpu")
    return flat


def unflatten_tensors(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor | None]:
    """The tensors of a message: views into it, None where the sender had none."""
    present = flat[-len(likes) :].tolist()
    found: list[Tensor | None] = [None] * len(likes)
    for place, part in _parts(flat, likes):
        if present[place]:
            found[place] = part
    return found


def _parts(flat: Tensor, likes: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    offset = 0
    for place in sorted(range(len(likes)), key=lambda i: -likes[i].element_size()):
        like = likes[place]
        part = flat[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
        offset += like.nbytes
        yield place, part
