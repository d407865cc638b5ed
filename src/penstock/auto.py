"""``Pipeline(schedule="auto")``: measure the stages, search for a program, tell how it came out.

    model, example ──profile──► costs per stage ─┐
    messages between ranks ──► latency, bandwidth ┴─search─► program ──Pipeline──► steps
                                                   │                                │
                                                   └─ predicted time ───────► log ◄─┘ measured time

The first rank measures and searches, and all others take what it found: times come out differently
on each. This module knows no schedule, and builds no stage.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.for_program import costs_of
from penstock.partition.balance.measuring import measure_model
from penstock.partition.cutting import cut_model
from penstock.partition.plan import Plan, split_by_counts
from penstock.partition.spec import Example, SplitSpec
from penstock.runtime.comm.link import Link, measure_link
from penstock.runtime.comm.process_group import collective_call, from_first_rank, objects_group
from penstock.schedule.program import Program
from penstock.schedule.resolve import DEFAULT_MICROBATCHES
from penstock.schedule.text import from_json, to_json
from penstock.search.engine import search

__all__ = ["AutoChoice", "Forecast", "find_program"]

logger = logging.getLogger(__name__)

SEARCH_S = 10.0
_TOLD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How long a step should take.

    Args:
        step_s: all ranks side by side.
        alone_s: one process that plays all ranks in turn.
    """

    step_s: float
    alone_s: float

    @contextmanager
    def watch(self, number: int, device: torch.device, *, alone: bool) -> Iterator[None]:
        """Log what a step took beside what it should take, for the first few.

        Args:
            number: which step this is, from 0.
            device: what to wait for at the end.
            alone: whether this process plays all ranks.
        """
        if number >= _TOLD:
            yield
            return
        started = time.perf_counter()
        yield
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        measured_s = time.perf_counter() - started
        predicted_s = self.alone_s if alone else self.step_s
        logger.info(
            "auto: step %d took %.4g s, %.4g s were predicted%s%s",
            number,
            measured_s,
            predicted_s,
            " for one process that plays all ranks" if alone else "",
            "; the first step warms up" if number == 0 else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoChoice:
    """What takes the place of ``"auto"``.

    Args:
        program: what to run.
        split: how to cut the model: a plan, where that was to be found too.
        forecast: how long a step should take.
    """

    program: Program
    split: SplitSpec | None
    forecast: Forecast


def find_program(
    model: Any,
    *,
    split: SplitSpec | None,
    example: Example | None,
    loss_fn: Callable[..., Any] | None,
    num_stages: int | None,
    ranks: int | None,
    virtual: int | None,
    n_microbatches: int | None,
    memory_limit: float | None,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> AutoChoice:
    """The best program for a model's stages, as they are measured on this machine.

    The model is run on the example a few times, its state, gradients and random numbers left as
    they are.

    Args:
        model: as ``Pipeline`` takes it, whole on the first rank.
        split: likewise.
        example: one microbatch.
        loss_fn: the loss function; None where the model computes its loss itself.
        num_stages: into how many stages the model is cut, where that is said.
        ranks: on how many ranks, likewise.
        virtual: stages per rank, likewise; 1 if None.
        n_microbatches: microbatches per step, likewise.
        memory_limit: the most bytes of activations that a rank may hold; None for no limit.
        group: the ranks; None where all of them are in this process.
        device: where stages will live.

    Raises:
        ScheduleError: numbers that do not fit each other, no example, or a memory limit that no
            program can meet.
        PartitionError: the model can't be cut so, or can't be measured.
    """
    if example is None:
        raise ScheduleError(
            "schedule='auto' measures the stages: pass example=, one microbatch as a tuple of "
            "positional or a dict of keyword arguments"
        )
    if group is not None and not isinstance(model, nn.Module) and _made_by_hand(model):
        raise ScheduleError(
            "schedule='auto' measures all stages on the first rank, and of stages made by hand a "
            "rank has its own alone: measure them, and pass penstock.search(...).program"
        )
    ranks = ranks if group is None else group.size()
    ranks, virtual = _sizes(num_stages, ranks, virtual)
    link: Link | None = None
    if group is not None:
        with collective_call(objects_group(group), "Pipeline()"):
            link = measure_link(group, device)
    told = from_first_rank(
        group,
        lambda: _find(
            model,
            split=split,
            example=example,
            loss_fn=loss_fn,
            ranks=ranks,
            virtual=virtual,
            microbatches=n_microbatches or DEFAULT_MICROBATCHES,
            memory_limit=memory_limit,
            link=link,
            device=device,
        ),
    )
    document = json.loads(told)
    plan = document["plan"]
    return AutoChoice(
        program=from_json(document["program"]),
        split=split if plan is None else SplitSpec.parse(Plan.from_toml(plan)),
        forecast=Forecast(step_s=document["step_s"], alone_s=document["alone_s"]),
    )


def _find(
    model: Any,
    *,
    split: SplitSpec | None,
    example: Example,
    loss_fn: Callable[..., Any] | None,
    ranks: int,
    virtual: int,
    microbatches: int,
    memory_limit: float | None,
    link: Link | None,
    device: torch.device,
) -> str:
    """What the first rank tells the others, as text."""
    num_stages = ranks * virtual
    measured = measure_model(model, example, device=device, loss_fn=loss_fn)
    plan: Plan | None = None
    if split is not None and split.auto:
        counts = balance(measured, num_stages).counts
        plan = measured.plan(counts, made="balanced on this machine")
        groups = split_by_counts(measured.blocks, counts)
    else:
        groups = _by_stage(model, measured, split, num_stages, example, device)
    costs = costs_of(groups)
    if link is not None:
        costs = replace(costs, latency=link.latency_s, bandwidth=link.bandwidth)
        logger.info(
            "auto: messages take %.4g s, and %.4g bytes more a second more",
            link.latency_s,
            link.bandwidth,
        )
    result = search(
        costs,
        ranks=ranks,
        microbatches=microbatches,
        virtual=virtual,
        memory_limit=memory_limit,
        recompute=memory_limit is not None,
        time_limit_s=SEARCH_S,
        exact=find_spec("ortools") is not None,
    )
    logger.info(
        "auto: %s; step %.4g s predicted, at least %.4g s; %.4g bytes of activations at most",
        result.method,
        result.value,
        result.bound,
        result.peak,
    )
    return json.dumps(
        {
            "program": to_json(result.program),
            "plan": None if plan is None else plan.to_toml(),
            "step_s": result.simulation.makespan,
            "alone_s": result.simulation.busy,
        }
    )


def _sizes(num_stages: int | None, ranks: int | None, virtual: int | None) -> tuple[int, int]:
    """Ranks, and stages per rank."""
    if ranks is None:
        if num_stages is None:
            raise ScheduleError(
                "say on how many ranks to run: pass ranks=, or split= with the stages"
            )
        ranks = num_stages // (virtual or 1)
    if virtual is None:
        virtual = 1 if num_stages is None else num_stages // max(1, ranks)
    if ranks < 1 or virtual < 1 or num_stages not in (None, ranks * virtual):
        raise ScheduleError(
            f"{num_stages} stages can't be laid on {ranks} ranks with {virtual} per rank; change "
            "split, ranks or virtual"
        )
    return ranks, virtual


def _made_by_hand(model: Sequence[Any]) -> bool:
    return any(isinstance(each, PipelineStage) for each in model)


def _by_stage(
    model: Any,
    measured: Profile,
    split: SplitSpec | None,
    num_stages: int,
    example: Example,
    device: torch.device,
) -> list[list[BlockCosts]]:
    """The blocks of each stage: where the parameters of the first of its modules are."""
    blocks = list(measured.blocks)
    if not isinstance(model, nn.Module) and len(blocks) == num_stages:
        return [[block] for block in blocks]
    stages = cut_model(model, split, num_stages, example=example, device=device).modules
    names = [{name for name, _ in stage.named_parameters()} for stage in stages]
    groups: list[list[BlockCosts]] = [[] for _ in stages]
    now = 0
    for block in blocks:
        for stage in range(now, num_stages):
            # A block without parameters goes with the one before it.
            if any(
                name == m or name.startswith(f"{m}.")
                for m in block.modules
                for name in names[stage]
            ):
                now = stage
                break
        groups[now].append(block)
    empty = [stage for stage, group in enumerate(groups) if not group]
    if empty:
        raise PartitionError(
            f"schedule='auto': stages {empty} hold no whole block of the model, so their times "
            "can't be told; pass split='auto', or name a schedule"
        )
    return groups
