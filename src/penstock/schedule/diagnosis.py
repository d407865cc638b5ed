"""Says in words what is wrong with a program, once something is known to be.

The checker decides in integers, fast; here every action is looked at one by one, with the rules'
own function, to name the place, what was expected and what was found. This module decides
nothing: for a right program each function finds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action, Op, action
from penstock.schedule.coding import Coding, MessageOrders
from penstock.schedule.encoding import fault_of
from penstock.schedule.play import ProgramPlayer
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, COVERS, SEND_OF, TRANSFERS, prerequisites
from penstock.schedule.words import number_of

__all__ = [
    "Problem",
    "count_problems",
    "malformed",
    "order_problems",
    "size_problems",
    "stuck_problems",
    "text_of",
]

# For an action: the rank that takes it and the index of its step there.
StepPlace = tuple[int, int]
# What gives an action (itself, or B for I and W), and where it is.
_Providers: TypeAlias = dict[Action, tuple[Action, StepPlace]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a program.

    Args:
        rank: the rank that it shows on; None where it is about the whole program.
        step: index, from 0, of the step on that rank; None where it is about no one step.
        action: the step in text form, or the action that is missing; None where there is none.
        message: what was expected, what was found.
    """

    rank: int | None
    step: int | None
    action: str | None
    message: str

    def __str__(self) -> str:
        """``rank 1, step 3 (1F0): ...``, leaving out what there is not."""
        place = [] if self.rank is None else [f"rank {self.rank}"]
        if self.step is not None:
            place.append(f"step {self.step} ({self.action})")
        return f"{', '.join(place)}: {self.message}" if place else self.message


def size_problems(program: Program) -> list[Problem]:
    """A number of ranks or microbatches that can't be."""
    messages = []
    microbatches = number_of(program.num_microbatches, "microbatch")
    if program.num_ranks != program.placement.num_ranks:
        messages.append(
            f"steps for {number_of(program.num_ranks, 'rank')}, but the placement has "
            f"{program.placement.num_ranks}"
        )
    if program.num_microbatches < 1:
        messages.append(f"{microbatches}; a step takes at least one")
    elif program.num_microbatches < program.placement.copies:
        messages.append(
            f"{microbatches} for {number_of(program.placement.copies, 'copy')} of the "
            "model; each copy takes at least one"
        )
    if program.num_splits < 1 or program.num_microbatches % program.num_splits:
        messages.append(
            f"{microbatches} for num_splits={program.num_splits}: each "
            "sequence is so many of them, at least one"
        )
    elif program.num_splits > 1 and program.placement.copies > 1:
        messages.append(
            "sequences are split and the model is there in several copies; the pieces of one "
            "sequence go through the same stages"
        )
    return [Problem(rank=None, step=None, action=None, message=m) for m in messages]


def malformed(program: Program) -> list[Problem]:
    """The steps that are wrong wherever they stand on their rank."""
    found = []
    for rank, steps in enumerate(program.ranks):
        for index, step in enumerate(steps):
            fault = fault_of(step, rank, program)
            if fault is not None:
                found.append(Problem(rank=rank, step=index, action=str(step), message=fault))
    return found


def count_problems(program: Program) -> list[Problem]:
    """What is done twice, not at all, or without need."""
    places: dict[Action, StepPlace] = {}
    repeated: list[Problem] = []
    for act, (rank, step) in _taken(program):
        if act not in places:
            places[act] = (rank, step)
        elif act.op not in (Op.UNSHARD, Op.RESHARD):
            message = f"{act} again, first done at step {places[act][1]}; once is enough"
            repeated.append(_at(program, rank, step, message))
    found = [*repeated, *_compute_problems(program, places)]
    if any(act.op in TRANSFERS for act in places):
        found += _transfer_problems(program, places)
    return found


def _compute_problems(program: Program, places: dict[Action, StepPlace]) -> Iterator[Problem]:
    backwards = (Op.FULL_BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
    has_backward = program.has_backward
    for stage in range(program.num_stages):
        for microbatch in range(program.num_microbatches):
            if not program.placement.passes(microbatch, stage):
                continue
            forward = action(stage, Op.FORWARD, microbatch)
            if forward not in places:
                yield _missing(program, forward, f"{forward} is missing")
            if not has_backward:
                continue
            full, by_input, by_weight = (action(stage, op, microbatch) for op in backwards)
            parts = [act for act in (by_input, by_weight) if act in places]
            if full in places:
                for act in parts:
                    message = f"{act} is done already, as a part of {full}"
                    yield _at(program, *places[act], message)
            elif not parts:
                message = f"the backward is missing: {full}, or {by_input} and {by_weight}"
                yield _missing(program, full, message)
            elif len(parts) == 1:
                other = by_weight if parts[0] is by_input else by_input
                message = f"{other} is missing: {parts[0]} is half of a backward"
                yield _missing(program, other, message)


def _transfer_problems(program: Program, places: dict[Action, StepPlace]) -> Iterator[Problem]:
    wanted: dict[Action, Action] = {}
    for act in places:
        if act.op not in COMPUTE:
            continue
        for receive in prerequisites(act, program.placement, transfers=True):
            if receive.op in TRANSFERS:
                wanted[receive] = act
                sends = prerequisites(receive, program.placement, transfers=True)
                wanted.update(dict.fromkeys(sends, act))
    for transfer, user in wanted.items():
        if transfer not in places:
            holder = program.placement.rank_of(user.stage)
            message = f"{transfer} is missing: {user} on rank {holder} needs what it carries"
            yield _missing(program, transfer, message)
    for act, (rank, step) in places.items():
        if act.op in TRANSFERS and act not in wanted:
            message = f"{act} carries nothing that another rank needs; leave it out"
            yield _at(program, rank, step, message)


def order_problems(program: Program, orders: MessageOrders, coding: Coding) -> list[Problem]:
    """The first difference of order between the two ends of each directed pair of ranks.

    Args:
        program: the program.
        orders: of its messages.
        coding: the numbering of the codes.
    """
    places = dict(_taken(program))
    found = []
    for (source, target), (sent, posted) in sorted(orders.items()):
        for k, (by_send, by_post) in enumerate(zip(sent, posted, strict=True)):
            if by_send != by_post:
                receive, expected = coding.action(by_post), coding.action(by_send)
                send = prerequisites(expected, program.placement, transfers=True)[0]
                message = (
                    f"{receive} is posted as number {k} of the messages from rank {source}, "
                    f"which sends {send} (its step {places[send][1]}) as number {k}; post "
                    f"{expected} here, so that both ends have the same order"
                )
                found.append(_at(program, target, places[receive][1], message))
                break
    return found


def stuck_problems(program: Program, player: ProgramPlayer, coding: Coding) -> list[Problem]:
    """Who waits for whom in a play that can't go on, and what stands before what it needs.

    Args:
        program: the program.
        player: its play, stuck.
        coding: the numbering of the codes.
    """
    providers: _Providers = {}
    for act, place in _taken(program):
        providers[act] = act, place
        for op in COVERS.get(act.op, ()):
            providers[action(act.stage, op, act.microbatch)] = act, place
    found = [*_backwards(program, providers)]
    told = {(problem.rank, problem.step) for problem in found}
    for rank, awaited in enumerate(player.awaits):
        step = player.positions[rank]
        if awaited is None or (rank, step) in told:
            continue
        wanted, (other, there) = providers[coding.action(awaited)]
        reached = player.positions[other]
        verb = "post" if wanted.op in SEND_OF else "do"
        message = (
            f"deadlock: waits for rank {other} to {verb} {wanted} (its step {there}), and "
            f"rank {other} is stuck at step {reached} ({program.ranks[other][reached]})"
        )
        found.append(_at(program, rank, step, message))
    return found


def _backwards(program: Program, providers: _Providers) -> Iterator[Problem]:
    """Steps that stand before something that they need of their own rank."""
    transfers = any(act.op in TRANSFERS for act in providers)
    for act, (rank, step) in _taken(program):
        for needed in prerequisites(
            act, program.placement, transfers=transfers, num_splits=program.num_splits
        ):
            if needed not in providers:
                yield _at(program, rank, step, f"{act} needs {needed}, which is not in the program")
                continue
            giver, (other, there) = providers[needed]
            if other == rank and there >= step:
                late = "is in the same block" if there == step else f"comes only at step {there}"
                yield _at(program, rank, step, f"{act} needs {giver}, which {late}")


def _taken(program: Program) -> Iterator[tuple[Action, StepPlace]]:
    for rank, steps in enumerate(program.ranks):
        for index, step in enumerate(steps):
            for act in step.parts:
                yield act, (rank, index)


def _at(program: Program, rank: int, step: int, message: str) -> Problem:
    text = str(program.ranks[rank][step])
    return Problem(rank=rank, step=step, action=text, message=message)


def _missing(program: Program, act: Action, message: str) -> Problem:
    rank = program.placement.rank_of(act.stage)
    return Problem(rank=rank, step=None, action=str(act), message=message)


def text_of(found: Sequence[Problem], shown: int) -> str:
    """The problems as lines, the first ``shown`` of them, then how many more there are."""
    lines = [f"  {problem}" for problem in found[:shown]]
    if len(found) > shown:
        lines.append(f"  and {len(found) - shown} more")
    return "\n".join(lines)
