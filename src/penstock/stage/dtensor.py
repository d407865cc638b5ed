"""Tensors that are spread over a mesh of devices (DTensor): their local parts cross.

    stage 0, rank 0 of 2   x[:4] ─────► stage 1, rank 0 of 2   x[:4]     each part to its like,
    stage 0, rank 1 of 2   x[4:] ─────► stage 1, rank 1 of 2   x[4:]     with how they are one

What crosses is described as data: the mesh by the names and sizes of its dimensions, since the mesh
of the next stage is another one. ``torch.distributed.tensor`` takes a second to import, so that it
is not imported here before a user's code has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BoundaryError

__all__ = [
    "MeshOf",
    "Spread",
    "find_mesh",
    "in_full",
    "is_spread",
    "largest",
    "local_part",
    "spread_of",
    "unknown_mesh",
    "whole",
]

_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How local parts make one tensor.

    Args:
        mesh: the names of the mesh's dimensions, and their sizes.
        placements: for each of these, what it does: ``("shard", dim)``, ``("replicate", None)`` or
            ``("partial", op)``.
        shape: of the whole tensor.
        stride: likewise.
    """

    mesh: tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def encode(self) -> list[Any]:
        """Lists of plain values, to be read by ``decode``."""
        return [self.mesh, self.placements, self.shape, self.stride]

    @classmethod
    def decode(cls, data: list[Any]) -> Spread:
        """What ``encode`` wrote."""
        mesh, placements, shape, stride = data
        return cls(
            mesh=tuple((str(name), int(size)) for name, size in mesh),
            placements=tuple((str(kind), what) for kind, what in placements),
            shape=tuple(shape),
            stride=tuple(stride),
        )

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        placed = ", ".join(
            f"{kind} {what}" if what is not None else kind for kind, what in self.placements
        )
        return f"{placed} over ({mesh}), {tuple(self.shape)} in all"


MeshOf: TypeAlias = Callable[[Spread], Any]
"""The mesh over which a received tensor is spread."""


def spread_of(tensor: Tensor) -> Spread | None:
    """How ``tensor`` is spread; None where it is whole.

    Raises:
        BoundaryError: it is spread in a way that has no name here.
    """
    if not is_spread(tensor):
        return None
    spread: Any = tensor
    return Spread(
        mesh=_dimensions(spread.device_mesh),
        placements=tuple(map(_described, spread.placements)),
        shape=tuple(spread.shape),
        stride=tuple(spread.stride()),
    )


def is_spread(tensor: Tensor) -> bool:
    """Whether ``tensor`` is one of several parts."""
    if type(tensor) is Tensor:
        return False
    kinds = sys.modules.get(_MODULE)
    return kinds is not None and isinstance(tensor, kinds.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, with its graph; a whole tensor as it is."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    part: Tensor = spread.to_local()
    return part


def in_full(tensor: Tensor) -> Tensor:
    """What a tensor is in all; each rank of its mesh, if it has one, calls and gets it."""
    if not is_spread(tensor):
        return tensor
    spread: Any = tensor
    full: Tensor = spread.full_tensor()
    return full


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in tensors that are spread over one mesh, each rank of which calls.

    Torch has none of a part without elements, such as a rank gets of a tensor with fewer rows than
    there are ranks.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    every: list[Any] = list(tensors)
    parts = []
    for tensor in every:
        summed = [Replicate() if p.is_partial() else p for p in tensor.placements]
        parts.append(tensor.redistribute(placements=summed).to_local())
    magnitudes = [part.abs().max() for part in parts if part.numel()]
    here = torch.stack(magnitudes or [parts[0].new_zeros(())]).max().reshape(1)
    # Gathered: a maximum that is taken on the way loses what is not a number.
    mesh = every[0].device_mesh
    everywhere: Any = DTensor.from_local(here, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    found: Tensor = everywhere.full_tensor().max()
    return found


def whole(part: Tensor, spread: Spread, mesh: Any) -> Tensor:
    """The tensor of which ``part`` is this rank's, with its graph."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    made: dict[str, Any] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    placements = [made[k]() if what is None else made[k](what) for k, what in spread.placements]
    shape = torch.Size(spread.shape)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=spread.stride
    )


def unknown_mesh(spread: Spread) -> Any:
    """Where nothing says what the mesh is.

    Raises:
        BoundaryError: always.
    """
    raise BoundaryError(
        f"a tensor came that is spread as {spread}, and nothing says over which mesh here: pass "
        "get_mesh= to PipelineStage, or have a parameter that is spread over it"
    )


def find_mesh(spread: Spread, tensors: Iterable[Tensor]) -> Any:
    """The mesh with dimensions of these names over which one of ``tensors`` is spread, if any."""
    for tensor in filter(is_spread, tensors):
        found: Any = tensor
        mesh = found.device_mesh
        if mesh.mesh_dim_names is not None and _dimensions(mesh) == spread.mesh:
            return mesh
    return None


def _dimensions(mesh: Any) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    return tuple(zip(names, mesh.shape, strict=True))


def _described(placement: Any) -> tuple[str, Any]:
    kinds: Any = sys.modules[_MODULE]
    if type(placement) is kinds.Shard:
        return ("shard", placement.dim)
    if type(placement) is kinds.Replicate:
        return ("replicate", None)
    if type(placement) is kinds.Partial:
        return ("partial", placement.reduce_op)
    raise BoundaryError(
        f"a tensor spread as {placement} can't cross between stages; redistribute it to Shard(), "
        "Replicate() or Partial() first, or return its to_local()"
    )
