"""Blocks of a forward and a backward, overlapped on two streams: who runs where, and when.

    program    1F2      (0F3;1B0)      1B1
    lane 0           ┌─ 0F3 ───┐                  the caller's stream
    lane 1     1F2 ──┴─ 1B0 ───┴─────  1B1        a stream beside it

The two parts of a block run side by side; everything else is ordered as if there were one stream,
so that only the parts of one block can meet. A backward runs where its forward did, because
autograd puts it there: a microbatch keeps to one lane in a stage, and the forward of a block takes
the lane that the backward beside it does not. Messages are posted on the lane of what they carry,
and wait for no other. What comes from the other lane is kept from being reused before this one is
done with it.

Lanes order calls of one process. They know neither what calls do nor the schedule's family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import TracebackType

from torch import Tensor

from penstock.runtime.call import Enter
from penstock.schedule.action import Action, Op, Step
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import BACKWARDS, SENDS, TRANSFERS
from penstock.stage.device_streams import DeviceStreams, Stream

__all__ = ["Lanes", "can_overlap", "has_blocks", "why_in_turn"]


# A stage and a microbatch → 0 or 1.
LaneOf = Mapping[tuple[int, int | None], int]


def has_blocks(program: Program) -> bool:
    """Whether a program has blocks at all."""
    return any(len(step.parts) > 1 for rank in program.ranks for step in rank)


def why_in_turn(
    program: Program, streams: DeviceStreams | None, device: str, *, wanted: bool
) -> str | None:
    """Why the parts of the program's blocks run in turn; None where they overlap.

    Args:
        program: a program with blocks.
        streams: those of the device, if it has any.
        device: what the device is called.
        wanted: whether overlap was asked for.
    """
    if streams is None:
        return f"a {device} device has no streams"
    if not wanted:
        return "overlap=True was not passed"
    if program.num_splits > 1:
        return "the pieces of a sequence hand on their state"
    if any(act.op is Op.UNSHARD for act in program.actions()):
        return "parameters are sharded"
    return None


def can_overlap(step: Step) -> bool:
    """Whether a step is a forward and a backward of another microbatch or another stage."""
    if len(step.parts) != 2:
        return False
    one, other = step.parts
    kinds = {one.op, other.op}
    apart = (one.stage, one.microbatch) != (other.stage, other.microbatch)
    return Op.FORWARD in kinds and bool(kinds & BACKWARDS) and apart


def assign(steps: Iterable[Step], placement: Placement) -> dict[tuple[int, int | None], int]:
    """The lane of each stage's microbatches, from the steps of one process in their order.

    Example:
        >>> from penstock.schedule.registry import build
        >>> program = build("dualpipev", ranks=1, microbatches=2)
        >>> assign(program.ranks[0], program.placement)
        {(0, 0): 0, (1, 0): 1, (0, 1): 0, (1, 1): 1}
    """
    lanes: dict[tuple[int, int | None], int] = {}
    for step in steps:
        forwards = [act for act in step.parts if act.op is Op.FORWARD]
        for act in forwards:
            own = placement.stages_of(placement.rank_of(act.stage)).index(act.stage) % 2
            lanes[act.stage, act.microbatch] = own
        if can_overlap(step):
            (forward,) = forwards
            (beside,) = (act for act in step.parts if act is not forward)
            lanes[forward.stage, forward.microbatch] = 1 - lanes[beside.stage, beside.microbatch]
    return lanes


class WaitsFor(Enum):
    """What a call waits for, beside what its own lane did before."""

    NOTHING = "a message, on the lane of what it carries"
    ALL = "all that was asked for so far"
    FORK = "the same, on both lanes: a block begins"


@dataclass(slots=True)
class _Planner:
    """Walks through the calls in their order and says for each what it waits for."""

    lane_of: LaneOf
    # Whether a lane was given something that the other one has not waited for yet.
    _ahead: list[bool] = field(default_factory=lambda: [False, False])

    def place(self, act: Action) -> int:
        """The lane of an action; what is on no microbatch runs on the caller's stream."""
        return self.lane_of.get((act.stage, act.microbatch), 0)

    def order(self, act: Action, *, in_block: bool, first: bool) -> WaitsFor:
        """What an action waits for; ``first``: of the calls of its step."""
        lane = self.place(act)
        if act.op in TRANSFERS:
            # What is sent may have to be made contiguous first.
            self._ahead[lane] |= act.op in SENDS
            return WaitsFor.NOTHING
        found = WaitsFor.NOTHING
        if in_block:
            if first and any(self._ahead):
                found = WaitsFor.FORK
                self._ahead = [False, False]
        elif self._ahead[1 - lane]:
            found = WaitsFor.ALL
            self._ahead[1 - lane] = False
        self._ahead[lane] = True
        return found


class Lanes:
    """Two streams, on which the calls of one process run.

    Entered around a step: then the caller's stream is lane 0, and in the end has waited for lane 1.

    Args:
        streams: those of the device.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._beside = streams.new()
        self._lanes: tuple[Stream, Stream] = (self._beside, self._beside)
        self._now: Stream = None

    def plan(self, steps: Sequence[Step], placement: Placement) -> list[list[tuple[Enter, Enter]]]:
        """For each step and each of its parts, what to call before the first call of that part,
        and before each of its others: a part that waits for a message, and then runs, has two."""
        planner = _Planner(assign(steps, placement))
        plans: list[list[tuple[Enter, Enter]]] = []
        for step in steps:
            in_block = can_overlap(step)
            plan: list[tuple[Enter, Enter]] = []
            for number, act in enumerate(step.parts):
                order = planner.order(act, in_block=in_block, first=number == 0)
                enter = partial(self._enter, planner.place(act))
                plan.append((partial(enter, order), partial(enter, WaitsFor.NOTHING)))
            plans.append(plan)
        return plans

    def _enter(self, lane: int, order: WaitsFor) -> None:
        lanes = self._lanes
        stream = lanes[lane]
        if order is not WaitsFor.NOTHING:
            self._streams.follow(stream, lanes[1 - lane])
            if order is WaitsFor.FORK:
                self._streams.follow(lanes[1 - lane], stream)
        if self._now is not stream:
            self._streams.switch(stream)
            self._now = stream

    def adopt(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep tensors that may come from the other lane until the current one is done."""
        if self._now is None:
            return  # the program has been bound anew, to be played on one stream
        for tensor in tensors:
            if tensor is not None:
                self._streams.keep(tensor, self._now)

    def __enter__(self) -> None:
        self._now = self._streams.current()
        self._lanes = (self._now, self._beside)
        self._streams.follow(self._beside, self._now)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        caller, beside = self._lanes
        self._streams.switch(caller)
        self._streams.follow(caller, beside)
        self._lanes = (self._beside, self._beside)
        self._now = None
