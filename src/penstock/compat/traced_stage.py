"""The stage of a traced model, with torch's API; made by ``Pipe.build_stage``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from penstock.compat.stage import PipelineStage
from penstock.errors import StageError
from penstock.stage.stage import MicrobatchState

__all__ = ["TracedStage", "build_stage"]


class TracedStage(PipelineStage):
    """A ``PipelineStage`` with the graph of all stages.

    Any rank may pass the model's own keyword arguments; only the first stage uses them.

    Args:
        stage_module: the stage's module, from ``Pipe.get_stage_module``.
        stage_index: the stage's index, from 0.
        pipe_info: ``Pipe.info()``, a ``penstock.PipeInfo``.
        device: the device of the module.
        group: the pipeline's process group; the default group if None.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        stage_index: int,
        pipe_info: Any,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(stage_module, stage_index, pipe_info.num_stages, device, group=group)
        self.pipe_info = pipe_info
        self.ties = pipe_info.shared
        nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        self._stage_names = {str(node.target): i for i, node in enumerate(nodes)}
        self.name = nodes[stage_index].name

    def forward(
        self,
        state: MicrobatchState,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        defer: bool,
    ) -> Any:
        """Run the module; stages after the first ignore keyword arguments."""
        return super().forward(state, args, kwargs if self.is_first else {}, defer=defer)

    def get_stage_index_of_submod(self, submod_name: str) -> int:
        """Look up a stage's index by its name in the pipe's graph, such as ``"submod_pp_0"``.

        Raises:
            StageError: no stage has this name.
        """
        if submod_name not in self._stage_names:
            raise StageError(
                f"no stage is called {submod_name!r}; the pipe's stages are "
                f"{list(self._stage_names)}"
            )
        return self._stage_names[submod_name]

    def find_dst_rank(self, user: fx.Node) -> int | None:
        """The group rank of the stage of a node of ``Pipe.info().graph``.

        None for a node without a stage, such as the output.
        """
        if user.op != "call_module":
            return None
        return self.stage_index_to_group_rank[self.get_stage_index_of_submod(str(user.target))]


def build_stage(
    stage_module: nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> TracedStage:
    """Make a ``TracedStage`` of a module, wrapped or not, which is moved to ``device``.

    Args: those of ``TracedStage``.
    """
    return TracedStage(stage_module.to(device), stage_index, pipe_info, device, group)
