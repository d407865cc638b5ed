"""Split a batch into microbatches, and merge outputs.

Rows are split as evenly as possible: 10 rows in 4 microbatches are 3, 3, 2, 2. No row is dropped or
padded. Each microbatch has the same weight in the mean loss, even if their numbers of rows differ.
For the batch's own mean pass divisible batches (``drop_last=True``), or sum in the loss and pass
``scale_grads=False``.

    tensors in any pytree (see ``stage/pytree.py``)    split
    a BlockMask of flex attention                      split along its batch dimension, if not 1
    a PackedSequence                                   refused: its rows do not lie together
    all else: tensors without dimensions, objects of   given to every microbatch as it is
    classes that are not registered with torch's pytree
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock.stage.pytree import NAMESPACE, flatten, same_value, unflatten

__all__ = [
    "Reducer",
    "Replicate",
    "TensorChunkSpec",
    "check_ready",
    "check_rows",
    "inputs_digest",
    "merge_chunks",
    "num_chunks",
    "split_args_kwargs_into_chunks",
    "split_call",
    "split_tree",
    "sum_reducer",
]


class TensorChunkSpec:
    """The dimension along which a tensor is split into microbatches.

    Args:
        split_dim: the dimension.

    Example:
        >>> TensorChunkSpec.from_tuple((0, 1))
        (TensorChunkSpec(0), TensorChunkSpec(1))
    """

    def __init__(self, split_dim: int) -> None:
        self.split_dim = split_dim

    def __repr__(self) -> str:
        return f"TensorChunkSpec({self.split_dim})"

    @staticmethod
    def from_tuple(chunk_dims: tuple[int, ...]) -> tuple[TensorChunkSpec, ...]:
        """A spec per positional argument, from their dimensions."""
        return tuple(TensorChunkSpec(dim) for dim in chunk_dims)

    @staticmethod
    def from_dict(chunk_dims: dict[str, int]) -> dict[str, TensorChunkSpec]:
        """A spec per keyword argument, from their dimensions."""
        return {name: TensorChunkSpec(dim) for name, dim in chunk_dims.items()}


class Replicate:
    """Replicate a value to every chunk; equivalent to None in a chunk spec."""


class Reducer:
    """Reduce the microbatches' values by a function, in ``output_merge_spec``.

    Args:
        init_value: the initial value.
        reduce_fn: called with the value so far and the next microbatch's.
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


# A number, not a tensor, so that it goes with any device.
sum_reducer = Reducer(0, operator.add)

_BATCH_DIM = TensorChunkSpec(0)
_PACKED = (
    "a PackedSequence can't be split into microbatches or merged: its rows do not lie together; "
    "use padded tensors and lengths, or ready microbatches (arg_mbs=, target_mbs=) and "
    "merge_outputs=False"
)
_NOT_SPLIT = (
    "a tensor whose rows are not the batch's (a mask or a table for all, offsets of packed "
    "sequences) goes whole to every microbatch if args_chunk_spec= or kwargs_chunk_spec= has None "
    "for it, or into each of the ready microbatches: arg_mbs=, kwarg_mbs=, target_mbs="
)


# --- splitting -----------------------------------------------------------------------------------


def split_tree(
    tree: Any, chunks: int, spec: Any = None, seen: dict[int, torch.Size] | None = None
) -> list[Any]:
    """Split every tensor of a pytree; the first chunks have a row more if rows do not divide.

    Args:
        tree: tensors and plain values in any containers (see the table above).
        chunks: the number of chunks.
        spec: a ``TensorChunkSpec`` for all leaves, a tree of them that is a prefix of ``tree``, or
            None for dimension 0. A leaf whose spec is None is given to every chunk.
        seen: filled with the numbers of rows of the split tensors, each with the first shape.

    Raises:
        ValueError: a tensor has fewer rows than there are chunks, or the spec does not fit.
    """
    leaves, treedef = flatten(tree, _is_packed)
    specs = _leaf_specs(tree, len(leaves), spec)
    columns = [_split_leaf(leaf, chunks, s, seen) for leaf, s in zip(leaves, specs, strict=True)]
    # A bare tensor, or a tuple of leaves, needs no optree.
    if treedef.is_leaf():
        return list(columns[0])
    if type(tree) is tuple and treedef.num_nodes == 1 + len(tree) == 1 + len(leaves) > 1:
        return list(zip(*columns, strict=True))
    return [unflatten(treedef, [c[i] for c in columns]) for i in range(chunks)]


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _leaf_specs(tree: Any, num_leaves: int, spec: Any) -> list[Any]:
    if spec is None or isinstance(spec, (TensorChunkSpec, Reducer)):
        return [_BATCH_DIM if spec is None else spec] * num_leaves
    # None is a spec, but no leaf of the tree itself.
    leaves = optree.tree_leaves(tree, _is_packed, none_is_leaf=True, namespace=NAMESPACE)
    try:
        specs = optree.broadcast_prefix(
            spec, tree, _is_packed, none_is_leaf=True, namespace=NAMESPACE
        )
    except ValueError as error:
        # Only the structure, since optree's error prints the tensors' values.
        shape = optree.tree_structure(tree, none_is_leaf=True, namespace=NAMESPACE)
        raise ValueError(
            f"the chunk spec {spec!r} does not fit values in {shape}; give one TensorChunkSpec for "
            "all of them, or a tree of specs that begins as the values do"
        ) from error
    return [
        None if isinstance(each, Replicate) or each is Replicate else each
        for each, leaf in zip(specs, leaves, strict=True)
        if leaf is not None
    ]


def _split_leaf(
    leaf: Any, chunks: int, spec: TensorChunkSpec | None, seen: dict[int, torch.Size] | None
) -> Sequence[Any]:
    if spec is None:
        return [leaf] * chunks
    if _is_packed(leaf):
        raise ValueError(_PACKED)
    is_mask = _is_block_mask(leaf)
    if not is_mask and (not isinstance(leaf, Tensor) or leaf.dim() == 0):
        return [leaf] * chunks
    if not isinstance(spec, TensorChunkSpec):
        raise ValueError(f"a chunk spec holds {spec!r}; use TensorChunkSpec(dim) or None")
    if is_mask:
        return _split_block_mask(leaf, chunks, spec)
    if not -leaf.dim() <= spec.split_dim < leaf.dim():
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} has no dimension {spec.split_dim} to be split "
            "along; pass another in its TensorChunkSpec"
        )
    rows = leaf.size(spec.split_dim)
    if rows < chunks:
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} can't be split into {chunks} microbatches "
            f"along dimension {spec.split_dim}; pass at least {chunks} rows, or use "
            f"n_microbatches={rows}; {_NOT_SPLIT}"
        )
    if seen is not None:
        seen.setdefault(rows, leaf.shape)
    parts = torch.tensor_split(leaf, chunks, dim=spec.split_dim)
    if leaf.requires_grad or type(leaf) is not Tensor:
        return parts
    # Each microbatch has its own version counter, since a model may write into one microbatch while
    # autograd has saved tensors of another.
    return [part.data for part in parts]


def _is_block_mask(value: object) -> bool:
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def _split_block_mask(mask: Any, chunks: int, spec: TensorChunkSpec) -> Sequence[Any]:
    """Split a mask of flex attention; the ``mask_mod`` of a part still gets the batch's rows."""
    rows = mask.kv_num_blocks.size(0)
    if spec.split_dim:
        raise ValueError(f"a BlockMask is split along dimension 0, its batch, not by {spec}")
    if rows == 1:
        return [mask] * chunks
    if rows < chunks:
        raise ValueError(
            f"a BlockMask of {rows} rows can't be split into {chunks} microbatches; make it of at "
            f"least {chunks} rows, or with B=None where it is the same for all"
        )
    begins = [_begin(i, rows, chunks) for i in range(chunks + 1)]
    parts = [mask[begin:end] for begin, end in pairwise(begins)]
    for part, begin in zip(parts, begins, strict=False):
        part.mask_mod = _from_row(begin, mask.mask_mod)
    return parts


def _from_row(first: int, mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda b, h, q_idx, kv_idx: mask_mod(b + first, h, q_idx, kv_idx)


def _begin(chunk: int, rows: int, chunks: int) -> int:
    """The index of a chunk's first row."""
    each, longer = divmod(rows, chunks)
    return chunk * each + min(chunk, longer)


def check_rows(counts: Mapping[int, torch.Size], chunks: int) -> None:
    """Check that tensors with different numbers of rows are cut at the same places.

    4 images and 8 captions in 2 microbatches are; 4 images and 5 offsets are not. ``counts`` is
    ``seen`` of ``split_tree``.
    """
    if len(counts) < 2:
        return
    cuts = {n: [Fraction(_begin(i, n, chunks), n) for i in range(chunks)] for n in counts}
    rows = max(counts)
    for other in counts:
        if cuts[other] != cuts[rows]:
            raise ValueError(
                f"{rows} rows of a tensor of shape {tuple(counts[rows])} and {other} of one of "
                f"shape {tuple(counts[other])} are cut at different places for {chunks} "
                f"microbatches; {_NOT_SPLIT}"
            )


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split a call's arguments into microbatches.

    Args:
        args, kwargs: the arguments; any trees of tensors and values (see the module's table).
        chunks: number of microbatches.
        args_chunk_spec: per argument its ``TensorChunkSpec``, or a tree of them that begins like
            it; where that is None, the value is given to every microbatch as it is. Without a
            spec, dimension 0 is split.
        kwargs_chunk_spec: likewise by name; of names that it lacks, dimension 0 is split.

    Returns:
        The positional and the keyword arguments of each microbatch. Shape (rows, …) becomes
        ``chunks`` shapes (rows/chunks, …), the first ones a row longer where it does not divide.

    Raises:
        ValueError: a tensor has fewer rows than there are microbatches, or a spec does not fit.

    Example:
        >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5),), {"scale": 2}, 2)
        >>> args, kwargs
        ([(tensor([0, 1, 2]),), (tensor([3, 4]),)], [{'scale': 2}, {'scale': 2}])
    """
    return split_call(args, kwargs, chunks, args_chunk_spec, kwargs_chunk_spec, None, None)


def split_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_spec: tuple[Any, ...] | None,
    kwargs_spec: dict[str, Any] | None,
    args_seen: dict[int, torch.Size] | None,
    kwargs_seen: dict[int, torch.Size] | None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """``split_args_kwargs_into_chunks``; the last two arguments are ``seen`` of ``split_tree``."""
    split_args = split_tree(args, chunks, args_spec, args_seen) if args else [()] * chunks
    if not kwargs:
        return split_args, [{}] * chunks
    if isinstance(kwargs_spec, Mapping):
        if unknown := [name for name in kwargs_spec if name not in kwargs]:
            raise ValueError(
                f"kwargs_chunk_spec has {unknown[0]!r}, which the call does not: it has "
                f"{', '.join(map(repr, kwargs))}; take it out, or pass {unknown[0]}=None"
            )
        kwargs_spec = {name: kwargs_spec.get(name, _BATCH_DIM) for name in kwargs}
    return split_args, split_tree(kwargs, chunks, kwargs_spec, kwargs_seen)


# --- merging -------------------------------------------------------------------------------------


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Merge the outputs of the microbatches into one.

    Args:
        chunks: one tree per microbatch, all of the same structure.
        chunk_spec: as for splitting, the dimension along which tensors are concatenated (default
            0). Tensors without dimensions are stacked. A ``Reducer`` reduces the values. If the
            spec is None, and for values that are no tensors, the chunks must agree.

    Raises:
        ValueError: chunks differ in structure, or in a value that can't be joined.
    """
    flats = [flatten(chunk, _is_packed) for chunk in chunks]
    treedef = flats[0][1]
    if any(other != treedef for _, other in flats):
        raise ValueError("the microbatches' outputs differ in structure and can't be merged")
    specs = _leaf_specs(chunks[0], len(flats[0][0]), chunk_spec)
    columns = zip(*(leaves for leaves, _ in flats), strict=True)
    merged = [_merge_leaf(column, spec) for column, spec in zip(columns, specs, strict=True)]
    return unflatten(treedef, merged)


def _merge_leaf(column: tuple[Any, ...], spec: Any) -> Any:
    first = column[0]
    if _is_packed(first):
        raise ValueError(_PACKED)
    if isinstance(spec, Reducer):
        return reduce(spec.reduce_fn, column, spec.init_value)
    if spec is not None and not isinstance(spec, TensorChunkSpec):
        raise ValueError(
            f"output_merge_spec holds {spec!r}; use penstock's TensorChunkSpec(dim) or "
            "sum_reducer, or None"
        )
    if isinstance(first, Tensor) and spec is not None:
        try:
            return torch.cat(column, dim=spec.split_dim) if first.dim() else torch.stack(column)
        except (RuntimeError, TypeError, IndexError) as error:
            shown = [tuple(x.shape) if isinstance(x, Tensor) else x for x in column]
            raise ValueError(
                f"the microbatches' outputs hold tensors of shapes {shown}, which can't be joined "
                f"along dimension {spec.split_dim}"
            ) from error
    if not all(same_value(first, other) for other in column[1:]):
        raise ValueError(
            f"the microbatches' outputs hold different values that can't be joined: {column}"
        )
    return first


# --- ready microbatches --------------------------------------------------------------------------

# List of ready microbatches → the batch in its place, and the type of an item.
_READY: dict[str, tuple[str, Any, str]] = {
    "arg_mbs": (
        "positional arguments",
        (tuple, list),
        "tuple of a microbatch's positional arguments, such as (x,)",
    ),
    "kwarg_mbs": ("keyword arguments", Mapping, "dict of a microbatch's keyword arguments"),
    "target_mbs": ("target=", object, ""),
}


def check_ready(ready: Mapping[str, Sequence[Any] | None], whole: Mapping[str, bool]) -> None:
    """Check the types of ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs``.

    ``whole`` says for each of them whether a batch to split was given as well.
    """
    for name, mbs in ready.items():
        if mbs is None:
            continue
        batch, kind, expected = _READY[name]
        if not hasattr(mbs, "__len__"):
            raise TypeError(f"{name} is a {type(mbs).__name__}, expected a list of microbatches")
        if whole[name]:
            raise ValueError(
                f"{batch} and {name} were both given; pass a batch, which is split, or ready "
                "microbatches"
            )
        for i, item in enumerate(mbs):
            if not isinstance(item, kind):
                raise TypeError(f"{name}[{i}] is a {type(item).__name__}, expected the {expected}")


def num_chunks(mappings: Mapping[str, Sequence[Any] | None]) -> int | None:
    """The common length of the lists of ready microbatches; None without lists."""
    lengths = {name: len(chunks) for name, chunks in mappings.items() if chunks is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists of microbatches differ in length: {lengths}")
    return next(iter(lengths.values()), None)


def inputs_digest(
    args: Sequence[tuple[Any, ...]] | None, kwargs: Sequence[Mapping[str, Any]]
) -> tuple[int, int]:
    """Two checksums of the inputs, compared between ranks: argument names, and sampled elements.

    Both are 0 on a rank without inputs, whose ``args`` are None.
    """
    if args is None:
        return 0, 0
    kind = "positional" if args[0] else repr(sorted(kwargs[0]))
    mbs: Sequence[Any] = args if args[0] else kwargs
    samples = repr([_samples(leaf) for leaf in flatten([mbs[0], mbs[-1]])[0]])
    return zlib.crc32(kind.encode()) + 1, zlib.crc32(samples.encode()) + 1


def _samples(leaf: Any) -> Any:
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return None
    flat = leaf.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // 16)]
    bits = some.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return tuple(leaf.shape), leaf.dtype, bits.tolist()
