"""Pure functions from program to program; what goes in stays as it is."""

from penstock.schedule.passes.forward_only import forward_only
from penstock.schedule.passes.insert_sharding import insert_sharding
from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.passes.lower import lower
from penstock.schedule.passes.merge_backward import merge_backward
from penstock.schedule.passes.offload import offload
from penstock.schedule.passes.recompute import recompute
from penstock.schedule.passes.reduce_gradients import reduce_gradients

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
