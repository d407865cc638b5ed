"""A checked program, stages and transports, put together: it trains and evaluates.

The engine serves one rank of a distributed pipeline as well as all ranks of a pipeline in one
process; which of the two, it learns from the transports that it is given. What a user calls
stands above it (``schedules.py``, ``pipeline.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from torch import Tensor

from penstock.cause import message_of
from penstock.errors import NOWHERE, PeerError, PenstockError, ScheduleError, StageError, Where
from penstock.parallel.tied_params import SharedParams
from penstock.partition.ties import SharedBuffers, Tie, refuse_shared_statistics
from penstock.runtime.act import Act
from penstock.runtime.agreement import agree, digest
from penstock.runtime.batch import Batch
from penstock.runtime.blocks import BlockFunction
from penstock.runtime.call import Call
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.nccl import channels_of
from penstock.runtime.recorder import decode_spans, encode_spans, merge_spans, spans_of
from penstock.runtime.role import LossFn, Role
from penstock.runtime.streams import make_streams, share_step_seed
from penstock.runtime.wrappers import Wrappers
from penstock.schedule.channels import Channels
from penstock.schedule.check import check
from penstock.schedule.passes import forward_only, lower
from penstock.schedule.program import CheckedProgram, Program
from penstock.schedule.rules import TRANSFERS
from penstock.schedule.text import to_json
from penstock.stage import device_streams
from penstock.stage.stage import Stage
from penstock.trace import Trace

__all__ = ["Engine", "Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How an engine runs.

    Args:
        loss_fn: ``loss_fn(output, target)`` gives a scalar, or ``(scalar, metrics)``.
        scale_grads: whether each microbatch's loss is divided by their number.
        dynamic_shapes: whether shapes may change from microbatch to microbatch.
        microbatch_rng: whether random numbers are those of one device.
        overlap: whether forward and backward of a block run side by side, where they can.
    """

    loss_fn: LossFn | None = None
    scale_grads: bool = True
    dynamic_shapes: bool = False
    microbatch_rng: bool = False
    overlap: bool = False


class Engine:
    """Plays a program over this process's stages.

    Args:
        program: the compute-only program to train by; its forwards alone are the one for eval.
        stages: this process's stages, by index.
        transports: one per rank that this process plays, in rank order.
        options: how it runs.
        ties: the parameters that stages share (see ``penstock.partition.ties``), beside those of
            a model that is there in several copies.

    Attributes:
        asked: the program as it was given.
        program: the program that runs, sends and receives included.
        shared_buffers: the buffers of layers that several stages call: of those of this process,
            unless somebody who knows the others' says more.

    Raises:
        ScheduleError: the program has problems, or the stages are not those of these ranks.
        PartitionError: a tie names something that does not exist, or stages have a layer with
            running statistics in common.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        options: Options,
        ties: Sequence[Tie] = (),
    ) -> None:
        self.options = options
        self.stages = dict(stages)
        self.transports = tuple(transports)
        device = next(iter(self.stages.values())).device if self.stages else torch.device("cpu")
        self._streams = device_streams.streams_of(device)
        self.failure: PenstockError | None = None
        self._agreed = False
        self._num_steps = 0
        # Of what was asked for: ranks may differ in whether their stages are sharded. They may in
        # its name as well, which is that of a file, where it was read from one.
        self._digest = digest(to_json(replace(program, name="")))
        self._check_stages(program)
        make_streams(self.stages, program.placement, wanted=options.microbatch_rng)
        self._sharing = SharedParams(ties, program.placement, self.stages, self.transports)
        # By the model's stages: copies of one are equal.
        number = program.placement.model_stage
        modules = {number(i): self.stages[i].submod for i in sorted(self.stages, key=number)}
        self._wrappers = Wrappers(self.stages)
        refuse_shared_statistics(modules)
        self.shared_buffers = SharedBuffers(modules)
        self.asked = program
        self._sharding = self._wrappers.sharding
        self._channels = channels_of(device)
        self.program = _lowered(program, self._sharding, self._channels)
        self.eval_program = check(
            lower(forward_only(program), channels=self._channels), self._channels
        )
        self._train = self._act(self.program, train=True)
        self._eval = self._act(self.eval_program, train=False)
        self._last = self._train
        # Transports have threads, which would outlive an engine that is dropped.
        weakref.finalize(self, _close, self.transports).atexit = False

    def _act(self, program: CheckedProgram, *, train: bool) -> Act:
        role = Role(
            train=train,
            loss_fn=self.options.loss_fn,
            loss_divisor=program.num_microbatches if self.options.scale_grads else 1,
            dynamic_shapes=self.options.dynamic_shapes,
            overlap=self.options.overlap,
        )
        return Act(program, role, self.stages, self.transports, self._streams)

    def _check_stages(self, program: Program) -> None:
        placement = program.placement
        for transport in self.transports:
            wanted = set(placement.stages_of(transport.rank))
            if missing := sorted(wanted - set(self.stages)):
                raise ScheduleError(
                    f"rank {transport.rank} needs the stages {sorted(wanted)} for {program.name} "
                    f"(stage → rank: {placement.stage_ranks}), but was given "
                    f"{sorted(self.stages)}; missing: {missing}"
                )
        ranks = {t.rank for t in self.transports}
        foreign = [i for i in sorted(self.stages) if placement.rank_of(i) not in ranks]
        if foreign:
            raise ScheduleError(
                f"stages {foreign} lie on other ranks than {sorted(ranks)} in {program.name} "
                f"(stage → rank: {placement.stage_ranks})"
            )

    @property
    def _is_alone(self) -> bool:
        """Whether all ranks are in this process."""
        return len(self.transports) == self.program.num_ranks

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        return self.program.num_microbatches

    @property
    def has_backward(self) -> bool:
        """Whether the program computes gradients."""
        return self.program.has_backward

    @property
    def has_first(self) -> bool:
        """Whether the model's inputs enter in this process."""
        return any(stage in self.stages for stage in self.program.placement.entries)

    @property
    def has_last(self) -> bool:
        """Whether the model's outputs leave in this process."""
        return any(stage in self.stages for stage in self.program.placement.exits)

    def run(self, batch: Batch, *, train: bool) -> Tensor | None:
        """Run one step.

        Args:
            batch: this process's inputs and targets; outputs and metrics are left in it.
            train: whether to compute gradients, or outputs alone.

        Returns:
            The losses, shape (microbatches,), on every rank; None if none were computed.

        Raises:
            PenstockError: this rank failed, or another one did.
        """
        act = self._last = self._train if train else self._eval
        self._begin("step() or eval()")
        self._agree()
        self._look_at_wrappers()
        act.open(batch, self._num_steps)
        if train and self.options.microbatch_rng:
            share_step_seed(self.stages.values(), self.transports, self.program.placement)
        with ExitStack() as around:
            if train:
                around.enter_context(self.shared_buffers.guarded())
                around.enter_context(self._sharing.reduced())
            self._play(act)
        losses = act.close(batch)
        for player in act.players.values():
            player.rest()
        for transport in self.transports:
            # Once more, for what closing sent: a send may not outlast a profiler of this step.
            transport.drain()
            transport.end()
        self._num_steps += 1
        return losses

    def _begin(self, what: str) -> None:
        for transport in self.transports:
            transport.begin(f"{what} of schedule {transport.number}")

    def _play(self, act: Act) -> None:
        replicas = self._wrappers.distinct
        for i, player in act.players.items():
            player.replicas = self._wrappers.of[i]
        try:
            with torch.set_grad_enabled(act.role.train):
                for each in replicas:
                    each.begin()
            for transport in self.transports:
                transport.watch_replicas([group for each in replicas for group in each.groups])
            with self.transports[0].waiting_for_replicas():
                for each in replicas:
                    each.share_buffers()
            with torch.set_grad_enabled(act.role.train):
                act.play()
            for transport in self.transports:
                transport.drain()
        finally:
            for each in replicas:
                each.end()

    def _look_at_wrappers(self) -> None:
        """Play what the stages' modules are wrapped in now, which may have changed."""
        self._wrappers.look()
        if self._wrappers.sharding is not self._sharding:
            self._sharding = self._wrappers.sharding
            self.program = _lowered(self.asked, self._sharding, self._channels)
            self._train.rebind(self.program)

    def play_blocks_by(self, function: BlockFunction) -> None:
        """Let ``function`` play the blocks of training steps, see ``runtime/blocks.py``."""
        self._train.play_blocks_by(function)

    def guard(self) -> _Guard:
        """A step runs in this: whatever is raised in it, every rank gets to know.

        Raises:
            PeerError: an earlier step failed.
        """
        self._refuse_after_failure()
        self._last.executor.marks = []
        return _Guard(self._failed)

    def _refuse_after_failure(self) -> None:
        if self.failure is not None:
            anew = "start the processes again, from a checkpoint"
            if self._is_alone:
                anew = "make a new one, over the same model"
            raise PeerError(
                f"an earlier step failed, and this schedule can't go on; {anew}: {self.failure}"
            ) from self.failure

    def _failed(self, error: BaseException) -> BaseException | None:
        """What to raise for ``error``, where that is another one; the others are told."""
        act = self._last
        if not act.executor.marks and self._is_alone:
            return None  # nothing has run, and nobody else is concerned
        call = act.executor.failed
        placed = _placed(error, call, self.program) if call is not None else error
        told = [t.fail(placed) for t in self.transports]
        raised: BaseException = next((e for e in told if e is not None), placed)
        if isinstance(raised, PenstockError):
            self.failure = raised
        else:
            self.failure = PeerError(f"{type(raised).__name__}: {message_of(raised)}")
        for player in act.players.values():
            player.reset()
        # Ctrl-C and the like are told to the others, but stay what they are here.
        return None if raised is error or not isinstance(error, Exception) else raised

    def _agree(self) -> None:
        """Once: do all ranks play the same program, each with its own stages?

        Raises:
            ScheduleError: no; the same on every rank.
        """
        if self._agreed:
            return
        facts = {
            "the number of microbatches": self.num_microbatches,
            "the number of stages": self.program.num_stages,
            "the number of pieces of a sequence": self.program.num_splits,
            "the program": self._digest,
            "dynamic_shapes": self.options.dynamic_shapes,
            "microbatch_rng": self.options.microbatch_rng,
            "CUDA_DEVICE_MAX_CONNECTIONS=1": self._channels.per_pair,
            "having a loss_fn": self.options.loss_fn is not None,
            "what stages share": self._sharing.facts,
        }
        agree(facts, self.transports, {"the program": f"{self.program.name} {self._digest}"})
        self._sharing.agree()
        self._agreed = True

    def trace(self) -> Trace:
        """What ran when in the last step, on all ranks. Every rank calls it.

        Raises:
            PenstockError: this rank failed, or another one did.
        """
        placement = self.program.placement
        spans = spans_of(self._last.executor, placement, self._streams)
        if not self._is_alone:
            transport = self.transports[0]
            self._refuse_after_failure()
            with _Guard(self._failed):
                self._begin("trace()")
                notes = transport.all_gather_bytes(encode_spans(spans))
                transport.end()
            spans = [span for note in notes for span in decode_spans(note)]
        trace = merge_spans(self.program.name, self.program.num_ranks, spans)
        program = self.program if self._last is self._train else self.eval_program
        return replace(trace, blocks=program.blocks)

    def close(self) -> None:
        """Let go of the transports' threads."""
        _close(self.transports)


class _Guard:
    """Raises what ``failed`` makes of what is raised within, unless that is None.

    A class: ``contextmanager`` takes a RuntimeError that a generator raises from a StopIteration
    for the interpreter's own, and drops it.
    """

    def __init__(self, failed: Callable[[BaseException], BaseException | None]) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        raised = None if error is None else self._failed(error)
        if raised is not None:
            raise raised from error


def _close(transports: Sequence[Transport]) -> None:
    for transport in transports:
        transport.close()


def _lowered(program: Program, sharding: bool, channels: Channels) -> CheckedProgram:
    """The program that runs.

    Raises:
        ScheduleError: it has problems, worded where possible in the steps of ``program`` itself.
    """
    try:
        return check(lower(program, sharding=sharding, channels=channels), channels)
    except ScheduleError:
        check(program)
        raise


def _placed(error: BaseException, call: Call, program: Program) -> BaseException:
    """``error`` with its place; what the user's code raised becomes a StageError."""
    action = call.action
    where = Where(
        rank=program.placement.rank_of(action.stage),
        stage=action.stage,
        microbatch=action.microbatch,
        action=str(action),
    )
    if isinstance(error, PenstockError) and error.where == NOWHERE:
        error.locate(where)
        return error
    # One that has a place comes from another pipeline, which the user's code runs here.
    if (call.waits or action.op in TRANSFERS) and isinstance(error, Exception):
        return error
    placed = StageError(f"{type(error).__name__}: {message_of(error)}", where=where)
    placed.__cause__ = error
    return placed
