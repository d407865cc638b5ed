"""A step of a replicated stage that is driven by hand: when it begins, and when it reduces.

A schedule knows which of a step's backwards is the last one, and reduces then. Who drives a stage
by hand says so with a backward, or asks for the reduction itself, or does both. This module knows
neither microbatches nor what reducing means.
"""

from __future__ import annotations

from torch import nn

from penstock.parallel.data_parallel import Replicas, replicas_of

__all__ = ["ReplicaStep"]


class ReplicaStep:
    """The replicas of a stage's module, from a step's first forward to its one reduction.

    Attributes:
        due: whether the backward that completes the step is to reduce.
    """

    def __init__(self) -> None:
        self.due = False
        self._begun = False
        self._replicas: Replicas | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded: those of the graph are then others than the module's."""
        return self._replicas is not None and self._replicas.sharded

    def begin(self, module: nn.Module) -> None:
        """Hold reductions back from now on, unless the step is under way."""
        if self._begun:
            return
        self._begun = True
        self._replicas = replicas_of(module)
        if self._replicas is not None:
            self._replicas.begin()
            self._replicas.share_buffers()

    def end(self, *, reduce: bool) -> None:
        """End the step, if one is under way: its gradients are averaged, or left as they are."""
        replicas, self._replicas = self._replicas, None
        self._begun = self.due = False
        if replicas is not None:
            try:
                if reduce:
                    replicas.reduce_grads()
            finally:
                replicas.end()
