"""Run overlapped pairs of a forward and a backward on two streams, or by a user's function.

    program     1F2      (0F3;1B0)      1B1
    stream 0          ┌─ 0F3 ───┐                  the caller's stream
    stream 1    1F2 ──┴─ 1B0 ───┴─────  1B1        a stream beside it

All but the two parts of a pair is ordered as on one stream. Autograd runs a backward on the stream
of its forward, so a microbatch keeps to one stream in a stage, and a pair's forward takes the
stream that its backward does not. Messages are posted on the stream of their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from penstock.errors import StageError
from penstock.runtime.executor import BoundAction
from penstock.schedule.action import Op, Overlap, Step
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import BACKWARDS, TRANSFERS
from penstock.stage.device_streams import DeviceStreams, Stream

__all__ = ["DualStreams", "PairFunction", "assign_streams", "bind_pair", "takes_streams"]

PairFunction: TypeAlias = Callable[..., Any]
"""``function(pair, forward, backward)``: the step, and a callable for each of its parts."""


def takes_streams(program: Program) -> bool:
    """True if the program's overlapped pairs may run on two streams.

    Chunks of a sequence pass on their state, and sharded parameters are gathered on one stream.
    """
    if not program.overlapped_pairs or program.num_splits > 1:
        return False
    return not any(action.op is Op.UNSHARD for action in program.actions())


# --- two streams ---------------------------------------------------------------------------------


def assign_streams(
    steps: Iterable[Step], placement: Placement
) -> dict[tuple[int, int | None], int]:
    """The stream (0 or 1) of each stage's microbatches, from one process's steps in order.

    Examples:
        >>> from penstock.schedule.registry import build
        >>> program = build("dualpipev", ranks=1, microbatches=2)
        >>> assign_streams(program.ranks[0], program.placement)
        {(0, 0): 0, (1, 0): 1, (0, 1): 0, (1, 1): 1}
    """
    found: dict[tuple[int, int | None], int] = {}
    for step in steps:
        backwards = [(a.stage, a.microbatch) for a in step.parts if a.op in BACKWARDS]
        for action in step.parts:
            if action.op is Op.FORWARD:
                local = placement.stages_of(placement.rank_of(action.stage))
                stream = local.index(action.stage) % 2
                if isinstance(step, Overlap):
                    stream = 1 - found[backwards[0]]
                found[action.stage, action.microbatch] = stream
    return found


class DualStreams:
    """Two streams for the actions of one process, entered around a step."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._beside = streams.new()
        self._both: tuple[Stream, Stream] = (self._beside, self._beside)
        self._now: Stream = None
        # By stream, the tensors used on it whose memory may belong to the other one.
        self._held: tuple[list[Any], list[Any]] = ([], [])

    def add_prologues(
        self,
        steps: Sequence[Step],
        bound: Sequence[Sequence[Sequence[BoundAction]]],
        placement: Placement,
    ) -> list[BoundAction]:
        """All bound actions (by step and part) in order, with their stream switch as prologue."""
        stream_of = assign_streams(steps, placement)
        found: list[BoundAction] = []
        for step, parts in zip(steps, bound, strict=True):
            in_pair = isinstance(step, Overlap)
            for action, actions in zip(step.parts, parts, strict=True):
                stream = stream_of.get((action.stage, action.microbatch), 0)
                # The streams that wait for the other one: both where a pair begins.
                waiting: tuple[int, ...] = (stream, 1 - stream) if in_pair else (stream,)
                if action.op in TRANSFERS or (in_pair and action is not step.parts[0]):
                    waiting = ()
                for each in actions:
                    found.append(replace(each, prologue=partial(self._enter, stream, waiting)))
                    waiting = ()
        return found

    def _enter(self, number: int, waiting: Sequence[int]) -> None:
        for each in waiting:
            self._streams.follow(self._both[each], self._both[1 - each])
            self._held[1 - each].clear()
        stream = self._both[number]
        if self._now is not stream:
            self._streams.switch(stream)
            self._now = stream

    def keep_alive(self, tensors: Iterable[Tensor | None]) -> None:
        """Hold tensors that this stream uses until the other stream, to which their memory may
        belong, waits for this one.

        ``record_stream`` would hold them until the device is done, however far the host is ahead.
        """
        if self._now is not None:  # else not within a step of these streams
            self._held[self._both.index(self._now)].extend(tensors)

    def __enter__(self) -> None:
        self._now = self._streams.current()
        self._both = (self._now, self._beside)
        self._streams.follow(self._beside, self._now)

    def __exit__(self, *_: object) -> None:
        caller, beside = self._both
        self._streams.switch(caller)
        self._streams.follow(caller, beside)
        self._streams.follow(beside, caller)
        for held in self._held:
            held.clear()
        self._both = (self._beside, self._beside)
        self._now = None


# --- a user's function ---------------------------------------------------------------------------


def bind_pair(
    function: PairFunction, pair: Step, bound: Sequence[Sequence[BoundAction]]
) -> list[BoundAction]:
    """Bind a pair to a function that runs its parts, perhaps in threads of its own.

    Returns the waits of both parts, the call of the function, and per part a check that it has run,
    which re-raises the part's exception at the part's own place.
    """
    parts = [_Part(actions[-1]) for actions in bound]
    waits = [action for actions in bound for action in actions[:-1]]
    checks = [BoundAction(part.action, part.finish) for part in parts]
    return [*waits, BoundAction(checks[0].action, partial(_call, function, pair, parts)), *checks]


class _Part:
    """One part of a pair: called once per step, in any thread."""

    def __init__(self, bound: BoundAction) -> None:
        self.action, self._run = bound.action, bound.run
        self.begin()

    def begin(self) -> None:
        self._has_begun = self._is_done = False
        self.error: BaseException | None = None

    def __call__(self) -> None:
        if self._has_begun:
            raise StageError(
                f"the custom function has called {self.action} twice; it calls each part once"
            )
        self._has_begun = True
        try:
            self._run()
        except BaseException as error:
            self.error = error
            raise
        self._is_done = True

    def finish(self) -> None:
        error, self.error = self.error, None
        if error is None and not self._is_done:
            error = StageError(
                "the custom function has returned without calling it; it calls each part once, and "
                "joins the threads that it has started"
            )
        if error is not None:
            raise error


def _call(function: PairFunction, pair: Step, parts: Sequence[_Part]) -> None:
    for part in parts:
        part.begin()
    try:
        function(pair, *parts)
    except Exception:
        # The exception of a part is the cause, and is raised in its own place.
        if all(part.error is None for part in parts):
            raise
