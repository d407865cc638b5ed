"""Boundaries between stages: the description of a pytree of tensors and plain values.

    stage s returns      crosses as             stage s+1 is called with
    (hidden, mask)       the leaves, in order   hidden, mask
    [hidden, mask]       the leaves, in order   hidden, mask
    (hidden, None)       hidden alone           hidden, None
    hidden               (hidden,)              hidden
    {"h": hidden}        ({"h": hidden},)       the dict

A ``BoundarySpec`` describes the tree, and each leaf's shape, dtype and need of a gradient. None is
structure of the tree, not a leaf: it is described once and sends nothing. The
sender makes it of the first value that crosses, sends it as JSON (never pickled objects), and
checks later values against it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from penstock.errors import BoundaryError
from penstock.stage.aliasing import sharing_memory
from penstock.stage.dtensor import MeshOf, from_local, local_part, unknown_mesh
from penstock.stage.pytree import as_args, decode_tree, encode_tree, flatten, unflatten
from penstock.stage.tensor_meta import Plain, TensorMeta, decode_leaf, encode_leaf, plain_tag

__all__ = ["BoundarySpec", "describe", "static_spec"]


class BoundarySpec:
    """The description of a pytree that crosses a boundary.

    Args:
        tree: the structure of the arguments tuple.
        leaves: for each leaf a ``TensorMeta``, or the plain value itself.
        shared: the pairs of tensors, by index, that shared memory in the sending stage. They
            arrive as separate tensors.
    """

    __slots__ = (
        "grad_metas",
        "grad_slots",
        "holds_values",
        "in_order",
        "leaves",
        "metas",
        "shared",
        "single",
        "tensor_leaves",
        "tree",
    )

    def __init__(
        self,
        tree: optree.PyTreeSpec,
        leaves: tuple[TensorMeta | Plain, ...],
        shared: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.tree = tree
        self.leaves = leaves
        self.shared = shared
        self.tensor_leaves = tuple(i for i, x in enumerate(leaves) if isinstance(x, TensorMeta))
        self.metas: tuple[TensorMeta, ...] = tuple(leaves[i] for i in self.tensor_leaves)
        self.grad_slots = tuple(i for i, meta in enumerate(self.metas) if meta.requires_grad)
        self.grad_metas = tuple(self.metas[i] for i in self.grad_slots)
        # Plain values may change from step to step while all shapes stay the same. (Bytes do not:
        # stages cut by module send descriptions of shapes as bytes.)
        self.holds_values = any(isinstance(leaf, _VALUES) for leaf in leaves)
        self.in_order = all(meta.order is None for meta in self.metas)
        # A fast path for the common case of one tensor.
        self.single = self.metas[0] if len(leaves) == 1 and _is_one_tuple(tree) else None
        if not self.metas or self.metas[0].dtensor is not None:
            self.single = None

    def tensors(self, output: Any) -> Sequence[Tensor]:
        """The tensors of a stage's output, in the order in which they are sent.

        Raises:
            BoundaryError: the output does not fit this description.
        """
        if self.single is not None:
            only = output[0] if type(output) is tuple and len(output) == 1 else output
            if isinstance(only, Tensor) and self.single.fits(only):
                return (only,)
        leaves, tree = flatten(as_args(output))
        if tree != self.tree:
            raise BoundaryError(f"the output's structure is {tree}, expected {self.tree}{_HINT}")
        for slot, (leaf, expected) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(expected, TensorMeta):
                if not isinstance(leaf, Tensor) or not expected.fits(leaf):
                    raise _mismatch(slot, expected, leaf)
            elif isinstance(leaf, Tensor) or not _same_plain(leaf, expected):
                raise _mismatch(slot, expected, leaf)
        return [local_part(leaves[i]) for i in self.tensor_leaves]

    def check_static(self, given: BoundarySpec | None, what: str) -> None:
        """Check this spec against the shapes and dtypes that the user gave in advance.

        Raises:
            BoundaryError: they differ.
        """
        if given is None:
            return
        if len(self.metas) != len(given.metas):
            raise BoundaryError(
                f"there are {len(self.metas)} {what} tensors, but {what}_args says "
                f"{len(given.metas)}: {', '.join(meta.kind for meta in given.metas)}"
            )
        for slot, meta, wanted in zip(self.tensor_leaves, self.metas, given.metas, strict=True):
            if (meta.shape, meta.dtype) != (wanted.shape, wanted.dtype):
                raise BoundaryError(
                    f"{what} {slot} is {meta.kind}, expected {wanted.kind} as {what}_args says"
                )

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as they are sent, see ``TensorMeta.pack``."""
        if self.in_order:
            return [t.contiguous() for t in tensors]
        return [meta.pack(t) for meta, t in zip(self.metas, tensors, strict=True)]

    def unpack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Restore the memory formats of the received tensors."""
        if self.in_order:
            return tensors
        return [meta.unpack(t) for meta, t in zip(self.metas, tensors, strict=True)]

    def unpack_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Restore the memory formats of the received gradients."""
        if self.in_order:
            return grads
        pairs = zip(self.grad_metas, grads, strict=True)
        return [None if grad is None else meta.unpack(grad) for meta, grad in pairs]

    def arguments(
        self, tensors: Sequence[Tensor], mesh_of: MeshOf = unknown_mesh
    ) -> tuple[Any, ...]:
        """The next stage's positional arguments.

        Args:
            tensors: the received tensors, unpacked.
            mesh_of: finds this rank's mesh of a DTensor.
        """
        if self.single is not None:
            return (tensors[0],)
        leaves = list(self.leaves)
        for i, tensor, meta in zip(self.tensor_leaves, tensors, self.metas, strict=True):
            whole = meta.dtensor
            leaves[i] = tensor if whole is None else from_local(tensor, whole, mesh_of(whole))
        args: Any = unflatten(self.tree, leaves)
        return args  # type: ignore[no-any-return]  # as_args made it a tuple

    def encode(self) -> bytes:
        """The spec as JSON, read by ``decode`` on another rank."""
        leaves = [encode_leaf(leaf) for leaf in self.leaves]
        told = {"tree": encode_tree(self.tree), "leaves": leaves, "shared": self.shared}
        return json.dumps(told).encode()

    @staticmethod
    def decode(data: bytes) -> BoundarySpec:
        """Read the spec that ``encode`` wrote.

        Raises:
            BoundaryError: it names a class that this process has not imported.
        """
        read = json.loads(data)
        leaves = tuple(decode_leaf(leaf) for leaf in read["leaves"])
        shared = tuple((one, other) for one, other in read["shared"])
        return BoundarySpec(decode_tree(read["tree"]), leaves, shared)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundarySpec)
            and self.tree == other.tree
            and self.leaves == other.leaves
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BoundarySpec({self.tree}, {', '.join(map(str, self.leaves))})"


_VALUES = (bool, int, float, complex, str)
_HINT = (
    "; pass dynamic_shapes=True where this may change between microbatches, or between steps for "
    "another reason than what is passed to step() or eval()"
)


def describe(output: Any) -> BoundarySpec:
    """The spec of a stage's output.

    Raises:
        BoundaryError: a leaf is neither a dense tensor nor a plain value.
    """
    leaves, tree = flatten(as_args(output))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    described = tuple(_describe_leaf(i, leaf) for i, leaf in enumerate(leaves))
    return BoundarySpec(tree, described, sharing_memory(tensors) if len(tensors) > 1 else ())


def _is_one_tuple(tree: optree.PyTreeSpec) -> bool:
    return tree.type is tuple and tree.num_children == 1 and tree.children()[0].is_leaf()


def _describe_leaf(slot: int, leaf: Any) -> TensorMeta | Plain:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            how = "is nested" if leaf.is_nested else f"has layout {leaf.layout}"
            raise BoundaryError(
                f"output {slot} {how}, which can't cross between stages; return it as dense "
                "tensors (indices and values, or values and lengths, for instance)"
            )
        return TensorMeta.of(leaf)
    if plain_tag(leaf) is None:
        cls = type(leaf)
        name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
        raise BoundaryError(
            f"output {slot} is a {name}, which can't cross between stages; {_advice(leaf)}"
        )
    return leaf


def _advice(leaf: Any) -> str:
    if type(leaf).__module__ == "numpy" and hasattr(leaf, "item"):
        return "return its .item(), or a tensor of an array"
    plain = next((cls for cls in (int, float, complex, str, bytes) if isinstance(leaf, cls)), None)
    if plain is not None:
        return f"return {plain.__name__}(…) of it: subclasses of {plain.__name__} would arrive bare"
    return (
        "tensors, numbers, strings, None and containers of these can, classes registered with "
        "torch's pytree among them"
    )


def _same_plain(left: Plain, right: Plain) -> bool:
    # By repr, NaN equals NaN, and 1 differs from True and 1.0.
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def _mismatch(slot: int, expected: TensorMeta | Plain, got: Any) -> BoundaryError:
    shown = TensorMeta.of(got) if isinstance(got, Tensor) else repr(got)
    wanted = expected if isinstance(expected, TensorMeta) else repr(expected)
    return BoundaryError(f"output {slot} is {shown}, expected {wanted}{_HINT}")


def static_spec(values: Any, grads: Any, what: str, stage_index: int) -> BoundarySpec | None:
    """The spec of a user's example tensors.

    Args:
        values: example tensors, or None.
        grads: per value an example gradient, None where it takes none; or None altogether, if all
            floating tensors take gradients.
        what: ``"input"`` or ``"output"``, for messages.
        stage_index: likewise.

    Raises:
        BoundaryError: there is not one gradient for each value, or a value is no tensor.
    """
    if values is None:
        return None
    given = values if isinstance(values, (tuple, list)) else (values,)
    for value in given:
        if not isinstance(value, Tensor):
            raise BoundaryError(
                f"stage {stage_index}: {what}_args holds a {type(value).__name__}, expected tensors"
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
