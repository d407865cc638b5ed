"""The handlers of one stage's actions, bound to them once.

All state of a schedule for its stage is in the runner, so that several schedules may share stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress
from typing import Any

from torch import Tensor

from penstock.errors import BoundaryError, ScheduleError
from penstock.parallel.data_parallel import Replicas
from penstock.runtime.comm.base import MetasOf, PendingReceive, RecvQueue, Transport
from penstock.runtime.config import RunConfig
from penstock.runtime.executor import BoundAction
from penstock.runtime.loss import LossHead
from penstock.runtime.step import StepState
from penstock.schedule.action import Action, Op
from penstock.schedule.program import Program
from penstock.schedule.rules import INPUT_GRADS
from penstock.stage import device_streams
from penstock.stage.boundary import BoundarySpec, TensorMeta, describe
from penstock.stage.offload import ActivationOffload, CopyStreams
from penstock.stage.recompute import RecomputeContext
from penstock.stage.rng import RandomStream
from penstock.stage.stage import MicrobatchState, Stage, detach_state

__all__ = ["Neighbor", "StageRunner"]


@dataclass(slots=True)
class Neighbor:
    """A neighbouring stage, and the metadata of the boundary to it."""

    peer: int  # the rank on which it lies
    states: Sequence[MicrobatchState] = ()  # of its microbatches, on this rank
    queue: RecvQueue | None = None  # the receives from it, if it lies on another rank
    # By shape id, the description of the activations; and for each gradient whether it is sent.
    specs: dict[int, BoundarySpec] = field(default_factory=dict)
    grads: dict[int, tuple[bool, ...]] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)  # the shape ids whose description was sent there


class StageRunner:
    """Runs the actions of one stage for one program.

    Args:
        states: the stage's microbatches' states.
        previous, following: its neighbours; None for the model's first and last stage.
        acknowledged: for each action that waits for a message, how many of this rank's messages
            to the sender have arrived by then (see ``schedule.index``).

    Attributes:
        replicas: the data-parallel wrapper of its module, if any.
        rng: its part of the microbatches' random streams, with ``microbatch_rng``.
    """

    def __init__(
        self,
        stage: Stage,
        states: Sequence[MicrobatchState],
        previous: Neighbor | None,
        following: Neighbor | None,
        *,
        program: Program,
        config: RunConfig,
        train: bool,
        transport: Transport,
        acknowledged: Mapping[Action, int],
    ) -> None:
        self.stage, self._states = stage, states
        self._is_first, self._is_last = previous is None, following is None
        self._prev = previous or Neighbor(transport.rank)
        self._next = following or Neighbor(transport.rank)
        self._transport, self._acknowledged = transport, acknowledged
        self._dynamic_shapes, self._num_splits = config.dynamic_shapes, program.num_splits
        divisor = program.num_microbatches if config.scale_grads else 1
        self._loss_head = LossHead(config.loss_fn, divisor, train=train)
        # The microbatches with these ops, which change their forward.
        actions = [a for step in program.ranks[transport.rank] for a in step.parts]
        self._deferred, self._recomputed, self._offloaded = (
            {a.microbatch for a in actions if a.op is op and a.stage == stage.stage_index}
            for op in (Op.INPUT_GRAD, Op.RECOMPUTE, Op.OFFLOAD)
        )
        streams = device_streams.streams_of(stage.device) if self._offloaded else None
        self._copy_streams = CopyStreams(streams) if streams is not None else None
        self.replicas: Replicas | None = None
        self.rng: RandomStream | None = None
        if train and config.microbatch_rng:
            if stage.static_inputs is not None or stage.static_outputs is not None:
                raise ScheduleError(
                    f"stage {stage.stage_index}: with microbatch_rng=True the generator's state "
                    "crosses boundaries too; leave input_args and output_args out"
                )
            self.rng = RandomStream(stage.device, first=self._is_first, last=self._is_last)
        # Between steps an empty step, so that the last step's tensors can be freed.
        self._step = self._no_step = StepState(program.num_microbatches)

    def begin(self, step: StepState, *, forget: bool = False) -> bool:
        """Begin a step; returns True if cached metadata was dropped, all of it with ``forget``.

        Metadata that holds plain values is always dropped, at both ends of a boundary, and sent
        again, since values do not follow from the inputs' shapes.
        """
        self._step, dropped = step, False
        self.stage.findings().is_outdated = True  # parameters may be frozen between steps
        if self.rng is not None:
            self.rng.step_seed = step.seed
        for side in (self._prev, self._next):
            for i in [i for i, spec in side.specs.items() if forget or spec.holds_values]:
                del side.specs[i]
                side.grads.pop(i, None)
                side.sent.discard(i)
                dropped = True
        return dropped

    def end(self, *, failed: bool = False) -> None:
        """End a step: release its data, and the microbatches' states if it has failed."""
        self._step = self._no_step
        for state in self._states if failed else ():
            state.clear()

    # --- binding -----------------------------------------------------------------------------

    def bind(self, action: Action) -> list[BoundAction]:
        """Bind ``action`` to its handler, behind the wait for its message if it has one."""
        op, mb = action.op, action.microbatch
        if mb is None:
            return [BoundAction(action, partial(StageRunner._run_replicas, self, _WHOLE_STAGE[op]))]
        handler, state, arrived = _HANDLERS[op], self._states[mb], self._acknowledged.get(action, 0)
        wait: Callable[..., None] | None = None
        if op is Op.FORWARD:
            if mb in self._recomputed:
                handler = StageRunner._forward_to_recompute
            elif mb in self._offloaded:
                handler = StageRunner._forward_to_offload
            wait = None if self._prev.queue is None else StageRunner._wait_input
        elif op in INPUT_GRADS:
            wait = None if self._next.queue is None else StageRunner._wait_grads
        bound = [BoundAction(action, partial(handler, self, state))]
        if wait is not None:
            bound.insert(0, BoundAction(action, partial(wait, self, state, arrived), is_wait=True))
        return bound

    # --- messages ----------------------------------------------------------------------------

    def _recv_forward(self, state: MicrobatchState) -> None:
        state.received = self._receive(self._prev.queue, self._input_metas, state)

    def _recv_backward(self, state: MicrobatchState) -> None:
        state.received_grads = self._receive(self._next.queue, self._grad_metas, state)

    def _receive(
        self, queue: RecvQueue | None, metas_of: MetasOf, state: MicrobatchState
    ) -> PendingReceive:
        """Post a receive, or defer it for lack of metadata."""
        assert queue is not None
        metas = None if queue.deferred else metas_of(state, None)
        if metas is None:
            return queue.defer(metas_of, state)
        return self._transport.receive(queue.peer, metas, self.stage.device)

    def _input_metas(
        self, state: MicrobatchState, metadata: bytes | None
    ) -> Sequence[TensorMeta] | None:
        """The cached metadata of the activations, or those of the peer's message."""
        specs, shape_id = self._prev.specs, self._step.shape_ids[state.microbatch]
        if metadata is not None:
            specs[shape_id] = BoundarySpec.decode(metadata)
            specs[shape_id].check_static(self.stage.static_inputs, "input")
        elif self._dynamic_shapes or shape_id not in specs:
            return None
        state.in_spec = spec = specs[shape_id]
        return spec.metas

    def _grad_metas(
        self, state: MicrobatchState, metadata: bytes | None
    ) -> Sequence[TensorMeta] | None:
        """The cached metadata of the gradients, or those of the peer's message."""
        following, shape_id = self._next, self._step.shape_ids[state.microbatch]
        if metadata is not None:
            following.grads[shape_id] = tuple(map(bool, metadata))
        elif self._dynamic_shapes or shape_id not in following.grads:
            return None
        state.grads_present = following.grads[shape_id]
        # A receive may be posted before this step's forward, while the state still has the last
        # step's spec; with metadata for every message it is posted after it.
        spec = state.out_spec if self._dynamic_shapes else following.specs[shape_id]
        assert spec is not None
        present = state.grads_present
        return spec.grad_metas if all(present) else list(compress(spec.grad_metas, present))

    def _wait_input(self, state: MicrobatchState, arrived: int) -> None:
        tensors = state.received()
        self._transport.release(self._prev.peer, arrived)
        assert state.in_spec is not None
        state.received = state.in_spec.unpack(tensors)

    def _wait_grads(self, state: MicrobatchState, arrived: int) -> None:
        grads = state.received_grads()
        self._transport.release(self._next.peer, arrived)
        if len(grads) != len(state.grads_present):
            received = iter(grads)
            grads = [next(received) if there else None for there in state.grads_present]
        assert state.out_spec is not None
        state.received_grads = state.out_spec.unpack(grads, grads=True)

    def _send_forward(self, state: MicrobatchState) -> None:
        assert state.to_send is not None and state.out_spec is not None
        following, shape_id = self._next, self._step.shape_ids[state.microbatch]
        if self._dynamic_shapes or shape_id not in following.sent:
            following.sent.add(shape_id)
            self._transport.send_metadata(following.peer, state.out_spec.encode())
        self._transport.send(following.peer, state.out_spec.pack(state.to_send))
        state.to_send = None

    def _send_backward(self, state: MicrobatchState) -> None:
        peer, grads, spec = self._prev.peer, state.grads_to_send, state.in_spec
        assert grads is not None and spec is not None
        state.grads_to_send = None
        here = tuple(grad is not None for grad in grads)
        shape_id = self._step.shape_ids[state.microbatch]
        if self._dynamic_shapes or shape_id not in self._prev.grads:
            self._prev.grads[shape_id] = here
            self._transport.send_metadata(peer, bytes(here))
        elif here != (before := self._prev.grads[shape_id]):
            # Zeros are not equivalent to a missing gradient: an optimizer skips parameters without
            # a gradient, but decays parameters with a zero gradient.
            slot = next(i for i, there in enumerate(here) if there != before[i])
            raise BoundaryError(
                f"input {spec.grad_slots[slot]} has a gradient in some microbatches and none in "
                "others; pass dynamic_shapes=True where this may change"
            )
        pairs = zip(spec.grad_metas, grads, strict=True)
        self._transport.send(peer, [meta.pack(grad) for meta, grad in pairs if grad is not None])

    # --- forward -----------------------------------------------------------------------------

    def _forward(self, state: MicrobatchState) -> None:
        args, kwargs, target = self._inputs(state)
        output = self._run(state, args, kwargs)
        if self._is_last:
            self._loss_head.run(state, output, target, self._step)
        else:
            self._pass_on(state, output)
        if state.sequence is not None:
            state.roots = [*state.roots, *state.sequence.edges]

    def _inputs(self, state: MicrobatchState) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
        """The arguments of the module and the target of the loss."""
        mb, step = state.microbatch, self._step
        target = step.targets[mb] if self._is_last and step.targets is not None else None
        if self._is_first:
            assert step.args is not None  # checked as the step began
            if self.stage.static_inputs is not None:
                describe(step.args[mb]).check_static(self.stage.static_inputs, "input")
            return step.args[mb], step.kwargs[mb], target
        tensors, state.received = state.received, None
        assert state.in_spec is not None
        return self.stage.enter(state, tensors, state.in_spec), step.kwargs[mb], target

    def _run(self, state: MicrobatchState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the module, with the random stream and the sequence's state of the microbatch."""
        self._await_replicas()
        mb, rng = state.microbatch, self.rng
        if state.in_sequence:
            before = self._states[mb - 1].sequence if mb % self._num_splits else None
            kwargs = {**kwargs, "state": None if before is None else before.take()}
        if rng is not None:
            args = rng.begin(mb, args)
        try:
            output = self.stage.forward(state, args, kwargs, defer=mb in self._deferred)
            if state.in_sequence:
                output, sequence = detach_state(output)
                state.sequence = sequence if (mb + 1) % self._num_splits else None
            return output if rng is None else rng.end(output)
        finally:
            if rng is not None:
                rng.leave()

    def _pass_on(self, state: MicrobatchState, output: Any) -> None:
        following, mb = self._next, state.microbatch
        shape_id = self._step.shape_ids[mb]
        spec = following.specs.get(shape_id)
        if spec is None or self._dynamic_shapes:
            spec = following.specs[shape_id] = describe(output)
            spec.check_static(self.stage.static_outputs, "output")
        self.stage.leave(state, output, spec)
        if following.queue is None:
            receiver = following.states[mb]
            receiver.received, receiver.in_spec = state.to_send, spec
            state.to_send = None

    # --- activations that are recomputed or offloaded ----------------------------------------

    def _forward_to_recompute(self, state: MicrobatchState) -> None:
        """Run the forward and keep only its inputs."""
        received = state.received or ()
        inputs = [*received, *self._step.given(state.microbatch)]
        loss_fn = self._loss_head.loss_fn if self._is_last else None
        context = RecomputeContext(self.stage.findings(), self.stage.device, inputs, loss_fn)
        if not self._is_first:
            state.received = [tensor.detach() for tensor in received]  # separate leaves
        self._forward(state)
        context.close()
        state.recompute = context
        state.received = None if self._is_first else received
        state.roots, state.leaves, state.work = (), (), None

    def _recompute(self, state: MicrobatchState) -> None:
        """Run the forward again for its graph; what is sent is the first output."""
        context, state.recompute, to_send = state.recompute, None, state.to_send
        assert context is not None
        args, kwargs, target = self._inputs(state)
        with context.restored():
            output = self._run(state, args, kwargs)
            if self._is_last:
                self._loss_head.run(state, output, target, self._step)
            else:
                assert state.out_spec is not None
                self.stage.leave(state, output, state.out_spec)
                state.to_send = to_send

    def _forward_to_offload(self, state: MicrobatchState) -> None:
        """Run the forward and record the tensors that autograd saves."""
        module, given = self.stage.submod, self._step.given(state.microbatch)
        stays = chain(module.parameters(), module.buffers(), state.received or (), given)
        state.offload = ActivationOffload(self.stage.device, stays, self._copy_streams)
        with state.offload.collecting():
            self._forward(state)

    def _reload(self, state: MicrobatchState) -> None:
        context, state.offload = state.offload, None
        assert context is not None
        context.reload()

    # --- backward ----------------------------------------------------------------------------

    def _weight_grad(self, state: MicrobatchState) -> None:
        self._await_replicas()
        self.stage.weight_grad(state)
        if self.replicas is not None:
            self.replicas.end_weight_grad()

    def _run_backward(self, state: MicrobatchState, run: Callable[..., None]) -> None:
        self._await_replicas()
        grads: Sequence[Tensor | None] = state.received_grads
        state.received_grads = None
        if state.sequence is not None:
            grads = [*grads, *state.sequence.grads()]
            state.sequence = None
        run(state, grads)
        if self._prev.queue is None:
            if not self._is_first:
                self._prev.states[state.microbatch].received_grads = state.grads_to_send
            state.grads_to_send = None

    def _run_replicas(self, act: Callable[[Replicas], None]) -> None:
        if self.replicas is not None:
            with self._transport.waiting_for_replicas():
                act(self.replicas)

    def _await_replicas(self) -> None:
        if self.replicas is not None and self.replicas.is_busy:
            self._run_replicas(Replicas.wait)


_WHOLE_STAGE: dict[Op, Callable[[Replicas], None]] = {
    Op.UNSHARD: lambda replicas: replicas.unshard(),
    Op.RESHARD: lambda replicas: replicas.reshard(),
    Op.REDUCE_GRAD: lambda replicas: replicas.start_reduction(),
}
# Functions, since bound methods in a runner would form reference cycles.
_HANDLERS: dict[Op, Callable[..., None]] = {
    Op.FORWARD: StageRunner._forward,
    Op.RECOMPUTE: StageRunner._recompute,
    Op.OFFLOAD: lambda runner, state: state.offload.offload(),
    Op.RELOAD: StageRunner._reload,
    Op.FULL_BACKWARD: lambda runner, state: runner._run_backward(state, runner.stage.backward),
    Op.INPUT_GRAD: lambda runner, state: runner._run_backward(state, runner.stage.input_grad),
    Op.WEIGHT_GRAD: StageRunner._weight_grad,
    Op.SEND_F: StageRunner._send_forward,
    Op.RECV_F: StageRunner._recv_forward,
    Op.SEND_B: StageRunner._send_backward,
    Op.RECV_B: StageRunner._recv_backward,
}
