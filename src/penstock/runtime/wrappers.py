"""What replicates or shards the stages' modules now: looked at before every step.

A module may be given to ``fully_shard``, ``replicate`` or DDP, whole or in parts, before its stage
is made, after, and between steps. This module knows stages; it does not know programs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from penstock.parallel.data_parallel import Replicas, replicas_of
from penstock.stage.stage import Stage

__all__ = ["Wrappers"]


class Wrappers:
    """The data-parallel wrappers around stages.

    Args:
        stages: this process's stages, by index.

    Attributes:
        of: each stage's, by index; None where its module is neither replicated nor sharded.
    """

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._seen: dict[int, list[object]] = {}
        self.of: dict[int, Replicas | None] = {}
        self.look()

    def look(self) -> None:
        """See what the stages' modules are wrapped in now.

        Raises:
            StageError: a wrapper that can't be pipelined.
        """
        seen = {i: _kinds(stage.submod) for i, stage in self._stages.items()}
        if seen == self._seen:
            return
        # A module that is a stage several times (one copy per direction) is wrapped once.
        modules = {id(stage.submod): stage.submod for stage in self._stages.values()}
        found = {key: replicas_of(module) for key, module in modules.items()}
        self.of = {i: found[id(stage.submod)] for i, stage in self._stages.items()}
        self._seen = seen

    @property
    def distinct(self) -> list[Replicas]:
        """Those there are, each once."""
        return list({id(r): r for r in self.of.values() if r is not None}.values())

    @property
    def sharding(self) -> bool:
        """Whether parameters are sharded, so that they are to be gathered."""
        return any(each.sharded for each in self.distinct)


def _kinds(module: nn.Module) -> list[object]:
    # fully_shard and replicate give a module another class, in place; DDP stands around it.
    return [module, *map(type, module.modules())]
