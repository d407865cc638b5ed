"""The masks of flex attention, split into microbatches along their batch dimension.

    mask             rows    mask_mod is asked for
    of the batch     0 1 2 3 4   row b
    microbatch 0     0 1 2       row b
    microbatch 1     3 4         row b + 3

A mask with a batch dimension of 1 holds for every row, and goes whole to each microbatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["is_block_mask", "split_block_mask"]

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


def is_block_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether ``value`` is a mask of flex attention, which whoever made one has imported."""
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def split_block_mask(mask: BlockMask, chunks: int) -> Sequence[BlockMask]:
    """A mask for each microbatch.

    Args:
        mask: batch dimension of rows, or of 1.
        chunks: number of microbatches.

    Raises:
        ValueError: it has fewer rows than there are microbatches.
    """
    rows = mask.kv_num_blocks.size(0)
    if rows == 1:
        return [mask] * chunks
    if rows < chunks:
        raise ValueError(
            f"a BlockMask of {rows} rows can't be split into {chunks} microbatches; make it of at "
            f"least {chunks} rows, or with B=None where it is the same for all"
        )
    splits: dict[str, Sequence[Tensor | None]] = {}
    for name in _TABLES:
        table: Tensor | None = getattr(mask, name)
        splits[name] = [None] * chunks if table is None else torch.tensor_split(table, chunks)
    parts: list[Any] = []
    first = 0
    for i in range(chunks):
        tables: dict[str, Any] = {name: split[i] for name, split in splits.items()}
        parts.append(
            type(mask).from_kv_blocks(
                **tables,
                BLOCK_SIZE=mask.BLOCK_SIZE,
                mask_mod=_from_row(first, mask.mask_mod),
                seq_lengths=mask.seq_lengths,
                # Without them a mask serves forwards alone.
                compute_q_blocks=mask.q_num_blocks is not None,
            )
        )
        first += tables["kv_num_blocks"].size(0)
    return parts


def _from_row(first: int, mask_mod: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if first == 0:
        return mask_mod

    def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask_mod(b + first, h, q_idx, kv_idx)

    return shifted
