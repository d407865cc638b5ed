"""DTensors at a boundary: each rank's local part crosses, with a description of the whole.

    stage 0, rank 0 of 2   x[:4] ─────► stage 1, rank 0 of 2   x[:4]
    stage 0, rank 1 of 2   x[4:] ─────► stage 1, rank 1 of 2   x[4:]

The next stage has another mesh, with dimensions of the same names and sizes. This module does not
import ``torch.distributed.tensor``, which takes a second, before user code has.
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
    "DTensorMeta",
    "MeshOf",
    "dtensor_meta",
    "find_mesh",
    "from_local",
    "full_tensor",
    "is_dtensor",
    "local_part",
    "max_magnitude",
    "unknown_mesh",
]

_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorMeta:
    """The description of a DTensor without its local part.

    Args:
        mesh: the names of the mesh's dimensions, and their sizes.
        placements: for each dimension ``("shard", dim)``, ``("replicate", None)`` or
            ``("partial", op)``.
        shape: the shape of the full tensor.
        stride: its strides.
    """

    mesh: tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def encode(self) -> list[Any]:
        """JSON values, to be read by ``decode``."""
        return [self.mesh, self.placements, self.shape, self.stride]

    @classmethod
    def decode(cls, data: list[Any]) -> DTensorMeta:
        """Read the values that ``encode`` wrote."""
        mesh, placements, shape, stride = data
        return cls(
            mesh=tuple((str(name), int(size)) for name, size in mesh),
            placements=tuple((str(kind), value) for kind, value in placements),
            shape=tuple(shape),
            stride=tuple(stride),
        )

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        placed = ", ".join(
            kind if value is None else f"{kind} {value}" for kind, value in self.placements
        )
        return f"{placed} over ({mesh}), {tuple(self.shape)} in all"


MeshOf: TypeAlias = Callable[[DTensorMeta], Any]
"""Finds the mesh of a received DTensor."""


def dtensor_meta(tensor: Tensor) -> DTensorMeta | None:
    """The description of a DTensor; None for another tensor.

    Raises:
        BoundaryError: one of its placements is of an unknown kind.
    """
    if not is_dtensor(tensor):
        return None
    dtensor: Any = tensor
    return DTensorMeta(
        mesh=_dimensions(dtensor.device_mesh),
        placements=tuple(map(_described, dtensor.placements)),
        shape=tuple(dtensor.shape),
        stride=tuple(dtensor.stride()),
    )


def is_dtensor(tensor: Tensor) -> bool:
    """True if ``tensor`` is a DTensor."""
    if type(tensor) is Tensor:
        return False
    kinds = sys.modules.get(_MODULE)
    return kinds is not None and isinstance(tensor, kinds.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, differentiable; any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    part: Tensor = dtensor.to_local()
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, in a collective over its mesh; any other tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor
    full: Tensor = dtensor.full_tensor()
    return full


def max_magnitude(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude in DTensors of one mesh, a collective over it.

    torch's ``max`` fails for a local part without elements, as of a tensor with fewer rows than
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
    # Gathered, not reduced: a maximum taken on the way may lose a NaN.
    mesh = every[0].device_mesh
    everywhere: Any = DTensor.from_local(here, mesh, [Shard(0)] * mesh.ndim, run_check=False)
    found: Tensor = everywhere.full_tensor().max()
    return found


def from_local(part: Tensor, meta: DTensorMeta, mesh: Any) -> Tensor:
    """The DTensor with this local part, differentiable."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    kinds: dict[str, Any] = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    placements = [kinds[k]() if value is None else kinds[k](value) for k, value in meta.placements]
    shape = torch.Size(meta.shape)
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=meta.stride
    )


def unknown_mesh(meta: DTensorMeta) -> Any:
    """Refuse a DTensor whose mesh is unknown on this rank.

    Raises:
        BoundaryError: always.
    """
    raise BoundaryError(
        f"the stage receives a DTensor ({meta}), and its mesh on this rank is not known: pass "
        "get_mesh= to PipelineStage, or have a parameter that is a DTensor over it"
    )


def find_mesh(meta: DTensorMeta, tensors: Iterable[Tensor]) -> Any:
    """The mesh with such dimensions of one of ``tensors``; None if there is none."""
    for tensor in filter(is_dtensor, tensors):
        found: Any = tensor
        mesh = found.device_mesh
        if mesh.mesh_dim_names is not None and _dimensions(mesh) == meta.mesh:
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
        f"a DTensor with the placement {placement} can't cross between stages; redistribute it to "
        "Shard(), Replicate() or Partial() first, or return its to_local()"
    )
