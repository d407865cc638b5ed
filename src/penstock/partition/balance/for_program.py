"""Choose the split for a program: the candidate with the shortest simulated step.

                                        zbv, 2 ranks       interleaved 1F1B, 2 ranks
    the slowest stage quickest              10.1 s             10.4 s
    the busiest rank quickest                9.5 s             10.9 s
    from the better of these, blocks
        moved while that helps               9.4 s              9.8 s

(GPT-2 with a head of five layers, 12 microbatches.) A zero-bubble schedule fills the gaps of uneven
stages, so a rank's total time counts. Interleaved 1F1B waits for the slowest stage. The simulator
decides between them. This module measures nothing, and imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, islice, permutations
from typing import Any

from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.plan import split_by_counts
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate

__all__ = ["balance_for", "rank_times", "stage_costs", "step_s"]

# Budgets of the local searches, about a second each.
MAX_STAGE_LOADS = 200_000
MAX_SIMULATED_ACTIONS = 200_000


def balance_for(measured: Profile, program: Program) -> tuple[int, ...]:
    """Find the numbers of blocks per stage with the shortest simulated step among several splits.

    With one stage on each rank, the split whose slowest stage is quickest.

    Args:
        measured: the costs of the model's blocks.
        program: the program of the stages.

    Raises:
        PartitionError: there are more stages than blocks.
    """
    placement = program.placement
    counts = balance(measured, placement.num_model_stages).counts
    if placement.num_stages == placement.num_ranks:
        return counts

    def busiest(counts: Sequence[int]) -> tuple[float, float]:
        times = rank_times(measured, counts, placement)
        return max(times), sum(time**2 for time in times)

    def step(counts: Sequence[int]) -> float:
        return step_s(measured, counts, program)

    by_rank = _move_blocks(counts, busiest, MAX_STAGE_LOADS // placement.num_stages)
    best = min((counts, by_rank), key=step)
    return _move_blocks(best, step, MAX_SIMULATED_ACTIONS // sum(1 for _ in program.actions()))


def _move_blocks(
    counts: tuple[int, ...], value: Callable[[Sequence[int]], Any], budget: int
) -> tuple[int, ...]:
    """Move single blocks from one stage to another while that lowers a split's value.

    The stages in between keep their number of blocks, shifted by one.
    """
    best, least, since_better = counts, value(counts), 0
    moves = list(permutations(range(len(counts)), 2))
    for giver, taker in islice(cycle(moves), budget):
        if since_better == len(moves):
            break
        since_better += 1
        if best[giver] == 1:
            continue
        changed = list(best)
        changed[giver] -= 1
        changed[taker] += 1
        found = value(changed)
        if found < least:
            best, least, since_better = tuple(changed), found, 0
    return best


def rank_times(measured: Profile, counts: Sequence[int], placement: Placement) -> tuple[float, ...]:
    """The time of each rank's stages together for one microbatch, without transfers."""
    groups = split_by_counts(measured.blocks, counts)
    times = [sum(block.time_s for block in group) for group in groups]
    return tuple(
        sum(times[placement.model_stage(stage)] for stage in placement.stages_of(rank))
        / placement.num_directions
        for rank in range(placement.num_ranks)
    )


def step_s(measured: Profile, counts: Sequence[int], program: Program) -> float:
    """The simulated length of a step with these blocks per stage, without transfer times."""
    placement = program.placement
    stages = split_by_counts(measured.blocks, counts) * placement.num_directions
    return simulate(program, stage_costs(stages)).makespan


def stage_costs(stages: Sequence[Sequence[BlockCosts]]) -> Costs:
    """The costs of stages with these blocks, in seconds and bytes, without message times."""

    def summed(name: str) -> list[float]:
        return [sum(float(getattr(block, name)) for block in stage) for stage in stages]

    sent = [float(stage[-1].sent_bytes) for stage in stages]
    return Costs(
        forward=summed("forward_s"),
        input_grad=summed("input_grad_s"),
        weight_grad=summed("weight_grad_s"),
        activation_bytes=summed("activation_bytes"),
        # A recomputed stage keeps its input; the first stage's input is the batch.
        recompute_bytes=[0.0, *sent[:-1]],
        message_bytes=sent,
    )
