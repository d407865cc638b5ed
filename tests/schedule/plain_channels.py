"""Channels once more, as plainly as they can be said: by counting messages, one rank at a time.

Written to disagree with ``penstock.schedule.check`` where that is wrong: it knows nothing of which
message is which but their number on the way, and tries every rank again and again.
"""

from __future__ import annotations

from collections import Counter

from penstock.schedule.action import Action, Op, action
from penstock.schedule.program import Program
from tests.readiness import prerequisites

SENDS = {Op.SEND_F: +1, Op.SEND_B: -1}
RECEIVES = {Op.RECV_F: -1, Op.RECV_B: +1}


def plays(program: Program) -> bool:
    """Whether all ranks come to their end, if both ends of each direction have one order."""
    sent: Counter[tuple[int, int]] = Counter()
    posted: Counter[tuple[int, int]] = Counter()
    number: dict[Action, int] = {}
    done: set[Action] = set()
    positions = [0] * program.num_ranks

    def peer(act: Action) -> int:
        offset = {**SENDS, **RECEIVES}[act.op]
        other = program.placement.neighbour(act.stage, offset)
        assert other is not None
        return program.placement.rank_of(other)

    def may(rank: int, act: Action) -> bool:
        if act.op in RECEIVES:
            return True
        for before in prerequisites(
            act,
            program.placement,
            transfers=program.has_transfers,
            num_splits=program.num_splits,
        ):
            if before not in done:
                return False
            # A message is there when as many have been sent as its receive's number says.
            if before.op in RECEIVES and sent[peer(before), rank] <= number[before]:
                return False
        if act.op not in SENDS:
            return True
        there = rank, peer(act)
        return sent[there] < posted[there]

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(program.ranks):
            while positions[rank] < len(steps):
                parts = steps[positions[rank]].parts
                if not all(may(rank, act) for act in parts):
                    break
                for act in parts:
                    done.add(act)
                    if act.op is Op.FULL_BACKWARD:
                        done.add(action(act.stage, Op.INPUT_GRAD, act.microbatch))
                        done.add(action(act.stage, Op.WEIGHT_GRAD, act.microbatch))
                    elif act.op in SENDS:
                        sent[rank, peer(act)] += 1
                    elif act.op in RECEIVES:
                        number[act] = posted[peer(act), rank]
                        posted[peer(act), rank] += 1
                positions[rank] += 1
                moved = True
    return all(p == len(steps) for p, steps in zip(positions, program.ranks, strict=True))
