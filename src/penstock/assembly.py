"""From what a user passes to ``Pipeline`` to a program, and the stages that this process holds.

    schedule, ranks, microbatches ──► program ──┐
                                                ├──► this process's stages
    model, split, example ──► modules ──────────┘

This module chooses, cuts and materializes by calling those that do; it runs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError
from penstock.partition.cutting import CutMethod, ModelCut, cut_model
from penstock.partition.materialize import materialize
from penstock.partition.plan import Plan
from penstock.partition.sequential import is_sequence
from penstock.partition.spec import Example, Split, SplitSpec, own_loss
from penstock.partition.ties import SharedBuffers, Tie, find_ties, refuse_shared_statistics
from penstock.runtime.comm.process_group import from_first_rank
from penstock.schedule.program import Program
from penstock.schedule.resolve import choose_program, copies_of
from penstock.schedule.text import load_csv
from penstock.stage.wrappers import plain_name

if TYPE_CHECKING:
    from penstock.auto import Forecast

__all__ = ["Assembly", "ModelOrStages", "assemble"]

ModelOrStages: TypeAlias = nn.Module | Sequence[nn.Module] | Sequence[PipelineStage]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """What a pipeline is made of.

    Args:
        program: what it plays.
        stages: this process's stages. Of the model no more is kept: the rest is other ranks'.
        ties: the parameters that stages have in common.
        loss_fn: the user's loss function, or the model's own; None where there is neither.
        whole_call: whether the stages together are called as the model is.
        forecast: how long a step should take, where the program was searched for.
        state_names: the names in the whole model's state; None where this process does not know
            those of other ranks.
        shared_buffers: those of layers that several stages call, on whichever rank; None where
            the stages of other ranks are not known here.
    """

    program: Program
    stages: tuple[PipelineStage, ...]
    ties: Sequence[Tie]
    loss_fn: Callable[..., Any] | None
    whole_call: bool
    forecast: Forecast | None
    state_names: frozenset[str] | None
    shared_buffers: SharedBuffers | None


def assemble(
    model: ModelOrStages,
    *,
    loss_fn: Callable[..., Any] | None,
    schedule: str | Program | os.PathLike[str],
    memory_limit: float | None,
    n_microbatches: int | None,
    ranks: int | None,
    virtual: int | None,
    split: Split | os.PathLike[str] | None,
    method: CutMethod | None,
    example: Example | None,
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    shared: Sequence[Tie],
) -> Assembly:
    """Choose a program and make this process's stages; the arguments are those of ``Pipeline``.

    Raises:
        PartitionError: the model can't be cut so.
        ScheduleError: ranks, stages and microbatches do not fit the schedule.
    """
    _refuse_nothing(model)
    spec = None if split is None else SplitSpec.parse(split, sequence=is_sequence(model))
    if isinstance(schedule, os.PathLike):
        schedule = load_csv(schedule)
    forecast = None
    if schedule == "auto":
        from penstock.auto import find_program  # with a search, which few need

        found = find_program(
            model,
            split=spec,
            example=example,
            loss_fn=loss_fn,
            num_stages=_num_stages(model, spec, copies=1),
            ranks=ranks,
            virtual=virtual,
            n_microbatches=n_microbatches,
            memory_limit=memory_limit,
            group=group,
            device=device,
        )
        schedule, spec, forecast = found.program, found.split, found.forecast
    elif memory_limit is not None:
        raise ScheduleError(
            f"memory_limit={memory_limit:g} is for schedule='auto'; a schedule that is named "
            "holds what it holds"
        )
    program = choose_program(
        schedule,
        num_stages=_num_stages(model, spec, copies_of(schedule)),
        n_microbatches=n_microbatches,
        ranks=ranks,
        virtual=virtual,
        world=None if group is None else group.size(),
    )
    if _is_stages(model):
        cut = None
        stages, found_ties, names = _given_stages(tuple(model), program, group)  # type: ignore
        ties: Sequence[Tie] = shared or found_ties
    else:
        cut = _cut(model, spec, program, example, loss_fn, device, group, method)
        refuse_shared_statistics(dict(enumerate(cut.modules)))
        ties = [*shared, *find_ties(cut.modules)]
        names = _state_names(cut.modules)
        try:
            stages = _stages(model, cut.modules, program, init_fn, device, group)
        except PartitionError as error:
            if not cut.why_exported:
                raise
            told = f"{error}; it was cut by torch.export, since {cut.why_exported}"
            raise PartitionError(told) from error
    return Assembly(
        program=program,
        stages=stages,
        ties=ties,
        loss_fn=own_loss if loss_fn is None and cut is not None and cut.has_loss else loss_fn,
        whole_call=cut is not None and cut.whole_call,
        forecast=forecast,
        state_names=names,
        shared_buffers=None if cut is None else SharedBuffers(dict(enumerate(cut.modules))),
    )


def _cut(
    model: Any,
    split: SplitSpec | None,
    program: Program,
    example: Example | None,
    loss_fn: Callable[..., Any] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
    method: CutMethod | None,
) -> ModelCut:
    """The modules of all stages."""
    num = program.placement.num_model_stages
    if split is not None and split.auto:
        from penstock.partition.balance.auto_split import (
            balanced_plan,  # measures, which few ask for
        )

        plan = partial(balanced_plan, model, program, example, device=device, loss_fn=loss_fn)
        # On one rank: times come out differently on each.
        found = Plan.from_toml(from_first_rank(group, lambda: plan().to_toml()))
        split = SplitSpec.parse(found)
    cut = cut_model(model, split, num, example=example, device=device, method=method)
    if program.num_splits == 1:
        return cut
    from penstock.partition.sequential import with_states  # for pieces of sequences alone

    return replace(cut, modules=with_states(cut.modules))


def _stages(
    model: ModelOrStages,
    modules: Sequence[nn.Module],
    program: Program,
    init_fn: Callable[[nn.Module], Any] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[PipelineStage, ...]:
    """The stages of this process's ranks."""
    num, placement, local = program.num_stages, program.placement, _own(program, group)
    mine = [modules[placement.model_stage(i)] for i in local]
    materialize(mine, device, init_fn, model if isinstance(model, nn.Module) else None)
    return tuple(
        PipelineStage(module, i, num, device, group=group)
        for i, module in zip(local, mine, strict=True)
    )


def _given_stages(
    stages: tuple[PipelineStage, ...], program: Program, group: dist.ProcessGroup | None
) -> tuple[tuple[PipelineStage, ...], Sequence[Tie], frozenset[str] | None]:
    """Of the stages that a user made this process's own, and what is known of all: what they
    share, and the names in their state."""
    if [s.stage_index for s in stages] != list(range(program.num_stages)):
        return stages, stages[0].ties, None
    modules = [s.submod for s in stages[: program.placement.num_model_stages]]
    refuse_shared_statistics(dict(enumerate(modules)))
    own = tuple(stages[i] for i in _own(program, group))
    return own, stages[0].ties or find_ties(modules), _state_names(modules)


def _own(program: Program, group: dist.ProcessGroup | None) -> Sequence[int]:
    """The stages that this process holds."""
    if group is None:
        return range(program.num_stages)
    return program.placement.stages_of(group.rank())


def _state_names(modules: Sequence[nn.Module]) -> frozenset[str]:
    return frozenset(plain_name(m, n) for m in modules for n in m.state_dict())


def _is_stages(model: ModelOrStages) -> bool:
    return not isinstance(model, nn.Module) and all(isinstance(m, PipelineStage) for m in model)


def _refuse_nothing(model: object) -> None:
    """Refuse what holds no layer, or can't."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
        return
    if not isinstance(model, (nn.Sequential, Sequence)):
        raise PartitionError(
            f"the model is a {type(model).__name__}, expected a module, a list of modules, or a "
            "list of PipelineStages"
        )
    if not len(model):
        what = "nn.Sequential" if isinstance(model, nn.Sequential) else "list of modules or stages"
        raise PartitionError(f"the {what} is empty: there is nothing to run")


def _num_stages(model: ModelOrStages, split: SplitSpec | None, copies: int) -> int | None:
    """Into how many stages the user cuts the model; None where that follows from the ranks."""
    if split is not None:
        return None if split.auto else split.num_stages
    if isinstance(model, nn.Module):
        return None
    if _is_stages(model):
        first: Any = model[0]
        return int(first.num_stages) // copies
    return len(model)
