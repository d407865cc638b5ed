"""One program at play on this process's stages: players, executor, and how a step begins and ends.

What crosses follows from the inputs' shapes and what ranks see beside them, or is restless: values
that are no tensors cross or are passed to the model, on whichever rank. Which it is, all ranks
learn as they end a step with new shapes; what is restless is told anew with every step's first
microbatch.

Training and evaluation are two acts over the same stages. An act is told of no failure and
handles none; see ``engine.py``.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import ScheduleError, StageError, Where
from penstock.runtime.batch import Batch
from penstock.runtime.blocks import BlockFunction, played_by
from penstock.runtime.call import Call
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.recv_queue import RecvQueue
from penstock.runtime.executor import Executor
from penstock.runtime.lanes import Lanes, can_overlap, has_blocks, why_in_turn
from penstock.runtime.outputs import join_outputs
from penstock.runtime.role import Role
from penstock.runtime.same_batch import looks_of, remark_on_others
from penstock.runtime.shape_cache import ShapeBook, conditions
from penstock.runtime.stage_runner import Player
from penstock.schedule.action import Op
from penstock.schedule.channels import acknowledgements
from penstock.schedule.check import global_order
from penstock.schedule.program import CheckedProgram
from penstock.stage.device_streams import DeviceStreams
from penstock.stage.pytree import flatten
from penstock.stage.stage import Stage

__all__ = ["Act"]

_log = logging.getLogger(__name__)

# The ops that change how the forward of their microbatch runs.
_SHAPES_FORWARD = frozenset({Op.INPUT_GRAD, Op.RECOMPUTE, Op.OFFLOAD})


class Act:
    """One program, bound.

    Args:
        program: what to play.
        role: how its players play.
        stages: this process's stages, by index.
        transports: one per rank that this process plays, in rank order.
        streams: those of the device, if it has any.

    Attributes:
        players: one per stage, by index.
        executor: runs what they are bound to.
    """

    def __init__(
        self,
        program: CheckedProgram,
        role: Role,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
        streams: DeviceStreams | None = None,
    ) -> None:
        self.role = role
        self._needs_target = role.train and role.needs_target
        self._program = program
        self._stages = stages
        self._transports = transports
        placement = program.placement
        # Where the model is there in several copies, the first speaks for all of them.
        self._first_rank = placement.rank_of(placement.entries[0])
        self._last_rank = placement.rank_of(placement.exits[0])
        self._exit_ranks = {placement.rank_of(stage) for stage in placement.exits}
        entry_ranks = {placement.rank_of(stage) for stage in placement.entries}
        self._device = next(iter(stages.values())).device
        self._is_alone = len(transports) == program.num_ranks
        self._compares_inputs = (
            len(entry_ranks) > 1 and not self._is_alone and transports[0].rank in entry_ranks
        )
        self._shapes = ShapeBook()
        self._is_fresh = self._is_restless = False
        self._has_looked = self._is_alone
        # By the number of the first microbatch's inputs, which is another under autocast.
        self._loss_dtypes: dict[int, torch.dtype | None] = {}
        self._told_later: str | None = None
        self._streams = streams
        self._block_function: BlockFunction | None = None
        self._lanes = self._make_lanes(streams)
        self.players = self._make_players()
        self.executor = Executor(self._bind(), streams)

    def rebind(self, program: CheckedProgram) -> None:
        """Play ``program`` from now on, whose computations and messages are the same as before.

        What stages know of what crosses their boundaries stays known.
        """
        self._program = program
        if self._lanes is not None:
            self._lanes = self._make_lanes(self._streams)
        self.executor = Executor(self._bind(), self._streams)

    def play_blocks_by(self, function: BlockFunction) -> None:
        """Let ``function`` play the program's blocks from now on, see ``runtime/blocks.py``."""
        self._block_function, self._lanes, self._told_later = function, None, None
        self.executor = Executor(self._bind(), self._streams)

    def _make_lanes(self, streams: DeviceStreams | None) -> Lanes | None:
        if not has_blocks(self._program):
            return None
        kind, wanted = self._device.type, self.role.overlap
        reason = why_in_turn(self._program, streams, kind, wanted=wanted)
        if reason is None and streams is not None:
            return Lanes(streams)
        if self._program.placement.entries[0] in self._stages:
            self._told_later = f"forward and backward of a block run in turn: {reason}"
        return None

    def play(self) -> None:
        """Run all calls of the program."""
        if self._told_later is not None:
            _log.info("%s: %s", self._program.name, self._told_later)
            self._told_later = None
        with self._lanes or nullcontext():
            self.executor.run()

    def _make_players(self) -> dict[int, Player]:
        program, placement = self._program, self._program.placement
        # Stage → op → the microbatches for which the program has that op.
        done: dict[int, dict[Op, set[int]]] = {i: defaultdict(set) for i in self._stages}
        for action in program.actions():
            if action.op in _SHAPES_FORWARD and action.stage in done:
                assert action.microbatch is not None
                done[action.stage][action.op].add(action.microbatch)
        players: dict[int, Player] = {}
        for transport in self._transports:
            stages = [self._stages[i] for i in placement.stages_of(transport.rank)]
            around = [placement.neighbour(s.stage_index, d) for s in stages for d in (-1, 1)]
            peers = {placement.rank_of(other) for other in around if other is not None}
            transport.register_peers(peers - {transport.rank})
            # In one process nothing is on its way: what is sent has arrived.
            arrived = {} if self._is_alone else acknowledgements(program, transport.rank)
            inboxes = {p: RecvQueue(transport, p, stages[0].device) for p in peers}
            for stage in stages:
                players[stage.stage_index] = Player(
                    stage,
                    self.role,
                    program.num_microbatches,
                    transport,
                    inboxes,
                    done[stage.stage_index],
                    arrived,
                    self._lanes,
                )
        for index, player in players.items():
            player.connect(
                self._neighbour(players, index, -1),
                self._neighbour(players, index, +1),
            )
        return players

    def _neighbour(
        self, players: Mapping[int, Player], index: int, offset: int
    ) -> Player | int | None:
        placement = self._program.placement
        other = placement.neighbour(index, offset)
        if other is None:
            return None
        same = placement.same_rank(index, other)
        return players[other] if same else placement.rank_of(other)

    def _bind(self) -> list[Call]:
        program = self._program
        if self._is_alone:
            steps = [step for _, step in global_order(program)]
        else:
            steps = list(program.ranks[self._transports[0].rank])
        plans = self._lanes.plan(steps, program.placement) if self._lanes is not None else None
        calls: list[Call] = []
        for number, step in enumerate(steps):
            bound = [self.players[action.stage].bind(action) for action in step.parts]
            if self._block_function is not None and can_overlap(step):
                calls += played_by(self._block_function, step, bound)
                continue
            for part, of_part in enumerate(bound):
                if plans is not None:
                    first, others = plans[number][part]
                    of_part = [
                        replace(call, enter=others if place else first)
                        for place, call in enumerate(of_part)
                    ]
                calls += of_part
        return calls

    def open(self, batch: Batch, num_steps: int) -> None:
        """Begin a step: all ranks learn which shapes come, from the rank of the first stage, and
        it learns under which conditions they do, from all.

        Args:
            batch: this process's inputs and targets.
            num_steps: how many steps went before; the same on every rank, if all is well.

        Raises:
            StageError: inputs or targets are missing where they are needed, or ranks where the
                model's inputs enter were given different ones.
            ScheduleError: the ranks are not at the same step.
        """
        # Where outputs leave on several ranks, these must agree on whether they are asked for.
        joins = len(self._exit_ranks) > 1
        number = self._transports[0].number
        header = [num_steps, int(self.role.train), int(joins and batch.keep_outputs), number]
        ids = self._check_batch(batch, self._share_conditions(batch))
        # Where inputs enter on several ranks, numbers alone do not tell whether shapes are alike.
        digest = self._shapes.digest(ids) if self._compares_inputs else 0
        looks = (0, 0) if self._has_looked else looks_of(batch)
        for transport in sorted(self._transports, key=lambda t: t.rank != self._first_rank):
            shared = transport.broadcast_ints([*header, digest, *looks, *ids], self._first_rank)
            if shared[:4] != header:
                raise ScheduleError(
                    f"rank {self._first_rank} is at {_moment(shared)}, rank {transport.rank} at "
                    f"{_moment(header)}: call step() and eval() in the same order on every rank"
                )
            remark_on_others(looks, transport.rank, shared[5:7], self._first_rank)
            batch.shape_ids = shared[7:]
        self._has_looked = True
        if self._compares_inputs and shared[4] != digest:
            raise StageError(
                f"the inputs here have other shapes than those on rank {self._first_rank}; each "
                "rank where the model's inputs enter passes the whole batch"
            )
        self._is_fresh = self._shapes.learn(batch.shape_ids)
        for transport in self._transports:
            transport.allow_unbounded_sends(
                self._is_fresh or self._is_restless or self.role.dynamic_shapes
            )
        for player in self.players.values():
            player.batch = batch
            if self._is_restless or self._shapes.forgot:
                player.forget()

    def _share_conditions(self, batch: Batch) -> tuple[int, ...]:
        """The number of each rank's conditions; of one that plays all, its own."""
        seen = conditions(self._stages.values(), self._device)
        if self._is_alone:
            return (self._shapes.condition(seen),)
        (transport,) = self._transports
        # What the first rank is given, is among the inputs.
        beside = () if transport.rank == self._first_rank else batch.kwargs
        return tuple(transport.all_gather_ints(self._shapes.condition(seen, beside)))

    def _check_batch(self, batch: Batch, under: tuple[int, ...]) -> list[int]:
        """The shape ids, where the inputs are here; zeros elsewhere."""
        rank_of = self._program.placement.rank_of
        if self._needs_target and batch.targets is None:
            for stage in (s for s in self._program.placement.exits if s in self._stages):
                raise StageError(
                    "no target, where the loss is computed: the rank of the last stage passes "
                    "target= (or target_mbs=) to step()",
                    where=Where(rank=rank_of(stage), stage=stage),
                )
        for stage in (s for s in self._program.placement.entries if s in self._stages):
            if batch.args is None:
                called = "step() or eval()"
                if not self.role.train:
                    called += ", which runs the model; train(False) of its modules sets their mode"
                raise StageError(
                    f"no inputs: the rank of the first stage passes them to {called}",
                    where=Where(rank=rank_of(stage), stage=stage),
                )
            return self._shapes.ids(batch.args, batch.kwargs, under)
        return [0] * self._program.num_microbatches

    def close(self, batch: Batch) -> Tensor | None:
        """End a step: no rank leaves before all are through, so that none misses a failure.

        Returns:
            The losses, shape (microbatches,), on every rank as the rank of the last stage has
            them; None where none were computed.
        """
        computed = [loss for loss in batch.losses if loss is not None]
        mine = torch.stack(computed) if computed else None
        if self._is_alone:
            self._is_restless |= self._has_seen_restless(batch)
            return mine
        (transport,) = self._transports
        if len(self._exit_ranks) > 1 and batch.keep_outputs:
            join_outputs(batch, self._program, transport, self._device)
        if self.role.loss_fn is None:
            self._end_without_losses(batch, transport)
            return None
        # Doubles hold every narrower loss exactly; the dtype is told along, as is "no losses".
        if self._shapes.forgot:
            self._loss_dtypes.clear()
        inputs = batch.shape_ids[0]
        if inputs not in self._loss_dtypes or not self.role.train:
            code = _DTYPES.index(mine.dtype) if mine is not None else -1
            (code,) = transport.broadcast_ints([code], self._last_rank)
            self._loss_dtypes[inputs] = _DTYPES[code] if code >= 0 else None
        dtype = self._loss_dtypes[inputs]
        # Put up from what is on the device: numbers from the host would be waited for there.
        zero = torch.zeros((), dtype=torch.float64, device=self._device)
        rows = [zero if loss is None else loss.to(zero) for loss in batch.losses]
        if self._is_fresh:
            rows.append(zero + self._has_seen_restless(batch))
        table = torch.stack(rows)
        transport.all_reduce(table)
        if self._is_fresh:
            self._is_restless |= bool(table[-1])
            table = table[:-1]
        return None if dtype is None else table.to(dtype)

    def _end_without_losses(self, batch: Batch, transport: Transport) -> None:
        if not self._is_fresh:
            transport.barrier()
            return
        seen = torch.tensor([self._has_seen_restless(batch)], dtype=torch.int64, device="cpu")
        transport.all_reduce(seen)
        self._is_restless |= bool(seen)

    def _has_seen_restless(self, batch: Batch) -> bool:
        """Whether what crosses here may change while the inputs' shapes do not."""
        given_beside = (
            self._transports[0].rank != self._first_rank
            and any(not isinstance(leaf, Tensor) for leaf in flatten(list(batch.kwargs))[0])
            and any(stage.reads_kwargs for stage in self._stages.values())
        )
        sent = any(player.sends_values for player in self.players.values())
        return self._shapes.met_values or given_beside or sent


# In an order that is the same on every rank. Of a step that does not train, a loss may be a count.
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)


def _moment(header: Sequence[int]) -> str:
    outputs = " with outputs" if header[2] else ""
    call = f"{'step' if header[1] else 'eval'}(){outputs} of schedule {header[3]}"
    return f"{call}, after {header[0]} others"
