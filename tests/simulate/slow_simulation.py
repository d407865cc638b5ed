"""Simulated times once more, by trying again and again: slow, and right by inspection."""

from __future__ import annotations

from penstock.schedule.action import Action, Op, action
from penstock.schedule.program import Program
from penstock.schedule.rules import COVERS, WHOLE_STAGE
from penstock.simulate.costs import Costs
from tests.readiness import prerequisites


def slowly(program: Program, costs: Costs) -> dict[Action, float]:
    """The end of each action of a compute-only program: again and again, until nothing moves."""
    stages = program.num_stages
    lengths = {op: costs.of(op, num_stages=stages) for op in Op}
    latency = costs.per_stage("latency", num_stages=stages)
    ends: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for steps in program.ranks:
            free = 0.0
            for step in steps:
                needs = [
                    (part, need)
                    for part in step.parts
                    for need in prerequisites(
                        part, program.placement, num_splits=program.num_splits
                    )
                ]
                if not all(need in ends for _, need in needs):
                    break
                start = free
                for part, need in needs:
                    local = program.placement.same_rank(need.stage, part.stage)
                    start = max(
                        start, ends[need] + (0.0 if local else latency[min(need.stage, part.stage)])
                    )
                length = sum(lengths[part.op][part.stage] for part in step.parts)
                if len(step.parts) > 1 and costs.overlap is not None:
                    length = costs.per_stage("overlap", num_stages=stages)[step.parts[0].stage]
                free = start + length
                for part in step.parts:
                    if part.op in WHOLE_STAGE:
                        continue
                    for op in (part.op, *COVERS.get(part.op, ())):
                        done = action(part.stage, op, part.microbatch)
                        moved = moved or ends.get(done) != free
                        ends[done] = free
    return ends
