"""Synchronize ranks at the start and at the end of a step.

    start   conditions of all ranks ─► shape ids of the first rank's inputs ─► all ranks
    end     losses of the last rank ─► all ranks; no rank leaves before all have finished

The rank of the first stage assigns an id to the shapes of each microbatch's inputs, and stage
runners cache boundary metadata by id. Plain values among the inputs count as part of their shapes;
objects of other types get a new id each step. Metadata also depends on *run conditions*: autocast,
the modules' training mode, which parameters require grad, and the shapes of keyword arguments on
other ranks. Equal shapes under other conditions have another id.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from penstock.errors import StageError, Where
from penstock.runtime.comm.base import Transport
from penstock.runtime.config import RunConfig
from penstock.runtime.loss import needs_target
from penstock.runtime.step import StepState
from penstock.schedule.program import Program
from penstock.stage.boundary import BoundarySpec, describe
from penstock.stage.pytree import flatten, is_plain
from penstock.stage.stage import Stage

__all__ = ["MAX_SHAPES", "ShapeCache", "StepSync", "run_conditions"]

# After so many ids all are forgotten, on all ranks at the same step; no id is reused.
MAX_SHAPES = 4096

# In an order that is the same on every rank. The loss of an evaluation may be a count.
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


class StepSync:
    """Synchronizes the steps of one program.

    Args:
        program: the program.
        config: the run options.
        stages: this process's stages, by index.
        transports: one per rank of this process.
        train: True for training, False for evaluation.

    Attributes:
        has_new_shapes: whether this step has a shape id that was not seen before.
    """

    def __init__(
        self,
        program: Program,
        config: RunConfig,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        *,
        train: bool,
    ) -> None:
        self._program = program
        self._stages = stages
        self._transports = transports
        self._train = train
        self._has_loss = config.loss_fn is not None
        self._needs_target = train and needs_target(config.loss_fn)
        placement = program.placement
        entry_ranks = [placement.rank_of(stage) for stage in placement.entries]
        # With several copies of the model, the first copy's ranks broadcast.
        self._first_rank = entry_ranks[0]
        self._last_rank = placement.rank_of(placement.exits[0])
        self._num_exit_ranks = len({placement.rank_of(stage) for stage in placement.exits})
        self._device = next(iter(stages.values())).device
        self._is_alone = len(transports) == program.num_ranks
        self._compares_inputs = (
            len(set(entry_ranks)) > 1 and not self._is_alone and transports[0].rank in entry_ranks
        )
        self._shapes = ShapeCache()
        self.has_new_shapes = False
        # By the shape id of the first microbatch, which is another one under autocast.
        self._loss_dtypes: dict[int, torch.dtype | None] = {}

    @property
    def forgets_shapes(self) -> bool:
        """True if all shape ids of earlier steps have just been dropped."""
        return self._shapes.was_cleared

    # --- start -------------------------------------------------------------------------------

    def describe_call(self, step: StepState, num_steps: int) -> str:
        """Describe the current call, to be compared between ranks."""
        call = "step()" if self._train else "eval()"
        # Ranks where outputs leave exchange them, if they are returned.
        joined = " with outputs" if self._num_exit_ranks > 1 and step.keep_outputs else ""
        return f"{call}{joined}, after {num_steps} others"

    def begin(self, step: StepState) -> None:
        """Begin a step: broadcast the shape ids, which are set in ``step``.

        Raises:
            StageError: inputs or targets are missing where they are needed, or the ranks where
                inputs enter were given different ones.
            ScheduleError: the ranks are in different calls.
        """
        conditions = self._gather_conditions(step)
        ids = self._shape_ids(step, conditions)
        # If inputs enter on several ranks, equal ids do not imply equal shapes.
        digest = self._shapes.digest(ids) if self._compares_inputs else 0
        for transport in sorted(self._transports, key=lambda t: t.rank != self._first_rank):
            first, *step.shape_ids = transport.broadcast_ints([digest, *ids], self._first_rank)
        if self._compares_inputs and first != digest:
            raise StageError(
                f"the inputs here have other shapes than those on rank {self._first_rank}; each "
                "rank where the model's inputs enter passes the whole batch"
            )
        self.has_new_shapes = self._shapes.learn(step.shape_ids)

    def _gather_conditions(self, step: StepState) -> tuple[int, ...]:
        """The id of each rank's run conditions; where one process plays all ranks, its own."""
        conditions = run_conditions(self._stages.values(), self._device)
        if self._is_alone:
            return (self._shapes.condition_id(conditions),)
        (transport,) = self._transports
        # The first rank's keyword arguments are part of its inputs.
        kwargs = () if transport.rank == self._first_rank else step.kwargs
        return tuple(transport.all_gather_ints(self._shapes.condition_id(conditions, kwargs)))

    def _shape_ids(self, step: StepState, conditions: tuple[int, ...]) -> list[int]:
        """The shape ids, where the inputs are here; zeros elsewhere."""
        placement = self._program.placement
        exits = [stage for stage in placement.exits if stage in self._stages]
        entries = [stage for stage in placement.entries if stage in self._stages]
        if exits and self._needs_target and step.targets is None:
            raise StageError(
                "no target, where the loss is computed: the rank of the last stage passes "
                "target= (or target_mbs=) to step()",
                where=Where(rank=placement.rank_of(exits[0]), stage=exits[0]),
            )
        if not entries:
            return [0] * self._program.num_microbatches
        if step.args is None:
            call = "step() or eval()"
            if not self._train:
                call += ", which runs the model; train(False) of its modules sets their mode"
            raise StageError(
                f"no inputs: the rank of the first stage passes them to {call}",
                where=Where(rank=placement.rank_of(entries[0]), stage=entries[0]),
            )
        return self._shapes.ids(step.args, step.kwargs, conditions)

    # --- end ---------------------------------------------------------------------------------

    def end(self, step: StepState) -> Tensor | None:
        """End a step: no rank leaves before all have finished, so that none misses a failure.

        Returns:
            The losses, shape (microbatches,), on every rank; None where none were computed.
        """
        computed = [loss for loss in step.losses if loss is not None]
        if self._is_alone:
            return torch.stack(computed) if computed else None
        (transport,) = self._transports
        if self._num_exit_ranks > 1 and step.keep_outputs:
            _exchange_outputs(step, self._program, transport, self._device)
        if not self._has_loss:
            transport.barrier()
            return None
        dtype = self._share_loss_dtype(step, computed, transport)
        # Float64 represents every narrower loss exactly. Built from device tensors, since numbers
        # from the host would require a synchronization.
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        table = torch.stack([zero if loss is None else loss.to(zero) for loss in step.losses])
        transport.all_reduce(table)
        return None if dtype is None else table.to(dtype)

    def _share_loss_dtype(
        self, step: StepState, losses: list[Tensor], transport: Transport
    ) -> torch.dtype | None:
        """The dtype of the losses on the last rank; None if there are none."""
        if self._shapes.was_cleared:
            self._loss_dtypes.clear()
        shape_id = step.shape_ids[0]
        if shape_id not in self._loss_dtypes or not self._train:
            code = _DTYPES.index(torch.stack(losses).dtype) if losses else -1
            (code,) = transport.broadcast_ints([code], self._last_rank)
            self._loss_dtypes[shape_id] = _DTYPES[code] if code >= 0 else None
        return self._loss_dtypes[shape_id]


def _exchange_outputs(
    step: StepState, program: Program, transport: Transport, device: torch.device
) -> None:
    """Complete ``step.outputs`` on every rank where outputs leave (with copies of the model).

    Raises:
        BoundaryError: an output is not made of tensors and plain values.
    """
    placement = program.placement
    leaving: dict[int, list[int]] = {}
    for stage in placement.exits:
        passing = [m for m in range(program.num_microbatches) if placement.passes(m, stage)]
        leaving.setdefault(placement.rank_of(stage), []).extend(passing)
    if transport.rank not in leaving:
        return
    mine = tuple(step.outputs[m] for m in leaving[transport.rank])
    spec = describe(mine)
    tensors = spec.pack(spec.tensors(mine))
    peers = sorted(leaving.keys() - {transport.rank})
    for peer in peers:
        transport.send_metadata(peer, spec.encode())
    for peer in peers:
        received = BoundarySpec.decode(transport.recv_metadata(peer))
        pending = transport.receive(peer, received.metas, device)
        transport.send(peer, tensors)
        outputs = received.arguments(received.unpack(pending.wait()))
        for microbatch, output in zip(leaving[peer], outputs, strict=True):
            step.outputs[microbatch] = output


# --- ids of shapes -------------------------------------------------------------------------------


def run_conditions(stages: Iterable[Stage], device: torch.device) -> tuple[Any, ...]:
    """This rank's conditions, besides input shapes, that boundary metadata depends on."""
    kind = device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    cast = torch.get_autocast_dtype(kind) if casts else None
    modules = [stage.submod for stage in stages]
    trained = (param.requires_grad for module in modules for param in module.parameters())
    return (cast, *(module.training for module in modules), *trained)


class ShapeCache:
    """The ids of all shapes seen so far.

    Attributes:
        was_cleared: whether ``learn`` has just forgotten all earlier ids.
    """

    def __init__(self) -> None:
        self._conditions: dict[tuple[Any, ...], int] = {}
        # By all ranks' conditions, and by the shapes themselves.
        self._ids: dict[tuple[tuple[int, ...], tuple[Any, ...]], int] = {}
        self._known: set[int] = set()
        self._next, self._next_condition = count(), count()
        self._num_calls = 0
        self.was_cleared = False

    def condition_id(
        self, condition: tuple[Any, ...], kwargs: Sequence[Mapping[str, Any]] = ()
    ) -> int:
        """The id of this rank's run conditions, with the shapes of ``kwargs`` per microbatch."""
        if any(kwargs):
            condition = (*condition, *(self._key((), named) for named in kwargs))
        if condition not in self._conditions:
            self._conditions[condition] = next(self._next_condition)
        return self._conditions[condition]

    def ids(
        self,
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[Mapping[str, Any]],
        conditions: tuple[int, ...] = (),
    ) -> list[int]:
        """Per microbatch the id of its inputs' shapes, under all ranks' conditions."""
        ids = self._ids
        self._num_calls += 1
        found: list[int] = []
        last: tuple[Any, ...] = ()
        for positional, named in zip(args, kwargs, strict=True):
            key = self._key(positional, named)
            # Most microbatches repeat the previous shapes, and comparing is faster than hashing.
            if key != last:
                if (conditions, key) not in ids:
                    ids[conditions, key] = next(self._next)
                last, number = key, ids[conditions, key]
            found.append(number)
        return found

    def learn(self, ids: Sequence[int]) -> bool:
        """Record ids; returns True if at least one is new."""
        distinct = set(ids)
        self.was_cleared = not distinct <= self._known and len(self._known) >= MAX_SHAPES
        if self.was_cleared:
            self._known.clear()
            self._conditions.clear()
            self._ids = {key: i for key, i in self._ids.items() if i in distinct}
        is_new = not distinct <= self._known
        self._known |= distinct
        return is_new

    def digest(self, ids: Sequence[int]) -> int:
        """A checksum of the shapes of ``ids``, comparable between ranks with different ids."""
        keys = {number: key for (_, key), number in self._ids.items()}
        shapes = [[part for part in keys[i] if isinstance(part, torch.Size)] for i in ids]
        return zlib.crc32(repr(shapes).encode())

    def _key(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            return (args[0].shape, args[0].dtype)
        leaves, tree = flatten((args, dict(kwargs)))
        parts: list[Any] = [tree]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                parts += (leaf.shape, leaf.dtype)
            else:
                # An object of another type may be mutated and still be the same object.
                parts += (type(leaf), leaf if is_plain(leaf) else self._num_calls)
        return tuple(parts)
