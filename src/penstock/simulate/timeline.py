"""The times of a program under costs: steps and messages as the queues of one replay.

Ids and the readiness rules are those of ``penstock.schedule.index``. A message is a delay between
the sending action and the action that uses its value. A message that waits for other messages, or
blocks its rank, has an id of its own, in a row after those of the actions:

    rank 0         F0   F1   F2                     one message at a time: the channel between
    rank 0 → 1        ▬▬▬▬▬▬ ▬▬▬▬▬▬ ▬▬▬▬▬▬          two ranks is a queue

    rank 0         F0 ▬▬▬▬▬▬ F1 ▬▬▬▬▬▬ F2 ▬▬▬▬▬▬    transfers that do not overlap: the message is
                                                    a step of its rank

Offloads and reloads have two channels per rank, out and back. The action itself only starts the
copy; the backward waits for the end of the reload:

    rank 0         F0 F1 F2 ·  B2 B1 B0
    out               ▬▬▬0
    back                    ▬▬▬0

This module knows neither figures nor families.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import TypeAlias, TypeVar

from penstock.errors import ScheduleError, Where
from penstock.schedule.action import Op
from penstock.schedule.index import ActionIndex, index_program
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay
from penstock.schedule.rules import (
    COMPUTE,
    COPIES,
    INPUT_GRADS,
    SEND_OF,
    TRANSFERS,
    WHOLE_STAGE,
    required,
)
from penstock.simulate.costs import Costs

__all__ = ["ProgramTimes", "RankTimes", "play_timeline"]

RankTimes: TypeAlias = tuple[tuple[float, ...], ...]
"""For each rank, one time per action in order, with overlapped pairs taken apart."""

_T = TypeVar("_T")
_MESSAGES = ((Op.FORWARD, +1), (Op.INPUT_GRAD, -1))
_SEND_FOR = {Op.FORWARD: Op.SEND_F, Op.INPUT_GRAD: Op.SEND_B}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTimes:
    """The times of all actions.

    Args:
        starts: the starts of all actions.
        ends: the ends of all actions; a receive ends when its message arrives.
        computes_only: True if all actions are computations.
    """

    starts: RankTimes
    ends: RankTimes
    computes_only: bool


def play_timeline(
    program: Program, costs: Costs, *, jitter: float = 0.0, seed: int = 0
) -> ProgramTimes:
    """Compute the times of a program.

    Args:
        program: with or without transfers.
        costs: the cost of each action.
        jitter: as ``simulate`` takes it.
        seed: the random seed of the jitter.

    Raises:
        ScheduleError: the program deadlocks or repeats an action, or the costs do not fit it.
    """
    costs.refuse_misfits(program.placement)
    timed = _TimedProgram(program, costs)
    replay = timed.replay(jitter, seed)
    if not replay.play() or timed.repeats(replay):
        # RankTimes do not decide whether a program ends: without messages steps are those of ranks.
        raise _TimedProgram(program, Costs()).failure()
    starts, ends = timed.times(replay)
    return ProgramTimes(starts=starts, ends=ends, computes_only=timed.computes_only)


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The tables of a replay, one entry per row."""

    needs: list[tuple[tuple[int, float], ...]]
    fulfilled: list[tuple[int, ...]]
    durations: list[float]
    overlaps: list[float | None]

    def add(self, needs: tuple[tuple[int, float], ...], duration: float) -> int:
        """Add a row that belongs to no action, and return its number."""
        self.needs.append(needs)
        self.fulfilled.append((0,))
        self.durations.append(duration)
        self.overlaps.append(None)
        return len(self.needs) - 1

    def per_action(self, width: int) -> _Rows:
        """The same tables with a row for each id."""

        def each(values: Iterable[_T]) -> list[_T]:
            return [value for value in values for _ in range(width)]

        return _Rows(
            needs=each(self.needs),
            fulfilled=each(self.fulfilled),
            durations=each(self.durations),
            overlaps=each(self.overlaps),
        )


class _TimedProgram:
    """A program and its costs, as queues and tables."""

    def __init__(self, program: Program, costs: Costs) -> None:
        indexed = index_program(program)
        self.program, self.costs = program, costs
        self.index: ActionIndex = indexed.index
        self.steps, self.overlapped = indexed.queues, indexed.overlapped
        self.width, self.num_stages = program.num_microbatches, program.num_stages
        ops = {self.index.op_and_stage(row)[0] for row in set(self._rows_of(self.steps))}
        self.sends = not ops.isdisjoint(TRANSFERS)
        self.computes_only = ops <= COMPUTE
        self.queues: list[list[int]] = list(self.steps)
        # Row that sends → row of its message, and the delay of the message behind that.
        self.message_of: dict[int, int] = {}
        self.arrival: dict[int, tuple[int, float]] = {}
        # Row of a receive → the offset of its message, and the delay.
        self.received: dict[int, tuple[int, float]] = {}
        # Copies that take no time; a backward need not wait for them.
        self.no_copies: list[int] = []
        overlap: Sequence[float | None] = [None] * self.num_stages
        if costs.overlap is not None:
            overlap = costs.per_stage("overlap", num_stages=self.num_stages)
        self.rows = _Rows(
            needs=[],
            # Reductions and sharding may occur several times per step, and no action depends on
            # them.
            fulfilled=[
                () if op in WHOLE_STAGE else offsets
                for (op, _), offsets in zip(self.index.rows(), self.index.fulfilled(), strict=True)
            ],
            durations=[c for op in Op for c in costs.of(op, num_stages=self.num_stages)],
            overlaps=list(overlap) * len(Op),
        )
        self.num_rows = len(self.rows.durations)
        self._add_messages()
        self._add_copies(not ops.isdisjoint(COPIES))

    def _add_messages(self) -> None:
        """Fill in the needs by row; messages that are more than a delay get rows and queues."""
        costs, placement, index = self.costs, self.program.placement, self.index
        inline = costs.bandwidth is not None and not costs.transfers_overlap
        in_turn = costs.bandwidth is not None and costs.one_message_at_a_time
        messages: list[tuple[int, float]] = []
        for made, offset in _MESSAGES:
            for stage in range(self.num_stages):
                other = placement.neighbour(stage, offset)
                if other is None or placement.same_rank(stage, other):
                    continue
                row = index.row(_SEND_FOR[made] if self.sends else made, stage)
                latency = costs.latency_between(stage, other, num_stages=self.num_stages)
                transfer = costs.transfer(stage, other, num_stages=self.num_stages)
                if inline and self.sends:
                    self.rows.durations[row] = transfer
                    self.arrival[index.row(made, stage)] = row, latency
                elif inline or in_turn:
                    self.message_of[row] = self.num_rows + len(messages)
                    self.arrival[index.row(made, stage)] = self.message_of[row], latency
                    messages.append((row, transfer))
                else:
                    self.arrival[index.row(made, stage)] = row, latency + transfer
        for row, (op, stage) in enumerate(index.rows()):
            self.rows.needs.append(self._needs(row, op, stage))
        for row, transfer in messages:
            message = len(self.rows.needs)
            self.rows.add((((row - message) * self.width, 0.0),), transfer)
        if self.message_of:
            self._queue_messages(inline)

    def _needs(self, row: int, op: Op, stage: int) -> tuple[tuple[int, float], ...]:
        """The offsets and delays of the prerequisites of a row."""
        placement, index, width = self.program.placement, self.index, self.width
        if op in SEND_OF:
            # Posting a receive waits for nothing; actions that use the message wait for it.
            peer = index.peer(op, stage)
            if self.sends and peer is not None:
                made = Op.FORWARD if op is Op.RECV_F else Op.INPUT_GRAD
                source, delay = self.arrival[index.row(made, peer[1])]
                self.received[row] = (source - row) * width, delay
            return ()
        found = []
        for needed, other in required(op, stage, placement):
            needed_row = index.row(needed, other)
            delay = 0.0
            if not placement.same_rank(stage, other):
                needed_row, delay = self.arrival[needed_row]
            found.append(((needed_row - row) * width, delay))
        if self.sends:
            posted = required(op, stage, placement, transfers=True)
            found += [(index.offset(op, stage, r), 0.0) for r in posted if r[0] in SEND_OF]
        return tuple(found)

    def _queue_messages(self, inline: bool) -> None:
        """Queue each message behind its sender's step, or in the channel between the ranks."""
        placement, width, index = self.program.placement, self.width, self.index
        full = index.row(Op.FULL_BACKWARD, 0) - index.row(Op.INPUT_GRAD, 0)
        forwards = self.num_stages
        if not self.sends:
            for row, message in list(self.message_of.items()):
                if row >= forwards:
                    self.message_of[row + full] = message
        channels: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for rank, queue in enumerate(self.steps):
            steps: list[int] = []
            for step in queue:
                steps.append(step)
                for part in self._parts([step]):
                    row, microbatch = divmod(part, width)
                    if row in self.message_of:
                        message = self.message_of[row] * width + microbatch
                        if inline:
                            steps.append(message)
                        else:
                            op, stage = index.op_and_stage(row)
                            forward = op in (Op.FORWARD, Op.SEND_F)
                            target = placement.neighbour(stage, +1 if forward else -1)
                            assert target is not None, "messages go to stages that exist"
                            channels[rank, placement.rank_of(target)].append(message)
            self.queues[rank] = steps
        self.queues += [channels[pair] for pair in sorted(channels)]

    def _add_copies(self, copies: bool) -> None:
        """Queue offloads and reloads in the channels of their ranks."""
        self.first_channel = len(self.queues)
        self.first_copy = len(self.rows.needs)
        if not copies:
            return
        width, index, size = self.width, self.index, self.num_stages
        times = self.costs.offload_times(num_stages=size)
        out, back = self.first_copy, self.first_copy + size
        for first, op, durations in zip((out, back), (Op.OFFLOAD, Op.RELOAD), times, strict=True):
            for stage in range(size):
                row = first + stage
                needs = [((index.row(op, stage) - row) * width, 0.0)]
                if op is Op.RELOAD:
                    # The two channels do not wait for each other by default.
                    needs.append(((out - back) * width, 0.0))
                self.rows.add(tuple(needs), durations[stage])
        channels: list[list[int]] = []
        reloaded: set[int] = set()
        for queue in self.steps:
            outwards, backwards = list[int](), list[int]()
            for step in queue:
                op, stage = index.op_and_stage(max(step, 0) // width)
                if op is Op.OFFLOAD:
                    outwards.append((out + stage) * width + step % width)
                elif op is Op.RELOAD:
                    backwards.append((back + stage) * width + step % width)
            channels += outwards, backwards
            reloaded.update(backwards)
        self.queues += channels
        for stage in {each // width - back for each in reloaded}:
            ids = range((back + stage) * width, (back + stage + 1) * width)
            self.no_copies += [each for each in ids if each not in reloaded]
            for op in INPUT_GRADS:
                row = index.row(op, stage)
                self.rows.needs[row] += (((back + stage - row) * width, 0.0),)

    def replay(self, jitter: float = 0.0, seed: int = 0) -> DependencyReplay:
        """Replay all queues."""
        rows, width = self.rows, self.width
        if jitter:
            rows, width = self._jittered(jitter, seed), 1
        if self.program.num_splits > 1:
            # With sequence chunks the needs depend on the microbatch, so each id has a row.
            rows = rows if width == 1 else rows.per_action(width)
            width = 1
            for step, other in self.index.required_chunks().items():
                rows.needs[step] = (*rows.needs[step], (other - step, 0.0))
        replay = DependencyReplay(
            self.queues,
            self.overlapped,
            num_ids=len(self.rows.needs) * self.width,
            width=width,
            needs=rows.needs,
            fulfilled=rows.fulfilled,
            durations=rows.durations,
            overlap_durations=rows.overlaps if self.costs.overlap is not None else None,
            parts_in_turn=True,
        )
        for copy in self.no_copies:
            replay.done[copy] = 0.0
        return replay

    def _jittered(self, jitter: float, seed: int) -> _Rows:
        """Tables by id in which computations, not messages, take randomly longer."""
        draw = Random(seed).random
        computing = {row for row, (op, _) in enumerate(self.index.rows()) if op in COMPUTE}
        return replace(
            self.rows.per_action(self.width),
            durations=[
                cost * (1 + jitter * draw()) if row in computing else cost
                for row, cost in enumerate(self.rows.durations)
                for _ in range(self.width)
            ],
            overlaps=[
                None if cost is None else cost * (1 + jitter * draw())
                for cost in self.rows.overlaps
                for _ in range(self.width)
            ],
        )

    def repeats(self, replay: DependencyReplay) -> bool:
        """True if a fully replayed program contains an action twice."""
        width, given = self.width, list(map(len, self.rows.fulfilled))
        rows = {
            row + offset // width
            for row in set(self._rows_of(self.queues))
            for offset in self.rows.fulfilled[row]
        }
        done = sum(width - replay.done[row * width : (row + 1) * width].count(-1.0) for row in rows)
        return done - len(self.no_copies) < sum(map(given.__getitem__, self._rows_of(self.queues)))

    def _rows_of(self, queues: Sequence[Sequence[int]]) -> Iterator[int]:
        """The row of each action, in no particular order; runs at C speed."""
        alone = filter((0).__le__, chain.from_iterable(queues))
        return map(self.width.__rfloordiv__, chain(alone, *self.overlapped))

    def times(self, replay: DependencyReplay) -> tuple[RankTimes, RankTimes]:
        """The starts and ends of the ranks' actions."""
        num_ranks, width = self.program.num_ranks, self.width
        starts, ends = replay.starts[:num_ranks], replay.ends[:num_ranks]
        if self.computes_only and not self.message_of:
            return tuple(map(tuple, starts)), tuple(map(tuple, ends))
        for rank in range(num_ranks):
            copies = [
                iter(zip(replay.starts[channel], replay.ends[channel], strict=True))
                for channel in range(self.first_channel + 2 * rank, len(replay.starts))[:2]
            ]
            shown: list[tuple[float, float]] = []
            timed = zip(self._parts(self.queues[rank]), starts[rank], ends[rank], strict=True)
            for part, start, end in timed:
                row = part // width
                if row >= self.num_rows:
                    continue
                op, _ = self.index.op_and_stage(row)
                if op in COPIES:
                    # The times of a copy come from its channel.
                    start, end = next(copies[op is Op.RELOAD])
                elif row in self.received:
                    offset, delay = self.received[row]
                    sent = replay.done[part + offset]
                    if sent < 0.0:
                        raise _failed([self._never_sent(rank, part)])
                    end = max(start, sent + delay)
                shown.append((start, end))
            starts[rank], ends[rank] = [a for a, _ in shown], [b for _, b in shown]
        return tuple(map(tuple, starts)), tuple(map(tuple, ends))

    def _never_sent(self, rank: int, receive: int) -> str:
        op, stage = self.index.op_and_stage(receive // self.width)
        peer = self.index.peer(op, stage)
        assert peer is not None, "a receive that waits has a sender"
        send = self.index.action(self.index.id(*peer, receive % self.width))
        return f"rank {rank} ({self.index.action(receive)}) waits for {send}, which is never sent"

    def _parts(self, queue: Sequence[int]) -> Iterator[int]:
        """The ids of a queue, with overlapped pairs taken apart."""
        for step in queue:
            yield from (step,) if step >= 0 else self.overlapped[~step]

    def failure(self) -> ScheduleError:
        """The error for a program that repeats an action or deadlocks."""
        planned = set[int]()
        for part in chain.from_iterable(map(self._parts, self.steps)):
            for offset in self.rows.fulfilled[part // self.width]:
                if part + offset in planned:
                    act = self.index.action(part + offset)
                    where = Where(stage=act.stage, microbatch=act.microbatch, action=str(act))
                    return ScheduleError("done twice in the program; remove one", where=where)
                planned.add(part + offset)
        replay = self.replay()
        replay.play()
        waits = []
        for rank, missing in enumerate(replay.awaits[: self.program.num_ranks]):
            if missing is not None:
                place, queue = replay.positions[rank], self.steps[rank]
                at = ";".join(str(self.index.action(part)) for part in self._parts([queue[place]]))
                missing = self._begun_by(missing)
                why = "comes only later" if missing in planned else "is not in the program"
                waits.append(
                    f"rank {rank}, step {place} of {len(queue)} ({at}) waits for "
                    f"{self.index.action(missing)}, which {why}"
                )
        return _failed(waits)

    def _begun_by(self, missing: int) -> int:
        """The action that starts a copy; any other id unchanged."""
        row, microbatch = divmod(missing, self.width)
        if row < self.first_copy:
            return missing
        reload, stage = divmod(row - self.first_copy, self.num_stages)
        return self.index.id(Op.RELOAD if reload else Op.OFFLOAD, stage, microbatch)


def _failed(waits: Sequence[str]) -> ScheduleError:
    return ScheduleError("the program can't go on:\n  " + "\n  ".join(sorted(waits)))
