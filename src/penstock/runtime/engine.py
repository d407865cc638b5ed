"""Train and evaluate a checked program over this process's stages and transports.

Depending on its transports, an engine runs one rank of a distributed pipeline, or all ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

import torch
from torch import Tensor

from penstock.cause import text_of
from penstock.errors import (
    NOWHERE,
    PeerError,
    PenstockError,
    ScheduleError,
    StageError,
    Where,
    shows_full_tracebacks,
)
from penstock.parallel.data_parallel import Replicas, replicas_of
from penstock.parallel.shared_params import SharedParams
from penstock.partition.ties import SharedBuffers, Tie
from penstock.runtime.bound_program import BoundProgram
from penstock.runtime.comm.agreement import BatchFacts, check_consistent, digest, gather_batch_facts
from penstock.runtime.comm.base import Transport
from penstock.runtime.config import RunConfig
from penstock.runtime.executor import BoundAction, merge_spans
from penstock.runtime.overlap import PairFunction
from penstock.runtime.shape_ids import RemoteKwargs
from penstock.runtime.step import StepState
from penstock.schedule.check import check
from penstock.schedule.passes import forward_only, keep_microbatches, lower
from penstock.schedule.program import CheckedProgram, Program
from penstock.schedule.rules import TRANSFERS
from penstock.schedule.text import format_csv
from penstock.stage.stage import Stage
from penstock.trace import Trace

__all__ = ["Engine"]


class Engine:
    """Runs a program over this process's stages; the context of its own steps.

    Args:
        program: the compute-only program of training steps; its forwards are evaluations.
        stages: this process's stages, by index.
        transports: one per rank of this process, in rank order.
        config: the run options.
        ties: the parameters that stages share, in addition to the copies of the model.
        pair_function: runs the overlapped pairs of training steps, if given.

    Attributes:
        requested: the program passed by the caller.
        layout: by name of the whole model's state, the dtype, the shape and the stage, to compare
            between ranks; None if unknown.
        shared_buffers: the buffers of layers that several stages call; of this process's stages
            unless a caller with all stages sets more.

    Raises:
        ScheduleError: the program is invalid, or the stages do not belong to these ranks.
        PartitionError: see ``SharedParams`` and ``SharedBuffers``.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        config: RunConfig,
        ties: Sequence[Tie] = (),
        pair_function: PairFunction | None = None,
    ) -> None:
        self.requested, self.config = program, config
        self.stages, self.transports = dict(stages), tuple(transports)
        # One speaks for all: over several in this process, nothing is awaited and nothing fails.
        self._transport = transports[0]
        self._is_single_process = len(transports) == program.num_ranks
        self.failure: PenstockError | None = None
        self._agreed, self._num_steps = False, 0
        placement, ranks = program.placement, [transport.rank for transport in transports]
        expected = sorted(i for rank in ranks for i in placement.stages_of(rank))
        if sorted(stages) != expected:
            raise ScheduleError(
                f"rank {', '.join(map(str, ranks))} needs the stages {expected} for {program.name} "
                f"(stage → rank: {placement.stage_ranks}), but was given {sorted(stages)}"
            )
        self._shared_params = SharedParams(ties, placement, self.stages, self.transports)
        # By stage of the model, since copies of a stage are equal.
        number = placement.model_stage
        modules = {number(i): self.stages[i].submod for i in sorted(self.stages, key=number)}
        self.shared_buffers = SharedBuffers(modules)
        self.layout: Mapping[str, str] | None = None
        self._wrapped: dict[int, list[object]] = {}
        # By stage the wrapper of its module, if any; and all of them as one.
        self._wrapper_of: dict[int, Replicas | None] = {}
        self._replicas = Replicas()
        # By train, and the number of microbatches with rows.
        self._bound: dict[tuple[bool, int], BoundProgram] = {}
        self._find_replicas()
        self._remote_kwargs = RemoteKwargs()
        self._pair_function = pair_function
        self._eval, self._train = (self._bind(t, program.num_microbatches) for t in (False, True))
        self._last = self._train
        self._running: BoundProgram | None = None
        # The transports' threads would outlive a garbage-collected engine.
        weakref.finalize(self, self._transport.close).atexit = False

    @property
    def program(self) -> CheckedProgram:
        """The executed program of training steps, including sends and receives."""
        return self._train.program

    def _bind(self, train: bool, num_microbatches: int) -> BoundProgram:
        """The bound program of so many microbatches, made once."""
        key = train, num_microbatches
        if key not in self._bound:
            shared = self.config, self.stages, self.transports, self._remote_kwargs
            pairs = self._pair_function if train else None
            self._bound[key] = BoundProgram(self._lowered(*key), *shared, pairs, train=train)
        return self._bound[key]

    def _lowered(self, train: bool, num_microbatches: int) -> CheckedProgram:
        program = keep_microbatches(self.requested, num_microbatches)
        sharding = train and self._replicas.sharded
        try:
            program = program if train else forward_only(program)
            lowered = lower(
                program,
                sharding=sharding,
                max_active_stages=self.config.max_active_stages,
                unshard_lookahead=self.config.unshard_lookahead,
            )
            return check(lowered)
        except ScheduleError:
            check(self.requested)  # raises, if it can, in terms of the caller's own steps
            raise

    # --- a step ------------------------------------------------------------------------------

    def run(
        self, prepare: Callable[[], StepState], *, train: bool, keep_outputs: bool, reduces: bool
    ) -> tuple[StepState, Tensor | None]:
        """Run one step.

        Args:
            prepare: returns the microbatches of the step. Its exceptions are raised on every rank
                before anything runs, and leave the engine usable.
            train: whether to train, or to evaluate.
            keep_outputs: whether outputs are returned.
            reduces: whether gradients are reduced, or left to a later step.

        Returns:
            The step, with outputs and metrics; and the losses, shape (microbatches with rows,), on
            every rank, or None if none were computed.
        """
        with self:
            step, facts, mistake = self._prepare(prepare, train, keep_outputs, reduces)
        if mistake is not None:
            raise mistake
        with self:
            return step, self._run(step, facts, train)

    def _prepare(
        self, prepare: Callable[[], StepState], train: bool, keep_outputs: bool, reduces: bool
    ) -> tuple[StepState, Sequence[BatchFacts], Exception | None]:
        """Agree with the other ranks on the step; the exception says why it can't run."""
        bound, num_splits = self._train if train else self._eval, self.requested.num_splits
        step, mine, mistake = StepState(0), None, None
        try:
            step = prepare()
            self._find_replicas()
            step.reduces = reduces and self._replicas.is_synced
            mine = bound.batch_facts(step, self._num_steps)
        except Exception as error:
            mistake = error
        call = bound.describe_call(self._num_steps, keep_outputs=keep_outputs, reduces=reduces)
        try:
            # Ranks with different options may interpret the same call differently.
            self._begin_call(call if self._agreed else "the first step() or eval()")
            if not self._agreed:
                self._agree(call)
            facts, mistake = gather_batch_facts(mine, mistake, self._transport)
        except ScheduleError as error:
            raise error from mistake
        if mistake is not None:
            self._transport.end()
        elif num := max(each.num_with_rows for each in facts):
            step.truncate(num * num_splits)
            self._bind(train, num * num_splits)
            step.is_split_by_shard = any(n > 1 for each in facts for _, n in each.rows)
        return step, facts, mistake

    def _begin_call(self, call: str) -> None:
        self._transport.begin(f"{call} of schedule {self._transport.schedule_index}")

    def _run(self, step: StepState, facts: Sequence[BatchFacts], train: bool) -> Tensor | None:
        bound = self._last = self._running = self._bind(train, len(step.outputs))
        bound.executor.marks = []
        self._num_steps += 1
        bound.begin(step, facts, self._num_steps)
        with ExitStack() as around:
            if train:
                around.enter_context(self.shared_buffers.guarded())
                reduces = all(each.reduces for each in facts)
                around.enter_context(self._shared_params.summing_grads(reduces=reduces))
            self._run_actions(bound, reduces=step.reduces)
        losses = bound.end(step)
        # Again, for messages at the step's end, since no send may outlast this step's profiler.
        self._transport.drain()
        self._transport.end()
        self._running = None
        return losses

    def _agree(self, call: str) -> None:
        """Check before the first step that all ranks have one program and one set of options."""
        program, config = self.program, self.config
        # Of the requested program, since ranks may differ in sharding and in file names.
        text = digest(f"{self.requested.placement}\n{format_csv(self.requested)}")
        facts = {
            "the number of microbatches": program.num_microbatches,
            "the number of stages": program.num_stages,
            "the number of chunks of a sequence": program.num_splits,
            "the program": text,
            "dynamic_shapes": config.dynamic_shapes,
            "microbatch_rng": config.microbatch_rng,
            "having a loss_fn": config.loss_fn is not None,
            "what stages share": self._shared_params.facts,
            "the first call": call,
            "the cut of the model": self.layout,
        }
        shown = {"the program": f"{program.name} {text}"}
        check_consistent(facts, self._transport, shown)
        self._shared_params.broadcast_values()
        self._agreed = True

    def _find_replicas(self) -> None:
        """Find the data-parallel wrappers of the stages, which may be applied between steps."""
        # fully_shard and replicate change a module's class in place; DDP wraps it.
        wrapped: dict[int, list[object]] = {
            i: [s.submod, *map(type, s.submod.modules())] for i, s in self.stages.items()
        }
        if wrapped != self._wrapped:
            # A module used by two stages (one per direction) is wrapped once.
            modules = dict.fromkeys(stage.submod for stage in self.stages.values())
            params = (module.named_parameters(remove_duplicate=False) for module in modules)
            counts = Counter(id(param) for _, param in chain.from_iterable(params))
            shared = {each for each, count in counts.items() if count > 1}
            found = {module: replicas_of(module, shared) for module in modules}
            self._wrapper_of = {i: found[stage.submod] for i, stage in self.stages.items()}
            was_sharded = self._replicas.sharded
            self._replicas = Replicas([each for each in found.values() if each is not None])
            self._wrapped = wrapped
            for (trains, num), each in self._bound.items():
                if trains and self._replicas.sharded is not was_sharded:
                    each.rebind(self._lowered(trains, num))

    def _run_actions(self, bound: BoundProgram, *, reduces: bool) -> None:
        for i, runner in bound.runners.items():
            runner.replicas = self._wrapper_of[i]
        try:
            with torch.set_grad_enabled(bound.train):
                self._replicas.begin(reduces=reduces)
            self._transport.watch_replicas(self._replicas.groups)
            with self._transport.waiting_for_replicas():
                self._replicas.share_buffers()
            with torch.set_grad_enabled(bound.train):
                bound.run()
            with self._transport.waiting_for_replicas():
                self._replicas.wait()
            self._transport.drain()
        finally:
            self._replicas.end()

    # --- failure -----------------------------------------------------------------------------

    def __enter__(self) -> None:
        """Enter a collective call, whose exceptions are reported to all ranks."""
        if self.failure is not None:
            raise PeerError(
                "an earlier step failed, and this schedule can't go on; make a new one over the "
                f"same model, or start several processes again, from a checkpoint: {self.failure}"
            ) from self.failure

    # Not by ``contextmanager``, which drops a RuntimeError raised from a StopIteration.
    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        raised = None if error is None else self._fail(error)
        if raised is not None:
            # A wait that broke says less than the cause that another rank has published.
            raise raised from (error if shows_full_tracebacks() else raised.__cause__)

    def _fail(self, error: BaseException) -> BaseException | None:
        """Report ``error`` to all ranks; returns the error to raise instead, if any."""
        bound, self._running = self._running, None
        if self._is_single_process and (bound is None or not bound.executor.marks):
            return None  # nothing has run, so no other rank is affected
        if bound is None and isinstance(error, ScheduleError):
            self._transport.end()
            return None  # nothing has run, and the ranks that disagree all raise it
        failed = None if bound is None else bound.executor.failed
        placed = _placed(error, failed, self.program) if failed is not None else error
        raised = self._transport.fail(placed) or placed
        self.failure = raised if isinstance(raised, PenstockError) else PeerError(text_of(raised))
        for runner in () if bound is None else bound.runners.values():
            runner.end(failed=True)
        # Ctrl-C and the like are reported to other ranks, but re-raised unchanged here.
        return None if raised is error or not isinstance(error, Exception) else raised

    # --- trace -------------------------------------------------------------------------------

    def trace(self) -> Trace:
        """The trace of the last step on all ranks. A collective call."""
        program = self._last.program
        encoded = [self._last.executor.encode_spans(program.placement)]
        if not self._is_single_process:
            with self:
                self._begin_call("trace()")
                encoded = self._transport.all_gather_bytes(encoded[0])
                self._transport.end()
        return merge_spans(self.program.name, program, encoded)

    def close(self) -> None:
        """Stop the transports' threads."""
        self._transport.close()


def _placed(error: BaseException, failed: BoundAction, program: Program) -> BaseException:
    """Add the place to ``error``; an exception of user code becomes a StageError."""
    action = failed.action
    rank, mb = program.placement.rank_of(action.stage), action.microbatch
    where = Where(rank=rank, stage=action.stage, microbatch=mb, action=str(action))
    if isinstance(error, PenstockError) and error.where == NOWHERE:
        error.locate(where)
        return error
    # An error that has a place already comes from another pipeline inside user code.
    if (failed.is_wait or action.op in TRANSFERS) and isinstance(error, Exception):
        return error
    placed = StageError(text_of(error), where=where)
    placed.__cause__ = error
    return placed
