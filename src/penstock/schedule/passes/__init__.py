"""Passes: pure functions from program to program; the input stays unchanged."""

from penstock.schedule.passes.computations import forward_only, merge_backward, offload, recompute
from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.passes.lower import insert_sharding, lower, reduce_gradients

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
