"""Pipeline-parallel training on PyTorch, with the gradients of one device.

Each public name is imported on first use. Planning a schedule neither needs nor imports torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.compat.stage import PipelineStage, PipelineStageInfo, TracedStage, build_stage
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
    from penstock.partition.export.markers import SplitPoint, annotate_split_points, pipe_split
    from penstock.partition.export.pipe import Pipe, PipeInfo, pipeline
    from penstock.partition.forward.by_module import split_by_module
    from penstock.partition.plan import Plan
    from penstock.partition.profile import profile
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
    from penstock.search.state import SearchResult
    from penstock.simulate.costs import Costs
    from penstock.simulate.liveness import (
        PipelineActivationLiveness,
        analyze_pipeline_activation_liveness,
    )
    from penstock.simulate.simulation import Simulation, simulate
    from penstock.stage.rng import draw_step_seed, microbatch_rng
    from penstock.stage.weight_grad.compiled import compile_stage
    from penstock.trace import Span, Trace

__version__ = "0.1.0"

# Training.
__all__ = [
    "Pipeline", "PipelineStage", "PipelineStageInfo", "TensorChunkSpec", "draw_step_seed",
    "microbatch_rng", "merge_chunks", "split_args_kwargs_into_chunks", "sum_reducer",
    "PipelineSchedule", "PipelineScheduleMulti", "PipelineScheduleSingle", "Schedule1F1B",
    "ScheduleChimera", "ScheduleDualPipe", "ScheduleDualPipeV", "ScheduleForwardOnly",
    "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS", "ScheduleProgram", "ScheduleZBVZeroBubble", "compile_stage",
    "get_schedule_class",
]  # fmt: skip
# Cutting.
__all__ += ["Plan", "balance", "profile", "split_by_module"]
__all__ += ["Pipe", "PipeInfo", "SplitPoint", "TracedStage", "annotate_split_points"]
__all__ += ["build_stage", "pipe_split", "pipeline"]
# Planning.
__all__ += ["Action", "CheckedProgram", "Costs", "Op", "Program"]
__all__ += ["SearchResult", "Simulation", "Span", "Trace", "build", "check", "load_csv"]
__all__ += ["PipelineActivationLiveness", "analyze_pipeline_activation_liveness"]
__all__ += ["save_csv", "schedule", "schedules", "search", "simulate"]
# Errors.
__all__ += ["BoundaryError", "InternalError", "PartitionError", "PeerError", "PenstockError"]
__all__ += ["ScheduleError", "StageError"]

# module → its public names. Type checkers read the imports above instead.
_NAMES = {
    "penstock.compat.actions": (
        "ComputationType TorchAction get_schedule_ops FORWARD BACKWARD_INPUT BACKWARD_WEIGHT "
        "UNSHARD RESHARD SEND_F RECV_F SEND_B RECV_B WAIT_SEND_F WAIT_SEND_B FULL_BACKWARD "
        "OVERLAP_F_B REDUCE_GRAD WAIT_REDUCE_GRAD"
    ),
    "penstock.compat.backward": "stage_backward stage_backward_input stage_backward_weight",
    "penstock.compat.stage": "PipelineStage PipelineStageInfo TracedStage build_stage",
    "penstock.errors": (
        "PenstockError ScheduleError PartitionError StageError BoundaryError PeerError "
        "InternalError"
    ),
    "penstock.partition.balance.balance": "balance",
    "penstock.partition.profile": "profile",
    "penstock.partition.export.markers": "SplitPoint annotate_split_points pipe_split",
    "penstock.partition.export.pipe": "Pipe PipeInfo",
    "penstock.partition.forward.by_module": "split_by_module",
    "penstock.partition.plan": "Plan",
    "penstock.pipeline": "Pipeline",
    "penstock.runtime.microbatch": (
        "Reducer Replicate TensorChunkSpec merge_chunks split_args_kwargs_into_chunks sum_reducer"
    ),
    "penstock.runtime.pipeline_schedule": "PipelineSchedule",
    "penstock.runtime.schedules": (
        "PipelineScheduleMulti PipelineScheduleRuntime PipelineScheduleSingle Schedule1F1B "
        "ScheduleChimera ScheduleDualPipe ScheduleDualPipeV ScheduleForwardOnly ScheduleGPipe "
        "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleProgram "
        "ScheduleZBVZeroBubble get_schedule_class"
    ),
    "penstock.schedule.action": "Action Op",
    "penstock.schedule.check": "check",
    "penstock.schedule.program": "CheckedProgram Program",
    "penstock.schedule.registry": "build schedules",
    "penstock.schedule.text": "load_csv save_csv",
    "penstock.search.state": "SearchResult",
    "penstock.simulate.costs": "Costs",
    "penstock.simulate.liveness": (
        "PipelineActivationLiveness analyze_pipeline_activation_liveness"
    ),
    "penstock.simulate.simulation": "Simulation",
    "penstock.stage.rng": "draw_step_seed microbatch_rng",
    "penstock.stage.weight_grad.compiled": "compile_stage",
    "penstock.trace": "Trace Span",
    "torch.nn.attention.flex_attention": "BlockMask",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# Names that users import although torch gives them a leading underscore.
_OF_TORCH = {
    "_Action": "TorchAction",
    "_ComputationType": "ComputationType",
    "_CustomReducer": "Reducer",
    "_PipelineSchedule": "PipelineSchedule",
    "_PipelineScheduleRuntime": "PipelineScheduleRuntime",
    "_PipelineStage": "TracedStage",
    "_PipelineStageBase": "PipelineStage",
    "_Replicate": "Replicate",
    "_ScheduleForwardOnly": "ScheduleForwardOnly",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module, and cache it."""
    called = _OF_TORCH.get(name, name)
    module = _HOME.get(called)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(module), called)
    globals()[name] = value
    return value


class _Function:
    """A public function that shares its name with a subpackage.

    Importing the subpackage would replace the function. This descriptor keeps the function and sets
    the subpackage's modules as its attributes for ``import penstock.schedule.check as check``.
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
    """The package's module class, which keeps functions that share a subpackage's name."""

    pipeline = _Function("penstock.partition.export.pipe")
    schedule = _Function("penstock.schedule.registry")
    search = _Function("penstock.search.engine")
    simulate = _Function("penstock.simulate.simulation")


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    """List all public names, including those not imported yet."""
    return sorted({*globals(), *__all__})
