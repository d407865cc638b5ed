"""A program bound to this process: a runner per stage and an executor of the actions.

Training and evaluation are two bound programs over the same stages.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from torch import Tensor

from penstock.runtime.comm.base import RecvQueue, Transport
from penstock.runtime.config import RunConfig
from penstock.runtime.executor import BoundAction, Executor
from penstock.runtime.overlap import (
    DualStreams,
    PairFunction,
    bind_pair,
    can_overlap,
    why_sequential,
)
from penstock.runtime.stage_runner import Neighbor, StageRunner
from penstock.runtime.step import StepState
from penstock.runtime.step_sync import StepSync
from penstock.schedule.action import Op
from penstock.schedule.channels import acknowledgements
from penstock.schedule.check import global_order
from penstock.schedule.program import CheckedProgram
from penstock.stage.device_streams import DeviceStreams
from penstock.stage.stage import MicrobatchState, Stage

__all__ = ["BoundProgram"]

_log = logging.getLogger(__name__)

# The ops that change the forward of their microbatch.
_FORWARD_MODES = frozenset({Op.INPUT_GRAD, Op.RECOMPUTE, Op.OFFLOAD})


class BoundProgram:
    """One program, bound to this process's stages and transports.

    Args:
        program: the program.
        config: the run options.
        stages: this process's stages, by index.
        transports: one per rank of this process, in rank order.
        streams: the device's streams.
        train: True for training, False for evaluation.

    Attributes:
        sync: the start and the end of steps on all ranks.
        runners: the stage runners, by stage.
        executor: runs the bound actions.
    """

    def __init__(
        self,
        program: CheckedProgram,
        config: RunConfig,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        streams: DeviceStreams | None = None,
        *,
        train: bool,
    ) -> None:
        self.train = train
        self.program = program
        self._config = config
        self._stages = stages
        self._transports = transports
        self._streams = streams
        self._is_alone = len(transports) == program.num_ranks
        self.sync = StepSync(program, config, stages, transports, train=train)
        self._log_later: str | None = None
        self._pair_function: PairFunction | None = None
        self._dual_streams = self._make_dual_streams()
        self.runners = self._make_runners()
        self.executor = Executor(self._bind(), streams)

    def rebind(self, program: CheckedProgram) -> None:
        """Switch to another program with the same computations and messages; keeps caches."""
        self.program = program
        if self._dual_streams is not None:
            self._dual_streams = self._make_dual_streams()
        self.executor = Executor(self._bind(), self._streams)

    def run_pairs_by(self, function: PairFunction) -> None:
        """Run the overlapped pairs by ``function`` (see ``runtime/overlap.py``)."""
        self._pair_function, self._dual_streams, self._log_later = function, None, None
        self.executor = Executor(self._bind(), self._streams)

    # --- a step ------------------------------------------------------------------------------

    def begin(self, step: StepState) -> None:
        """Begin a step on all ranks (see ``StepSync.begin``)."""
        self.sync.begin(step)
        forget = self.sync.forgets_shapes
        resends = [runner.begin(step, forget=forget) for runner in self.runners.values()]
        # Receives that wait for metadata are posted late, so that a bounded sender could deadlock.
        unbounded = self._config.dynamic_shapes or self.sync.has_new_shapes or any(resends)
        for transport in self._transports:
            transport.allow_unbounded_sends(unbounded)

    def run(self) -> None:
        """Run all actions of the step."""
        if self._log_later is not None:
            _log.info("%s: %s", self.program.name, self._log_later)
            self._log_later = None
        with self._dual_streams or nullcontext():
            self.executor.run()

    def end(self, step: StepState) -> Tensor | None:
        """End a step on all ranks; returns the losses (see ``StepSync.end``)."""
        losses = self.sync.end(step)
        for runner in self.runners.values():
            runner.end()
        return losses

    # --- binding -----------------------------------------------------------------------------

    def _make_dual_streams(self) -> DualStreams | None:
        program, config = self.program, self._config
        if not program.overlapped_pairs:
            return None
        kind = next(iter(self._stages.values())).device.type
        reason = why_sequential(program, self._streams, kind, requested=config.overlap)
        if reason is None and self._streams is not None:
            return DualStreams(self._streams)
        if program.placement.entries[0] in self._stages:
            self._log_later = f"forward and backward of a block run in turn: {reason}"
        return None

    def _make_runners(self) -> dict[int, StageRunner]:
        program, placement = self.program, self.program.placement
        # Stage → op → the microbatches with that op in the program.
        ops: dict[int, dict[Op, set[int]]] = {i: defaultdict(set) for i in self._stages}
        for action in program.actions():
            if action.op in _FORWARD_MODES and action.stage in ops:
                assert action.microbatch is not None
                ops[action.stage][action.op].add(action.microbatch)
        microbatches, chunked = range(program.num_microbatches), program.num_splits > 1
        states = {
            i: [MicrobatchState(m, in_sequence=chunked) for m in microbatches] for i in self._stages
        }
        runners: dict[int, StageRunner] = {}
        for transport in self._transports:
            queues: dict[int, RecvQueue] = {}
            # Within one process no message is in flight: a sent message has arrived.
            acknowledged = {} if self._is_alone else acknowledgements(program, transport.rank)
            for index in placement.stages_of(transport.rank):
                stage = self._stages[index]
                neighbors: list[Neighbor | None] = []
                for offset in (-1, 1):
                    other = placement.neighbour(index, offset)
                    if other is None:
                        neighbors.append(None)
                        continue
                    peer = placement.rank_of(other)
                    if peer == transport.rank:
                        neighbors.append(Neighbor(peer, states[other]))
                        continue
                    if peer not in queues:
                        queues[peer] = RecvQueue(transport, peer, stage.device)
                    neighbors.append(Neighbor(peer, queue=queues[peer]))
                runners[index] = StageRunner(
                    stage,
                    states[index],
                    *neighbors,
                    program=program,
                    config=self._config,
                    train=self.train,
                    ops=ops[index],
                    transport=transport,
                    acknowledged=acknowledged,
                    dual_streams=self._dual_streams,
                )
            transport.register_peers(queues)
        return runners

    def _bind(self) -> list[BoundAction]:
        program = self.program
        if self._is_alone:
            steps = [step for _, step in global_order(program)]
        else:
            steps = list(program.ranks[self._transports[0].rank])
        bound = [[self.runners[a.stage].bind(a) for a in step.parts] for step in steps]
        if self._dual_streams is not None:
            return self._dual_streams.add_prologues(steps, bound, program.placement)
        found: list[BoundAction] = []
        for step, parts in zip(steps, bound, strict=True):
            if self._pair_function is not None and can_overlap(step):
                found += bind_pair(self._pair_function, step, parts)
            else:
                found += [each for part in parts for each in part]
        return found
