"""How a model is laid on ranks: a schedule, the split, and what passes make of the program."""

from __future__ import annotations

from dataclasses import dataclass, replace

import penstock
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.family import Family
from penstock.schedule.passes import offload, recompute
from penstock.schedule.program import Program
from penstock.schedule.registry import family
from penstock.schedule.rules import COVERS, HOST_TRANSFERS
from tests.agreement import BIDIRECTIONAL, TRAINING, virtuals
from tests.generated.draws import Draws
from tests.readiness import prerequisites

__all__ = ["Plan", "draw_beside", "draw_plan", "with_given"]

MOST_STAGES, MOST_MICROBATCHES = 8, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A program, and the layers of its stages.

    Args:
        schedule: its family.
        ranks: the number of ranks.
        virtual: stages per rank.
        microbatches: whole ones, per step.
        pieces: into how many pieces sequences are split.
        kept: what is done with activations: "" for nothing, ``recompute`` or ``offload``.
        stages: for which stages.
        ahead: how many computations ahead what is offloaded is reloaded.
        merged: whether split backwards are made whole.
        order: the seed of an order of its own for all actions; None for the family's.
        split: how many layers each stage has; empty until the model is drawn.
        given: how the pipeline gets it: as a ``program``, by its ``name``, in a ``file``, by a
            ``function`` of the user's, or as one to be found, ``auto``.
        beside: that of another pipeline over the same model, if there is one.
        shares_stages: whether that has the stages of this one, or stages of its own.
    """

    schedule: str
    ranks: int
    virtual: int
    microbatches: int
    pieces: int = 1
    kept: str = ""
    stages: tuple[int, ...] = ()
    ahead: int = 1
    merged: bool = False
    order: int | None = None
    split: tuple[int, ...] = ()
    given: str = "program"
    beside: Plan | None = None
    shares_stages: bool = False

    @property
    def family(self) -> Family:
        """The schedule's."""
        return family(self.schedule)

    @property
    def num_model_stages(self) -> int:
        """Into how many stages the model is cut."""
        return self.ranks * self.virtual

    @property
    def sums_in_order(self) -> bool:
        """Whether each parameter's gradients are summed in the order of microbatches."""
        alone = self.order is None and self.family.num_directions == 1 and self.pieces == 1
        return alone and (self.beside is None or self.beside.sums_in_order)

    @property
    def num_copies(self) -> int:
        """Of the model, at most."""
        return max(plan.family.num_directions for plan in (self, self.beside) if plan is not None)

    def program(self) -> Program:
        """What is played."""
        program = penstock.build(
            self.schedule,
            ranks=self.ranks,
            virtual=self.virtual,
            microbatches=self.microbatches,
            **({"splits": self.pieces} if "splits" in self.family.options else {}),
        )
        if self.merged:
            program = with_whole_backwards(program)
        if self.order is not None:
            program = in_any_order(program, Draws(self.order))
        match self.kept:
            case "recompute":
                program = recompute(program, stages=self.stages)
            case "offload":
                program = offload(program, stages=self.stages, ahead=self.ahead)
        return program


def with_whole_backwards(program: Program) -> Program:
    """The program with a full backward for each I with its W right behind it."""
    ranks = []
    for steps in program.ranks:
        whole: list[Step] = []
        for step in steps:
            act = step.parts[0]
            input_grad = action(act.stage, Op.INPUT_GRAD, act.microbatch)
            if act.op is Op.WEIGHT_GRAD and whole[-1] == input_grad:
                whole[-1] = action(act.stage, Op.FULL_BACKWARD, act.microbatch)
            else:
                whole.append(step)
        ranks.append(whole)
    return program.with_ranks(ranks)


def in_any_order(program: Program, draws: Draws) -> Program:
    """The same computations, on the same ranks, in an order that the rules allow."""
    waiting = [act for act in program.actions() if act.op not in HOST_TRANSFERS]
    ranks: list[list[Action]] = [[] for _ in program.ranks]
    done: set[Action] = set()
    while waiting:
        ready = [
            act
            for act in waiting
            if done.issuperset(prerequisites(act, program.placement, num_splits=program.num_splits))
        ]
        act = draws.one_of(ready)
        waiting.remove(act)
        done |= {act, *(action(act.stage, op, act.microbatch) for op in COVERS.get(act.op, ()))}
        ranks[program.placement.rank_of(act.stage)].append(act)
    return replace(program, ranks=tuple(map(tuple, ranks)))


def draw_plan(draws: Draws, *, way: str, ranks: int | None = None) -> Plan:
    """A plan, still without a split.

    Args:
        draws: the choices.
        way: how the model is cut.
        ranks: the number of ranks, where it is given.
    """
    if way == "pieces":
        return Plan(
            schedule="seq1f1b",
            ranks=ranks or draws.number(1, 4),
            virtual=1,
            microbatches=draws.number(1, 4),
            pieces=draws.number(2, 3),
            order=draws.number(0, 999) if draws.takes("any-order", 0.2) else None,
        )
    num = ranks or draws.number(1, 4)
    two_ways = draws.takes("two-ways", 0.12) and num % 2 == 0
    each = family(draws.one_of(BIDIRECTIONAL if two_ways else TRAINING))
    fitting = [v for v in virtuals(each) if v * num <= MOST_STAGES] or [each.default_virtual]
    num, microbatches = each.nearest(num, draws.number(1, MOST_MICROBATCHES))
    virtual = draws.one_of(fitting)
    plan = Plan(schedule=each.name, ranks=num, virtual=virtual, microbatches=microbatches)
    stages = range(plan.num_model_stages * each.num_directions)
    if draws.takes("any-order", 0.12):
        plan = replace(plan, order=draws.number(0, 999))
    if draws.chance(0.1):
        plan = replace(plan, merged=True)
    offloads = each.name.startswith("po-") and plan.order is None
    for kept in ("recompute", "offload"):
        if draws.takes(kept, 0.25) and not offloads:
            some = draws.some_of(stages, 0.7)
            plan = replace(plan, kept=kept, stages=some, ahead=draws.number(1, 3))
    return plan


def with_given(draws: Draws, plan: Plan, *, way: str) -> Plan:
    """A plan that the pipeline may get in another form than as a program."""
    forms = ["function", "function"]
    if plan.pieces == 1:  # of which a file tells nothing
        forms += ["file", "file"]
    if not plan.kept and not plan.merged and plan.order is None and plan.pieces == 1:
        forms += ["name", "name"]
        # Layers cut anywhere may not be what is measured, and are refused then.
        if way == "by module" and plan.family.num_directions == 1 and draws.has("auto"):
            forms += ["auto", "auto"]
    return replace(plan, given=draws.one_of(forms)) if draws.takes("forms", 0.3) else plan


def draw_beside(draws: Draws, plan: Plan, *, shares: bool, alike: bool) -> Plan | None:
    """The plan of another pipeline over the same model; None where none is found.

    Args:
        draws: the choices.
        plan: that of the first, with its split.
        shares: whether both have the same stages.
        alike: whether stages hold the same layers, and lie on the same ranks.
    """
    for _ in range(20):
        other = draw_plan(draws, way="layers", ranks=plan.ranks if alike else None)
        if other.num_model_stages > sum(plan.split):
            continue
        if alike and other.program().placement == plan.program().placement:
            return replace(other, split=plan.split, shares_stages=shares)
        if not alike:
            split = draws.parts_of(sum(plan.split), other.num_model_stages)
            return replace(other, split=split)
    return None
