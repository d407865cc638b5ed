"""Checks what a rank owes its stages besides computing: sharded parameters, gradient reduction.

Both are matters of one rank's own order; no other rank is looked at.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.coding import Coded
from penstock.schedule.diagnosis import Problem
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE

__all__ = ["reduction_problems", "sharding_problems"]

_WEIGHT_GRADS = (Op.FULL_BACKWARD, Op.WEIGHT_GRAD)


def sharding_problems(program: Program) -> list[Problem]:
    """Where a stage that is ever unsharded or resharded is not in the state that it must be in."""
    managed = {a.stage for a in program.actions() if a.op in (Op.UNSHARD, Op.RESHARD)}
    found: list[Problem] = []
    for rank, steps in enumerate(program.ranks):
        present: set[int] = set()
        for index, step in enumerate(steps):
            for act in step.parts:
                message = None
                if act.op is Op.UNSHARD:
                    if act.stage in present:
                        message = f"stage {act.stage} is unsharded already"
                    present.add(act.stage)
                elif act.op is Op.RESHARD:
                    if act.stage not in present:
                        message = f"stage {act.stage} is not unsharded here"
                    present.discard(act.stage)
                elif act.op in COMPUTE and act.stage in managed and act.stage not in present:
                    message = f"{act} needs the parameters: put {act.stage}UNSHARD before it"
                if message is not None:
                    found.append(Problem(rank=rank, step=index, action=str(step), message=message))
        for stage in sorted(present):
            text = f"{stage}RESHARD"
            message = f"stage {stage} is left unsharded; put {text} at the end"
            found.append(Problem(rank=rank, step=None, action=text, message=message))
    return found


def reduction_problems(program: Program, coded: Coded) -> list[Problem]:
    """Where gradients are reduced too early, or for some stages and not for others."""
    found: list[Problem] = []
    coding = coded.coding
    num_microbatches = coding.num_microbatches
    for rank, queue in enumerate(coded.queues):
        last: dict[int, int] = {}
        for index, code in enumerate(queue):
            for part in coded.parts(code):
                last[part // num_microbatches] = index
        for stage in program.placement.stages_of(rank):
            keys = [coding.code(op, stage) // num_microbatches for op in _WEIGHT_GRADS]
            made = max((last[key] for key in keys if key in last), default=None)
            reduced = last.get(coding.code(Op.REDUCE_GRAD, stage) // num_microbatches)
            text = f"{stage}REDUCE_GRAD"
            if made is None and reduced is not None:
                message = f"stage {stage} has no weight gradient to reduce"
                found.append(Problem(rank=rank, step=reduced, action=text, message=message))
            elif made is not None and reduced is None:
                message = f"{text} is missing: gradients are reduced for all stages or for none"
                found.append(Problem(rank=rank, step=None, action=text, message=message))
            elif made is not None and reduced is not None and reduced < made:
                message = (
                    f"reduced before the last weight gradient of stage {stage}, at step {made} "
                    f"({program.ranks[rank][made]})"
                )
                found.append(Problem(rank=rank, step=reduced, action=text, message=message))
    return found
