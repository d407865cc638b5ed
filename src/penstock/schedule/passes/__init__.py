"""Passes: pure functions from program to program; the input stays unchanged."""

from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.passes.lower import (
    forward_only,
    insert_sharding,
    lower,
    merge_backward,
    offload,
    recompute,
    reduce_gradients,
)

__all__ = [
    "forward_only",
    "insert_sharding",
    "insert_transfers",
    "lower",
    "merge_backward",
    "offload",
    "recompute",
    "reduce_gradients",
]
