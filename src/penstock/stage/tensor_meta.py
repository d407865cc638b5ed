"""Leaves at a boundary: the description of a tensor, or a plain value; also as JSON."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.stage.dtensor import DTensorMeta, dtensor_meta, local_part

__all__ = ["Plain", "TensorMeta", "decode_leaf", "encode_leaf", "plain_tag"]

# A leaf that is no tensor: a number, a string, a dtype, a device. None is structure, no leaf.
Plain: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """The shape, dtype and memory format of a tensor that crosses a boundary.

    Args:
        shape: its shape; of a DTensor, its local part's, as are the dtype and the order.
        dtype: its dtype.
        requires_grad: whether its gradient is sent back.
        order: its dimensions by descending stride, if that is another order (channels last,
            transposed), so that the memory format is restored; None otherwise.
        dtensor: the DTensor's description, if it is one.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] | None = None
    dtensor: DTensorMeta | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The description of ``tensor``."""
        part = local_part(tensor)
        return cls(
            shape=part.shape,
            dtype=part.dtype,
            requires_grad=tensor.requires_grad,
            order=_order_in_memory(part),
            dtensor=dtensor_meta(tensor),
        )

    @property
    def wire_shape(self) -> Sequence[int]:
        """The shape in which it is sent: contiguous, dimensions by descending stride."""
        return self.shape if self.order is None else [self.shape[i] for i in self.order]

    def pack(self, tensor: Tensor) -> Tensor:
        """``tensor`` as it is sent: a view if it is dense."""
        return (tensor if self.order is None else tensor.permute(self.order)).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """The received tensor with its memory format restored."""
        if self.order is None:
            return tensor
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return tensor.permute(inverse)

    def fits(self, tensor: Tensor) -> bool:
        """True if this describes ``tensor``.

        A tensor that no longer requires grad fits (its producer was frozen since); one that
        requires grad where none would be sent back does not.
        """
        if self.dtensor is not None or type(tensor) is not Tensor:
            if dtensor_meta(tensor) != self.dtensor:
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
        return told if self.dtensor is None else f"{told}, {self.dtensor}"


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
    """The kind of a plain value; None for any other object."""
    return _PLAIN.get(type(value))


def encode_leaf(leaf: TensorMeta | Plain) -> list[Any]:
    """A leaf as JSON values."""
    if isinstance(leaf, TensorMeta):
        dtype = str(leaf.dtype).removeprefix("torch.")
        dtensor = None if leaf.dtensor is None else leaf.dtensor.encode()
        return ["tensor", list(leaf.shape), dtype, leaf.requires_grad, leaf.order, dtensor]
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
    """Read a leaf that ``encode_leaf`` wrote."""
    match data:
        case ["tensor", shape, dtype, requires_grad, order, dtensor]:
            return TensorMeta(
                shape=torch.Size(shape),
                dtype=_dtype(dtype),
                requires_grad=requires_grad,
                order=None if order is None else tuple(order),
                dtensor=None if dtensor is None else DTensorMeta.decode(dtensor),
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
