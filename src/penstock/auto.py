"""Profile, search and log for ``Pipeline(schedule="auto")``.

    model, example ──profile──► costs per stage ─┐
    messages between ranks ──► latency, bandwidth ┴─search─► program ──Pipeline──► steps
                                                   │                                │
                                                   └─ predicted time ───────► log ◄─┘ measured time

Times differ between ranks. Therefore rank 0 alone measures and searches, and broadcasts the result.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec

import torch
from torch import nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.for_program import costs_of
from penstock.partition.cutting import cut_model
from penstock.partition.plan import Plan, split_by_counts
from penstock.partition.profile import measure_model
from penstock.partition.spec import SplitSpec
from penstock.runtime.comm.process_group import (
    Link,
    collective_call,
    control_group,
    from_first_rank,
    measure_link,
)
from penstock.runtime.config import PipelineSpec
from penstock.schedule.program import Program
from penstock.schedule.registry import DEFAULT_MICROBATCHES, choose_sizes
from penstock.search.engine import search

__all__ = ["Forecast", "find_program"]

logger = logging.getLogger(__name__)

SEARCH_S = 10.0
_NUM_LOGGED_STEPS = 3


@dataclass(slots=True, kw_only=True)
class Forecast:
    """The predicted time of a step."""

    step_s: float
    is_alone: bool  # one process runs all ranks in turn
    device: torch.device  # to synchronize
    num_steps: int = 0  # the steps so far

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Log the measured and the predicted time of each of the first few steps."""
        number, started = self.num_steps, time.perf_counter()
        self.num_steps += 1
        yield
        if number >= _NUM_LOGGED_STEPS:
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        alone = " for one process that plays all ranks" if self.is_alone else ""
        warming = "; the first step warms up" if number == 0 else ""
        logger.info(
            "auto: step %d took %.4g s, %.4g s were predicted%s%s",
            number, time.perf_counter() - started, self.step_s, alone, warming,
        )  # fmt: skip


def find_program(
    spec: PipelineSpec, split: SplitSpec | None, num_stages: int | None
) -> tuple[Program, SplitSpec | None, Forecast]:
    """Search for the fastest program for a model's stages, as profiled on this machine.

    Runs the whole model on the example a few times, on the first rank. Preserves its state, its
    gradients and the random number generators.

    Returns:
        The program to run, the split points of the model, and the predicted time of a step.

    Raises:
        ScheduleError: ranks, stages and microbatches do not fit, the example is missing, or the
            memory limit is infeasible.
        PartitionError: the model can't be split this way, or can't be profiled.
    """
    group, model = spec.group, spec.model
    if spec.example is None:
        raise ScheduleError(
            "schedule='auto' measures the stages: pass example=, one microbatch as a tuple of "
            "positional or a dict of keyword arguments"
        )
    by_hand = not isinstance(model, nn.Module) and any(isinstance(m, PipelineStage) for m in model)
    if group is not None and by_hand:
        raise ScheduleError(
            "schedule='auto' measures all stages on the first rank, which has only its own of "
            "stages made by hand: measure them, and pass penstock.search(...).program"
        )
    ranks, virtual = choose_sizes(
        "schedule='auto'", default_virtual=1, num_stages=num_stages, virtual=spec.virtual,
        ranks=spec.ranks if group is None else group.size(),
    )  # fmt: skip
    link = None
    if group is not None:
        with collective_call(control_group(group), "Pipeline()"):
            link = measure_link(group, spec.device)
    program, plan, step_s = from_first_rank(group, lambda: _find(spec, split, ranks, virtual, link))
    if plan is not None:
        split = SplitSpec.parse(plan)
    return program, split, Forecast(step_s=step_s, is_alone=group is None, device=spec.device)


def _find(
    spec: PipelineSpec, split: SplitSpec | None, ranks: int, virtual: int, link: Link | None
) -> tuple[Program, Plan | None, float]:
    """Search on the first rank: the program, the plan of the stages if they were balanced here,
    and the predicted time of a step."""
    assert spec.example is not None
    num_stages = ranks * virtual
    measured = measure_model(spec.model, spec.example, device=spec.device, loss_fn=spec.loss_fn)
    plan: Plan | None = None
    if split is not None and split.auto:
        counts = balance(measured, num_stages).counts
        plan = measured.plan(counts, made="balanced on this machine")
        groups = split_by_counts(measured.blocks, counts)
    else:
        groups = _by_stage(spec, split, measured, num_stages)
    costs = costs_of(groups)
    if link is not None:
        costs = replace(costs, latency=link.latency_s, bandwidth=link.bandwidth)
        logger.info("auto: messages take %.4g s, and %.4g bytes/s", *astuple(link))
    result = search(
        costs, ranks=ranks, microbatches=spec.n_microbatches or DEFAULT_MICROBATCHES,
        virtual=virtual, memory_limit=spec.memory_limit, time_limit_s=SEARCH_S,
        recompute=spec.memory_limit is not None, exact=find_spec("ortools") is not None,
    )  # fmt: skip
    logger.info(
        "auto: %s; step %.4g s predicted, at least %.4g s; %.4g bytes of activations at most",
        result.method, result.value, result.bound, result.peak,
    )  # fmt: skip
    # One process runs all ranks in turn, and so takes their busy times together.
    simulated = result.simulation
    return result.program, plan, simulated.busy if spec.group is None else simulated.makespan


def _by_stage(
    spec: PipelineSpec, split: SplitSpec | None, measured: Profile, num_stages: int
) -> list[list[BlockCosts]]:
    """Group the measured blocks by the stage that has their parameters."""
    blocks, model = list(measured.blocks), spec.model
    if not isinstance(model, nn.Module) and len(blocks) == num_stages:
        return [[block] for block in blocks]
    cut = cut_model(model, split, num_stages, example=spec.example, device=spec.device)
    names = [[f"{name}." for name, _ in stage.named_parameters()] for stage in cut.modules]
    groups: list[list[BlockCosts]] = [[] for _ in names]
    stage = 0
    for block in blocks:
        within = tuple(f"{module}." for module in block.modules)
        later = range(stage, num_stages)
        # A block without parameters belongs to the stage of the block before it.
        stage = next((i for i in later if any(n.startswith(within) for n in names[i])), stage)
        groups[stage].append(block)
    if empty := [stage for stage, group in enumerate(groups) if not group]:
        raise PartitionError(
            f"schedule='auto': stages {empty} hold no whole block of the model, so their times "
            "can't be measured; pass split='auto', or name a schedule"
        )
    return groups
