"""The handlers of one stage's actions on a microbatch's state, the step and the transport.

The runner binds actions to handlers once (``bind``), and the executor runs the handlers. All state
of a schedule for its stage is in the runner, so that several schedules may share stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from torch import Tensor, is_grad_enabled

from penstock.errors import BoundaryError, ScheduleError
from penstock.parallel.data_parallel import Replicas
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.recv_queue import RecvQueue
from penstock.runtime.config import RunConfig
from penstock.runtime.executor import BoundAction
from penstock.runtime.loss import LossHead
from penstock.runtime.overlap import DualStreams
from penstock.runtime.step import StepState
from penstock.schedule.action import Action, Op
from penstock.schedule.program import Program
from penstock.schedule.rules import INPUT_GRADS
from penstock.stage import device_streams
from penstock.stage.boundary import BoundarySpec, TensorMeta, describe
from penstock.stage.offload import ActivationOffload, CopyStreams
from penstock.stage.pytree import map_tensors
from penstock.stage.recompute import Recomputer
from penstock.stage.rng import RandomStream
from penstock.stage.sequence_state import detach_state
from penstock.stage.stage import MicrobatchState, Stage

__all__ = ["Neighbor", "StageRunner"]

# A neighbouring stage: its states where it lies on this rank, or the receives from its rank.
Neighbor: TypeAlias = "Sequence[MicrobatchState] | RecvQueue | None"


class StageRunner:
    """Runs the actions of one stage for one program.

    Args:
        stage: the stage.
        states: its microbatches' states.
        previous, following: its neighbours.
        program: the program.
        config: how it runs.
        train: whether the program trains, or evaluates.
        ops: the microbatches for which the program has INPUT_GRAD, RECOMPUTE and OFFLOAD, which
            change how their forward runs.
        transport: its rank's connection.
        acknowledged: for each action that waits for a message, how many of this rank's messages
            to the sender have arrived by then (see ``schedule.channels``).
        dual_streams: the two streams that its actions run on, where overlapped pairs need them.

    Attributes:
        replicas: the data-parallel wrapper of its module, if any.
        rng: its part of the microbatches' random streams, with ``microbatch_rng``.

    Raises:
        ScheduleError: ``microbatch_rng``, and the stage was given static boundary shapes.
    """

    def __init__(
        self,
        stage: Stage,
        states: Sequence[MicrobatchState],
        previous: Neighbor,
        following: Neighbor,
        *,
        program: Program,
        config: RunConfig,
        train: bool,
        ops: Mapping[Op, Set[int]],
        transport: Transport,
        acknowledged: Mapping[Action, int],
        dual_streams: DualStreams | None = None,
    ) -> None:
        self.stage = stage
        self._states = states
        self._is_first, self._is_last = previous is None, following is None
        self._prev_queue = previous if isinstance(previous, RecvQueue) else None
        self._next_queue = following if isinstance(following, RecvQueue) else None
        self._prev_states = None if isinstance(previous, RecvQueue) else previous
        self._next_states = None if isinstance(following, RecvQueue) else following
        self._transport = transport
        self._acknowledged = acknowledged
        self._dual_streams = dual_streams
        self._dynamic_shapes = config.dynamic_shapes
        self._num_splits = program.num_splits
        divisor = program.num_microbatches if config.scale_grads else 1
        self._loss_head = LossHead(config.loss_fn, divisor, train=train)
        self._deferred = ops.get(Op.INPUT_GRAD, frozenset())
        self._recomputed = ops.get(Op.RECOMPUTE, frozenset())
        self._offloaded = ops.get(Op.OFFLOAD, frozenset())
        self._recomputer = Recomputer(stage.device)
        streams = device_streams.streams_of(stage.device) if self._offloaded else None
        self._copy_streams = CopyStreams(streams) if streams is not None else None
        self.replicas: Replicas | None = None
        self.rng = _make_rng(stage, program) if train and config.microbatch_rng else None
        # Between steps an empty step, so that the last step's tensors can be freed.
        self._no_step = StepState(program.num_microbatches)
        # By shape id: the specs of inputs and outputs, and which gradients go back and come back.
        self._in_specs: dict[int, BoundarySpec] = {}
        self._out_specs: dict[int, BoundarySpec] = {}
        self._grads_out: dict[int, tuple[bool, ...]] = {}
        self._grads_in: dict[int, tuple[bool, ...]] = {}
        self._caches = ((self._in_specs, self._grads_out), (self._out_specs, self._grads_in))
        self.end()

    def begin(self, step: StepState, *, forget: bool = False) -> bool:
        """Begin a step.

        Metadata that holds plain values is dropped at both ends of a boundary, to be sent again:
        values do not follow from the inputs' shapes.

        Args:
            step: its data.
            forget: drop all that is cached by shape id.

        Returns:
            Whether metadata has been dropped.
        """
        self._step = step
        self._shape_ids, self._kwargs = step.shape_ids, step.kwargs
        dropped = False
        for specs, grads in self._caches:
            for shape_id in [i for i, spec in specs.items() if forget or spec.holds_values]:
                del specs[shape_id]
                grads.pop(shape_id, None)
                dropped = True
        return dropped

    def end(self) -> None:
        """End a step: release its data."""
        self._step = self._no_step
        self._shape_ids, self._kwargs = self._no_step.shape_ids, self._no_step.kwargs

    def reset(self) -> None:
        """Release the state of a failed step."""
        self.end()
        for state in self._states:
            state.clear()

    # --- binding -----------------------------------------------------------------------------

    def bind(self, action: Action) -> list[BoundAction]:
        """Bind ``action`` to its handler, behind the wait for its message if it has one."""
        op, mb = action.op, action.microbatch
        if mb is None:
            return [BoundAction(action, partial(_OF_STAGE[op], self))]
        handler, state = _OF_MICROBATCH[op], self._states[mb]
        if op is Op.FORWARD and mb in self._recomputed:
            handler = StageRunner._forward_to_recompute
        elif op is Op.FORWARD and mb in self._offloaded:
            handler = StageRunner._forward_to_offload
        bound = [BoundAction(action, partial(handler, self, state))]
        arrived = self._acknowledged.get(action, 0)
        if op is Op.FORWARD and self._prev_queue is not None:
            wait = partial(self._wait_input, state, arrived)
            bound.insert(0, BoundAction(action, wait, is_wait=True))
        elif op in INPUT_GRADS and self._next_queue is not None:
            wait = partial(self._wait_grads, state, arrived)
            bound.insert(0, BoundAction(action, wait, is_wait=True))
        return bound

    # A stage that is neither replicated nor sharded has nothing to gather or reduce.

    def _unshard(self) -> None:
        if self.replicas is not None:
            with self._transport.waiting_for_replicas():
                self.replicas.unshard()

    def _reshard(self) -> None:
        if self.replicas is not None:
            self.replicas.reshard()

    def _reduce_grads(self) -> None:
        if self.replicas is not None:
            with self._transport.waiting_for_replicas():
                self.replicas.reduce_grads()

    # --- forward -----------------------------------------------------------------------------

    def _recv_forward(self, state: MicrobatchState) -> None:
        assert self._prev_queue is not None
        state.received = self._prev_queue.expect(self._input_metas, state)

    def _input_metas(
        self, state: MicrobatchState, metadata: bytes | None
    ) -> Sequence[TensorMeta] | None:
        shape_id = self._shape_ids[state.microbatch]
        if metadata is not None:
            state.in_spec = self._in_specs[shape_id] = BoundarySpec.decode(metadata)
            state.in_spec.check_static(self.stage.static_inputs, "input")
        elif self._dynamic_shapes or shape_id not in self._in_specs:
            return None
        else:
            state.in_spec = self._in_specs[shape_id]
        return state.in_spec.metas

    def _wait_input(self, state: MicrobatchState, arrived: int) -> None:
        tensors = state.received.wait()
        assert self._prev_queue is not None and state.in_spec is not None
        self._transport.release(self._prev_queue.peer, arrived)
        state.received = state.in_spec.unpack(tensors)

    def _forward(self, state: MicrobatchState) -> None:
        mb, step = state.microbatch, self._step
        output = self._run(state, self._arguments(state), self._kwargs[mb])
        if self._is_last:
            target = None if step.targets is None else step.targets[mb]
            self._loss_head.run(state, output, target, step)
        else:
            self._pass_on(state, output)
        if state.sequence is not None:
            state.roots = [*state.roots, *state.sequence.edges]

    def _arguments(self, state: MicrobatchState) -> tuple[Any, ...]:
        if self._is_first:
            assert self._step.args is not None  # checked as the step began
            return self._step.args[state.microbatch]
        tensors, spec = state.received, state.in_spec
        state.received = None
        assert spec is not None
        if self._dual_streams is not None:
            self._dual_streams.keep_alive(tensors)
        return self.stage.enter(state, tensors, spec)

    def _run(self, state: MicrobatchState, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        mb = state.microbatch
        defer = mb in self._deferred
        if state.in_sequence:
            before = self._states[mb - 1].sequence if mb % self._num_splits else None
            kwargs = {**kwargs, "state": None if before is None else before.take()}
        rng = self.rng
        if rng is None or not is_grad_enabled():
            output = self.stage.forward(state, args, kwargs, defer=defer)
            return self._pass_state(state, output) if state.in_sequence else output
        args = rng.begin(mb, args)
        try:
            output = self.stage.forward(state, args, kwargs, defer=defer)
            return rng.end(self._pass_state(state, output) if state.in_sequence else output)
        finally:
            rng.leave()

    def _pass_state(self, state: MicrobatchState, returned: Any) -> Any:
        """Keep the state that a chunk's forward returned for the next chunk; return the output."""
        output, sequence = detach_state(returned)
        is_end = (state.microbatch + 1) % self._num_splits == 0
        state.sequence = None if is_end else sequence
        return output

    def _pass_on(self, state: MicrobatchState, output: Any) -> None:
        shape_id = self._shape_ids[state.microbatch]
        spec = self._out_specs.get(shape_id)
        if spec is None or self._dynamic_shapes:
            spec = self._out_specs[shape_id] = describe(output)
            spec.check_static(self.stage.static_outputs, "output")
            if self._next_states is None:
                state.metadata = spec.encode()
        self.stage.leave(state, output, spec)
        if self._next_states is not None:
            receiver = self._next_states[state.microbatch]
            receiver.received, receiver.in_spec = state.to_send, spec
            state.to_send = None

    def _send_forward(self, state: MicrobatchState) -> None:
        queue = self._next_queue
        assert queue is not None and state.to_send is not None and state.out_spec is not None
        if state.metadata is not None:
            self._transport.send_metadata(queue.peer, state.metadata)
            state.metadata = None
        self._transport.send(queue.peer, state.out_spec.pack(state.to_send))
        state.to_send = None

    # --- activations that are recomputed or offloaded ----------------------------------------

    def _forward_to_recompute(self, state: MicrobatchState) -> None:
        """Run the forward and keep only its inputs."""
        received = state.received or ()
        inputs = [*received, *self._step.given(state.microbatch)]
        context = self._recomputer.record(self.stage.submod, inputs)
        if not self._is_first:
            state.received = [tensor.detach() for tensor in received]  # separate leaves
        self._forward(state)
        context.close()
        state.recompute = context
        state.received = None if self._is_first else [context.restore(t) for t in received]
        state.roots, state.leaves, state.work = (), (), None

    def _recompute(self, state: MicrobatchState) -> None:
        """Run the forward again for its graph; its output has already been sent."""
        context, state.recompute = state.recompute, None
        assert context is not None
        mb, step = state.microbatch, self._step
        args, kwargs = self._arguments(state), self._kwargs[mb]
        target = None if step.targets is None else step.targets[mb]
        if context.written_inputs:
            args, kwargs, target = map_tensors(context.restore, (args, kwargs, target))
        with context:
            output = self._run(state, args, kwargs)
            if self._is_last:
                self._loss_head.run(state, output, target, step)
            else:
                assert state.out_spec is not None
                self.stage.leave(state, output, state.out_spec)
                state.to_send = None

    def _forward_to_offload(self, state: MicrobatchState) -> None:
        """Run the forward and record the tensors that autograd saves."""
        module = self.stage.submod
        stays = chain(
            module.parameters(),
            module.buffers(),
            state.received or (),
            self._step.given(state.microbatch),
        )
        state.offload = ActivationOffload(self.stage.device, stays, self._copy_streams)
        with state.offload.collecting():
            self._forward(state)

    def _offload(self, state: MicrobatchState) -> None:
        assert state.offload is not None
        state.offload.offload()

    def _reload(self, state: MicrobatchState) -> None:
        offload, state.offload = state.offload, None
        assert offload is not None
        offload.reload()

    # --- backward ----------------------------------------------------------------------------

    def _recv_backward(self, state: MicrobatchState) -> None:
        assert self._next_queue is not None
        state.received_grads = self._next_queue.expect(self._grad_metas, state)

    def _grad_metas(
        self, state: MicrobatchState, metadata: bytes | None
    ) -> Sequence[TensorMeta] | None:
        shape_id = self._shape_ids[state.microbatch]
        if metadata is not None:
            self._grads_in[shape_id] = tuple(bool(b) for b in metadata)
        elif self._dynamic_shapes or shape_id not in self._grads_in:
            return None
        state.grads_present = present = self._grads_in[shape_id]
        # A receive may be posted before this step's forward, while the state still has the last
        # step's spec; with metadata for every message it is posted after it.
        spec = state.out_spec if self._dynamic_shapes else self._out_specs[shape_id]
        assert spec is not None
        if all(present):
            return spec.grad_metas
        return [meta for meta, there in zip(spec.grad_metas, present, strict=True) if there]

    def _wait_grads(self, state: MicrobatchState, arrived: int) -> None:
        tensors = state.received_grads.wait()
        assert self._next_queue is not None
        self._transport.release(self._next_queue.peer, arrived)
        present = state.grads_present
        if len(tensors) != len(present):
            received = iter(tensors)
            tensors = [next(received) if there else None for there in present]
        assert state.out_spec is not None
        state.received_grads = state.out_spec.unpack_grads(tensors)

    def _backward(self, state: MicrobatchState) -> None:
        self.stage.backward(state, self._take_grads(state))
        self._pass_back(state)

    def _input_grad(self, state: MicrobatchState) -> None:
        self.stage.input_grad(state, self._take_grads(state))
        self._pass_back(state)

    def _weight_grad(self, state: MicrobatchState) -> None:
        self.stage.weight_grad(state)

    def _take_grads(self, state: MicrobatchState) -> Sequence[Tensor | None]:
        grads: Sequence[Tensor | None] = state.received_grads
        state.received_grads = None
        if self._dual_streams is not None:
            self._dual_streams.keep_alive(grads)
        if state.sequence is not None:
            grads = [*grads, *state.sequence.grads()]
            state.sequence = None
        return grads

    def _pass_back(self, state: MicrobatchState) -> None:
        if self._is_first:
            state.grads_to_send = None
        elif self._prev_states is not None:
            self._prev_states[state.microbatch].received_grads = state.grads_to_send
            state.grads_to_send = None

    def _send_backward(self, state: MicrobatchState) -> None:
        queue, grads = self._prev_queue, state.grads_to_send
        assert queue is not None and grads is not None
        state.grads_to_send = None
        shape_id = self._shape_ids[state.microbatch]
        present = self._grads_out.get(shape_id)
        if present is None or self._dynamic_shapes:
            present = self._grads_out[shape_id] = tuple(g is not None for g in grads)
            self._transport.send_metadata(queue.peer, bytes(present))
        self._transport.send(queue.peer, _present_grads(state, grads, present))


# Functions, since bound methods in a runner would form reference cycles.
_OF_STAGE: dict[Op, Callable[[StageRunner], None]] = {
    Op.UNSHARD: StageRunner._unshard,
    Op.RESHARD: StageRunner._reshard,
    Op.REDUCE_GRAD: StageRunner._reduce_grads,
}
_OF_MICROBATCH: dict[Op, Callable[[StageRunner, MicrobatchState], None]] = {
    Op.FORWARD: StageRunner._forward,
    Op.RECOMPUTE: StageRunner._recompute,
    Op.OFFLOAD: StageRunner._offload,
    Op.RELOAD: StageRunner._reload,
    Op.FULL_BACKWARD: StageRunner._backward,
    Op.INPUT_GRAD: StageRunner._input_grad,
    Op.WEIGHT_GRAD: StageRunner._weight_grad,
    Op.SEND_F: StageRunner._send_forward,
    Op.RECV_F: StageRunner._recv_forward,
    Op.SEND_B: StageRunner._send_backward,
    Op.RECV_B: StageRunner._recv_backward,
}


def _present_grads(
    state: MicrobatchState, grads: Sequence[Tensor | None], present: tuple[bool, ...]
) -> list[Tensor]:
    spec = state.in_spec
    assert spec is not None
    sent = []
    for i, grad, expected in zip(spec.grad_slots, grads, present, strict=True):
        if (grad is not None) != expected:
            # Zeros are not equivalent to a missing gradient: an optimizer skips parameters without
            # a gradient, but decays parameters with a zero gradient.
            now, before = ("no", "one") if expected else ("a", "none")
            raise BoundaryError(
                f"input {i} has {now} gradient in this microbatch and had {before} in earlier "
                "ones; pass dynamic_shapes=True where this may change"
            )
        if grad is not None:
            sent.append(spec.metas[i].pack(grad))
    return sent


def _make_rng(stage: Stage, program: Program) -> RandomStream:
    if stage.static_inputs is not None or stage.static_outputs is not None:
        raise ScheduleError(
            f"stage {stage.stage_index}: with microbatch_rng=True the generator's state crosses "
            "boundaries too; leave input_args and output_args out"
        )
    placement, index = program.placement, stage.stage_index
    return RandomStream(
        stage.device, first=index in placement.entries, last=index in placement.exits
    )
