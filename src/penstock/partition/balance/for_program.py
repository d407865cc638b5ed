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

from collections.abc import Sequence
from itertools import cycle, islice, permutations

from penstock.partition.balance.balance import Balance, balance, split_costs
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.plan import split_by_counts
from penstock.schedule.program import Program
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate

__all__ = ["balance_for", "costs_of", "step_s"]

# Budget of the local search, in simulated actions: about a second.
MOVING = 200_000


def balance_for(measured: Profile, program: Program) -> Balance:
    """Find the split of a model with the shortest simulated step among several candidates.

    With several stages on a rank the split is not proven optimal.

    Args:
        measured: the costs of its blocks.
        program: the program of the stages.

    Raises:
        PartitionError: there are more stages than blocks.
    """
    placement, num_stages = program.placement, program.placement.num_model_stages
    if placement.num_stages == placement.num_ranks:
        return balance(measured, num_stages, placement=placement)
    tried = (
        balance(measured, num_stages, placement=placement),
        balance(measured, num_stages),
    )
    best = min((found.counts for found in tried), key=lambda c: step_s(measured, c, program))
    return split_costs(measured, _move_blocks(measured, best, program), placement=placement)


def _move_blocks(measured: Profile, counts: Sequence[int], program: Program) -> tuple[int, ...]:
    """Move single blocks from one stage to another while that shortens the step.

    The stages in between keep their number of blocks, shifted by one.
    """
    best, best_s = tuple(counts), step_s(measured, counts, program)
    moves = list(permutations(range(len(counts)), 2))
    budget = MOVING // sum(1 for _ in program.actions())
    since_better = 0
    for giver, taker in islice(cycle(moves), budget):
        if since_better == len(moves):
            break
        since_better += 1
        if best[giver] == 1:
            continue
        changed = list(best)
        changed[giver] -= 1
        changed[taker] += 1
        found_s = step_s(measured, changed, program)
        if found_s < best_s * (1 - 1e-9):
            best, best_s, since_better = tuple(changed), found_s, 0
    return best


def step_s(measured: Profile, counts: Sequence[int], program: Program) -> float:
    """The simulated length of a step with these blocks per stage, without transfer times."""
    placement = program.placement
    directions = placement.num_stages // placement.num_model_stages
    stages = split_by_counts(measured.blocks, counts) * directions
    return simulate(program, costs_of(stages)).makespan


def costs_of(stages: Sequence[Sequence[BlockCosts]]) -> Costs:
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
