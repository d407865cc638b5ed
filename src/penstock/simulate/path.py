"""Why each step of a simulated run began when it did, and which steps its length comes from.

    rank 0   F0 F1 ·  ·  ·  B0 B1        B0 on rank 0 waited for B0 on rank 1, that one for its
    rank 1      F0 ·  B0 F1 B1           rank, whose step before was F0, and that for F0 on rank 0

A step begins when its rank is free, or when the last result that it needs has come. This is read
off the times afterwards; this module knows neither the engine nor how times come about.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, action
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE, COPIES, COVERS, RECEIVE_FOR, prerequisites
from penstock.simulate.costs import Costs
from penstock.trace import Span

__all__ = ["Waits"]

_RECEIVES = frozenset(RECEIVE_FOR.values())
# What a rank begins and does not wait for.
_ASIDE = _RECEIVES | COPIES
# Times that are as good as one: sums of the same costs in another order.
_CLOSE = 1e-9


class Waits:
    """What each step of a run waited for.

    Args:
        program: what was run.
        costs: what it was simulated with.
        starts: per rank, the start of each of its actions, blocks taken apart.
        ends: likewise, the ends.
    """

    __slots__ = ("_costs", "_ends", "_firsts", "_places", "_program", "_starts", "_transfers")

    def __init__(
        self,
        program: Program,
        costs: Costs,
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
    ) -> None:
        self._program = program
        self._costs = costs
        self._starts = starts
        self._ends = ends
        self._transfers = program.has_transfers
        # Per rank: the place among its actions of each step's first one.
        self._firsts: list[list[int]] = []
        # An action, or what it covers: its rank and step.
        self._places: dict[Action, tuple[int, int]] = {}
        for rank, steps in enumerate(program.ranks):
            firsts, count = [], 0
            for index, step in enumerate(steps):
                firsts.append(count)
                for part in step.parts:
                    count += 1
                    for op in (part.op, *COVERS.get(part.op, ())):
                        done = action(part.stage, op, part.microbatch)
                        self._places.setdefault(done, (rank, index))
            self._firsts.append([*firsts, count])

    def waited_for(self, span: Span) -> Action | None:
        """What the action of ``span`` was held up by; None where only by its own rank.

        Raises:
            ScheduleError: the program has no such action.
        """
        place = self._places.get(span.action)
        if place is None:
            raise ScheduleError(f"{span.action} is not in program {self._program.name!r}")
        missing = self._missing(*place)
        if missing is None:
            return None
        # A full backward stands in for the input gradient that was asked for.
        rank, index = self._places[missing]
        for part in self._program.ranks[rank][index].parts:
            same = (part.stage, part.microbatch) == (missing.stage, missing.microbatch)
            if same and missing.op in (part.op, *COVERS.get(part.op, ())):
                return part
        return missing

    def critical_path(self) -> tuple[Span, ...]:
        """The computations that the last one's end comes from, by start."""
        place = self._last()
        found: list[Span] = []
        while place is not None:
            rank, index = place
            first, stop = self._firsts[rank][index : index + 2]
            parts = self._program.ranks[rank][index].parts
            for part, at in zip(parts[::-1], range(stop - 1, first - 1, -1), strict=True):
                if part.op in COMPUTE:
                    start, end = self._starts[rank][at], self._ends[rank][at]
                    found.append(Span(rank=rank, action=part, start=start, end=end))
            missing = self._missing(rank, index)
            place = self._before(rank, index) if missing is None else self._places[missing]
        return tuple(reversed(found))

    def _last(self) -> tuple[int, int] | None:
        """The computing step that ends last."""
        best: tuple[float, int, int] | None = None
        for rank, steps in enumerate(self._program.ranks):
            computing = (i for i in reversed(range(len(steps))) if self._computes(rank, i))
            index = next(computing, None)
            if index is not None:
                end = self._ends[rank][self._firsts[rank][index + 1] - 1]
                if best is None or end > best[0]:
                    best = end, rank, index
        return best[1:] if best is not None else None

    def _computes(self, rank: int, index: int) -> bool:
        return self._program.ranks[rank][index].parts[0].op in COMPUTE

    def _missing(self, rank: int, index: int) -> Action | None:
        """The result that held up a step after its rank was free."""
        parts = self._program.ranks[rank][index].parts
        first = self._firsts[rank][index]
        begun = self._starts[rank][first]
        if parts[0].op in _RECEIVES:
            # A receive is posted at once; what takes time is its message.
            begun = self._ends[rank][first]
        free = self._free(self._before(rank, index))
        if begun <= free + _CLOSE * max(1.0, abs(begun)):
            return None
        if parts[0].op in COPIES and (ahead := self._copy_before(rank, index)) is not None:
            return ahead
        needed = [
            (part.stage, before)
            for part in parts
            for before in prerequisites(
                part,
                self._program.placement,
                transfers=self._transfers,
                num_splits=self._program.num_splits,
            )
            if before not in parts and before in self._places
        ]
        needed += [
            (part.stage, back)
            for part in parts
            if part.op in COMPUTE - {Op.FORWARD}
            and (back := action(part.stage, Op.RELOAD, part.microbatch)) in self._places
        ]
        last = max(needed, key=lambda need: self._arrival(need[0], need[1], rank), default=None)
        return None if last is None else last[1]

    def _before(self, rank: int, index: int) -> tuple[int, int] | None:
        """The last step that a rank had to do before another: not what runs aside."""
        steps = self._program.ranks[rank]
        earlier = (i for i in reversed(range(index)) if steps[i].parts[0].op not in _ASIDE)
        before = next(earlier, None)
        return None if before is None else (rank, before)

    def _copy_before(self, rank: int, index: int) -> Action | None:
        """The copy the same way that kept a copy waiting for its channel."""
        steps, begun = self._program.ranks[rank], self._starts[rank][self._firsts[rank][index]]
        op = steps[index].parts[0].op
        for i in reversed(range(index)):
            if steps[i].parts[0].op is op:
                end = self._ends[rank][self._firsts[rank][i]]
                return steps[i].parts[0] if end >= begun - _CLOSE * max(1.0, begun) else None
        return None

    def _free(self, place: tuple[int, int] | None) -> float:
        """When a rank had done the step at ``place``."""
        if place is None:
            return 0.0
        rank, index = place
        free = self._ends[rank][self._firsts[rank][index + 1] - 1]
        if not self._costs.transfers_overlap and not self._transfers:
            free += sum(map(self._sending, self._program.ranks[rank][index].parts))
        return free

    def _sending(self, part: Action) -> float:
        """How long an action's message holds up its rank where transfers do not overlap."""
        placement = self._program.placement
        offset = {Op.FORWARD: +1, Op.INPUT_GRAD: -1, Op.FULL_BACKWARD: -1}.get(part.op)
        other = None if offset is None else placement.neighbour(part.stage, offset)
        if other is None or placement.same_rank(part.stage, other):
            return 0.0
        return self._costs.transfer(part.stage, other, num_stages=placement.num_stages)

    def _arrival(self, stage: int, needed: Action, rank: int) -> tuple[bool, float]:
        """A key that orders results by when they came to ``rank``, for a stage of it."""
        holder, index = self._places[needed]
        end = self._ends[holder][self._firsts[holder][index + 1] - 1]
        if holder != rank:
            end += self._costs.travel(needed.stage, stage, self._program.placement)
        # What the rank itself has made was there when the rank was free.
        return holder != rank or needed.op in _ASIDE, end
