"""Split a batch into microbatches, and merge outputs again.

Rows are shared out as evenly as they go: 10 rows in 4 microbatches are 3, 3, 2, 2. Nothing is
dropped or padded. Each microbatch then counts alike in the mean of their losses, also where they
differ in rows: where that mean is to be the batch's, pass batches that divide.

    tensors in any container                split; containers are those of ``row_trees.py``,
                                            classes registered with torch's pytree among them
    a BlockMask of flex attention           split along its batch dimension, where that is not 1
    a PackedSequence                        refused: its rows do not lie together
    all else, tensors without dimensions    given to every microbatch as it is

An object of a class that is none of these containers goes to every microbatch whole, whatever
tensors it holds: nobody can know which of them have rows. Register its class with
``torch.utils._pytree.register_pytree_node`` where they have. What such a class is registered with
beside its tensors, its context, goes to every microbatch as it is: it must not depend on the number
of rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import optree
import torch
from torch import Tensor

from penstock.runtime.block_mask import is_block_mask, split_block_mask
from penstock.runtime.row_trees import ROWS, flatten_rows
from penstock.stage.pytree import same_value

__all__ = [
    "Reducer",
    "Replicate",
    "TensorChunkSpec",
    "check_ready",
    "is_split_alike",
    "merge_chunks",
    "num_chunks",
    "split_args_kwargs_into_chunks",
    "split_call",
    "split_tree",
    "sum_reducer",
]


class TensorChunkSpec:
    """Along which dimension a tensor is split into microbatches.

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
    """In a chunk spec: the value is given to every chunk, as where the spec has None."""


class Reducer:
    """In ``output_merge_spec``: the microbatches' values are put together by a function.

    Args:
        init_value: what to begin with.
        reduce_fn: makes of what there is so far, and the next microbatch's value, what is next.
    """

    def __init__(self, init_value: Any, reduce_fn: Callable[[Any, Any], Any]) -> None:
        self.init_value = init_value
        self.reduce_fn = reduce_fn


# A number, not a tensor, so that it goes with any device.
sum_reducer = Reducer(0, operator.add)

_BATCH_DIM = TensorChunkSpec(0)


def split_tree(
    tree: Any, chunks: int, spec: Any = None, seen: dict[int, torch.Size] | None = None
) -> list[Any]:
    """Split every tensor of a tree.

    Args:
        tree: tensors and plain values in any containers (see the table above).
        chunks: into how many.
        spec: a ``TensorChunkSpec`` for all leaves, a tree of them that begins like ``tree``, or
            None for dimension 0. Where a spec has None, the value is given to every chunk.
        seen: is filled with the numbers of rows of what is split, each with the first shape met.

    Returns:
        ``chunks`` trees; the first ones are a row longer where rows do not divide.

    Raises:
        ValueError: a tensor has fewer rows than there are chunks, the spec does not fit, or a
            container can't be made of some of its rows.
    """
    leaves, treedef = flatten_rows(tree)
    specs = _leaf_specs(tree, len(leaves), spec)
    columns = [_split_leaf(leaf, chunks, s, seen) for leaf, s in zip(leaves, specs, strict=True)]
    # A bare tensor, or a tuple of nothing but leaves, is put together without optree's help.
    if treedef.is_leaf():
        return list(columns[0])
    if type(tree) is tuple and len(tree) == len(leaves) > 0 and treedef.num_nodes == len(tree) + 1:
        return list(zip(*columns, strict=True))
    return [optree.tree_unflatten(treedef, [c[i] for c in columns]) for i in range(chunks)]


def _leaf_specs(tree: Any, num_leaves: int, spec: Any) -> list[Any]:
    if spec is None:
        return [_BATCH_DIM] * num_leaves
    if isinstance(spec, (TensorChunkSpec, Reducer)):
        return [spec] * num_leaves
    try:
        specs = optree.broadcast_prefix(spec, tree, none_is_leaf=True, namespace=ROWS)
    except ValueError as error:
        # Without what the leaves are: the error itself shows the tensors' numbers.
        shape = optree.tree_structure(tree, none_is_leaf=True, namespace=ROWS)
        raise ValueError(
            f"the chunk spec {spec!r} does not fit values in {shape}; give one TensorChunkSpec for "
            "all of them, or a tree of specs that begins as the values do"
        ) from error
    specs = [None if isinstance(s, Replicate) or s is Replicate else s for s in specs]
    # None says in a spec what becomes of a leaf; in the tree itself it is none.
    leaves = optree.tree_leaves(tree, none_is_leaf=True, namespace=ROWS)
    return [each for each, leaf in zip(specs, leaves, strict=True) if leaf is not None]


def _split_leaf(
    leaf: Any, chunks: int, spec: TensorChunkSpec | None, seen: dict[int, torch.Size] | None
) -> Sequence[Any]:
    if spec is None:
        return [leaf] * chunks
    if is_block_mask(leaf):
        if isinstance(spec, TensorChunkSpec) and spec.split_dim:
            raise ValueError(f"a BlockMask is split along dimension 0, its batch, not by {spec}")
        return split_block_mask(leaf, chunks)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return [leaf] * chunks
    if not isinstance(spec, TensorChunkSpec):
        raise ValueError(f"a chunk spec holds {spec!r}; use TensorChunkSpec(dim) or None")
    if not -leaf.dim() <= spec.split_dim < leaf.dim():
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} has no dimension {spec.split_dim} to be split "
            "along; pass another in its TensorChunkSpec"
        )
    rows = leaf.size(spec.split_dim)
    if not rows:
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} has no rows along dimension {spec.split_dim}: "
            "there is nothing to train on"
        )
    if rows < chunks:
        raise ValueError(
            f"a tensor of shape {tuple(leaf.shape)} can't be split into {chunks} microbatches "
            f"along dimension {spec.split_dim}; pass at least {chunks} rows, or use "
            f"n_microbatches={rows}; what is the same for every microbatch has None in "
            "args_chunk_spec= or kwargs_chunk_spec=, or goes into each of the ready ones "
            "(arg_mbs=, kwarg_mbs=, target_mbs=)"
        )
    if seen is not None:
        seen.setdefault(rows, leaf.shape)
    parts = torch.tensor_split(leaf, chunks, dim=spec.split_dim)
    if leaf.requires_grad or type(leaf) is not Tensor:
        return parts
    # Each with a version of its own: a model may write into its input, and what autograd has saved
    # of one microbatch is not changed by what is written into another.
    return [part.data for part in parts]


def is_split_alike(rows: int, others: int, chunks: int) -> bool:
    """Whether two numbers of rows are cut at the same places, seen from the whole.

    Then chunk i of the one may belong to chunk i of the other: 4 images and 8 of their captions.

    Example:
        >>> is_split_alike(4, 8, 2), is_split_alike(5, 8, 2)
        (True, False)
    """
    return all(
        _begin(i, rows, chunks) * others == _begin(i, others, chunks) * rows for i in range(chunks)
    )


def _begin(chunk: int, rows: int, chunks: int) -> int:
    """The first row of a chunk, where rows are shared out as evenly as they go."""
    each, longer = divmod(rows, chunks)
    return chunk * each + min(chunk, longer)


def split_args_kwargs_into_chunks(
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    chunks: int,
    args_chunk_spec: tuple[Any, ...] | None = None,
    kwargs_chunk_spec: dict[str, Any] | None = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Split a call's arguments into microbatches.

    Args:
        args: positional arguments; any trees of tensors and values (see the module's table).
        kwargs: keyword arguments, likewise.
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
    """``split_args_kwargs_into_chunks``; ``split_tree`` says what the last two arguments are."""
    split_args = split_tree(args, chunks, args_spec, args_seen) if args else [()] * chunks
    if not kwargs:
        return split_args, [{}] * chunks
    return split_args, split_tree(kwargs, chunks, _by_name(kwargs_spec, kwargs), kwargs_seen)


def _by_name(spec: Any, kwargs: Mapping[str, Any]) -> Any:
    """A spec for every keyword argument, of one that may lack some."""
    if not isinstance(spec, Mapping):
        return spec
    for name in spec:
        if name not in kwargs:
            raise ValueError(
                f"kwargs_chunk_spec has {name!r}, which the call does not: it has "
                f"{', '.join(map(repr, kwargs))}; take it out, or pass {name}=None"
            )
    return {name: spec.get(name, _BATCH_DIM) for name in kwargs}


def merge_chunks(chunks: Sequence[Any], chunk_spec: Any = None) -> Any:
    """Merge the outputs of the microbatches into one.

    Args:
        chunks: one tree per microbatch, all of the same structure.
        chunk_spec: as for splitting: along which dimension tensors are joined (default 0). A
            tensor without dimensions is stacked with its like; where the spec has a ``Reducer``,
            values are put together by it; where it has None, and for what is no tensor, the
            chunks must agree and their value is kept.

    Raises:
        ValueError: chunks differ in structure, or in a value that can't be joined, or a container
            can't be made of more rows.
    """
    flats = [flatten_rows(chunk) for chunk in chunks]
    treedef = flats[0][1]
    if any(other != treedef for _, other in flats):
        raise ValueError("the microbatches' outputs differ in structure and can't be merged")
    specs = _leaf_specs(chunks[0], len(flats[0][0]), chunk_spec)
    columns = zip(*(leaves for leaves, _ in flats), strict=True)
    merged = [_merge_leaf(column, spec) for column, spec in zip(columns, specs, strict=True)]
    return optree.tree_unflatten(treedef, merged)


def _merge_leaf(column: tuple[Any, ...], spec: Any) -> Any:
    first = column[0]
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


# Of each kind of ready microbatches, what a batch that is to be split is passed as.
_WHOLE = {
    "arg_mbs": "positional arguments",
    "kwarg_mbs": "keyword arguments",
    "target_mbs": "target=",
}


def check_ready(ready: Mapping[str, Sequence[Any] | None], whole: Mapping[str, bool]) -> None:
    """Hold lists of ready microbatches against what they are to be.

    Args:
        ready: ``arg_mbs``, ``kwarg_mbs`` and ``target_mbs``.
        whole: for each of them, whether a batch to split was given as well.

    Raises:
        ValueError: a batch was given as well.
        TypeError: one is no list, or an item no tuple of arguments, or no dict of them.
    """
    for name, mbs in ready.items():
        if mbs is not None and not hasattr(mbs, "__len__"):
            raise TypeError(f"{name} is a {type(mbs).__name__}, expected a list of microbatches")
        if mbs is not None and whole[name]:
            raise ValueError(
                f"{_WHOLE[name]} and {name} were both given; pass a batch, which is split, or "
                "ready microbatches"
            )
    for i, args in enumerate(ready["arg_mbs"] or ()):
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"arg_mbs[{i}] is a {type(args).__name__}, expected the tuple of a microbatch's "
                "positional arguments, such as (x,)"
            )
    for i, kwargs in enumerate(ready["kwarg_mbs"] or ()):
        if not isinstance(kwargs, Mapping):
            raise TypeError(
                f"kwarg_mbs[{i}] is a {type(kwargs).__name__}, expected the dict of a microbatch's "
                "keyword arguments"
            )


def num_chunks(mappings: Mapping[str, Sequence[Any] | None]) -> int | None:
    """The common length of lists of ready microbatches; None where no list is given.

    Raises:
        ValueError: they differ.
    """
    lengths = {name: len(chunks) for name, chunks in mappings.items() if chunks is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists of microbatches differ in length: {lengths}")
    return next(iter(lengths.values()), None)
