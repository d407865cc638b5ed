"""What crosses a boundary, leaf by leaf: a tensor's description or a plain value, also as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.stage.dtensor import Spread, local_part, spread_of

__all__ = ["Plain", "TensorMeta", "decode_leaf", "encode_leaf", "plain_tag"]

Plain: TypeAlias = Any  # a leaf that is no tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Shape and dtype of a tensor that crosses, and whether its gradient comes back.

    Args:
        shape: its sizes.
        dtype: its dtype.
        requires_grad: whether the producing stage needs its gradient.
        order: its dimensions as they lie in memory, outermost first, where that is another order
            than their own (channels last, transposed): so it arrives as it left. None otherwise.
        spread: how it is spread over a mesh of devices, if it is: then the rest is about this
            rank's part of it.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] | None = None
    spread: Spread | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The description of ``tensor``."""
        part = local_part(tensor)
        return cls(
            shape=part.shape,
            dtype=part.dtype,
            requires_grad=tensor.requires_grad,
            order=_order_in_memory(part),
            spread=spread_of(tensor),
        )

    @property
    def wire_shape(self) -> Sequence[int]:
        """The shape in which it travels: contiguous, dimensions as they lie in memory."""
        return self.shape if self.order is None else [self.shape[i] for i in self.order]

    def pack(self, tensor: Tensor) -> Tensor:
        """``tensor`` as it travels: a view wherever it is dense."""
        return (tensor if self.order is None else tensor.permute(self.order)).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """What ``pack`` was given, from what arrived."""
        if self.order is None:
            return tensor
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor.permute(inverse)

    def fits(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is what this describes.

        One that needs no gradient any more fits (its producer was frozen since); one that needs
        a gradient which nobody would send back does not.
        """
        if self.spread is not None or type(tensor) is not Tensor:
            if spread_of(tensor) != self.spread:
                return False
            tensor = local_part(tensor)
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (self.requires_grad or not tensor.requires_grad)
        )

    @property
    def kind(self) -> str:
        """``float32 (4, 512)``."""
        return f"{str(self.dtype).removeprefix('torch.')} {tuple(self.shape)}"

    def __str__(self) -> str:
        """``float32 (4, 512), with gradient``."""
        told = f"{self.kind}, {'with' if self.requires_grad else 'no'} gradient"
        return told if self.spread is None else f"{told}, {self.spread}"


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    if 0 in strides:
        return None
    in_order = tuple(range(tensor.dim()))
    order = tuple(sorted(in_order, key=lambda i: -strides[i]))
    return None if order == in_order else order


_PLAIN: dict[type[Any], str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    complex: "complex",
    bytes: "bytes",
    torch.dtype: "dtype",
    torch.device: "device",
    torch.Size: "size",
}


def plain_tag(value: Plain) -> str | None:
    return _PLAIN.get(type(value))


def encode_leaf(leaf: TensorMeta | Plain) -> list[Any]:
    if isinstance(leaf, TensorMeta):
        dtype = str(leaf.dtype).removeprefix("torch.")
        spread = None if leaf.spread is None else leaf.spread.encode()
        return ["tensor", list(leaf.shape), dtype, leaf.requires_grad, leaf.order, spread]
    tag = plain_tag(leaf)
    match tag:
        case "bool" | "int" | "str":
            return [tag, leaf]
        case "float":
            return [tag, leaf.hex()]
        case "complex":
            return [tag, leaf.real.hex(), leaf.imag.hex()]
        case "bytes":
            return [tag, base64.b64encode(leaf).decode()]
        case "size":
            return [tag, list(leaf)]
        case _:
            return [str(tag), str(leaf).removeprefix("torch.")]


def decode_leaf(data: list[Any]) -> TensorMeta | Plain:
    match data:
        case ["tensor", shape, dtype, requires_grad, order, spread]:
            return TensorMeta(
                shape=torch.Size(shape),
                dtype=_dtype(dtype),
                requires_grad=requires_grad,
                order=None if order is None else tuple(order),
                spread=None if spread is None else Spread.decode(spread),
            )
        case ["float", value]:
            return float.fromhex(value)
        case ["complex", real, imag]:
            return complex(float.fromhex(real), float.fromhex(imag))
        case ["bytes", value]:
            return base64.b64decode(value)
        case ["size", value]:
            return torch.Size(value)
        case ["dtype", value]:
            return _dtype(value)
        case ["device", value]:
            return torch.device(value)
        case [_, value]:
            return value
    raise BoundaryError(f"a boundary's description holds an unknown leaf {data!r}")


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
