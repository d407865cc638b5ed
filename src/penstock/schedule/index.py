"""The integer index of a program: actions as dense ids, the readiness rules as offsets.

    id  = (op number · stages + stage) · microbatches + microbatch       one action
    row = id // microbatches                                             an op and a stage

A prerequisite is the same microbatch of another row, at a fixed offset from the action's id: one
table entry per row, from ``penstock.schedule.rules``, serves all microbatches. An overlapped pair
is ``~i``, a negative number, for pair i of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from itertools import chain, islice
from typing import NamedTuple, TypeAlias, TypeVar, cast

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import (
    BACKWARDS,
    COVERS,
    IN_SEQUENCE,
    RECEIVE_FOR,
    REQUIRES,
    SEND_OF,
    SENDS,
    WHOLE_STAGE,
    next_chunk,
    required,
)
from penstock.schedule.wording import Problem, runs_of

__all__ = ["IndexedProgram", "Offsets", "Transfer", "acknowledgements", "faults", "index_program"]

Offsets: TypeAlias = Sequence[tuple[int, ...]]
"""By row, offsets from the id of an action to related ids."""

_Table = TypeVar("_Table")
_OPS = tuple(Op)
_NUMBER = {op: number for number, op in enumerate(_OPS)}
# By transfer, the op at its other end, and the offset to the stage there.
_PEERS = {receive: (SEND_OF[receive], offset) for (_, offset), receive in RECEIVE_FOR.items()}
_PEERS |= {send: (receive, -offset) for receive, (send, offset) in _PEERS.items()}


class Transfer(NamedTuple):
    """A row of transfers: its rank and its peer's, and the offset to the peer's id."""

    rank: int
    peer: int
    offset: int
    is_send: bool


def _made_once(make: Callable[[IndexedProgram], _Table]) -> Callable[[IndexedProgram], _Table]:
    """Programs of the same placement and as many microbatches share a table."""

    @lru_cache
    def made(placement: Placement, num_microbatches: int) -> _Table:
        return make(IndexedProgram(placement=placement, num_microbatches=num_microbatches))

    return wraps(make)(lambda program: made(program.placement, program.num_microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedProgram:
    """A program as ids.

    Args:
        placement, num_microbatches, num_splits: those of the program.
        queues: for each rank the ids of its steps; ``~i`` stands for overlapped pair i.
        overlapped: for each overlapped pair the ids of its actions.

    Examples:
        >>> from penstock.schedule.text import parse_csv
        >>> indexed = index_program(parse_csv("0F0,0F1\\n1F0,1F1\\n"))
        >>> indexed.queues, str(indexed.action(3)), indexed.required()[1]
        ([[0, 1], [2, 3]], '1F1', (-2,))
    """

    placement: Placement
    num_microbatches: int
    num_splits: int = 1
    queues: list[list[int]] = field(default_factory=list)
    overlapped: list[tuple[int, ...]] = field(default_factory=list)

    def parts(self, step: int) -> tuple[int, ...]:
        """The ids of a step's actions."""
        return (step,) if step >= 0 else self.overlapped[~step]

    def ids(self) -> Iterator[int]:
        """The id of every action, those of overlapped pairs last."""
        steps = chain.from_iterable(self.queues)
        actions = (step for step in steps if step >= 0)
        return chain(actions, *self.overlapped) if self.overlapped else steps

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(_OPS) * self.placement.num_stages

    @property
    def size(self) -> int:
        """Number of ids; every id is smaller."""
        return self.num_rows * self.num_microbatches

    def row(self, op: Op, stage: int) -> int:
        """The row of an op and a stage."""
        return _NUMBER[op] * self.placement.num_stages + stage

    def id(self, op: Op, stage: int, microbatch: int | None = None) -> int:
        """The id of an action; operations on a whole stage use microbatch 0."""
        return self.row(op, stage) * self.num_microbatches + (microbatch or 0)

    def op_and_stage(self, row: int) -> tuple[Op, int]:
        """The op and the stage of a row."""
        number, stage = divmod(row, self.placement.num_stages)
        return _OPS[number], stage

    def action(self, number: int) -> Action:
        """The action with an id."""
        row, microbatch = divmod(number, self.num_microbatches)
        op, stage = self.op_and_stage(row)
        return action(stage, op, None if op in WHOLE_STAGE else microbatch)

    def rows(self) -> Iterator[tuple[Op, int]]:
        """The op and the stage of each row, in order."""
        return ((op, stage) for op in _OPS for stage in range(self.placement.num_stages))

    def section(self, op: Op) -> slice:
        """The ids of all actions with ``op``."""
        return slice(self.id(op, 0), self.id(op, self.placement.num_stages))

    def passing(self) -> bytes:
        """For each id in one op's section, 1 if the microbatch passes the stage."""
        marks, size, placement = bytearray(), self.num_microbatches, self.placement
        for stage in range(placement.num_stages):
            row, passing = bytearray(size), placement.passing(stage, size)
            row[passing.start :: passing.step] = bytes([1]) * len(passing)
            marks += row
        return bytes(marks)

    def peer(self, op: Op, stage: int) -> tuple[Op, int] | None:
        """The op and stage at the other end of a transfer; None without one on another rank."""
        there, offset = _PEERS.get(op, (op, 0))
        other = self.placement.neighbour(stage, offset)
        if other is None or self.placement.same_rank(stage, other):
            return None
        return there, other

    @_made_once
    def transfers(self) -> Sequence[Transfer | None]:
        """By row, its transfer; None for other rows."""
        rank_of = self.placement.rank_of

        def transfer(op: Op, stage: int) -> Transfer | None:
            if (to := self.peer(op, stage)) is None:
                return None
            offset = self.id(*to) - self.id(op, stage)
            return Transfer(rank_of(stage), rank_of(to[1]), offset, op in SENDS)

        return [transfer(op, stage) for op, stage in self.rows()]

    def _offsets(self, related: Callable[[Op, int], Iterable[tuple[Op, int]]]) -> Offsets:
        return [
            tuple(self.id(*each) - self.id(op, stage) for each in related(op, stage))
            for op, stage in self.rows()
        ]

    @_made_once
    def required(self) -> Offsets:
        """The actions that must be complete before each action may start, without transfers."""
        return self._offsets(lambda op, stage: required(op, stage, self.placement))

    @_made_once
    def blocking(self) -> Offsets:
        """As ``required``, with explicit sends, which require that their receive is posted.

        Posting a receive requires nothing; the use of a received value requires its send.
        """

        def needed(op: Op, stage: int) -> Iterator[tuple[Op, int]]:
            if op not in SEND_OF:
                for local in required(op, stage, self.placement, transfers=True):
                    yield self.peer(*local) or local
                if (posted := self.peer(op, stage)) is not None:
                    yield posted

        return self._offsets(needed)

    def required_chunks(self) -> dict[int, int]:
        """By id, the sequence chunk that must be complete first, which is no fixed offset."""
        return {
            self.id(op, stage, microbatch): self.id(wanted, stage, other)
            for microbatch in range(self.num_microbatches if self.num_splits > 1 else 0)
            for op, (wanted, offset) in IN_SEQUENCE.items()
            if (other := next_chunk(microbatch, offset, self.num_splits)) is not None
            for stage in range(self.placement.num_stages)
        }

    @_made_once
    def fulfilled(self) -> Offsets:
        """The actions that an action completes: itself, and the actions that it covers."""
        return self._offsets(
            lambda op, stage: [(each, stage) for each in (op, *COVERS.get(op, ()))]
        )

    @_made_once
    def receives(self) -> Offsets:
        """The receives, on an action's own rank, of its inputs."""
        needed = partial(required, placement=self.placement, transfers=True)
        return self._offsets(lambda *row: [each for each in needed(*row) if each[0] in SEND_OF])

    @_made_once
    def sends(self) -> Sequence[tuple[int, int, int] | None]:
        """By row, of the send of an action's output: its offset, the offset of its receive, and the
        receiving rank; None without a send."""
        table: list[tuple[int, int, int] | None] = [None] * self.num_rows
        for (send, stage), transfer in zip(self.rows(), self.transfers(), strict=True):
            if transfer is not None and transfer.is_send:
                value = REQUIRES[send][0][0]
                for op in (value, *(op for op, covered in COVERS.items() if value in covered)):
                    offset = self.id(send, stage) - self.id(op, stage)
                    table[self.row(op, stage)] = offset, offset + transfer.offset, transfer.peer
        return table


def index_program(program: Program) -> IndexedProgram:
    """Encode a program, right or wrong in its order, as ids.

    Raises:
        ScheduleError: an action is invalid at any position on its rank (see ``faults``).
    """
    indexed = IndexedProgram(
        placement=program.placement,
        num_microbatches=program.num_microbatches,
        num_splits=program.num_splits,
    )
    for rank, steps in enumerate(program.ranks):
        queue = _index_rank(steps, _valid_rows(indexed, rank), indexed.overlapped)
        if queue is None:
            fault = next(each for each in faults(program) if each.rank == rank)
            raise ScheduleError(fault.message, where=Where(rank=rank, action=fault.action))
        indexed.queues.append(queue)
    return indexed


_Rows: TypeAlias = dict[Op, dict[int, tuple[int, Sequence[int | None]]]]
"""By op and stage, the id of microbatch 0, and the valid microbatches."""


def _valid_rows(program: IndexedProgram, rank: int) -> _Rows:
    placement, size = program.placement, program.num_microbatches
    valid = {stage: placement.passing(stage, size) for stage in placement.stages_of(rank)}
    return {
        op: {s: (program.id(op, s), (None,) if op in WHOLE_STAGE else m) for s, m in valid.items()}
        for op in Op
    }


def _index_rank(
    steps: tuple[Step, ...], rows: _Rows, overlapped: list[tuple[int, ...]]
) -> list[int] | None:
    """The ids of a rank's steps, of which pairs go to ``overlapped``; None if one is invalid."""
    paired = Overlap in set(map(type, steps))
    parts = chain.from_iterable(step.parts for step in steps)
    numbers: list[int] = []
    try:
        for act in parts if paired else cast("tuple[Action, ...]", steps):
            first, valid = rows[act.op][act.stage]
            microbatch = act.microbatch
            if microbatch not in valid:
                return None
            numbers.append(first + (microbatch or 0))
    except KeyError:  # No stage of this rank.
        return None
    if not paired:
        return numbers
    queue, following = [], iter(numbers)
    for step in steps:
        if isinstance(step, Action):
            queue.append(next(following))
        elif _is_pair(step):
            queue.append(~len(overlapped))
            overlapped.append(tuple(islice(following, len(step.parts))))
        else:
            return None
    return queue


def _is_pair(step: Overlap) -> bool:
    ops = [act.op for act in step.parts]
    return len(ops) == 2 and Op.FORWARD in ops and not BACKWARDS.isdisjoint(ops)


def faults(program: Program) -> Iterator[Problem]:
    """The steps that are invalid at any position on their rank."""
    for rank, steps in enumerate(program.ranks):
        for number, step in enumerate(steps):
            if (message := _fault_of(step, rank, program)) is not None:
                yield Problem(rank=rank, step=number, action=str(step), message=message)


def _fault_of(step: Step, rank: int, program: Program) -> str | None:
    stages = program.placement.stages_of(rank)
    if isinstance(step, Overlap) and not _is_pair(step):
        return "an overlapped pair is one forward and one backward"
    for act in step.parts:
        if act.stage not in stages:
            return f"stage {act.stage} is not among the stages of rank {rank}: {runs_of(stages)}"
        passing = program.placement.passing(act.stage, program.num_microbatches)
        if act.microbatch not in ((None,) if act.op in WHOLE_STAGE else passing):
            takes = "none" if act.op in WHOLE_STAGE else f"one of {runs_of(passing)}"
            return f"microbatch {act.microbatch}; {act.op.value} of stage {act.stage} takes {takes}"
    return None


def acknowledgements(program: Program, rank: int) -> dict[Action, int]:
    """The number of sends that each received message acknowledges.

        rank 0   F0 S F1 S F2 S      B0 ◄─ when the gradient for B0 is here, F0's message arrived:
        rank 1         F0 B0 S ─────┘      rank 1 has computed on it before it sent

    A rank keeps a sent tensor until it has arrived. Since every rank knows the program, a received
    message implies which messages its sender had received before.

    Args:
        program: a checked program with its transfers.
        rank: the rank that sends and receives.

    Returns:
        For each computation of ``rank`` that waits for a message: the number of this rank's sends
        to the message's sender, from the step's start, that are known to have arrived.
    """
    indexed = index_program(program)
    width = program.num_microbatches
    ops = [op for op, _ in indexed.rows()]
    # By row: the receiving rank of a send, and the offsets of the sends that an action waits for.
    target = [t.peer if t is not None and t.is_send else None for t in indexed.transfers()]
    awaited = [
        [offset for offset in offsets if ops[(row * width + offset) // width] in SENDS]
        for row, offsets in enumerate(indexed.blocking())
    ]
    orders = [[part for step in queue for part in indexed.parts(step)] for queue in indexed.queues]
    # By send of a peer: the number of this rank's messages that the peer has waited for by then.
    arrived: dict[int, int] = {}
    for peer, order in enumerate(orders):
        sent = (number for number in orders[rank] if target[number // width] == peer != rank)
        place = {number: count for count, number in enumerate(sent, 1)}
        known = 0
        for number in order if place else ():
            if target[number // width] == rank:
                arrived[number] = known
            for offset in awaited[number // width]:
                # Messages between two ranks arrive in order, so one acknowledges all earlier ones.
                known = max(known, place.get(number + offset, 0))
    return {
        indexed.action(number): arrived.get(number + offset, 0)
        for number in orders[rank]
        for offset in awaited[number // width]
    }
