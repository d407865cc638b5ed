"""Pipeline-parallel training on PyTorch, with the gradients of one device.

The public names, each imported when it is first asked for: planning a schedule needs no torch and
loads none. This module knows where names live, and nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.compat.stage import PipelineStage
    from penstock.compat.traced_stage import TracedStage, build_stage
    from penstock.errors import (
        BoundaryError,
        InternalError,
        PartitionError,
        PeerError,
        PenstockError,
        ScheduleError,
        StageError,
    )
    from penstock.partition.balance.balance import balance
    from penstock.partition.balance.profile import profile
    from penstock.partition.export.markers import SplitPoint, annotate_split_points, pipe_split
    from penstock.partition.export.pipe import Pipe, PipeInfo
    from penstock.partition.export.split_model import pipeline
    from penstock.partition.forward.by_module import split_by_module
    from penstock.partition.plan import Plan
    from penstock.pipeline import Pipeline
    from penstock.runtime.microbatch import (
        TensorChunkSpec,
        merge_chunks,
        split_args_kwargs_into_chunks,
        sum_reducer,
    )
    from penstock.runtime.pipeline_schedule import PipelineSchedule
    from penstock.runtime.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
        Schedule1F1B,
        ScheduleChimera,
        ScheduleDualPipe,
        ScheduleDualPipeV,
        ScheduleForwardOnly,
        ScheduleGPipe,
        ScheduleInterleaved1F1B,
        ScheduleInterleavedZeroBubble,
        ScheduleLoopedBFS,
        ScheduleProgram,
        ScheduleZBVZeroBubble,
        get_schedule_class,
    )
    from penstock.schedule.action import Action, Op
    from penstock.schedule.check import check
    from penstock.schedule.program import CheckedProgram, Program
    from penstock.schedule.registry import build, schedule, schedules
    from penstock.schedule.text import load_csv, save_csv
    from penstock.search.engine import search
    from penstock.search.result import Point, Progress, SearchResult
    from penstock.simulate.costs import Costs
    from penstock.simulate.simulation import Simulation, simulate
    from penstock.stage.rng import draw_step_seed, microbatch_rng
    from penstock.trace import Span, Trace

__all__ = [
    # training
    "Pipeline",
    "PipelineStage",
    "PipelineSchedule",
    "PipelineScheduleSingle",
    "PipelineScheduleMulti",
    "ScheduleForwardOnly",
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
    "ScheduleDualPipe",
    "ScheduleChimera",
    "ScheduleProgram",
    "get_schedule_class",
    "TensorChunkSpec",
    "split_args_kwargs_into_chunks",
    "merge_chunks",
    "sum_reducer",
    "draw_step_seed",
    "microbatch_rng",
    # cutting by capture
    "pipeline",
    "Pipe",
    "PipeInfo",
    "SplitPoint",
    "annotate_split_points",
    "pipe_split",
    "build_stage",
    "TracedStage",
    # cutting
    "split_by_module",
    "profile",
    "balance",
    "Plan",
    # planning
    "build",
    "schedule",
    "schedules",
    "simulate",
    "search",
    "check",
    "load_csv",
    "save_csv",
    "Costs",
    "Simulation",
    "SearchResult",
    "Progress",
    "Point",
    "Program",
    "CheckedProgram",
    "Action",
    "Op",
    "Trace",
    "Span",
    # errors
    "PenstockError",
    "ScheduleError",
    "PartitionError",
    "StageError",
    "BoundaryError",
    "PeerError",
    "InternalError",
]

# module → the public names that it holds; the imports above say the same to type checkers.
_HOLDS = {
    "penstock.errors": (
        "PenstockError",
        "ScheduleError",
        "PartitionError",
        "StageError",
        "BoundaryError",
        "PeerError",
        "InternalError",
    ),
    "penstock.partition.balance.balance": ("balance",),
    "penstock.partition.forward.by_module": ("split_by_module",),
    "penstock.partition.export.markers": ("SplitPoint", "annotate_split_points", "pipe_split"),
    "penstock.partition.export.pipe": ("Pipe", "PipeInfo"),
    "penstock.partition.plan": ("Plan",),
    "penstock.partition.balance.profile": ("profile",),
    "penstock.pipeline": ("Pipeline",),
    "penstock.runtime.microbatch": (
        "Reducer",
        "Replicate",
        "TensorChunkSpec",
        "merge_chunks",
        "split_args_kwargs_into_chunks",
        "sum_reducer",
    ),
    "penstock.runtime.pipeline_schedule": ("PipelineSchedule",),
    "penstock.runtime.schedules": (
        "PipelineScheduleMulti",
        "PipelineScheduleRuntime",
        "PipelineScheduleSingle",
        "Schedule1F1B",
        "ScheduleChimera",
        "ScheduleDualPipe",
        "ScheduleDualPipeV",
        "ScheduleForwardOnly",
        "ScheduleGPipe",
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleLoopedBFS",
        "ScheduleProgram",
        "ScheduleZBVZeroBubble",
        "get_schedule_class",
    ),
    "penstock.schedule.action": ("Action", "Op", "Overlap"),
    "penstock.schedule.registry": ("build", "schedules"),
    "penstock.schedule.check": ("check",),
    "penstock.schedule.program": ("CheckedProgram", "Program"),
    "penstock.schedule.text": ("load_csv", "save_csv"),
    "penstock.search.result": ("Point", "Progress", "SearchResult"),
    "penstock.simulate.costs": ("Costs",),
    "penstock.simulate.simulation": ("Simulation",),
    "penstock.compat.stage": ("PipelineStage",),
    "penstock.stage.rng": ("draw_step_seed", "microbatch_rng"),
    "penstock.compat.traced_stage": ("TracedStage", "build_stage"),
    "penstock.trace": ("Trace", "Span"),
}
_HOME = {name: module for module, names in _HOLDS.items() for name in names}

# Names that torch writes as its own and users import all the same → what they are here.
_OF_TORCH = {
    "OVERLAP_F_B": "Overlap",
    "_CustomReducer": "Reducer",
    "_PipelineSchedule": "PipelineSchedule",
    "_PipelineScheduleRuntime": "PipelineScheduleRuntime",
    "_PipelineStage": "TracedStage",
    "_PipelineStageBase": "PipelineStage",
    "_Replicate": "Replicate",
    "_ScheduleForwardOnly": "ScheduleForwardOnly",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module, and keep it."""
    called = _OF_TORCH.get(name, name)
    module = _HOME.get(called)
    if module is None:
        torch_names = import_module("penstock.compat.torch_names")
        if name in torch_names.OF_MODULE:
            raise torch_names.no_import(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), called)
    globals()[name] = value
    return value


class _Function:
    """A function of this package that a module in it shares its name with.

    Importing the module binds it here by that name; the function stays, and has the module's own
    modules as attributes: ``import penstock.schedule.check as check`` looks for them there.
    """

    def __init__(self, home: str) -> None:
        self._home = home

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, package: ModuleType | None, owner: type) -> object:
        function = getattr(import_module(self._home), self._name)
        inside = f"{__name__}.{self._name}"
        for name, part in vars(sys.modules.get(inside, ModuleType(inside))).items():
            if isinstance(part, ModuleType) and part.__name__ == f"{inside}.{name}":
                setattr(function, name, part)
        return function

    def __set__(self, package: ModuleType, module: ModuleType) -> None:
        pass


class _Package(ModuleType):
    """This package."""

    pipeline = _Function("penstock.partition.export.split_model")
    schedule = _Function("penstock.schedule.registry")
    search = _Function("penstock.search.engine")
    simulate = _Function("penstock.simulate.simulation")


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """What is here, whether imported yet or not."""
    return sorted({*globals(), *__all__})
