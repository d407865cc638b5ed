"""One stage at play: what each action does with a microbatch's slot, the batch and the transport.

The player binds actions to calls once (``bind``); the executor then runs the calls. It knows the
neighbours of its stage, but no schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any, assert_never

from torch import Tensor

from penstock.errors import BoundaryError
from penstock.parallel.data_parallel import Replicas
from penstock.runtime.batch import Batch
from penstock.runtime.call import Call
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.recv_queue import RecvQueue
from penstock.runtime.ending import Ending
from penstock.runtime.keeping import Keeper
from penstock.runtime.lanes import Lanes
from penstock.runtime.role import Role
from penstock.schedule.action import Action, Op
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.slots import Slot
from penstock.stage.stage import Stage
from penstock.stage.tensor_meta import TensorMeta

__all__ = ["Player"]


class Player:
    """One stage, its microbatches' slots, and its neighbours.

    Args:
        stage: the stage.
        role: what it plays.
        num_microbatches: how many slots it needs.
        transport: its rank's connection.
        inboxes: its rank's inboxes, by peer.
        done: for each op that changes how forwards run, the microbatches for which the program
            has it: INPUT_GRAD leaves weight gradients to W, RECOMPUTE and OFFLOAD are the keeper's.
        arrived: for each action that waits for a message, how many of its rank's messages to the
            sender have arrived by then (see ``schedule.channels``).
        lanes: the streams that its calls run on, where there are several.

    Attributes:
        replicas: the data-parallel wrapper of its module, if any.
        sends_values: whether what it passes on has held values that do not follow from shapes.
    """

    def __init__(
        self,
        stage: Stage,
        role: Role,
        num_microbatches: int,
        transport: Transport,
        inboxes: dict[int, RecvQueue],
        done: Mapping[Op, Set[int]],
        arrived: Mapping[Action, int],
        lanes: Lanes | None = None,
    ) -> None:
        self.stage = stage
        # Whether the model's inputs enter here, and whether its outputs leave.
        self._is_first = self._is_last = False
        self.slots = [Slot(m) for m in range(num_microbatches)]
        # Between steps a batch that holds nothing: the step's tensors are the caller's again.
        self._no_batch = self.batch = Batch(num_microbatches)
        self._role = role
        self._ending = Ending(role)
        self._transport = transport
        self._inboxes = inboxes
        self._deferred = done.get(Op.INPUT_GRAD, frozenset())
        self._keeper = Keeper(stage, done)
        self._arrived = arrived
        self._lanes = lanes
        self.replicas: Replicas | None = None
        self.sends_values = False
        # Each neighbour is on this rank, with its slots, or a peer with its inbox, or neither.
        self._before: Sequence[Slot] | None = None
        self._after: Sequence[Slot] | None = None
        self._before_peer: RecvQueue | None = None
        self._after_peer: RecvQueue | None = None
        # By shape id: what comes in, what goes out, and which gradients come back.
        self._in_specs: dict[int, BoundarySpec] = {}
        self._out_specs: dict[int, BoundarySpec] = {}
        self._grads_out: dict[int, tuple[bool, ...]] = {}
        self._grads_in: dict[int, tuple[bool, ...]] = {}

    def connect(self, before: Player | int | None, after: Player | int | None) -> None:
        """Set the neighbours: a player on this rank, a peer's rank, or none."""
        self._is_first, self._is_last = before is None, after is None
        if isinstance(before, int):
            self._before_peer = self._inboxes[before]
        else:
            self._before = before.slots if before is not None else None
        if isinstance(after, int):
            self._after_peer = self._inboxes[after]
        else:
            self._after = after.slots if after is not None else None

    def forget(self) -> None:
        """What crosses this stage's boundaries is told anew, shape by shape."""
        for known in (self._in_specs, self._out_specs, self._grads_out, self._grads_in):
            known.clear()

    def rest(self) -> None:
        """The step is over: let go of its batch."""
        self.batch = self._no_batch

    def reset(self) -> None:
        """Forget what a broken step has left. A whole one leaves nothing."""
        self.rest()
        for slot in self.slots:
            slot.clear()

    def bind(self, action: Action) -> list[Call]:
        """The calls that carry out ``action``, in order."""
        if action.microbatch is None:
            return self._bind_whole_stage(action)
        slot = self.slots[action.microbatch]
        match action.op:
            case Op.FORWARD:
                wait = self._wait_input if self._before_peer is not None else None
                given = partial(self._given, action.microbatch)
                forward = self._keeper.forward_for(action.microbatch, self._forward, given)
                return self._calls(action, wait, forward, slot)
            case Op.RECOMPUTE:
                return [Call(action, partial(self._recompute, slot))]
            case Op.OFFLOAD:
                return [Call(action, partial(self._keeper.offload, slot))]
            case Op.RELOAD:
                return [Call(action, partial(self._keeper.reload, slot))]
            case Op.FULL_BACKWARD:
                wait = self._wait_grads if self._after_peer is not None else None
                return self._calls(action, wait, self._backward, slot)
            case Op.INPUT_GRAD:
                wait = self._wait_grads if self._after_peer is not None else None
                return self._calls(action, wait, self._input_grad, slot)
            case Op.WEIGHT_GRAD:
                return [Call(action, partial(self.stage.weight_grad, slot))]
            case Op.SEND_F:
                return [Call(action, partial(self._send_forward, slot))]
            case Op.RECV_F:
                return [Call(action, partial(self._expect_input, slot))]
            case Op.SEND_B:
                return [Call(action, partial(self._send_backward, slot))]
            case Op.RECV_B:
                return [Call(action, partial(self._expect_grads, slot))]
            case Op.UNSHARD | Op.RESHARD | Op.REDUCE_GRAD:
                raise AssertionError(f"{action} names a microbatch")
            case _:
                assert_never(action.op)

    def _calls(
        self,
        action: Action,
        wait: Callable[[Slot, int], None] | None,
        run: Callable[[Slot], None],
        slot: Slot,
    ) -> list[Call]:
        calls = [Call(action, partial(run, slot))]
        if wait is not None:
            arrived = self._arrived.get(action, 0)
            calls.insert(0, Call(action, partial(wait, slot, arrived), waits=True))
        return calls

    def _bind_whole_stage(self, action: Action) -> list[Call]:
        match action.op:
            case Op.UNSHARD:
                return [Call(action, self._unshard)]
            case Op.RESHARD:
                return [Call(action, self._reshard)]
            case Op.REDUCE_GRAD:
                return [Call(action, self._reduce_grads)]
            case _:
                raise AssertionError(f"{action} names no microbatch")

    # A stage that is not replicated or sharded has nothing to gather or reduce.

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

    def _expect_input(self, slot: Slot) -> None:
        assert self._before_peer is not None
        slot.arrival = self._before_peer.expect(self._input_metas, slot)

    def _input_metas(self, slot: Slot, note: bytes | None) -> Sequence[TensorMeta] | None:
        shape_id = self.batch.shape_ids[slot.microbatch]
        if note is not None:
            slot.in_spec = self._in_specs[shape_id] = BoundarySpec.decode(note)
            slot.in_spec.check_static(self.stage.static_inputs, "input")
        elif self._role.dynamic_shapes or shape_id not in self._in_specs:
            return None
        else:
            slot.in_spec = self._in_specs[shape_id]
        return slot.in_spec.metas

    def _wait_input(self, slot: Slot, arrived: int) -> None:
        tensors = slot.arrival.wait()
        assert self._before_peer is not None and slot.in_spec is not None
        self._transport.release(self._before_peer.peer, arrived)
        slot.arrival = slot.in_spec.unpack(tensors)

    def _arguments(self, slot: Slot) -> tuple[Any, ...]:
        if self._is_first:
            assert self.batch.args is not None  # the act has seen to it
            return self.batch.args[slot.microbatch]
        tensors, spec = slot.arrival, slot.in_spec
        slot.arrival = None
        assert spec is not None
        if self._lanes is not None:
            self._lanes.adopt(tensors)
        return self.stage.enter(slot, tensors, spec)

    def _given(self, microbatch: int) -> Sequence[Tensor]:
        return self.batch.given(microbatch)

    def _run(self, slot: Slot) -> Any:
        mb = slot.microbatch
        args, kwargs = self._arguments(slot), self.batch.kwargs[mb]
        return self.stage.forward(slot, args, kwargs, defer=mb in self._deferred)

    def _forward(self, slot: Slot) -> None:
        output = self._run(slot)
        if self._is_last:
            self._ending.take(slot, output, self.batch)
        else:
            self._pass_on(slot, output)

    def _recompute(self, slot: Slot) -> None:
        self._keeper.recompute(slot, self.batch, self._forward_again)

    def _forward_again(self, slot: Slot) -> None:
        """Run the forward for its graph alone: what it gave has been passed on already."""
        output = self._run(slot)
        if self._is_last:
            # What is known of the batch is found once more, the same.
            self._ending.take(slot, output, self.batch)
        else:
            assert slot.spec is not None
            self.stage.leave(slot, output, slot.spec)
            slot.outgoing = None

    def _pass_on(self, slot: Slot, output: Any) -> None:
        shape_id = self.batch.shape_ids[slot.microbatch]
        spec = self._out_specs.get(shape_id)
        if spec is None or self._role.dynamic_shapes:
            spec = self._out_specs[shape_id] = describe(output)
            spec.check_static(self.stage.static_outputs, "output")
            self.sends_values |= spec.holds_values
            if self._after is None:
                slot.note = spec.encode()
        self.stage.leave(slot, output, spec)
        if self._after is not None:
            taken = self._after[slot.microbatch]
            taken.arrival, taken.in_spec = slot.outgoing, spec
            slot.outgoing = None

    def _send_forward(self, slot: Slot) -> None:
        peer = self._after_peer
        assert peer is not None and slot.outgoing is not None and slot.spec is not None
        if slot.note is not None:
            self._transport.send_metadata(peer.peer, slot.note)
            slot.note = None
        self._transport.send(peer.peer, slot.spec.pack(slot.outgoing))
        slot.outgoing = None

    # --- backward ----------------------------------------------------------------------------

    def _expect_grads(self, slot: Slot) -> None:
        assert self._after_peer is not None
        slot.grad_arrival = self._after_peer.expect(self._grad_metas, slot)

    def _grad_metas(self, slot: Slot, note: bytes | None) -> Sequence[TensorMeta] | None:
        shape_id = self.batch.shape_ids[slot.microbatch]
        if note is not None:
            self._grads_in[shape_id] = tuple(bool(b) for b in note)
        elif self._role.dynamic_shapes or shape_id not in self._grads_in:
            return None
        slot.grads_present = present = self._grads_in[shape_id]
        # A receive may be posted before this step's forward, when the slot still tells of the last
        # step's; where shapes always come with a note, it is posted after it.
        spec = slot.spec if self._role.dynamic_shapes else self._out_specs[shape_id]
        assert spec is not None
        if all(present):
            return spec.grad_metas
        return [meta for meta, there in zip(spec.grad_metas, present, strict=True) if there]

    def _wait_grads(self, slot: Slot, arrived: int) -> None:
        tensors = slot.grad_arrival.wait()
        assert self._after_peer is not None
        self._transport.release(self._after_peer.peer, arrived)
        present = slot.grads_present
        if len(tensors) != len(present):
            come = iter(tensors)
            tensors = [next(come) if there else None for there in present]
        assert slot.spec is not None
        slot.grad_arrival = slot.spec.unpack_grads(tensors)

    def _backward(self, slot: Slot) -> None:
        self.stage.backward(slot, self._take_grads(slot))
        self._pass_back(slot)

    def _input_grad(self, slot: Slot) -> None:
        self.stage.input_grad(slot, self._take_grads(slot))
        self._pass_back(slot)

    def _take_grads(self, slot: Slot) -> Sequence[Tensor | None]:
        grads: Sequence[Tensor | None] = slot.grad_arrival
        slot.grad_arrival = None
        if self._lanes is not None:
            self._lanes.adopt(grads)
        return grads

    def _pass_back(self, slot: Slot) -> None:
        if self._is_first:
            slot.outgoing_grads = None
        elif self._before is not None:
            self._before[slot.microbatch].grad_arrival = slot.outgoing_grads
            slot.outgoing_grads = None

    def _send_backward(self, slot: Slot) -> None:
        peer, grads = self._before_peer, slot.outgoing_grads
        assert peer is not None and grads is not None
        slot.outgoing_grads = None
        shape_id = self.batch.shape_ids[slot.microbatch]
        present = self._grads_out.get(shape_id)
        if present is None or self._role.dynamic_shapes:
            present = self._grads_out[shape_id] = tuple(g is not None for g in grads)
            self._transport.send_metadata(peer.peer, bytes(present))
        self._transport.send(peer.peer, self._present_grads(slot, grads, present))

    def _present_grads(
        self, slot: Slot, grads: Sequence[Tensor | None], present: tuple[bool, ...]
    ) -> list[Tensor]:
        spec = slot.in_spec
        assert spec is not None
        sent = []
        for i, grad, wanted in zip(spec.grad_slots, grads, present, strict=True):
            if (grad is not None) != wanted:
                # Zeros in place of a missing gradient would be another result: an optimizer
                # passes over parameters without a gradient, and decays those with zeros.
                now, before = ("no", "one") if wanted else ("a", "none")
                raise BoundaryError(
                    f"input {i} has {now} gradient in this microbatch and had {before} in earlier "
                    "ones; pass dynamic_shapes=True where this may change"
                )
            if grad is not None:
                sent.append(spec.metas[i].pack(grad))
        return sent
