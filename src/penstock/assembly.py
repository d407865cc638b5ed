"""Assemble a program and this process's stages from the arguments of ``Pipeline``.

schedule, ranks, microbatches ──► program ──┐
                                            ├──► this process's stages
model, split, example ──► modules ──────────┘
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError
from penstock.partition.cutting import ModelCut, cut_model
from penstock.partition.materialize import materialize
from penstock.partition.sequential import is_sequence, with_states
from penstock.partition.spec import SplitSpec, own_loss, value_text
from penstock.partition.ties import SharedBuffers, Tie, find_ties
from penstock.runtime.config import LossFn, PipelineSpec
from penstock.schedule.program import Program
from penstock.schedule.registry import choose_program, directions_of
from penstock.schedule.text import load_csv
from penstock.stage.wrappers import plain_name

if TYPE_CHECKING:
    from penstock.auto import Forecast

__all__ = ["Assembly", "ModelOrStages", "assemble"]

ModelOrStages: TypeAlias = nn.Module | Sequence[nn.Module] | Sequence[PipelineStage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """The parts of a pipeline: this process's stages, and facts about the whole model."""

    program: Program
    stages: tuple[PipelineStage, ...]
    names: tuple[tuple[str, ...], ...]  # of the modules of every stage; empty if unknown
    ties: Sequence[Tie]
    loss_fn: LossFn | None
    forecast: Forecast | None  # where the model was measured
    # The whole model's state: by name, the dtype, the shape and the stage; None if unknown.
    layout: Mapping[str, str] | None
    takes_model_call: bool = False  # the stages accept the model's own call signature
    # The buffers of layers that several stages call, if known of all ranks.
    shared_buffers: SharedBuffers | None = None


def assemble(spec: PipelineSpec) -> Assembly:
    """Choose a program, split the model, and make this process's stages; raises as ``Pipeline``."""
    model = spec.model
    if not isinstance(model, nn.Module | Sequence):
        raise PartitionError(
            f"the model is a {type(model).__name__}, expected a module, a list of modules, or a "
            "list of PipelineStages"
        )
    if isinstance(model, nn.Sequential | Sequence) and not len(model):
        what = "nn.Sequential" if isinstance(model, nn.Module) else "list of modules or stages"
        raise PartitionError(f"the {what} is empty: there is nothing to run")
    program, split, forecast = _choose(spec)
    local: Sequence[int] = range(program.num_stages)
    if spec.group is not None:
        local = program.placement.stages_of(spec.group.rank())
    ties: Sequence[Tie]
    layout: Mapping[str, str] | None = None
    if not isinstance(model, nn.Module) and all(isinstance(m, PipelineStage) for m in model):
        if spec.wrap_fn is not None:
            raise PartitionError(
                "wrap_fn= wraps the stages of a model that Pipeline cuts; wrap these modules "
                "before making their PipelineStages"
            )
        stages, cut = tuple(model), ModelCut(modules=())
        if [stage.stage_index for stage in stages] == list(range(program.num_stages)):
            modules = [stage.submod for stage in stages[: program.placement.num_model_stages]]
            stages, cut = tuple(stages[i] for i in local), ModelCut(modules=tuple(modules))
            layout = _layout(cut.modules)
        ties = spec.shared or stages[0].ties or find_ties(cut.modules)
    else:
        cut, number = _cut(spec, split, program), program.placement.model_stage
        layout, found = _layout(cut.modules), find_ties(cut.modules)
        ties = [*spec.shared, *(tie for tie in found if tie not in spec.shared)]
        mine = {number(i): cut.modules[number(i)] for i in local}
        roots = [model] if isinstance(model, nn.Module) else model
        mine = materialize(mine, spec.device, roots, spec.init_fn, spec.wrap_fn)
        stages = tuple(
            PipelineStage(mine[number(i)], i, program.num_stages, spec.device, group=spec.group)
            for i in local
        )
    return Assembly(
        program=program,
        stages=stages,
        names=cut.names,
        ties=ties,
        loss_fn=own_loss if spec.loss_fn is None and cut.has_loss else spec.loss_fn,
        forecast=forecast,
        layout=layout,
        takes_model_call=cut.whole_call,
        shared_buffers=SharedBuffers(dict(enumerate(cut.modules))) if cut.modules else None,
    )


def _choose(spec: PipelineSpec) -> tuple[Program, SplitSpec | None, Forecast | None]:
    """The program, the split of the model, and a forecast where the model was measured."""
    model, split, forecast = spec.model, None, None
    if spec.split is not None:
        split = SplitSpec.parse(spec.split, sequence=is_sequence(model))
    schedule = load_csv(spec.schedule) if isinstance(spec.schedule, os.PathLike) else spec.schedule
    if schedule == "auto":
        from penstock.auto import find_program  # imports the search

        num_stages = _num_stages(model, split, copies=1)
        schedule, split, forecast = find_program(spec, split, num_stages)
    elif spec.memory_limit is not None:
        raise ScheduleError(
            f"memory_limit={spec.memory_limit:g} is for schedule='auto'; a named schedule holds "
            "a fixed number of microbatches"
        )
    program = choose_program(
        schedule,
        num_stages=_num_stages(model, split, directions_of(schedule)),
        n_microbatches=spec.n_microbatches,
        ranks=spec.ranks,
        virtual=spec.virtual,
        world=None if spec.group is None else spec.group.size(),
    )
    if split is not None and split.auto:
        from penstock.auto import balance_stages

        split, forecast = balance_stages(spec, program)
    return program, split, forecast


def _cut(spec: PipelineSpec, split: SplitSpec | None, program: Program) -> ModelCut:
    """Split the model into the modules of all stages."""
    model, example, device = spec.model, spec.example, spec.device
    num = program.placement.num_model_stages
    cut = cut_model(model, split, num, example=example, device=device, method=spec.method)
    return cut if program.num_splits == 1 else replace(cut, modules=with_states(cut.modules))


def _layout(modules: Sequence[nn.Module]) -> dict[str, str]:
    """By name in the model's state, the dtype, the shape, and the stages that hold it."""
    found: dict[str, str] = {}
    for stage, module in enumerate(modules):
        for name, value in module.state_dict(keep_vars=True).items():
            plain, where = plain_name(module, name), f"{value_text(value)} in stage {stage}"
            found[plain] = f"{found[plain]} and {where}" if plain in found else where
    return found


def _num_stages(model: ModelOrStages, split: SplitSpec | None, copies: int) -> int | None:
    """The user's number of stages; None if it follows from the ranks."""
    if split is not None:
        return None if split.auto else split.num_stages
    if isinstance(model, nn.Module):
        return None
    first = model[0]
    return first.num_stages // copies if isinstance(first, PipelineStage) else len(model)
