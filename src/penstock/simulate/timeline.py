"""The times of a program under costs: steps and messages as the queues of one replay.

A message is a delay between the sending action and the action that uses its value. A message that
waits for other messages, or blocks its rank, has an id of its own, in a row after those of the
actions (``penstock.schedule.index``):

    rank 0         F0   F1   F2                     one message at a time: the channel between
    rank 0 → 1        ▬▬▬▬▬▬ ▬▬▬▬▬▬ ▬▬▬▬▬▬          two ranks is a queue

    rank 0         F0 ▬▬▬▬▬▬ F1 ▬▬▬▬▬▬ F2 ▬▬▬▬▬▬    transfers that do not overlap: the message is
                                                    a step of its rank

So have the copies of offloads and reloads, with two channels per rank. The action itself only
starts the copy; the backward waits for the end of the reload:

    rank 0         F0 F1 F2 ·  B2 B1 B0
    out               ▬▬▬0
    back                    ▬▬▬0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.check import problems
from penstock.schedule.index import index_program
from penstock.schedule.program import Program
from penstock.schedule.replay import DependencyReplay, needed_results
from penstock.schedule.rules import (
    COMPUTE,
    HOST_TRANSFERS,
    INPUT_GRADS,
    REQUIRES,
    SEND_OF,
    TRANSFERS,
    WHOLE_STAGE,
    required,
)
from penstock.simulate.costs import Costs

__all__ = ["RankTimes", "play_timeline"]

RankTimes: TypeAlias = tuple[tuple[float, ...], ...]
"""For each rank, one time per action in order, with overlapped pairs taken apart."""


def play_timeline(program: Program, costs: Costs) -> tuple[RankTimes, RankTimes, bool]:
    """The starts and ends of all actions, and True if all are computations.

    Arguments as for ``simulate``. A receive ends when its message arrives.

    Raises:
        ScheduleError: the program deadlocks or repeats an action, or the costs do not fit it.
    """
    costs.refuse_misfits(program.placement)
    timeline = _Timeline(program, costs)
    replay = timeline.replay()
    times = None if timeline.repeats() or not replay.play() else timeline.times(replay)
    if times is None:
        found = "\n  ".join(map(str, problems(program)))
        raise ScheduleError(f"the program can't go on:\n  {found}")
    return *times, timeline.ops <= COMPUTE


class _Timeline:
    """A program and its costs, as the queues and the tables of a replay."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.index, self.width = index_program(program), program.num_microbatches
        self.ids = list(self.index.ids())
        self.rows_used = {number // self.width for number in self.ids}
        self.ops = {self.index.op_and_stage(row)[0] for row in self.rows_used}
        self.sends = not self.ops.isdisjoint(TRANSFERS)
        self.durations = [c for op in Op for c in costs.of(op, num_stages=program.num_stages)]
        self.num_rows = len(self.durations)
        self.needs: list[tuple[tuple[int, float], ...]] = [()] * self.num_rows
        # Row of an action → the row of the message or copy that it starts, and the queue of that:
        # two ranks, a rank and the op of a copy, or None for the action's own rank.
        self.started: dict[int, tuple[int, tuple[int, int | Op] | None]] = {}
        # Row of a value → the row that sends it to another rank, and the delay behind that.
        self.arrival: dict[int, tuple[int, float]] = {}
        # Row of a receive → the offset of the end of its message, and the delay.
        self.received: dict[int, tuple[int, float]] = {}
        self._add_messages()
        for row, (op, stage) in enumerate(self.index.rows()):
            self.needs[row] = self._needs(row, op, stage)
        self.reloads: list[int] = []
        if not self.ops.isdisjoint(HOST_TRANSFERS):
            self._add_copies()
        self.queues: list[list[int]] = self.index.queues
        if self.started:
            self._queue_started()

    def _add(self, needed: Sequence[int], duration: float) -> int:
        """Add a row that belongs to no action, after the needed rows; return its number."""
        row = len(self.needs)
        self.needs.append(tuple(((each - row) * self.width, 0.0) for each in needed))
        self.durations.append(duration)
        return row

    def _add_messages(self) -> None:
        """Find the arrival of each message; one that is more than a delay gets a row."""
        costs, placement, index = self.costs, self.program.placement, self.index
        stages = placement.num_stages
        inline = costs.bandwidth is not None and not costs.transfers_overlap
        in_turn = costs.bandwidth is not None and costs.one_message_at_a_time
        for send, stage in product(SEND_OF.values(), range(stages)):
            if (peer := index.peer(send, stage)) is None:
                continue
            ((value, _),) = REQUIRES[send]
            latency = costs.latency_between(stage, peer[1], num_stages=stages)
            transfer = costs.transfer(stage, peer[1], num_stages=stages)
            row = index.row(send if self.sends else value, stage)
            if inline and self.sends:
                self.durations[row] = transfer
            elif inline or in_turn:
                makers = INPUT_GRADS if value is Op.INPUT_GRAD else (value,)
                pair = placement.rank_of(stage), placement.rank_of(peer[1])
                row = self._add([row], transfer)
                for op in (send,) if self.sends else makers:
                    self.started[index.row(op, stage)] = row, None if inline else pair
            else:
                latency += transfer
            self.arrival[index.row(value, stage)] = row, latency

    def _needs(self, row: int, op: Op, stage: int) -> tuple[tuple[int, float], ...]:
        """The offsets and delays of the prerequisites of a row."""
        placement, index, width = self.program.placement, self.index, self.width
        if op in SEND_OF:
            # Posting a receive waits for nothing; actions that use the message wait for it.
            peer = index.peer(op, stage)
            if self.sends and peer is not None:
                ((value, _),) = REQUIRES[peer[0]]
                source, delay = self.arrival[index.row(value, peer[1])]
                self.received[row] = (source - row) * width, delay
            return ()
        found = []
        for needed, other in required(op, stage, placement):
            needed_row, delay = index.row(needed, other), 0.0
            if not placement.same_rank(stage, other):
                needed_row, delay = self.arrival[needed_row]
            found.append(((needed_row - row) * width, delay))
        if self.sends:
            found += [(offset, 0.0) for offset in index.receives()[row]]
        return tuple(found)

    def _add_copies(self) -> None:
        """Add the copies of offloads and reloads; the backward waits for the reload's copy."""
        index, placement = self.index, self.program.placement
        for stage, rank in enumerate(placement.stage_ranks):
            offload, reload = (index.row(op, stage) for op in (Op.OFFLOAD, Op.RELOAD))
            out = self._add([offload], self.durations[offload])
            back = self._add([reload, out], self.durations[reload])
            self.durations[offload] = self.durations[reload] = 0.0
            self.started[offload] = out, (rank, Op.OFFLOAD)
            self.started[reload] = back, (rank, Op.RELOAD)
            if reload in self.rows_used:
                self.reloads.append(back)
                for row in (index.row(op, stage) for op in INPUT_GRADS):
                    self.needs[row] += (((back - row) * self.width, 0.0),)

    def _queue_started(self) -> None:
        """Queue each message and copy behind its action's step, or in its channel."""
        self.queues = []
        channels: dict[object, list[int]] = {}
        for queue in self.index.queues:
            steps: list[int] = []
            self.queues.append(steps)
            for step in queue:
                steps.append(step)
                for part in self.index.parts(step):
                    row, microbatch = divmod(part, self.width)
                    if row in self.started:
                        message, channel = self.started[row]
                        target = steps if channel is None else channels.setdefault(channel, [])
                        target.append(message * self.width + microbatch)
        self.queues += channels.values()

    def replay(self) -> DependencyReplay:
        """A replay of all queues, not played yet."""
        width, needs = self.width, self.needs
        chunks = self.index.required_chunks()
        messages = [row * width + offset for row, (offset, _) in self.received.items()]
        read = chain(messages, chunks.values())
        added = [(0,)] * (len(needs) - self.num_rows)
        fulfilled = [*needed_results(self.index.fulfilled(), needs, width, read), *added]
        overlaps: list[float] | None = None
        if self.costs.overlap is not None:
            lengths = self.costs.per_stage("overlap", num_stages=self.program.num_stages)
            overlaps = [*lengths] * len(Op)
        replay = DependencyReplay(
            self.queues,
            self.index.overlapped,
            num_ids=len(needs) * width,
            width=width,
            needs=needs,
            fulfilled=fulfilled,
            more=chunks,
            durations=self.durations,
            overlap_durations=overlaps,
        )
        # A backward need not wait where nothing is reloaded.
        reloaded = set(chain.from_iterable(self.queues[self.program.num_ranks :]))
        for row in self.reloads:
            for copy in range(row * width, (row + 1) * width):
                if copy not in reloaded:
                    replay.done[copy] = 0.0
        return replay

    def repeats(self) -> bool:
        """True if the program contains an action twice, by itself or as a part of another one."""
        ids, halves = self.ids, {Op.INPUT_GRAD, Op.WEIGHT_GRAD}
        if self.ops & WHOLE_STAGE or (Op.FULL_BACKWARD in self.ops and self.ops & halves):
            rows = zip(self.index.rows(), self.index.fulfilled(), strict=True)
            table = [() if op in WHOLE_STAGE else offsets for (op, _), offsets in rows]
            ids = [number + offset for number in ids for offset in table[number // self.width]]
        return len(set(ids)) < len(ids)

    def times(self, replay: DependencyReplay) -> tuple[RankTimes, RankTimes] | None:
        """The starts and ends of the ranks' actions, after the replay; None if a receive waits for
        a message that no one sends."""
        num_ranks = self.program.num_ranks
        starts, ends = replay.starts[:num_ranks], replay.ends[:num_ranks]
        if self.started or not self.ops <= COMPUTE:
            # The times of messages and copies in channels, by id.
            aside: dict[int, tuple[float, float]] = {}
            for number in range(num_ranks, len(self.queues)):
                times = zip(replay.starts[number], replay.ends[number], strict=True)
                aside.update(zip(self.queues[number], times, strict=True))
            for rank in range(num_ranks):
                shown: list[tuple[float, float]] = []
                parts = chain.from_iterable(map(self.index.parts, self.queues[rank]))
                for part, start, end in zip(parts, starts[rank], ends[rank], strict=True):
                    row, microbatch = divmod(part, self.width)
                    if row in self.received:
                        offset, delay = self.received[row]
                        if replay.done[part + offset] < 0.0:
                            return None
                        end = max(start, replay.done[part + offset] + delay)
                    elif row < self.num_rows and self.index.op_and_stage(row)[0] in HOST_TRANSFERS:
                        start, end = aside[self.started[row][0] * self.width + microbatch]
                    if row < self.num_rows:
                        shown.append((start, end))
                starts[rank], ends[rank] = [a for a, _ in shown], [b for _, b in shown]
        return tuple(map(tuple, starts)), tuple(map(tuple, ends))
