"""Checks what a rank owes its stages besides computing: parameters, activations, reductions.

All are matters of one rank's own order; no other rank is looked at.
"""

from __future__ import annotations

from penstock.schedule.action import Op, Step
from penstock.schedule.diagnosis import Problem
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, WEIGHT_GRADS

__all__ = ["keeping_problems", "last_steps", "reduction_problems", "sharding_problems"]

# op → the state in which it needs what F keeps, and the state that it leaves.
_KEEPING = {
    Op.FORWARD: ("not made yet", "kept"),
    Op.RECOMPUTE: ("dropped", "kept"),
    Op.OFFLOAD: ("kept", "away"),
    Op.RELOAD: ("away", "kept"),
    Op.INPUT_GRAD: ("kept", "used up"),
    Op.FULL_BACKWARD: ("kept", "used up"),
}
_REDUCTION = frozenset({Op.REDUCE_GRAD})


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


def keeping_problems(program: Program) -> list[Problem]:
    """Where an activation that is recomputed or offloaded is not there when it is needed.

    F ──► kept ──OFFLOAD──► away ──RELOAD──► kept ──► I or B
    F ──► dropped ──RECOMPUTE──► kept ──► I or B
    """
    dropped = {(a.stage, a.microbatch) for a in program.actions() if a.op is Op.RECOMPUTE}
    found: list[Problem] = []
    for rank, steps in enumerate(program.ranks):
        states: dict[tuple[int, int | None], str] = {}
        for index, step in enumerate(steps):
            for act in step.parts:
                if act.op not in _KEEPING:
                    continue
                key = (act.stage, act.microbatch)
                state = states.get(key, "not made yet")
                if act.op is Op.FORWARD:
                    states[key] = "dropped" if key in dropped else "kept"
                    continue
                wanted, states[key] = _KEEPING[act.op]
                if state != wanted:
                    name = f"{act.stage}F{act.microbatch}"
                    message = f"what {name} keeps is {state} here; {act} needs it {wanted}"
                    found.append(Problem(rank=rank, step=index, action=str(step), message=message))
    return found


def reduction_problems(program: Program) -> list[Problem]:
    """Where gradients are reduced too early, or for some stages and not for others."""
    found: list[Problem] = []
    for rank, steps in enumerate(program.ranks):
        stages = program.placement.stages_of(rank)
        made = last_steps(steps, WEIGHT_GRADS, len(stages))
        reduced = last_steps(steps, _REDUCTION, len(stages))
        for stage in stages:
            text = f"{stage}REDUCE_GRAD"
            step = reduced.get(stage)
            if step is None and stage in made:
                message = f"{text} is missing: gradients are reduced for all stages or for none"
            elif step is not None and stage not in made:
                message = f"stage {stage} has no weight gradient to reduce"
            elif step is not None and step < made[stage]:
                message = (
                    f"reduced before the last weight gradient of stage {stage}, at step "
                    f"{made[stage]} ({steps[made[stage]]})"
                )
            else:
                continue
            found.append(Problem(rank=rank, step=step, action=text, message=message))
    return found


def last_steps(steps: tuple[Step, ...], ops: frozenset[Op], num_stages: int) -> dict[int, int]:
    """For each stage of a rank the index of the last step with one of ``ops``, if there is one."""
    last: dict[int, int] = {}
    for index in range(len(steps) - 1, -1, -1):
        for act in steps[index].parts:
            if act.op in ops:
                last.setdefault(act.stage, index)
        if len(last) == num_stages:
            break
    return last
