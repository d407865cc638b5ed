"""What must be done before an action may start: the only copy of that rule.

The checker, the passes, the simulator and the runtime all read these tables.

                 stage s−1      stage s                     stage s+1
    forward      F ─────────►   F ──────────────────────►   F
                                │                           │
    backward     I ◄─────────   I ◄──────────────────────   I
                                └► W

What F keeps for the backward may be dropped and made again (RECOMPUTE), or be copied to the host
and back (OFFLOAD, RELOAD), both between F and the backward on the same rank.

Where sequences are split (``Program.num_splits``), the pieces of one sequence follow each other
in every stage: forward in their order, since a piece looks back at those before it, and backward
in reverse (k = 2, microbatch 1):

    forward      F2 ───► F3
    backward     I2 ◄─── I3

A full backward B stands for I and W at once. Which stages are neighbours, the placement says
(``Placement.neighbour``). Between stages on different ranks an arrow is a pair SEND (on the
producer's rank) and RECV (on the consumer's): RECV posts the receive, and what needs the value
waits for it.
"""

from __future__ import annotations

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement

__all__ = [
    "BACKWARDS",
    "COMPUTE",
    "COPIES",
    "COVERS",
    "INPUT_GRADS",
    "IN_SEQUENCE",
    "RECEIVE_FOR",
    "REQUIRES",
    "SENDS",
    "SEND_OF",
    "TRANSFERS",
    "WEIGHT_GRADS",
    "next_piece",
    "prerequisites",
]

COMPUTE = frozenset({Op.FORWARD, Op.FULL_BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD, Op.RECOMPUTE})
TRANSFERS = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
COPIES = frozenset({Op.OFFLOAD, Op.RELOAD})
# What computes input gradients, weight gradients, either.
INPUT_GRADS = frozenset({Op.FULL_BACKWARD, Op.INPUT_GRAD})
WEIGHT_GRADS = frozenset({Op.FULL_BACKWARD, Op.WEIGHT_GRAD})
BACKWARDS = INPUT_GRADS | WEIGHT_GRADS

# op → (required op, stage offset), for the same microbatch. A full backward fulfils what asks
# for an input gradient or a weight gradient (COVERS). A requirement on a stage that does not
# exist (before the first, after the last) is none.
REQUIRES: dict[Op, tuple[tuple[Op, int], ...]] = {
    Op.FORWARD: ((Op.FORWARD, -1),),
    Op.FULL_BACKWARD: ((Op.FORWARD, 0), (Op.INPUT_GRAD, +1)),
    Op.INPUT_GRAD: ((Op.FORWARD, 0), (Op.INPUT_GRAD, +1)),
    Op.WEIGHT_GRAD: ((Op.INPUT_GRAD, 0),),
    Op.SEND_F: ((Op.FORWARD, 0),),
    Op.RECV_F: ((Op.SEND_F, -1),),
    Op.SEND_B: ((Op.INPUT_GRAD, 0),),
    Op.RECV_B: ((Op.SEND_B, +1),),
    Op.UNSHARD: (),
    Op.RESHARD: (),
    Op.REDUCE_GRAD: (),
    Op.RECOMPUTE: ((Op.FORWARD, 0),),
    Op.OFFLOAD: ((Op.FORWARD, 0),),
    Op.RELOAD: ((Op.OFFLOAD, 0),),
}

# op → (required op, offset of the piece), for the same stage, among the pieces of one sequence.
IN_SEQUENCE: dict[Op, tuple[Op, int]] = {
    Op.FORWARD: (Op.FORWARD, -1),
    Op.FULL_BACKWARD: (Op.INPUT_GRAD, +1),
    Op.INPUT_GRAD: (Op.INPUT_GRAD, +1),
}

# What an action counts as, beside itself.
COVERS: dict[Op, tuple[Op, ...]] = {Op.FULL_BACKWARD: (Op.INPUT_GRAD, Op.WEIGHT_GRAD)}

# The receive (at the consumer's stage) that stands for a requirement on another rank.
RECEIVE_FOR: dict[tuple[Op, int], Op] = {
    (Op.FORWARD, -1): Op.RECV_F,
    (Op.INPUT_GRAD, +1): Op.RECV_B,
}

# receive → the send that it meets.
SEND_OF: dict[Op, Op] = {receive: REQUIRES[receive][0][0] for receive in RECEIVE_FOR.values()}
SENDS = frozenset(SEND_OF.values())


def next_piece(microbatch: int, offset: int, num_splits: int) -> int | None:
    """The piece of a sequence that lies ``offset`` from another; None past the sequence's ends.

    Example:
        >>> next_piece(2, +1, 2), next_piece(3, +1, 2), next_piece(2, -1, 2)
        (3, None, None)
    """
    other = microbatch + offset
    return other if other // num_splits == microbatch // num_splits else None


def prerequisites(
    act: Action, placement: Placement, *, transfers: bool = False, num_splits: int = 1
) -> tuple[Action, ...]:
    """The actions that must be complete before ``act`` may start.

    Args:
        act: the action asked about.
        placement: which rank holds which stage.
        transfers: whether the program spells out its sends and receives: then what is needed
            from another rank is this rank's receive, else the producing action itself.
        num_splits: into how many pieces the program splits sequences.

    Returns:
        The required actions, none twice. An INPUT_GRAD or WEIGHT_GRAD among them is also
        fulfilled by the FULL_BACKWARD of the same stage and microbatch (see ``COVERS``).

    Example:
        >>> from penstock.schedule.placement import linear
        >>> [str(a) for a in prerequisites(action(1, Op.INPUT_GRAD, 0), linear(3))]
        ['1F0', '2I0']
    """
    found: list[Action] = []
    for op, offset in REQUIRES[act.op]:
        stage = placement.neighbour(act.stage, offset)
        if stage is None:
            continue
        receive = RECEIVE_FOR.get((op, offset))
        if transfers and receive is not None and not placement.same_rank(act.stage, stage):
            found.append(action(act.stage, receive, act.microbatch))
        else:
            found.append(action(stage, op, act.microbatch))
    if num_splits > 1 and act.op in IN_SEQUENCE and act.microbatch is not None:
        op, offset = IN_SEQUENCE[act.op]
        other = next_piece(act.microbatch, offset, num_splits)
        if other is not None:
            found.append(action(act.stage, op, other))
    return tuple(found)
