"""Split a batch into microbatches, and merge outputs.

Rows are split as evenly as possible: 10 rows in 4 microbatches are 3, 3, 2, 2. No row is dropped or
padded. Each microbatch has the same weight in the mean loss, even if their numbers of rows differ.
For the batch's own mean pass divisible batches (``drop_last=True``), or sum in the loss and pass
``scale_grads=False``. A step with fewer rows than microbatches runs one microbatch per row.

    tensors in any pytree (see ``stage/pytree.py``)    split
    a BlockMask of flex attention                      split along its batch dimension, if not 1
    a DTensor that is sharded along its rows           each of its shards is split: microbatch i has
                                                       the i-th part of every shard
    a PackedSequence                                   refused: its rows do not lie together
    all else: tensors without dimensions, objects of   given to every microbatch as it is
    classes that are not registered with torch's pytree
"""

from __future__ import annotations

import operator
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from penstock.stage.dtensor import is_dtensor, local_part, num_shards, with_local_part
from penstock.stage.pytree import NAMESPACE, flatten, same_value, unflatten

__all__ = [
    "Reducer", "Replicate", "TensorChunkSpec", "check_ready", "num_with_rows", "inputs_digest",
    "merge_chunks", "sample_of", "split_args_kwargs_into_chunks", "split_tree", "sum_reducer",
]  # fmt: skip


class TensorChunkSpec:
    """The dimension along which a tensor is split into microbatches.

    Examples:
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
        return tuple(map(TensorChunkSpec, chunk_dims))

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


Rows: TypeAlias = dict[tuple[int, int], torch.Size]
"""By numbers of rows, and of shards of these, the shape of a tensor that was split."""


def split_tree(tree: Any, chunks: int, spec: Any = None, seen: Rows | None = None) -> list[Any]:
    """Split every tensor of a pytree; the first chunks have a row more if rows do not divide.

    ``spec`` is a ``TensorChunkSpec`` for all leaves, a tree of them that is a prefix of ``tree``,
    or None for dimension 0; a leaf whose spec is None is given to every chunk. ``seen`` is filled
    with the rows of the split tensors; with it, the last chunks may be empty (see
    ``num_with_rows``).
    """
    leaves, treedef = flatten(tree, _is_packed)
    specs = _leaf_specs(tree, len(leaves), spec)
    columns = [_split_leaf(leaf, chunks, s, seen) for leaf, s in zip(leaves, specs, strict=True)]
    return [unflatten(treedef, [c[i] for c in columns]) for i in range(chunks)]


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _leaf_specs(tree: Any, num_leaves: int, spec: Any) -> list[Any]:
    if spec is None or isinstance(spec, (TensorChunkSpec, Reducer)):
        return [_BATCH_DIM if spec is None else spec] * num_leaves
    # None is a spec, but no leaf of the tree itself.
    options: dict[str, Any] = {"none_is_leaf": True, "namespace": NAMESPACE}
    leaves, treedef = optree.tree_flatten(tree, _is_packed, **options)
    try:
        specs = optree.broadcast_prefix(spec, tree, _is_packed, **options)
    except ValueError as error:
        # Only the structure, since optree's error prints the tensors' values.
        raise ValueError(
            f"the chunk spec {spec!r} does not fit values in {treedef}; give one TensorChunkSpec "
            "for all of them, or a tree of specs that begins as the values do"
        ) from error
    given = [each for each, leaf in zip(specs, leaves, strict=True) if leaf is not None]
    return [None if isinstance(s, Replicate) or s is Replicate else s for s in given]


def _split_leaf(
    leaf: Any, chunks: int, spec: TensorChunkSpec | None, seen: Rows | None
) -> Sequence[Any]:
    if spec is None:
        return [leaf] * chunks
    if _is_packed(leaf):
        raise ValueError(_PACKED)
    # A mask of flex attention is split as the indices of its rows are.
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    is_mask = flex_attention is not None and isinstance(leaf, flex_attention.BlockMask)
    tensor = torch.arange(leaf.kv_num_blocks.size(0)) if is_mask else leaf
    if not isinstance(tensor, Tensor) or tensor.dim() == 0 or (is_mask and len(tensor) == 1):
        return [leaf] * chunks
    if not isinstance(spec, TensorChunkSpec):
        raise ValueError(f"a chunk spec holds {spec!r}; use TensorChunkSpec(dim) or None")
    dim, shape = spec.split_dim, tensor.shape
    shown = f"a BlockMask of {len(tensor)} rows" if is_mask else f"a tensor of shape {tuple(shape)}"
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"{shown} has no dimension {dim} to be split along; pass another in its TensorChunkSpec"
        )
    rows = shape[dim]
    least = chunks if seen is None else 1
    if rows < least:
        raise ValueError(
            f"{shown} can't be split into {chunks} microbatches along dimension {dim}; pass at "
            f"least {least} row{'s' if least > 1 else ''}; {_NOT_SPLIT}"
        )
    shards = num_shards(tensor, dim)
    if seen is not None:
        seen.setdefault((rows, shards), shape)
    if shards > 1:
        return _split_shards(tensor, chunks, dim % len(shape), shards)
    parts = torch.tensor_split(tensor, chunks, dim=dim)
    if is_mask:
        return [_part_of_mask(leaf, part) if len(part) else leaf for part in parts]
    if tensor.requires_grad or type(tensor) is not Tensor:
        return parts
    # Each microbatch has its own version counter, since a model may write into one microbatch while
    # autograd has saved tensors of another.
    return [part.data for part in parts]


def _split_shards(tensor: Tensor, chunks: int, dim: int, shards: int) -> list[Tensor]:
    """Split a DTensor that is sharded along ``dim``: every rank splits its own rows."""
    rows = tensor.size(dim)
    if rows % (chunks * shards):
        raise ValueError(
            f"a DTensor of {rows} rows in {shards} shards can't be split evenly into {chunks} "
            "microbatches; pad it, or pass ready microbatches (arg_mbs=, kwarg_mbs=, target_mbs=)"
        )
    parts = torch.tensor_split(local_part(tensor), chunks, dim=dim)
    return [with_local_part(tensor, part, rows // chunks, dim) for part in parts]


def _part_of_mask(mask: Any, rows: Tensor) -> Any:
    """Some rows of a mask of flex attention; its ``mask_mod`` still gets the batch's rows."""
    first, mask_mod = int(rows[0]), mask.mask_mod
    part = mask[first : first + len(rows)]
    part.mask_mod = lambda b, h, q_idx, kv_idx: mask_mod(b + first, h, q_idx, kv_idx)
    return part


def num_with_rows(seen: Rows, chunks: int) -> int:
    """The number of chunks that have rows, by ``seen`` of ``split_tree``; 0 if nothing was split.

    Raises:
        ValueError: the tensors' rows are cut at different places.
    """
    counts = {rows: shape for (rows, _), shape in seen.items()}
    if len(counts) > 1 and any(rows % chunks for rows in counts):
        rows, other = sorted(counts, reverse=True)[:2]
        raise ValueError(
            f"{rows} rows of a tensor of shape {tuple(counts[rows])} and {other} of one of shape "
            f"{tuple(counts[other])} are cut at different places for {chunks} microbatches; "
            f"{_NOT_SPLIT}"
        )
    return min(chunks, *counts) if counts else 0


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
    *,
    seen: tuple[Rows | None, Rows | None] = (None, None),
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split a call's arguments into microbatches.

    Args:
        args, kwargs: the arguments; any trees of tensors and values (see the module's table).
        chunks: number of microbatches.
        args_chunk_spec: per argument its ``TensorChunkSpec``, or a tree of them that begins like
            it; where that is None, the value is given to every microbatch as it is. Without a
            spec, dimension 0 is split.
        kwargs_chunk_spec: likewise by name; of names that it lacks, dimension 0 is split.
        seen: of the positional and the keyword arguments, ``seen`` of ``split_tree``.

    Returns:
        The positional and the keyword arguments of each microbatch. Shape (rows, …) becomes
        ``chunks`` shapes (rows/chunks, …), the first ones a row longer where it does not divide.

    Raises:
        ValueError: a tensor has fewer rows than there are microbatches, or a spec does not fit.

    Examples:
        >>> args, kwargs = split_args_kwargs_into_chunks((torch.arange(5),), {"scale": 2}, 2)
        >>> args, kwargs
        ([(tensor([0, 1, 2]),), (tensor([3, 4]),)], [{'scale': 2}, {'scale': 2}])
    """
    split_args = split_tree(args, chunks, args_chunk_spec, seen[0]) if args else [()] * chunks
    if not kwargs:
        return split_args, [{}] * chunks
    spec = kwargs_chunk_spec
    if isinstance(spec, Mapping):
        if unknown := [name for name in spec if name not in kwargs]:
            raise ValueError(
                f"kwargs_chunk_spec has {unknown[0]!r}, which the call does not: it has "
                f"{', '.join(map(repr, kwargs))}; take it out, or pass {unknown[0]}=None"
            )
        spec = {name: spec.get(name, _BATCH_DIM) for name in kwargs}
    return split_args, split_tree(kwargs, chunks, spec, seen[1])


# --- merging -------------------------------------------------------------------------------------


def merge_chunks(
    chunks: Sequence[Any], chunk_spec: Any = None, *, split_by_shard: bool = True
) -> Any:
    """Merge the outputs of the microbatches into one.

    Args:
        chunks: one tree per microbatch, all of the same structure.
        chunk_spec: as for splitting, the dimension along which tensors are concatenated (default
            0). Tensors without dimensions are stacked. A ``Reducer`` reduces the values. If the
            spec is None, and for values that are no tensors, the chunks must agree.
        split_by_shard: whether the rows of DTensors that are sharded along them were split on
            every rank. If False, their rows come one chunk after the other.

    Raises:
        ValueError: chunks differ in structure, or in a value that can't be joined.
    """
    flats = [flatten(chunk, _is_packed) for chunk in chunks]
    treedef = flats[0][1]
    if any(other != treedef for _, other in flats):
        raise ValueError("the microbatches' outputs differ in structure and can't be merged")
    specs = _leaf_specs(chunks[0], len(flats[0][0]), chunk_spec)
    columns = zip(*(leaves for leaves, _ in flats), strict=True)
    pairs = zip(columns, specs, strict=True)
    merged = [_merge_leaf(column, spec, split_by_shard) for column, spec in pairs]
    return unflatten(treedef, merged)


def _merge_leaf(column: tuple[Any, ...], spec: Any, split_by_shard: bool) -> Any:
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
            if first.dim() and is_dtensor(first):
                dim = range(first.dim())[spec.split_dim]
                return _merge_dtensors(column, dim, split_by_shard)
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


def _merge_dtensors(column: Sequence[Any], dim: int, split_by_shard: bool) -> Any:
    """Merge DTensors of the same placements, which the result has, too."""
    first, rows = column[0], [each.size(dim) for each in column]
    shards = num_shards(first, dim)
    placements = [getattr(each, "placements", None) for each in column]
    if any(each != first.placements for each in placements):
        raise ValueError(f"the microbatches' outputs have different placements: {placements}")
    if shards == 1 or not split_by_shard:
        whole: Any = torch.cat(list(column), dim=dim)
        return whole.redistribute(placements=first.placements)
    if any(num % shards for num in rows):
        raise ValueError(f"outputs of {rows} rows in {shards} shards are not evenly sharded")
    parts = torch.cat([local_part(each) for each in column], dim=dim)
    return with_local_part(first, parts, sum(rows), dim)


# --- ready microbatches --------------------------------------------------------------------------


def check_ready(ready: Mapping[str, Any], has_batch: Sequence[bool], num: int) -> None:
    """Check ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs``: lists of one length, at most ``num``.

    ``has_batch`` says for each whether a batch to split was given as well.
    """
    length = 0
    kinds: tuple[Any, ...] = ((tuple, list), Mapping, object)
    for (name, mbs), also, kind in zip(ready.items(), has_batch, kinds, strict=True):
        if mbs is None:
            continue
        if not hasattr(mbs, "__len__"):
            raise TypeError(f"{name} is a {type(mbs).__name__}, expected a list of microbatches")
        if also:
            raise ValueError(
                f"{name} was given beside a batch; pass a batch, which is split, or ready "
                "microbatches"
            )
        if wrong := [item for item in mbs if not isinstance(item, kind)]:
            expected = "a dict" if kind is Mapping else "a tuple, such as (x,)"
            raise TypeError(
                f"{name} holds a {type(wrong[0]).__name__}, expected {expected} of a call's "
                "arguments for each microbatch"
            )
        length = length or len(mbs)
        if not 0 < len(mbs) == length <= num:
            raise ValueError(
                f"{len(mbs)} ready microbatches in {name}, expected 1 to n_microbatches={num}, and "
                "as many in each list"
            )


def inputs_digest(
    args: Sequence[tuple[Any, ...]] | None, kwargs: Sequence[Mapping[str, Any]]
) -> tuple[int, int]:
    """Two checksums, of argument names and of sampled elements; 0 on a rank without inputs."""
    if args is None:
        return 0, 0
    kind = "positional" if args[0] else repr(sorted(kwargs[0]))
    mbs: Sequence[Any] = args if args[0] else kwargs
    samples = repr([sample_of(leaf) for leaf in flatten([mbs[0], mbs[-1]])[0]])
    return zlib.crc32(kind.encode()) + 1, zlib.crc32(samples.encode()) + 1


def sample_of(leaf: Any) -> Any:
    """Shape, dtype and some bytes of a plain tensor with values; None for anything else."""
    if type(leaf) is not Tensor or leaf.layout is not torch.strided or leaf.device.type == "meta":
        return None
    flat = leaf.detach().reshape(-1)
    some = flat[:: max(1, len(flat) // 16)]
    bits = some.resolve_conj().resolve_neg().contiguous().view(torch.uint8)
    return tuple(leaf.shape), leaf.dtype, bits.tolist()
