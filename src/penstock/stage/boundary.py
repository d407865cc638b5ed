"""What crosses from one stage to the next: any tree of tensors and plain values.

    stage s returns      crosses as             stage s+1 is called with
    (hidden, mask)       the leaves, in order   hidden, mask
    [hidden, mask]       likewise               hidden, mask
    hidden               (hidden,)              hidden
    {"h": hidden}        ({"h": hidden},)       the dict

A ``BoundarySpec`` describes the tree, and each leaf's shape, dtype and need of gradients. It is
learned from the first value that crosses, travels as data (JSON, never pickled objects), and
every later value is held against it. This module neither sends nor runs anything.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from penstock.errors import BoundaryError

__all__ = ["BoundarySpec", "TensorMeta", "as_args", "describe", "flatten"]

NAMESPACE = "penstock"
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
    """

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """The description of ``tensor``."""
        return cls(
            shape=tensor.shape,
            dtype=tensor.dtype,
            requires_grad=tensor.requires_grad,
            order=_order_in_memory(tensor),
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
        return (
            tensor.shape == self.shape
            and tensor.dtype is self.dtype
            and (self.requires_grad or not tensor.requires_grad)
        )

    def __str__(self) -> str:
        """``float32 (4, 512), with gradient``."""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {tuple(self.shape)}, {'with' if self.requires_grad else 'no'} gradient"


def _order_in_memory(tensor: Tensor) -> tuple[int, ...] | None:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda i: -strides[i]))
    return order if tensor.permute(order).is_contiguous() else None


def as_args(output: Any) -> tuple[Any, ...]:
    """A stage's output as the positional arguments of the next stage (see the table above)."""
    # Named tuples, torch.return_types and torch.Size are tuples too, but one value each.
    if type(output) is tuple:
        return output
    return tuple(output) if type(output) is list else (output,)


def flatten(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves and structure of any tree; dataclasses are opened like the other containers."""
    leaves, tree = optree.tree_flatten(value, namespace=NAMESPACE)
    fresh = {type(leaf) for leaf in leaves if _is_dataclass_instance(leaf)}
    if not fresh:
        return leaves, tree
    for cls in fresh:
        _register_dataclass(cls)
    return flatten(value)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _register_dataclass(cls: type[Any]) -> None:
    names = tuple(f.name for f in dataclasses.fields(cls))

    def unflatten(_: object, children: Sequence[Any]) -> Any:
        values = dict(zip(names, children, strict=True))
        made = object.__new__(cls)
        if issubclass(cls, dict):  # such as Hugging Face's ModelOutput: both views of the fields
            return cls(**values)
        for name, value in values.items():
            object.__setattr__(made, name, value)
        return made

    optree.register_pytree_node(
        cls,
        lambda value: (tuple(getattr(value, name) for name in names), None, names),
        unflatten,  # type: ignore[arg-type]  # a dataclass is no Collection; optree takes it
        namespace=NAMESPACE,
    )


class BoundarySpec:
    """The tree that crosses a boundary, and what each of its leaves is.

    Args:
        tree: the structure of the arguments tuple.
        leaves: for each leaf a ``TensorMeta``, or the plain value itself.
    """

    __slots__ = (
        "grad_metas",
        "grad_slots",
        "in_order",
        "leaves",
        "metas",
        "single",
        "tensor_leaves",
        "tree",
    )

    def __init__(self, tree: optree.PyTreeSpec, leaves: tuple[TensorMeta | Plain, ...]) -> None:
        self.tree = tree
        self.leaves = leaves
        # Which leaves are tensors, what they are, and which of these take gradients.
        self.tensor_leaves = tuple(i for i, x in enumerate(leaves) if isinstance(x, TensorMeta))
        self.metas: tuple[TensorMeta, ...] = tuple(leaves[i] for i in self.tensor_leaves)
        self.grad_slots = tuple(i for i, meta in enumerate(self.metas) if meta.requires_grad)
        self.grad_metas = tuple(self.metas[i] for i in self.grad_slots)
        self.in_order = all(meta.order is None for meta in self.metas)
        # The common case, kept fast: one tensor and nothing else.
        self.single = self.metas[0] if len(leaves) == 1 and _is_one_tuple(tree) else None
        if not self.metas:
            self.single = None

    def tensors(self, output: Any) -> Sequence[Tensor]:
        """The tensors of a stage's output, in the order in which they cross.

        Args:
            output: what the stage returned.

        Raises:
            BoundaryError: it is not what this boundary has carried so far.
        """
        if self.single is not None and isinstance(output, Tensor) and self.single.fits(output):
            return (output,)
        leaves, tree = flatten(as_args(output))
        if tree != self.tree:
            raise BoundaryError(f"the output's structure is {tree}, expected {self.tree}{_HINT}")
        for slot, (leaf, expected) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(expected, TensorMeta):
                if not isinstance(leaf, Tensor) or not expected.fits(leaf):
                    raise _mismatch(slot, expected, leaf)
            elif isinstance(leaf, Tensor) or not _same_plain(leaf, expected):
                raise _mismatch(slot, expected, leaf)
        return [leaves[i] for i in self.tensor_leaves]

    def check_static(self, given: BoundarySpec | None, what: str) -> None:
        """Hold this spec against the shapes and dtypes that the user gave in advance.

        Raises:
            BoundaryError: they differ.
        """
        if given is None:
            return
        mine = [(tuple(m.shape), m.dtype) for m in self.metas]
        theirs = [(tuple(m.shape), m.dtype) for m in given.metas]
        if mine != theirs:
            raise BoundaryError(f"the {what}s are {mine}, but {what}_args says {theirs}")

    def check_received(self, tensors: Sequence[Tensor]) -> None:
        """Hold what arrived against the spec (shapes and dtypes; gradients are this side's own).

        Raises:
            BoundaryError: a tensor is missing, or of another shape or dtype.
        """
        if len(tensors) != len(self.metas):
            raise BoundaryError(f"{len(tensors)} tensors arrived, expected {len(self.metas)}")
        for slot, tensor, meta in zip(self.tensor_leaves, tensors, self.metas, strict=True):
            if tensor.shape != meta.shape or tensor.dtype is not meta.dtype:
                raise _mismatch(slot, meta, tensor)

    def pack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as they travel, see ``TensorMeta.pack``."""
        return [meta.pack(t) for meta, t in zip(self.metas, tensors, strict=True)]

    def unpack(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors as they left, from what arrived."""
        if self.in_order:
            return tensors
        return [meta.unpack(t) for meta, t in zip(self.metas, tensors, strict=True)]

    def unpack_grads(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients laid out as the tensors are, from what arrived."""
        if self.in_order:
            return grads
        pairs = zip(self.grad_metas, grads, strict=True)
        return [None if grad is None else meta.unpack(grad) for meta, grad in pairs]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The next stage's positional arguments, from the tensors that crossed."""
        if self.single is not None:
            return (tensors[0],)
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensor_leaves, tensors, strict=True):
            leaves[i] = tensor
        args: Any = optree.tree_unflatten(self.tree, leaves)
        return args  # type: ignore[no-any-return]  # as_args made it a tuple

    def encode(self) -> bytes:
        """The spec as JSON, to be read by ``decode`` on another rank."""
        skeleton = optree.tree_unflatten(self.tree, [_Leaf(i) for i in range(len(self.leaves))])
        leaves = [_encode_leaf(leaf) for leaf in self.leaves]
        return json.dumps({"tree": _encode_tree(skeleton), "leaves": leaves}).encode()

    @staticmethod
    def decode(data: bytes) -> BoundarySpec:
        """The spec that ``encode`` wrote.

        Raises:
            BoundaryError: it names a class that this process has not imported.
        """
        read = json.loads(data)
        _, tree = flatten(_decode_tree(read["tree"]))
        return BoundarySpec(tree, tuple(_decode_leaf(leaf) for leaf in read["leaves"]))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, BoundarySpec)
            and self.tree == other.tree
            and self.leaves == other.leaves
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"BoundarySpec({self.tree}, {', '.join(map(str, self.leaves))})"


_HINT = "; pass dynamic_shapes=True where this may change between microbatches"
_UNFROZEN = (
    "; it took no gradient when this shape was first met: make the schedule anew after unfreezing "
    "parameters, or pass dynamic_shapes=True"
)


def describe(output: Any) -> BoundarySpec:
    """The spec of a stage's output.

    Raises:
        BoundaryError: a leaf is neither a dense tensor nor a plain value.
    """
    leaves, tree = flatten(as_args(output))
    return BoundarySpec(tree, tuple(_describe_leaf(i, leaf) for i, leaf in enumerate(leaves)))


def _is_one_tuple(tree: optree.PyTreeSpec) -> bool:
    return tree.type is tuple and tree.num_children == 1 and tree.children()[0].is_leaf()


def _describe_leaf(slot: int, leaf: Any) -> TensorMeta | Plain:
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided:
            raise BoundaryError(
                f"output {slot} has layout {leaf.layout}, which can't cross between stages; "
                "return it as dense tensors (indices and values, for instance)"
            )
        return TensorMeta.of(leaf)
    if _plain_tag(leaf) is None:
        raise BoundaryError(
            f"output {slot} is a {type(leaf).__qualname__}, which can't cross between stages; "
            "tensors, numbers, strings, None and containers of these can"
        )
    return leaf


def _same_plain(left: Plain, right: Plain) -> bool:
    # repr tells NaN from nothing else, and 1 from True and 1.0.
    return type(left) is type(right) and (left == right or repr(left) == repr(right))


def _mismatch(slot: int, expected: TensorMeta | Plain, got: Any) -> BoundaryError:
    shown = TensorMeta.of(got) if isinstance(got, Tensor) else repr(got)
    wanted = expected if isinstance(expected, TensorMeta) else repr(expected)
    hint = _HINT
    if (
        isinstance(shown, TensorMeta)
        and isinstance(expected, TensorMeta)
        and (shown.shape, shown.dtype) == (expected.shape, expected.dtype)
    ):
        hint = _UNFROZEN
    return BoundaryError(f"output {slot} is {shown}, expected {wanted}{hint}")


# --- the JSON form ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Stands for the leaf of this index while a tree is written or read."""

    index: int


# Classes that this process has sent: found again without a look into their module.
_seen_classes: dict[str, type[Any]] = {}


def _encode_tree(node: Any) -> Any:
    match node:
        case _Leaf(index):
            return index
        case None:
            return None
        case tuple() if hasattr(node, "_fields") or optree.is_structseq(node):
            return {"class": _class_name(type(node)), "items": [_encode_tree(x) for x in node]}
        case tuple() | list():
            return {"kind": type(node).__name__, "items": [_encode_tree(x) for x in node]}
        case _ if _is_dataclass_instance(node):
            values = [getattr(node, f.name) for f in dataclasses.fields(node)]
            return {"class": _class_name(type(node)), "items": [_encode_tree(x) for x in values]}
        case dict() if type(node) in (dict, OrderedDict):
            items = [[_encode_key(k), _encode_tree(v)] for k, v in node.items()]
            return {"kind": type(node).__name__, "items": items}
    raise BoundaryError(
        f"a {type(node).__qualname__} can't cross between stages; return a tuple, list, dict, "
        "named tuple or dataclass"
    )


def _encode_key(key: Any) -> Any:
    if type(key) in (str, int):
        return key
    raise BoundaryError(f"dict key {key!r} can't cross between stages; use str or int keys")


def _decode_tree(node: Any) -> Any:
    if node is None:
        return None
    if isinstance(node, int):
        # A bare object is a leaf to optree, whatever it is.
        return object()
    items = node["items"]
    if "class" in node:
        return _make(_find_class(node["class"]), [_decode_tree(x) for x in items])
    match node["kind"]:
        case "tuple":
            return tuple(_decode_tree(x) for x in items)
        case "list":
            return [_decode_tree(x) for x in items]
        case "dict":
            return {key: _decode_tree(value) for key, value in items}
        case "OrderedDict":
            return OrderedDict((key, _decode_tree(value)) for key, value in items)
    raise BoundaryError(f"a boundary's description names an unknown container {node['kind']!r}")


def _make(cls: type[Any], values: list[Any]) -> Any:
    if optree.is_structseq_class(cls):  # such as torch.return_types.topk
        return cls(values)
    if issubclass(cls, tuple):
        return cls(*values)
    made = object.__new__(cls) if not issubclass(cls, dict) else None
    names = [f.name for f in dataclasses.fields(cls)]
    if made is None:
        return cls(**dict(zip(names, values, strict=True)))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _class_name(cls: type[Any]) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    _seen_classes[name] = cls
    return name


def _find_class(name: str) -> type[Any]:
    """The class of this name among those that this process has; nothing is imported for it."""
    if name in _seen_classes:
        return _seen_classes[name]
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    is_container = isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or hasattr(found, "_fields")
        or optree.is_structseq_class(found)
    )
    if not is_container:
        raise BoundaryError(
            f"a stage sends a {name}, a class that this rank can't find; define it at the top "
            "level of a module that every rank imports"
        )
    cls: type[Any] = found
    return cls


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


def _plain_tag(value: Plain) -> str | None:
    return _PLAIN.get(type(value))


def _encode_leaf(leaf: TensorMeta | Plain) -> list[Any]:
    if isinstance(leaf, TensorMeta):
        dtype = str(leaf.dtype).removeprefix("torch.")
        return ["tensor", list(leaf.shape), dtype, leaf.requires_grad, leaf.order]
    tag = _plain_tag(leaf)
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


def _decode_leaf(data: list[Any]) -> TensorMeta | Plain:
    match data:
        case ["tensor", shape, dtype, requires_grad, order]:
            return TensorMeta(
                shape=torch.Size(shape),
                dtype=_dtype(dtype),
                requires_grad=requires_grad,
                order=None if order is None else tuple(order),
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
