"""The checker's rules once more, as plainly as they can be said: slow, and with no words.

Written to disagree with ``penstock.schedule.check`` where that is wrong: it shares only the table
of prerequisites, and plays by trying every rank again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from penstock.schedule.action import Action, Op, action
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, TRANSFERS
from tests.readiness import prerequisites

WHOLE = {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
RECEIVES = {Op.RECV_F, Op.RECV_B}
SENDS = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}


def is_right(program: Program, plays: Callable[[Program], bool] | None = None) -> bool:
    """Whether nothing is wrong with the program; ``plays`` decides whether it ends."""
    return (
        _is_well_formed(program)
        and _does_all_once(program)
        and _sends_what_is_needed(program)
        and _keeps_channels_in_order(program)
        and (plays or _plays_to_its_end)(program)
        and _shards(program)
        and _reduces(program)
    )


def without_transfers(program: Program) -> Program:
    """The program without its sends and receives."""
    return program.with_ranks(
        tuple(
            tuple(step for step in steps if not any(a.op in TRANSFERS for a in step.parts))
            for steps in program.ranks
        )
    )


def _is_well_formed(program: Program) -> bool:
    for rank, steps in enumerate(program.ranks):
        for step in steps:
            if not step.parts or (
                not isinstance(step, Action) and any(a.op not in COMPUTE for a in step.parts)
            ):
                return False
            for act in step.parts:
                if act.stage not in program.placement.stages_of(rank):
                    return False
                if act.op in WHOLE:
                    if act.microbatch is not None:
                        return False
                elif act.microbatch not in _passing(program, act.stage):
                    return False
    return True


def _passing(program: Program, stage: int) -> range:
    """The microbatches of the copy that the stage belongs to."""
    copies = program.placement.num_directions
    first = stage // (program.num_stages // copies)
    return range(first, program.num_microbatches, copies)


def _does_all_once(program: Program) -> bool:
    count = Counter(program.actions())
    if any(n > 1 for act, n in count.items() if act.op not in (Op.UNSHARD, Op.RESHARD)):
        return False
    kinds = set()
    for stage in range(program.num_stages):
        for m in _passing(program, stage):
            done = "".join(op.value for op in Op if op in COMPUTE and count[action(stage, op, m)])
            if done not in ("F", "FB", "FIW"):
                return False
            kinds.add(done == "F")
    return len(kinds) == 1


def _sends_what_is_needed(program: Program) -> bool:
    found = {act for act in program.actions() if act.op in TRANSFERS}
    needed = set()
    for act in program.actions():
        if act.op in COMPUTE:
            for before in prerequisites(act, program.placement):
                if not program.placement.same_rank(act.stage, before.stage):
                    forward = act.op is Op.FORWARD
                    needed.add(
                        action(act.stage, Op.RECV_F if forward else Op.RECV_B, act.microbatch)
                    )
                    send = Op.SEND_F if forward else Op.SEND_B
                    needed.add(action(before.stage, send, act.microbatch))
    return not found or found == needed


def _keeps_channels_in_order(program: Program) -> bool:
    ends: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}
    holder = program.placement.rank_of
    for rank, steps in enumerate(program.ranks):
        for act in (a for step in steps for a in step.parts):
            if act.op in SENDS:
                receive, offset = SENDS[act.op]
                posted = action(act.stage + offset, receive, act.microbatch)
                ends.setdefault((rank, holder(posted.stage)), ([], []))[0].append(posted)
            elif act.op in RECEIVES:
                source = holder(act.stage + (-1 if act.op is Op.RECV_F else 1))
                ends.setdefault((source, rank), ([], []))[1].append(act)
    return all(sent == posted for sent, posted in ends.values())


def _plays_to_its_end(program: Program) -> bool:
    transfers = any(act.op in TRANSFERS for act in program.actions())
    done: set[Action] = set()
    positions = [0] * program.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(program.ranks):
            while positions[rank] < len(steps):
                parts = steps[positions[rank]].parts
                if not all(_is_ready(act, program, done, transfers) for act in parts):
                    break
                for act in parts:
                    done.add(act)
                    if act.op is Op.FULL_BACKWARD:
                        done.add(action(act.stage, Op.INPUT_GRAD, act.microbatch))
                        done.add(action(act.stage, Op.WEIGHT_GRAD, act.microbatch))
                positions[rank] += 1
                moved = True
    return all(p == len(steps) for p, steps in zip(positions, program.ranks, strict=True))


def _is_ready(act: Action, program: Program, done: set[Action], transfers: bool) -> bool:
    if act.op in RECEIVES:
        return True
    for before in prerequisites(
        act, program.placement, transfers=transfers, num_splits=program.num_splits
    ):
        if before not in done:
            return False
        # A posted receive is no value yet: the message must have been sent.
        if before.op in RECEIVES and not done.issuperset(
            prerequisites(before, program.placement, transfers=True)
        ):
            return False
    if act.op in SENDS:
        receive, offset = SENDS[act.op]
        return action(act.stage + offset, receive, act.microbatch) in done
    return True


def _shards(program: Program) -> bool:
    for stage in range(program.num_stages):
        rank = program.placement.rank_of(stage)
        acts = [a for step in program.ranks[rank] for a in step.parts if a.stage == stage]
        kinds = [a.op for a in acts if a.op in COMPUTE or a.op in (Op.UNSHARD, Op.RESHARD)]
        text = "".join("." if op in COMPUTE else op.value[0] for op in kinds)
        if "U" in text or "R" in text:
            # U, computation, R, and so on; the last R may be missing.
            *pieces, last = text.split("R")
            for piece in [*pieces, last] if last else pieces:
                if not piece.startswith("U") or piece.count("U") != 1:
                    return False
    return True


def _reduces(program: Program) -> bool:
    reduced = {a.stage for a in program.actions() if a.op is Op.REDUCE_GRAD}
    if not reduced:
        return True
    for stage in range(program.num_stages):
        steps = program.ranks[program.placement.rank_of(stage)]
        ops = [a.op for step in steps for a in step.parts if a.stage == stage]
        made = [i for i, op in enumerate(ops) if op in (Op.FULL_BACKWARD, Op.WEIGHT_GRAD)]
        if stage not in reduced or not made or ops.index(Op.REDUCE_GRAD) < made[-1]:
            return False
    return True
