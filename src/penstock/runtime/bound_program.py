"""A program bound to this process: a runner per stage, an executor, and the start and end of steps.

start   conditions of all ranks ─► shape ids of the first rank's inputs, and a seed ─► all ranks
actions                     Executor ─► StageRunner ─► Stage
end     losses of the last rank ─► all ranks; no rank leaves before all have finished
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.errors import StageError, Where
from penstock.runtime import overlap
from penstock.runtime.comm.agreement import BatchFacts
from penstock.runtime.comm.base import RecvQueue, Transport
from penstock.runtime.config import RunConfig
from penstock.runtime.executor import BoundAction, Executor
from penstock.runtime.loss import needs_target
from penstock.runtime.microbatch import inputs_digest
from penstock.runtime.overlap import PairFunction
from penstock.runtime.shape_ids import MAX_SHAPES, RemoteKwargs, condition_id, inputs_id, shape_ids
from penstock.runtime.stage_runner import Neighbor, StageRunner
from penstock.runtime.step import StepState
from penstock.schedule.action import Overlap
from penstock.schedule.check import global_order
from penstock.schedule.index import acknowledgements
from penstock.schedule.program import CheckedProgram, Program
from penstock.stage import device_streams
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.rng import draw_step_seed
from penstock.stage.stage import MicrobatchState, Stage

__all__ = ["BoundProgram"]

# In an order that is the same on every rank. The loss of an evaluation may be a count.
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


class BoundProgram:
    """One program, for training or evaluation, bound to this process's stages and transports."""

    def __init__(
        self,
        program: CheckedProgram,
        config: RunConfig,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        remote_kwargs: RemoteKwargs,
        pair_function: PairFunction | None = None,
        *,
        train: bool,
    ) -> None:
        self.program, self.train = program, train
        self._remote_kwargs = remote_kwargs
        self._config, self._stages, self._transports = config, stages, transports
        self._is_single_process = len(transports) == program.num_ranks
        placement = program.placement
        rank, alone = transports[0].rank, self._is_single_process
        # With several copies of the model, the first copy's ranks broadcast.
        self._entry_ranks, self._exit_ranks = (
            [rank if alone else placement.rank_of(stage) for stage in ends]
            for ends in (placement.entries, placement.exits)
        )
        self._is_first = rank == self._entry_ranks[0]
        self._enters = rank in self._entry_ranks
        self._device = next(iter(stages.values())).device
        self._streams = device_streams.streams_of(self._device)
        self._needs_target = train and needs_target(config.loss_fn)
        self._known_shapes: set[int] = set()
        # By the shape id of the first microbatch, which is another one under autocast.
        self._loss_dtypes: dict[int, torch.dtype | None] = {}
        self._pair_function = pair_function
        self.runners = self._make_runners()
        self.rebind(program)

    def rebind(self, program: CheckedProgram) -> None:
        """Bind a program with the same computations and messages."""
        self.program = program
        self.executor = Executor(self._bind(), self._streams)

    # --- the start of a step -----------------------------------------------------------------

    def describe_call(self, num_steps: int, *, keep_outputs: bool, reduces: bool) -> str:
        """Describe the current call, to be compared between ranks."""
        outputs = " with outputs" if self._exchanges_outputs(keep_outputs) else ""
        partly = "" if reduces else "finalize_gradients=False"
        return f"{'step' if self.train else 'eval'}({partly}){outputs}, after {num_steps} others"

    def batch_facts(self, step: StepState, number: int) -> BatchFacts:
        """This rank's facts about the batch of the step of this number.

        Raises:
            StageError: inputs or targets are missing where they are needed.
        """
        self._check_given(step)
        # The first rank's keyword arguments are part of its inputs.
        kwargs = () if self._is_first else step.kwargs
        conditions = condition_id(self._stages.values(), self._device, kwargs, number)
        inputs = 0
        if self._enters and len(set(self._entry_ranks)) > 1:
            assert step.args is not None
            inputs = inputs_id(step.args, step.kwargs, number)
        me, stages = self._transports[0].rank, self._stages.values()
        kwargs_here = self._remote_kwargs.describe(me, conditions, kwargs, stages)
        # Loaders may differ from some epoch on: compared in steps 0, 1, 2, 4, 8, and so on.
        digest = (0, 0) if number & (number - 1) else inputs_digest(step.args, step.kwargs)
        facts = (conditions, step.num_with_rows, inputs, step.reduces, step.rows, kwargs_here)
        return BatchFacts(*facts, digest)

    def begin(self, step: StepState, facts: Sequence[BatchFacts], number: int) -> None:
        """Begin the step of this number: broadcast its shape ids and its seed."""
        transport, ids = self._transports[0], step.shape_ids
        self._remote_kwargs.note(facts)
        if self._enters:
            assert step.args is not None
            conditions = [each.conditions for each in facts]
            ids = shape_ids(step.args, step.kwargs, conditions, number)
            first = next(i for i in self.program.placement.entries if i in self._stages)
            self._remote_kwargs.complete(step, facts, self._stages[first])
        # Drawn on every rank, so that the generators stay alike; the first rank's counts.
        seed = draw_step_seed() if self.train and self._config.microbatch_rng else 0
        sent = transport.broadcast_ints([seed, *ids], self._entry_ranks[0])
        step.seed, *step.shape_ids = sent
        is_new = not self._known_shapes.issuperset(step.shape_ids)
        forget = is_new and len(self._known_shapes) >= MAX_SHAPES
        if forget:
            self._known_shapes.clear()
            self._loss_dtypes.clear()
        self._known_shapes.update(step.shape_ids)
        resends = [runner.begin(step, forget=forget) for runner in self.runners.values()]
        # Receives that wait for metadata are posted late, so that a bounded sender could deadlock.
        unbounded = self._config.dynamic_shapes or is_new or any(resends)
        transport.allow_unbounded_sends(unbounded)

    def _check_given(self, step: StepState) -> None:
        placement = self.program.placement
        for stage in sorted(self._stages):
            problem = None
            if stage in placement.exits and self._needs_target and step.targets is None:
                problem = (
                    "no target, where the loss is computed: the rank of the last stage passes "
                    "target= (or target_mbs=) to step()"
                )
            if stage in placement.entries and step.args is None:
                problem = "no inputs: the rank of the first stage passes them to step() or eval()"
                if not self.train:
                    problem += ", which runs the model; train(False) of its modules sets their mode"
            if problem is not None:
                raise StageError(problem, where=Where(rank=placement.rank_of(stage), stage=stage))

    # --- the actions, and the end of a step --------------------------------------------------

    def run(self) -> None:
        """Run all actions of the step."""
        self.executor.run()

    def end(self, step: StepState) -> Tensor | None:
        """End a step: no rank leaves before all have finished, so that none misses a failure.

        Returns:
            The losses, shape (microbatches,), on every rank; None where none were computed.
        """
        for runner in self.runners.values():
            runner.end()
        losses, dtype, transport = step.losses, step.loss_dtype, self._transports[0]
        if self._exchanges_outputs(step.keep_outputs) and transport.rank in self._exit_ranks:
            _exchange_outputs(step, self.program, transport, self._device)
        if self._config.loss_fn is None:
            transport.barrier()
            return None
        # The dtype of the losses on the last rank; None if there are none.
        shape_id = step.shape_ids[0]
        if shape_id not in self._loss_dtypes or not self.train:
            code = -1 if dtype is None else _DTYPES.index(dtype)
            (code,) = transport.broadcast_ints([code], self._exit_ranks[0])
            self._loss_dtypes[shape_id] = _DTYPES[code] if code >= 0 else None
        dtype = self._loss_dtypes[shape_id]
        if losses is None:
            wide = device_streams.widest_float(self._device)
            losses = torch.zeros(len(step.outputs), dtype=wide, device=self._device)
        losses = losses.to(self._device)  # a user's loss may be elsewhere
        transport.all_reduce(losses)
        return None if dtype is None else losses.to(dtype)

    def _exchanges_outputs(self, keep_outputs: bool) -> bool:
        """True if outputs leave on several ranks (with copies of the model), and are returned."""
        return keep_outputs and len(set(self._exit_ranks)) > 1

    # --- binding -----------------------------------------------------------------------------

    def _make_runners(self) -> dict[int, StageRunner]:
        program, placement = self.program, self.program.placement
        microbatches, chunked = range(program.num_microbatches), program.num_splits > 1
        states = {
            i: [MicrobatchState(m, in_sequence=chunked) for m in microbatches] for i in self._stages
        }
        runners: dict[int, StageRunner] = {}
        for transport in self._transports:
            queues: dict[int, RecvQueue] = {}
            # Within one process no message is in flight: a sent message has arrived.
            alone = self._is_single_process
            acknowledged = {} if alone else acknowledgements(program, transport.rank)
            for index in placement.stages_of(transport.rank):
                neighbors: list[Neighbor | None] = []
                for other in (placement.neighbour(index, -1), placement.neighbour(index, 1)):
                    if other is None:
                        neighbors.append(None)
                    elif (peer := placement.rank_of(other)) == transport.rank:
                        neighbors.append(Neighbor(peer, states[other]))
                    else:
                        queue = queues.setdefault(peer, RecvQueue(transport, peer, self._device))
                        neighbors.append(Neighbor(peer, queue=queue))
                runners[index] = StageRunner(
                    self._stages[index],
                    states[index],
                    *neighbors,
                    program=program,
                    config=self._config,
                    train=self.train,
                    transport=transport,
                    acknowledged=acknowledged,
                )
            transport.register_peers(queues)
        return runners

    def _bind(self) -> list[BoundAction]:
        program = self.program
        steps = program.ranks[self._transports[0].rank]
        if self._is_single_process:
            steps = tuple(step for _, step in global_order(program))
        bound = [[self.runners[a.stage].bind(a) for a in step.parts] for step in steps]
        found: list[BoundAction] = []
        for step, parts in zip(steps, bound, strict=True):
            if self._pair_function is not None and isinstance(step, Overlap):
                found += overlap.bind_pair(self._pair_function, step, parts, self._device)
            else:
                found += [each for part in parts for each in part]
        return found


def _exchange_outputs(
    step: StepState, program: Program, transport: Transport, device: torch.device
) -> None:
    """Complete ``step.outputs`` on every rank where outputs leave."""
    placement = program.placement
    leaving: defaultdict[int, list[int]] = defaultdict(list)
    for stage in placement.exits:
        passing = (m for m in range(program.num_microbatches) if placement.passes(m, stage))
        leaving[placement.rank_of(stage)] += passing
    mine = tuple(step.outputs[m] for m in leaving.pop(transport.rank))
    spec = describe(mine)
    for peer in sorted(leaving):
        transport.send_metadata(peer, spec.encode())
        received = BoundarySpec.decode(transport.recv_metadata(peer))
        pending = transport.receive(peer, received.metas, device)
        transport.send(peer, spec.pack(spec.tensors(mine)))
        outputs = received.arguments(received.unpack(pending()))
        for microbatch, output in zip(leaving[peer], outputs, strict=True):
            step.outputs[microbatch] = output
