"""The cause of each step's start, and the critical path that determines the makespan.

    rank 0   F0 F1 ·  ·  ·  B0 B1        B0 on rank 0 waited for B0 on rank 1, that one for its
    rank 1      F0 ·  B0 F1 B1           rank, whose step before was F0, and that for F0 on rank 0

A step starts when its rank is free, or when the last result that it needs has arrived. Both follow
from the recorded times, so measured and simulated steps are treated alike.
"""

from __future__ import annotations

from collections.abc import Container

from penstock.schedule.action import Action, Op, action
from penstock.schedule.placement import Placement
from penstock.schedule.rules import COMPUTE, COVERS, HOST_TRANSFERS, REQUIRES
from penstock.simulate.costs import Costs
from penstock.trace import Span, Trace

__all__ = ["StepCauses"]

_STEPS = COMPUTE | HOST_TRANSFERS
_SENDING = {Op.FORWARD: +1, Op.INPUT_GRAD: -1, Op.FULL_BACKWARD: -1}
# The relative tolerance of sums of the same costs in another order.
_CLOSE = 1e-9
# The longest pause between two actions of a busy rank, as a share of a measured step.
_PAUSE = 0.002


class StepCauses:
    """The cause of each step's start.

    Args:
        trace: a step; its transfers between ranks are left out.
        costs: the costs of a simulation; None for a measured step.
        placement: the placement; given together with ``costs``.
    """

    def __init__(
        self, trace: Trace, *, costs: Costs | None = None, placement: Placement | None = None
    ) -> None:
        self._costs, self._placement = costs, placement
        self._pause = trace.makespan * (_PAUSE if trace.unit == "s" else _CLOSE)
        self._steps: list[list[list[Span]]] = [[] for _ in range(trace.num_ranks)]
        # By action, or action covered by it: its span, its rank, and the index of its step.
        self._places: dict[Action, tuple[Span, int, int]] = {}
        pair_of = trace.pair_of()
        for span in trace.spans:
            if span.action.op not in _STEPS:
                continue
            steps, pair = self._steps[span.rank], pair_of.get(span.action)
            if pair is not None and steps and pair_of.get(steps[-1][0].action) == pair:
                steps[-1].append(span)
            else:
                steps.append([span])
            act, place = span.action, (span, span.rank, len(steps) - 1)
            for op in (act.op, *COVERS.get(act.op, ())):
                self._places.setdefault(action(act.stage, op, act.microbatch), place)

    def cause(self, span: Span) -> Span | None:
        """The span that delayed ``span``: a result that it needs, or the step before it on its
        rank; None if there is none."""
        _, rank, index = self._places[span.action]
        missing = self._missing(rank, index)
        if missing is not None:
            return self._places[missing][0]
        spans = self._steps[rank][index]
        if span in spans[1:]:
            return spans[spans.index(span) - 1]
        before = self._before(rank, index)
        return None if before < 0 else max(self._steps[rank][before][::-1], key=lambda s: s.end)

    def critical_path(self) -> tuple[Span, ...]:
        """The computations on the critical path to the last end, by start."""
        steps = [spans for of_rank in self._steps for spans in reversed(of_rank)]
        computed = [spans for spans in steps if spans[0].action.op in COMPUTE]
        # Of equal ends the first: the lowest rank's last step.
        latest = max(computed, key=lambda spans: max(span.end for span in spans), default=None)
        span = None if latest is None else latest[0]
        found: dict[Action, Span] = {}
        while span is not None and span.action not in found:
            _, rank, index = self._places[span.action]
            spans = self._steps[rank][index]
            found |= {each.action: each for each in reversed(spans)}
            span = self.cause(spans[0])
        return tuple(each for each in reversed(found.values()) if each.action.op in COMPUTE)

    def _missing(self, rank: int, index: int) -> Action | None:
        """The result that delayed a step after its rank was free."""
        spans = self._steps[rank][index]
        first = spans[0]
        if first.start <= self._free(rank, index) + self._pause:
            return None
        if first.action.op in HOST_TRANSFERS:
            # The copy before it in the same direction may have occupied the channel.
            copy = self._before(rank, index, (first.action.op,))
            ahead = self._steps[rank][copy][0] if copy >= 0 else None
            if ahead is not None and ahead.end >= first.start - self._pause:
                return ahead.action
        parts = [span.action for span in spans]
        needed = [
            (self._arrival(part.stage, act, rank), act)
            for part in parts
            for act in self._needs(part)
            if act not in parts and self._places[act][0].start <= spans[-1].end
        ]
        return max(needed, default=(None, None), key=lambda each: each[0])[1]

    def _needs(self, act: Action) -> list[Action]:
        """The actions of the step that ``act`` waits for."""
        needed = [
            action(act.stage + offset, op, act.microbatch)
            for op, offset in REQUIRES[act.op]
            if act.stage + offset >= 0
        ]
        if act.op in COMPUTE and act.op is not Op.FORWARD:
            needed.append(action(act.stage, Op.RELOAD, act.microbatch))
        return [each for each in needed if each in self._places]

    def _before(self, rank: int, index: int, ops: Container[Op] = COMPUTE) -> int:
        """The index of the last step before one with an op of ``ops``; -1 if there is none."""
        steps, index = self._steps[rank], index - 1
        while index >= 0 and steps[index][0].action.op not in ops:
            index -= 1
        return index

    def _free(self, rank: int, index: int) -> float:
        """The time at which a rank finished the previous step, and sent its results."""
        before, costs, placement = self._before(rank, index), self._costs, self._placement
        if before < 0:
            return 0.0
        spans = self._steps[rank][before]
        free = max(span.end for span in spans)
        if costs is None or placement is None or costs.transfers_overlap:
            return free
        sending = 0.0
        for act in (span.action for span in spans if span.action.op in _SENDING):
            other = placement.neighbour(act.stage, _SENDING[act.op])
            if other is not None and not placement.same_rank(act.stage, other):
                sending += costs.transfer(act.stage, other, num_stages=placement.num_stages)
        return free + sending

    def _arrival(self, stage: int, act: Action, rank: int) -> tuple[bool, float]:
        """A sort key for results by their arrival on a rank, for one of its stages."""
        _, maker, index = self._places[act]
        end = max(span.end for span in self._steps[maker][index])
        if maker != rank and self._costs is not None and self._placement is not None:
            end += self._costs.travel(act.stage, stage, self._placement)
        # The rank's own results are available as soon as it is free.
        return maker != rank or act.op in HOST_TRANSFERS, end
