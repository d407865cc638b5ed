"""Measure, choose and forecast for ``Pipeline(split="auto")`` and ``Pipeline(schedule="auto")``.

    all ranks at once   messages ──► latency, bandwidth      runtime ──► time per action
                        model, example ──profile──► costs per block        AdamW ──► time per byte
    first rank          costs ──balance, search──► split, program ──simulate──► forecast
    all ranks           ◄── broadcast, alike for replicas of the pipeline

Ranks measure at once, since a rank whose neighbours idle computes faster than in a step. Times
differ between ranks. Therefore those of the first rank count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.for_program import balance_for, stage_costs
from penstock.partition.plan import split_by_counts
from penstock.partition.profile import measure_model
from penstock.partition.spec import SplitSpec
from penstock.runtime.comm.c10d import control_group
from penstock.runtime.comm.process_group import (
    Link,
    collective_call,
    from_first_replica,
    from_rank,
    measure_link,
)
from penstock.runtime.config import PipelineSpec
from penstock.runtime.schedules import ScheduleProgram
from penstock.schedule.action import Op
from penstock.schedule.family import refuse_sizes
from penstock.schedule.program import Program
from penstock.schedule.registry import DEFAULT_MICROBATCHES, build, choose_sizes
from penstock.schedule.text import format_csv
from penstock.search.engine import search
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate

__all__ = ["Forecast", "balance_stages", "find_program"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

SEARCH_S = 10.0
# Of the pipeline that measures the runtime.
_NUM_MICROBATCHES, _NUM_RUNS = 16, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The predicted time and memory of a step.

    Attributes:
        step_s: the time of ``Pipeline.step``; in one process, of all ranks in turn.
        optimizer_s: the time of an update by AdamW, on the rank that trains the most parameters.
        peak_bytes: per rank its parameters, gradients and AdamW's two moments of those that train,
            its activations at their peak, and the temporary tensors of a forward or backward.
    """

    step_s: float
    optimizer_s: float
    peak_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """A model on this machine: its blocks' costs, and the costs beside them."""

    profile: Profile
    link: Link | None  # None if all ranks are in this process
    runtime_s: float  # per forward or backward
    update_s: float  # per byte of trained parameters

    def costs_of(
        self, stages: Sequence[Sequence[BlockCosts]], program: Program | None = None
    ) -> Costs:
        """The costs of stages with these blocks, with messages and runtime; as a program splits
        their backwards, if it is known."""
        costs, num = stage_costs(stages), len(stages)
        names = ("forward", "input_grad", "weight_grad")
        times = list(zip(*(costs.per_stage(name, num_stages=num) for name in names), strict=True))
        held = list(costs.per_stage("activation_bytes", num_stages=num))
        if program is not None:
            split = {a.stage for a in program.actions() if a.op is Op.WEIGHT_GRAD}
            for i, blocks in enumerate(stages):
                forward, backward = times[i][0], sum(block.backward_s for block in blocks)
                if i not in split:
                    times[i] = forward, backward, 0.0
                elif i in program.placement.entries:  # W runs the whole backward
                    times[i] = forward, 0.0, backward
                else:
                    held[i] = sum(float(block.weight_grad_bytes) for block in blocks)
                    deferral = sum(block.deferral_s for block in blocks)
                    times[i] = forward + deferral, *times[i][1:]
        ops = ([f + self.runtime_s for f, _, _ in times], [i + self.runtime_s for _, i, _ in times])
        costs = replace(
            costs,
            forward=ops[0],
            input_grad=ops[1],
            weight_grad=[w for *_, w in times],
            weight_grad_bytes=held,
        )
        if self.link is None:
            return costs
        return replace(costs, latency=self.link.latency_s, bandwidth=self.link.bandwidth)


def find_program(
    spec: PipelineSpec, split: SplitSpec | None, num_stages: int | None
) -> tuple[Program, SplitSpec, Forecast]:
    """Balance a model's stages, and search for their fastest program, as profiled on this machine.

    Runs the whole model on the example a few times, on every rank. Preserves its state, its
    gradients and the random number generators.

    Returns:
        The program to run, the split points of the model, and the predicted time of a step.

    Raises:
        ScheduleError: ranks, stages and microbatches do not fit, a split is given, or the memory
            limit is infeasible.
        PartitionError: the example is missing, there are too few blocks, or the model can't be
            profiled.
    """
    group = spec.group
    if split is not None and not split.auto:
        raise ScheduleError(
            "schedule='auto' balances the stages itself: leave split= out, or name a schedule"
        )
    ranks, virtual = choose_sizes(
        "schedule='auto'", default_virtual=1, num_stages=num_stages, virtual=spec.virtual,
        ranks=spec.ranks if group is None else group.size(),
    )  # fmt: skip
    num = DEFAULT_MICROBATCHES if spec.n_microbatches is None else spec.n_microbatches
    refuse_sizes("schedule='auto'", ranks=ranks, virtual=virtual, microbatches=num)
    subject = (ranks, virtual, num, spec.memory_limit)
    return _choose(spec, subject, lambda measured: _search(spec, ranks, virtual, num, measured))


def balance_stages(spec: PipelineSpec, program: Program) -> tuple[SplitSpec, Forecast]:
    """Balance a model's stages for a program, as profiled here; raises as ``find_program``."""
    return _choose(spec, format_csv(program), lambda measured: _balance(spec, program, measured))


def _choose(spec: PipelineSpec, request: object, choose: Callable[[_Measured], T]) -> T:
    """Measure on all ranks at once, and choose on the first, alike for replicas."""
    if spec.example is None:
        raise PartitionError(
            "'auto' measures the model: pass example=, one microbatch as a tuple of positional or "
            "a dict of keyword arguments"
        )
    group, link = spec.group, None
    modules = [spec.model] if isinstance(spec.model, nn.Module) else spec.model
    if any(isinstance(module, PipelineStage) for module in modules):
        raise PartitionError(
            "'auto' measures a model or a list of layers, not PipelineStages: measure their "
            "modules, and pass penstock.search(...).program as schedule="
        )
    if group is None:
        return choose(_measure(spec, None))
    with collective_call(control_group(group), "Pipeline()"):
        link = measure_link(group, spec.device)
    if group.rank() > 0:
        try:
            _measure(spec, link)
        except Exception as error:  # the first rank raises, or steps do
            logger.debug("auto: rank %d could not measure: %s", group.rank(), error)
    shapes = [(name, p.shape) for module in modules for name, p in module.named_parameters()]

    def make() -> T:
        return from_first_replica(group, (shapes, request), lambda: choose(_measure(spec, link)))

    return from_rank(group, 0, "Pipeline()", make)


# --- measuring -----------------------------------------------------------------------------------


def _measure(spec: PipelineSpec, link: Link | None) -> _Measured:
    assert spec.example is not None
    runtime_s = _runtime_s(spec)  # before what may raise on one rank, as it counts schedules
    return _Measured(
        profile=measure_model(spec.model, spec.example, device=spec.device, loss_fn=spec.loss_fn),
        link=link,
        runtime_s=runtime_s,
        update_s=_update_s(spec.device),
    )


def _runtime_s(spec: PipelineSpec) -> float:
    """The time of a forward or backward in the runtime, beyond that in a plain loop."""
    num, device = _NUM_MICROBATCHES, spec.device
    layers = [nn.LayerNorm(1, device=device) for _ in range(2)]  # draw no random numbers
    stages = [
        PipelineStage(layer, i, 2, device, group=spec.group) for i, layer in enumerate(layers)
    ]
    program = build("1f1b", ranks=2, microbatches=num)
    inputs, target = torch.ones(num, 1, device=device), torch.zeros(num, 1, device=device)
    loss_fn = nn.functional.mse_loss
    schedule = ScheduleProgram(stages, program, loss_fn, is_single_process=True)

    def plain() -> None:
        for x, y in zip(inputs.chunk(num), target.chunk(num), strict=True):
            torch.autograd.backward(loss_fn(layers[1](layers[0](x)), y) / num)

    def piped() -> None:
        schedule.step(inputs, target=target, return_outputs=False)

    return max(0.0, _least_s(piped, device) - _least_s(plain, device)) / (4 * num)


def _update_s(device: torch.device) -> float:
    """The time of AdamW per byte of parameters."""
    params = [nn.Parameter(torch.zeros(1 << 18, device=device)) for _ in range(8)]
    for param in params:
        param.grad = torch.zeros_like(param)
    taken = _least_s(torch.optim.AdamW(params).step, device)
    return taken / sum(param.nbytes for param in params)


def _least_s(run: Callable[[], object], device: torch.device) -> float:
    """The shortest time of several runs."""
    times = []
    for _ in range(1 + _NUM_RUNS):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


# --- choosing ------------------------------------------------------------------------------------


def _balance(
    spec: PipelineSpec, program: Program, measured: _Measured
) -> tuple[SplitSpec, Forecast]:
    counts = balance_for(measured.profile, program)
    logger.info("split='auto': blocks per stage %s", list(counts))
    plan = measured.profile.plan(counts, made=f"balanced on this machine, for {program.name}")
    groups = split_by_counts(measured.profile.blocks, counts) * program.placement.num_directions
    return SplitSpec.parse(plan), _forecast(spec, program, groups, measured)


def _search(
    spec: PipelineSpec, ranks: int, virtual: int, num_microbatches: int, measured: _Measured
) -> tuple[Program, SplitSpec, Forecast]:
    counts = balance(measured.profile, ranks * virtual).counts
    plan = measured.profile.plan(counts, made="balanced on this machine")
    groups = split_by_counts(measured.profile.blocks, counts)
    if measured.link is not None:
        logger.info("auto: messages take %.4g s, and %.4g bytes/s", *astuple(measured.link))
    result = search(
        measured.costs_of(groups), ranks=ranks, virtual=virtual,
        microbatches=num_microbatches, memory_limit=spec.memory_limit, time_limit_s=SEARCH_S,
        recompute=spec.memory_limit is not None, exact=find_spec("ortools") is not None,
    )  # fmt: skip
    logger.info(
        "auto: %s; step %.4g s predicted, at least %.4g s; %.4g bytes of activations at most",
        result.method, result.value, result.bound, result.peak,
    )  # fmt: skip
    forecast = _forecast(spec, result.program, groups, measured)
    return result.program, SplitSpec.parse(plan), forecast


def _forecast(
    spec: PipelineSpec,
    program: Program,
    groups: Sequence[Sequence[BlockCosts]],
    measured: _Measured,
) -> Forecast:
    """The forecast of a program over stages with these blocks."""
    simulated = simulate(program, measured.costs_of(groups, program))
    stages_of = program.placement.stages_of
    ranks = [[b for i in stages_of(r) for b in groups[i]] for r in range(program.num_ranks)]
    trained = [sum(b.parameter_bytes - b.frozen_bytes for b in blocks) for blocks in ranks]
    peaks = (
        sum(b.state_bytes(4) for b in blocks) + peak + max(b.temporary_bytes for b in blocks)
        for peak, blocks in zip(simulated.peak_bytes, ranks, strict=True)
    )
    # One process runs all ranks in turn, and so takes their busy times together.
    alone = spec.group is None
    return Forecast(
        step_s=simulated.busy if alone else simulated.makespan,
        optimizer_s=measured.update_s * (sum(trained) if alone else max(trained)),
        peak_bytes=tuple(peaks),
    )
