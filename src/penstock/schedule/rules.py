"""The readiness rules: the actions that must be complete before an action may start.

All checks read these tables, through ``required`` or its integer form, ``penstock.schedule.index``.

                 stage s−1      stage s                     stage s+1
    forward      F ─────────►   F ──────────────────────►   F
                                │                           │
    backward     I ◄─────────   I ◄──────────────────────   I
                                └► W

The activations of F may be dropped and recomputed (RECOMPUTE), or be copied to the host and back
(OFFLOAD, RELOAD), both between F and the backward on the same rank.

With sequence chunks (``Program.num_splits``), the chunks of one sequence run in order in every
stage: forwards rising, since a chunk attends to those before it, and backwards falling (k = 2,
microbatch 1):

    forward      F2 ───► F3
    backward     I2 ◄─── I3

A full backward B counts as I and W at once. ``Placement.neighbour`` defines neighbouring stages.
Between stages on different ranks an arrow is a pair of SEND (on the producer's rank) and RECV (on
the consumer's): RECV posts the receive, and the action that uses the value waits.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.placement import Placement

__all__ = [
    "BACKWARDS", "COMPUTE", "HOST_TRANSFERS", "COVERS", "INPUT_GRADS", "IN_SEQUENCE", "RECEIVE_FOR",
    "REQUIRES", "SENDS", "SHARDING", "SEND_OF", "TRANSFERS", "WEIGHT_GRADS", "WHOLE_STAGE",
    "next_chunk", "required",
]  # fmt: skip

COMPUTE = frozenset({Op.FORWARD, Op.FULL_BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD, Op.RECOMPUTE})
TRANSFERS = frozenset({Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
HOST_TRANSFERS = frozenset({Op.OFFLOAD, Op.RELOAD})
SHARDING = frozenset({Op.UNSHARD, Op.RESHARD})
WHOLE_STAGE = SHARDING | {Op.REDUCE_GRAD}
# The ops that compute input gradients, weight gradients, or either.
INPUT_GRADS = frozenset({Op.FULL_BACKWARD, Op.INPUT_GRAD})
WEIGHT_GRADS = frozenset({Op.FULL_BACKWARD, Op.WEIGHT_GRAD})
BACKWARDS = INPUT_GRADS | WEIGHT_GRADS

# op → (required op, stage offset), for the same microbatch, if that stage exists. A full backward
# fulfils a requirement of an input gradient or a weight gradient (COVERS).
REQUIRES: dict[Op, tuple[tuple[Op, int], ...]] = {
    Op.FORWARD: ((Op.FORWARD, -1),),
    Op.FULL_BACKWARD: ((Op.FORWARD, 0), (Op.INPUT_GRAD, +1)),
    Op.INPUT_GRAD: ((Op.FORWARD, 0), (Op.INPUT_GRAD, +1)),
    Op.WEIGHT_GRAD: ((Op.INPUT_GRAD, 0),),
    Op.SEND_F: ((Op.FORWARD, 0),),
    Op.RECV_F: ((Op.SEND_F, -1),),
    Op.SEND_B: ((Op.INPUT_GRAD, 0),),
    Op.RECV_B: ((Op.SEND_B, +1),),
    Op.RECOMPUTE: ((Op.FORWARD, 0),),
    Op.OFFLOAD: ((Op.FORWARD, 0),),
    Op.RELOAD: ((Op.OFFLOAD, 0),),
    **dict.fromkeys(WHOLE_STAGE, ()),
}

# op → (required op, offset of the chunk), for the same stage, within one sequence.
IN_SEQUENCE: dict[Op, tuple[Op, int]] = {
    Op.FORWARD: (Op.FORWARD, -1),
    Op.FULL_BACKWARD: (Op.INPUT_GRAD, +1),
    Op.INPUT_GRAD: (Op.INPUT_GRAD, +1),
}

# The ops that an action fulfils besides its own.
COVERS: dict[Op, tuple[Op, ...]] = {Op.FULL_BACKWARD: (Op.INPUT_GRAD, Op.WEIGHT_GRAD)}

# The receive (at the consumer's stage) that replaces a requirement on another rank.
RECEIVE_FOR: dict[tuple[Op, int], Op] = {
    (Op.FORWARD, -1): Op.RECV_F,
    (Op.INPUT_GRAD, +1): Op.RECV_B,
}

# By receive, the matching send.
SEND_OF: dict[Op, Op] = {receive: REQUIRES[receive][0][0] for receive in RECEIVE_FOR.values()}
SENDS = frozenset(SEND_OF.values())


def required(
    op: Op, stage: int, placement: Placement, *, transfers: bool = False
) -> tuple[tuple[Op, int], ...]:
    """The ops and stages that must be complete, for the same microbatch, before an op may start.

    With ``transfers``, explicit sends and receives, a requirement on another rank is this rank's
    receive, else the producing op itself.
    """
    found: list[tuple[Op, int]] = []
    for needed, offset in REQUIRES[op]:
        other = placement.neighbour(stage, offset)
        if other is not None:
            receive = RECEIVE_FOR.get((needed, offset)) if transfers else None
            if receive is None or placement.same_rank(stage, other):
                found.append((needed, other))
            else:
                found.append((receive, stage))
    return tuple(found)


def next_chunk(microbatch: int, offset: int, num_splits: int) -> int | None:
    """The chunk ``offset`` away in the same sequence; None past the ends of the sequence."""
    other = microbatch + offset
    return other if other // num_splits == microbatch // num_splits else None
