"""Boundaries between stages: the description of a pytree of tensors and plain values.

    stage s returns      crosses as             stage s+1 is called with
    (hidden, mask)       the leaves, in order   hidden, mask
    [hidden, mask]       the leaves, in order   hidden, mask
    (hidden, None)       hidden alone           hidden, None
    hidden               (hidden,)              hidden
    {"h": hidden}        ({"h": hidden},)       the dict

None is structure of the tree, not a leaf: the metadata describes it, and no tensor is sent. The
sender makes a ``BoundarySpec`` of the first value that crosses, sends it as JSON (never pickled
objects), and checks later values against it.
"""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import optree
import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.stage import pytree
from penstock.stage.dtensor import (
    DTensorMeta,
    MeshOf,
    dtensor_meta,
    find_mesh,
    from_local,
    local_part,
)

__all__ = ["BoundarySpec", "TensorMeta", "describe", "shape_text", "static_spec"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """The shape, dtype and memory format of a tensor, or local part, that crosses a boundary.

    ``order`` has the dimensions by descending stride, if that is another order (channels last,
    transposed). ``requires_grad`` says whether the gradient is sent back.
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] | None = None
    dtensor: DTensorMeta | None = None

    @property
    def wire_shape(self) -> Sequence[int]:
        """The shape in which it is sent: contiguous, dimensions by descending stride."""
        return self.shape if self.order is None else [self.shape[i] for i in self.order]

    @property
    def num_bytes(self) -> int:
        """The size of the message."""
        return self.shape.numel() * self.dtype.itemsize

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

    def pack(self, tensor: Tensor) -> Tensor:
        """``tensor`` as it is sent: a view if it is dense."""
        return (tensor if self.order is None else tensor.permute(self.order)).contiguous()

    def unpack(self, tensor: Tensor) -> Tensor:
        """The received tensor with its memory format restored."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))

    @property
    def kind(self) -> str:
        """``float32[4,512]``, and of a DTensor how it is placed."""
        shown = shape_text(self)
        return shown if self.dtensor is None else f"{shown}, {self.dtensor}"

    def __str__(self) -> str:
        """``float32[4,512], with gradient``."""
        return f"{self.kind}, {'with' if self.requires_grad else 'no'} gradient"


def shape_text(tensor: Tensor | TensorMeta) -> str:
    """A dtype and a shape as text, ``float32[4,512]``, with ``*`` for an open size."""
    sizes = ",".join(str(size) if isinstance(size, int) else "*" for size in tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}]"


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda i: -strides[i]))
    return None if order == tuple(range(tensor.dim())) else order


class BoundarySpec:
    """The description of a pytree that crosses a boundary.

    Args:
        tree: the structure of the arguments tuple.
        leaves: for each leaf a ``TensorMeta``, or the plain value itself.
        shared: the pairs of tensors, by index, that shared memory in the sending stage.

    Attributes:
        metas: the tensors' descriptions.
        grad_slots, grad_metas: the indices and descriptions of those whose gradients are sent back.
        holds_values: whether it holds plain values that may change while all shapes stay the same.
    """

    def __init__(
        self,
        tree: optree.PyTreeSpec,
        leaves: tuple[TensorMeta | pytree.Plain, ...],
        shared: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.tree = tree
        self.leaves = leaves
        self.shared = shared
        self._slots = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, TensorMeta))
        self.metas: tuple[TensorMeta, ...] = tuple(leaves[i] for i in self._slots)
        self.grad_slots = tuple(i for i, meta in enumerate(self.metas) if meta.requires_grad)
        self.grad_metas = tuple(self.metas[i] for i in self.grad_slots)
        # Bytes don't change: stages cut by module send descriptions of shapes as bytes.
        self.holds_values = any(isinstance(x, (bool, int, float, complex, str)) for x in leaves)
        self._in_order = all(meta.order is None for meta in self.metas)
        # A fast path for the common case of one tensor.
        is_one = len(leaves) == 1 and tree.type is tuple and tree.num_nodes == 2
        self._only = self.metas[0] if is_one and self.metas and not self.metas[0].dtensor else None

    def tensors(self, output: Any) -> Sequence[Tensor]:
        """The tensors of a stage's output, which must fit this description, in sent order."""
        if self._only is not None:
            value = output[0] if type(output) is tuple and len(output) == 1 else output
            if type(value) is Tensor and _fits(value, self._only):
                return (value,)
        leaves, tree = pytree.flatten(pytree.as_args(output))
        if tree != self.tree:
            raise BoundaryError(f"the output's structure is {tree}, expected {self.tree}{_HINT}")
        pairs = list(zip(leaves, self.leaves, strict=True))
        misfits = [slot for slot, pair in enumerate(pairs) if not _fits(*pair)]
        if misfits:  # tensors first: stages cut by module also send long descriptions of them
            slot = next((s for s in misfits if isinstance(leaves[s], Tensor)), misfits[0])
            got, expected = map(_shown, pairs[slot])
            raise BoundaryError(f"output {slot} is {got}, expected {expected}{_HINT}")
        return [local_part(leaves[i]) for i in self._slots]

    def check_static(self, given: BoundarySpec | None, what: str) -> None:
        """Check this spec against the shapes, dtypes and placements that the user gave."""
        if given is None:
            return
        kinds, wanted = ([meta.kind for meta in spec.metas] for spec in (self, given))
        if kinds != wanted:
            raise BoundaryError(
                f"the stage's {what} is {' and '.join(kinds)}, expected {' and '.join(wanted)} as "
                f"{what}_args says"
            )

    def retyped(self, leaves: Sequence[Any]) -> BoundarySpec:
        """This description with the dtypes of ``leaves``; itself if they are the same."""
        pairs = list(zip(self.leaves, leaves, strict=True))
        if all(not isinstance(m, TensorMeta) or m.dtype is x.dtype for m, x in pairs):
            return self
        metas = (
            dataclasses.replace(meta, dtype=leaf.dtype) if isinstance(meta, TensorMeta) else meta
            for meta, leaf in pairs
        )
        return BoundarySpec(self.tree, tuple(metas), self.shared)

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as they are sent, see ``TensorMeta.pack``."""
        if self._in_order:
            return [tensor.contiguous() for tensor in tensors]
        return [meta.pack(t) for meta, t in zip(self.metas, tensors, strict=True)]

    def unpack(self, tensors: Sequence[Any], *, grads: bool = False) -> Sequence[Any]:
        """Restore the memory formats of the received tensors, or of gradients, None for some."""
        if self._in_order:
            return tensors
        pairs = zip(self.grad_metas if grads else self.metas, tensors, strict=True)
        return [None if tensor is None else meta.unpack(tensor) for meta, tensor in pairs]

    def arguments(self, tensors: Sequence[Tensor], mesh_of: MeshOf = find_mesh) -> tuple[Any, ...]:
        """The next stage's positional arguments, with the received tensors, unpacked."""
        if self._only is not None:
            return (tensors[0],)
        leaves = list(self.leaves)
        for i, tensor, meta in zip(self._slots, tensors, self.metas, strict=True):
            full = meta.dtensor
            leaves[i] = tensor if full is None else from_local(tensor, full, mesh_of(full))
        args: tuple[Any, ...] = pytree.unflatten(self.tree, leaves)
        return args

    def encode(self) -> bytes:
        """The spec as JSON, read by ``decode`` on another rank."""
        leaves = [dataclasses.asdict(x) if isinstance(x, TensorMeta) else x for x in self.leaves]
        return json.dumps(pytree.encode((self.tree, leaves, self.shared))).encode()

    @staticmethod
    def decode(data: bytes) -> BoundarySpec:
        """Read the spec that ``encode`` wrote."""
        tree, leaves, shared = pytree.decode(json.loads(data))
        decoded = (TensorMeta(**leaf) if isinstance(leaf, dict) else leaf for leaf in leaves)
        return BoundarySpec(tree, tuple(decoded), shared)

    def __repr__(self) -> str:
        return f"BoundarySpec({self.tree}, {', '.join(map(str, self.leaves))})"


def _fits(leaf: Any, expected: Any) -> bool:
    """True if a leaf is as expected; a tensor may have been frozen since."""
    if not isinstance(expected, TensorMeta):
        alike = type(leaf) is type(expected)
        return alike and (leaf == expected or repr(leaf) == repr(expected))  # NaN equals NaN
    if expected.dtensor is not None or type(leaf) is not Tensor:
        if not isinstance(leaf, Tensor) or dtensor_meta(leaf) != expected.dtensor:
            return False
        leaf = local_part(leaf)
    is_alike = leaf.shape == expected.shape and leaf.dtype is expected.dtype
    return is_alike and (expected.requires_grad or not leaf.requires_grad)


def _shown(leaf: Any) -> str:
    leaf = TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf
    return str(leaf) if isinstance(leaf, TensorMeta) else reprlib.repr(leaf)


_HINT = (
    "; pass dynamic_shapes=True where this may change between microbatches, or between steps for "
    "another reason than what is passed to step() or eval()"
)


def describe(output: Any) -> BoundarySpec:
    """The spec of a stage's output: dense tensors and plain values in any containers."""
    leaves, tree = pytree.flatten(pytree.as_args(output))
    for slot, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            how = "is nested" if leaf.is_nested else f"has layout {leaf.layout}"
            raise BoundaryError(
                f"output {slot} {how}, which can't cross between stages; return it as dense "
                "tensors (indices and values, or values and lengths, for instance)"
            )
        if not isinstance(leaf, Tensor) and not pytree.is_plain(leaf):
            name = f"{type(leaf).__module__}.{type(leaf).__qualname__}".removeprefix("builtins.")
            raise BoundaryError(
                f"output {slot} is a {name}, which can't cross between stages; return tensors, "
                "numbers, strings, None and containers of these, classes registered with torch's "
                "pytree among them (of NumPy's numbers .item(), of an enum's member its .value)"
            )
    described = (TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return BoundarySpec(tree, tuple(described), _sharing_memory(tensors))


def _sharing_memory(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The pairs of tensors, by index, that share a storage."""
    if len(tensors) < 2:
        return ()
    plain = [(i, t) for i, t in enumerate(tensors) if type(t) is Tensor and not t.is_meta]
    places = [(i, t.untyped_storage().data_ptr()) for i, t in plain if t.numel()]
    return tuple((i, j) for (i, here), (j, there) in combinations(places, 2) if here == there)


def static_spec(values: Any, grads: Any, what: str, stage_index: int) -> BoundarySpec | None:
    """The spec of a user's example tensors, the stage's ``"input"`` or ``"output"``, if any.

    ``grads`` has an example gradient per value, None where it takes none; None altogether, if all
    floating tensors take gradients.
    """
    if values is None:
        return None
    given = values if isinstance(values, (tuple, list)) else (values,)
    if wrong := [type(v).__name__ for v in given if not isinstance(v, Tensor)]:
        raise BoundaryError(
            f"stage {stage_index}: {what}_args holds a {wrong[0]}, expected tensors"
        )
    if grads is None:
        takes = [v.is_floating_point() or v.is_complex() for v in given]
    else:
        takes = [g is not None for g in (grads if isinstance(grads, (tuple, list)) else (grads,))]
    if len(takes) != len(given):
        raise BoundaryError(
            f"stage {stage_index}: {len(takes)} {what}_grads for {len(given)} {what}_args"
        )
    pairs = zip(given, takes, strict=True)
    return describe(tuple(v.detach().to("meta").requires_grad_(take) for v, take in pairs))
