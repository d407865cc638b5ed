"""Actions as dense integers, and the rules' tables in that form.

A program may hold hundreds of thousands of actions; what reads all of them (the checker, the
passes) works on plain integers. The code of an action is

    code = (index of its op · stages + stage) · microbatches + microbatch
    key  = code // microbatches                         (the op and the stage alone)

so that what an action needs and gives is a fixed distance from its own code, the same for every
microbatch. The tables by key are derived from ``penstock.schedule.rules``; no rule stands here.
An overlapped block is coded as a negative number, ``~i`` for block i of its program. Programs are
turned into codes by ``penstock.schedule.encoding``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement
from penstock.schedule.rules import (
    COVERS,
    IN_SEQUENCE,
    RECEIVE_FOR,
    REQUIRES,
    SEND_OF,
    SENDS,
    TRANSFERS,
    next_piece,
)

__all__ = ["WHOLE_STAGE", "Coded", "Coding", "Distances", "MessageOrders"]

WHOLE_STAGE = frozenset({Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})

MessageOrders: TypeAlias = dict[tuple[int, int], tuple[list[int], list[int]]]
"""For each directed pair of ranks (from, to) the codes of its receives: in the order of their
sends, and in the order in which they are posted."""

# For each key, the distances from an action's code to the codes that the table is about.
Distances: TypeAlias = list[tuple[int, ...]]

_OPS = tuple(Op)
_INDEX = {op: index for index, op in enumerate(_OPS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """The numbering of all actions that a placement and a number of microbatches allow.

    Args:
        placement: which rank holds which stage.
        num_microbatches: microbatches per step, at least 1.
        num_splits: into how many pieces sequences are split.
    """

    placement: Placement
    num_microbatches: int
    num_splits: int = 1

    @property
    def size(self) -> int:
        """How many codes there are; every code lies below."""
        return len(_OPS) * self.placement.num_stages * self.num_microbatches

    def key(self, op: Op, stage: int) -> int:
        """The key of an op and a stage."""
        return _INDEX[op] * self.placement.num_stages + stage

    def code(self, op: Op, stage: int, microbatch: int = 0) -> int:
        """The code of an action; operations on a whole stage take microbatch 0."""
        return self.key(op, stage) * self.num_microbatches + microbatch

    def passing(self) -> bytes:
        """For each code of one op's section, 1 where the microbatch goes through the stage."""
        placement, size = self.placement, self.num_microbatches
        rows = (
            bytes(placement.passes(microbatch, entry) for microbatch in range(size))
            for entry in placement.entries
        )
        return b"".join(row * placement.num_model_stages for row in rows)

    def section(self, op: Op) -> slice:
        """The codes of all actions with ``op``."""
        return slice(self.code(op, 0), self.code(op, self.placement.num_stages))

    def action(self, code: int) -> Action:
        """The action of a code."""
        key, microbatch = divmod(code, self.num_microbatches)
        op, stage = self.op_and_stage(key)
        return action(stage, op, None if op in WHOLE_STAGE else microbatch)

    def op_and_stage(self, key: int) -> tuple[Op, int]:
        """What a key stands for."""
        index, stage = divmod(key, self.placement.num_stages)
        return _OPS[index], stage

    def entries(self) -> Iterator[tuple[Op, int]]:
        """What each key stands for, in order."""
        return ((op, s) for op in _OPS for s in range(self.placement.num_stages))

    def _distance(self, op: Op, stage: int, to_op: Op, to_stage: int) -> int:
        return self.code(to_op, to_stage) - self.code(op, stage)

    def partner(self, op: Op, stage: int) -> tuple[Op, int] | None:
        """The receive that a send meets, or the send that a receive meets.

        None where there is no such other end: ``op`` is no transfer, the other stage does not
        exist, or it lies on the same rank.
        """
        for (_, offset), receive in RECEIVE_FOR.items():
            send = SEND_OF[receive]
            if op is receive:
                other_op, other = send, self.placement.neighbour(stage, offset)
            elif op is send:
                other_op, other = receive, self.placement.neighbour(stage, -offset)
            else:
                continue
            if other is not None and not self.placement.same_rank(stage, other):
                return other_op, other
        return None

    def needs(self, *, transfers: bool) -> Distances:
        """By key: what must be done before the action can start.

        With transfers, a send also needs its receive to be posted, posting a receive needs
        nothing, and what uses a received value needs the send to be done. Reductions and
        sharding need nothing here: their place is a matter of their own rank alone.
        """
        tables: Distances = []
        for op, stage in self.entries():
            needed: list[tuple[Op, int]] = []
            if op not in SEND_OF:
                for wanted, offset in REQUIRES[op]:
                    other = self.placement.neighbour(stage, offset)
                    if other is not None:
                        receive = RECEIVE_FOR.get((wanted, offset)) if transfers else None
                        sent = self.partner(receive, stage) if receive is not None else None
                        # A received value is there when it was sent; any other when it is made.
                        needed.append(sent or (wanted, other))
            if op in SENDS and (posted := self.partner(op, stage)) is not None:
                needed.append(posted)
            tables.append(tuple(self._distance(op, stage, *n) for n in needed))
        return tables

    def needs_in_sequence(self) -> dict[int, int]:
        """By code, beside ``needs``: the piece of the same sequence that must be done before.

        Unlike all else it hangs on the microbatch, so that it is no fixed distance.
        """
        if self.num_splits == 1:
            return {}
        found: dict[int, int] = {}
        for op, (wanted, offset) in IN_SEQUENCE.items():
            others = (next_piece(m, offset, self.num_splits) for m in range(self.num_microbatches))
            pairs = [(m, other) for m, other in enumerate(others) if other is not None]
            for stage in range(self.placement.num_stages):
                first, needed = self.code(op, stage), self.code(wanted, stage)
                found.update((first + m, needed + other) for m, other in pairs)
        return found

    def gives(self) -> Distances:
        """By key: what is done when the action is: itself, and what it covers."""
        return [
            tuple(self._distance(op, stage, given, stage) for given in (op, *COVERS.get(op, ())))
            for op, stage in self.entries()
        ]

    def receives(self) -> Distances:
        """By key: the receives, on the action's own rank, of the values that it needs."""
        tables: Distances = []
        for op, stage in self.entries():
            wanted = [RECEIVE_FOR[r] for r in REQUIRES[op] if r in RECEIVE_FOR]
            remote = [r for r in wanted if self.partner(r, stage) is not None]
            tables.append(tuple(self._distance(op, stage, r, stage) for r in remote))
        return tables

    def sends(self) -> Distances:
        """By key: the sends, on the action's own rank, of the values that it makes."""
        tables: Distances = []
        for op, stage in self.entries():
            made = {op, *COVERS.get(op, ())}
            sends = [SEND_OF[r] for (value, _), r in RECEIVE_FOR.items() if value in made]
            remote = [s for s in sends if self.partner(s, stage) is not None]
            tables.append(tuple(self._distance(op, stage, s, stage) for s in remote))
        return tables

    def transfers_by_key(self) -> list[tuple[Op, int] | None]:
        """By key: the op and stage of a transfer; None for all else."""
        return [(op, stage) if op in TRANSFERS else None for op, stage in self.entries()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """A program in integers.

    Args:
        coding: the numbering.
        queues: for each rank the codes of its steps; ``~i`` stands for block i.
        blocks: for each overlapped block the codes of its parts.
    """

    coding: Coding
    queues: list[list[int]]
    blocks: list[tuple[int, ...]]

    def parts(self, code: int) -> tuple[int, ...]:
        """The codes of a step's actions."""
        return (code,) if code >= 0 else self.blocks[~code]
