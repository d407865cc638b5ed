"""DTensors at a boundary: each rank's local part crosses, with a description of the full tensor.

    stage 0, rank 0 of 2   x[:4] ─────► stage 1, rank 0 of 2   x[:4]
    stage 0, rank 1 of 2   x[4:] ─────► stage 1, rank 1 of 2   x[4:]

The next stage has another mesh, with dimensions of the same names and sizes. This module does not
import ``torch.distributed.tensor``, which takes a second, before user code has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import BoundaryError

__all__ = [
    "DTensorMeta", "MeshOf", "dtensor_meta", "encode_placement", "find_mesh", "from_local",
    "full_tensor", "is_dtensor", "local_part", "num_shards", "sharded_like", "with_local_part",
]  # fmt: skip


class DTensorMeta(NamedTuple):
    """The description of a DTensor without its local part.

    ``mesh`` has the names and sizes of the mesh's dimensions, ``placements`` for each of these
    ``("Shard", dim)``, ``("Replicate", None)`` or ``("Partial", op)``. ``shape`` and ``stride`` are
    those of the full tensor.
    """

    mesh: tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        placed = (kind if value is None else f"{kind} {value}" for kind, value in self.placements)
        return f"{', '.join(placed)} over ({mesh}), {self.shape} in all".lower()


# Finds the mesh of a received DTensor.
MeshOf: TypeAlias = Callable[[DTensorMeta], Any]


def _torch_dtensor() -> Any:
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(tensor: object) -> bool:
    """True if ``tensor`` is a DTensor."""
    if type(tensor) is Tensor:
        return False
    kinds = _torch_dtensor()
    return kinds is not None and isinstance(tensor, kinds.DTensor)


def dtensor_meta(tensor: Any) -> DTensorMeta | None:
    """The description of a DTensor; None for another tensor."""
    if not is_dtensor(tensor):
        return None
    placements = tuple(map(encode_placement, tensor.placements))
    mesh = _dimensions(tensor.device_mesh)
    return DTensorMeta(mesh, placements, tuple(tensor.shape), tuple(tensor.stride()))


def encode_placement(placement: Any) -> tuple[str, Any]:
    """The kind of a placement, with its dimension or operation."""
    kinds, kind = _torch_dtensor(), type(placement)
    if kind not in (kinds.Shard, kinds.Replicate, kinds.Partial):
        raise BoundaryError(
            f"a DTensor with the placement {placement} can't cross between stages; redistribute it "
            "to Shard(), Replicate() or Partial() first, or return its to_local()"
        )
    return kind.__name__, getattr(placement, "dim", getattr(placement, "reduce_op", None))


def local_part(tensor: Any) -> Tensor:
    """The local part of a DTensor, differentiable; any other tensor unchanged."""
    part: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return part


def num_shards(tensor: Any, dim: int) -> int:
    """The number of parts into which a DTensor is sharded along ``dim``; 1 for another tensor."""
    if not is_dtensor(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, each in sizes if each.is_shard(dim % tensor.dim()))


def with_local_part(tensor: Any, part: Tensor, rows: int, dim: int) -> Tensor:
    """The DTensor placed as ``tensor`` with another local part, and ``rows`` rows along ``dim``."""
    shape = torch.Size([*tensor.shape[:dim], rows, *tensor.shape[dim + 1 :]])
    made: Tensor = _torch_dtensor().DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    return made


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor of a DTensor, in a collective over its mesh; any other tensor unchanged."""
    full: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full


def sharded_like(own: Any, value: Any) -> Any:
    """A full tensor, which every process has, sharded as the DTensor ``own``; for another ``own``,
    the value itself."""
    if not is_dtensor(own) or is_dtensor(value):
        return value
    return _torch_dtensor().distribute_tensor(
        value.to(own.device), own.device_mesh, own.placements, src_data_rank=None
    )


def from_local(part: Tensor, meta: DTensorMeta, mesh: Any) -> Tensor:
    """The DTensor with this local part, differentiable."""
    import torch.distributed.tensor as kinds

    placements = [
        getattr(kinds, kind)(*() if value is None else (value,)) for kind, value in meta.placements
    ]
    return kinds.DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(meta.shape), stride=meta.stride
    )


def find_mesh(meta: DTensorMeta, tensors: Iterable[Any] = ()) -> Any:
    """The mesh with such dimensions of one of ``tensors``; refuses a DTensor without one."""
    for tensor in tensors:
        if is_dtensor(tensor):
            mesh = tensor.device_mesh
            if mesh.mesh_dim_names is not None and _dimensions(mesh) == meta.mesh:
                return mesh
    raise BoundaryError(
        f"the stage receives a DTensor ({meta}), and its mesh on this rank is not known: pass "
        "get_mesh= to PipelineStage, or have a parameter that is a DTensor over it"
    )


def _dimensions(mesh: Any) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names or tuple(f"dim {i}" for i in range(mesh.ndim))
    return tuple(zip(names, mesh.shape, strict=True))
