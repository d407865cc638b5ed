"""Pipe: a captured model, cut into stages.

    pipe.get_stage_module(i)     the module, to be wrapped (DDP, FSDP2) or moved
    pipe.build_stage(i, device)  the stage, to be given to a schedule
    pipe(...)                    all stages in turn, as the model itself runs

This module knows neither how models are captured nor schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from penstock.compat.traced_stage import TracedStage, build_stage
from penstock.errors import PartitionError
from penstock.partition.ties import Tie, record_ties

__all__ = ["Pipe", "PipeInfo", "SplitPolicy"]

# Given the captured graph, returns one with calls of ``pipe_split`` in it.
SplitPolicy = Callable[[fx.GraphModule], fx.GraphModule]


@dataclass(frozen=True, slots=True)
class PipeInfo:
    """Facts of a pipe for its stages.

    Args:
        graph: the graph whose ``call_module`` nodes are the stages.
        num_stages: the number of stages.
        has_loss_and_backward: always False: the loss is the schedule's.
        shared: parameters that stages share, see ``Pipe``.
    """

    graph: fx.Graph
    num_stages: int
    has_loss_and_backward: bool
    shared: Sequence[Tie] = ()


class Pipe(nn.Module):
    """A captured model, cut into stages. ``pipeline`` makes it.

    Args:
        split_gm: a graph that runs the stages ``submod_pp_0``, ``submod_pp_1``, … in turn.
        num_stages: the number of stages.
        has_loss_and_backward: accepted for compatibility.
        loss_spec: likewise.

    Attributes:
        shared: for each parameter that several stages hold (embedding and head, say), its name by
            stage, as ``Pipeline(shared=)`` takes it. It is one object in all of them; under several
            processes its gradients have to be added up.
        crossing: for each boundary, the values that cross it: names with dtype and shape.
    """

    def __init__(
        self,
        split_gm: fx.GraphModule,
        num_stages: int,
        has_loss_and_backward: bool = False,
        loss_spec: Any = None,
    ) -> None:
        super().__init__()
        self.split_gm = split_gm
        self.num_stages = num_stages
        self.has_loss_and_backward = has_loss_and_backward
        self.loss_spec = loss_spec
        self.shared = record_ties([self.get_stage_module(i) for i in range(num_stages)])
        self.crossing: tuple[tuple[str, ...], ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages in turn, as the model itself runs."""
        values = self.get_stage_module(0)(*args, **kwargs)
        for stage in range(1, self.num_stages):
            values = self.get_stage_module(stage)(*values)
        return values

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of one stage; it holds the model's own parameters under their names.

        Args:
            stage_idx: its index, from 0.

        Raises:
            PartitionError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise PartitionError(
                f"stage {stage_idx}: the pipe has stages 0 to {self.num_stages - 1}"
            )
        return self.split_gm.get_submodule(f"submod_pp_{stage_idx}")

    def build_stage(
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> TracedStage:
        """Make one stage, to be given to a schedule. Its module is moved to ``device``.

        Args:
            stage_index: its index, from 0.
            device: where it is to live.
            group: the pipeline's process group; the default group if None.
        """
        module = self.get_stage_module(stage_index)
        return build_stage(module, stage_index, self.info(), torch.device(device), group)

    def info(self) -> PipeInfo:
        """Facts of the pipe for its stages, without its parameters."""
        return PipeInfo(
            self.split_gm.graph, self.num_stages, self.has_loss_and_backward, self.shared
        )

    def print_readable(self) -> None:
        """Print the stages' code."""
        for stage in range(self.num_stages):
            module: Any = self.get_stage_module(stage)
            module.print_readable()

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: SplitPolicy | None = None,
    ) -> Pipe:
        """``pipeline`` without a ``split_spec``, under the name that torch has for it."""
        from penstock.partition.export.split_model import pipeline  # which makes a Pipe

        return pipeline(mod, example_args, example_kwargs, split_policy=split_policy)

    def __repr__(self) -> str:
        """One line per stage: its parameters, and the values it hands on."""
        lines = [f"Pipe of {self.num_stages} stages"]
        for stage in range(self.num_stages):
            params = sum(p.numel() for p in self.get_stage_module(stage).parameters())
            handed = ", ".join(self.crossing[stage]) if stage < len(self.crossing) else ""
            children = ", ".join(name for name, _ in self.get_stage_module(stage).named_children())
            line = f"  stage {stage}: {params:,} parameters in {children or 'no modules'}"
            lines.append(f"{line}; hands on {handed}" if handed else line)
        for tie in self.shared:
            lines.append("  shared: " + ", ".join(f"{n} (stage {s})" for s, n in tie.items()))
        return "\n".join(lines)
