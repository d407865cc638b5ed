"""Passes: pure functions from program to program; the input stays unchanged.

``lower`` makes a program that runs. Other passes choose which computations run, when activations
are kept, when parameters are gathered and gradients reduced, and where messages are sent and
posted.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Literal, TypeAlias

from penstock.errors import InternalError, ScheduleError
from penstock.schedule.action import Action, Op, Step, action
from penstock.schedule.check import check, last_steps
from penstock.schedule.index import IndexedProgram, index_program
from penstock.schedule.program import CheckedProgram, Program, refuse_no_program, refuse_present
from penstock.schedule.replay import blocking_replay
from penstock.schedule.rules import COMPUTE, INPUT_GRADS, SHARDING, TRANSFERS, WEIGHT_GRADS
from penstock.schedule.wording import is_count

__all__ = [
    "forward_only", "insert_sharding", "insert_transfers", "keep_microbatches", "lower", "offload",
    "recompute", "reduce_gradients",
]  # fmt: skip

Lookahead: TypeAlias = Literal["full", "auto"] | int | tuple[int, ...]


def lower(
    program: Program,
    *,
    sharding: bool = False,
    max_active_stages: int = 3,
    unshard_lookahead: Lookahead = "full",
) -> Program:
    """Insert gradient reductions, sharding if requested, and transfers.

    Reductions, sharding or transfers that the program already contains, even partly, stay as they
    are. So a program from a file runs as written, and lowering is idempotent.

    Args:
        program: any program that ``check`` accepts.
        sharding: if True, inserts UNSHARD and RESHARD for sharded parameters.
        max_active_stages, unshard_lookahead: see ``insert_sharding``.

    Raises:
        ScheduleError: ``check`` finds problems in a program without transfers.

    Examples:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(lower(parse_csv("0F0,0B0\\n1F0,1B0\\n"))), end="")
        0RECV_B0,0F0,0SEND_F0,0B0,0REDUCE_GRAD
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
    """
    refuse_no_program(program, "lower()")
    used = {act.op for act in program.actions()}
    if Op.REDUCE_GRAD not in used:
        program = reduce_gradients(program)
    if sharding and used.isdisjoint(SHARDING):
        program = insert_sharding(
            program, max_active_stages=max_active_stages, unshard_lookahead=unshard_lookahead
        )
    if used.isdisjoint(TRANSFERS):
        program = insert_transfers(program)
    return program


def reduce_gradients(program: Program) -> Program:
    """Insert a REDUCE_GRAD right after the last weight gradient of each stage.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0B0 0B1 0REDUCE_GRAD

    Keeps the order of all steps. A program without backwards stays as it is.

    Raises:
        ScheduleError: the program already has a REDUCE_GRAD.
    """
    refuse_present(program, frozenset({Op.REDUCE_GRAD}), "reduce_gradients()")
    ranks = []
    for rank, steps in enumerate(program.ranks):
        last = last_steps(steps, WEIGHT_GRADS, len(program.placement.stages_of(rank)))
        reduced = list(steps)
        # From the end, so that earlier positions stay valid.
        for stage, place in sorted(last.items(), key=itemgetter(1), reverse=True):
            reduced.insert(place + 1, action(stage, Op.REDUCE_GRAD))
        ranks.append(reduced)
    return program.with_ranks(ranks)


def insert_sharding(
    program: Program, *, max_active_stages: int = 3, unshard_lookahead: Lookahead = "full"
) -> Program:
    """Insert UNSHARD before a stage is needed, and RESHARD when other stages are needed sooner.

        before, at most 1   0F0 2F0 2B0 0B0
        after               0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD

    Before each step, a rank holds the stages that it needs next, the nearest
    ``max_active_stages`` of them: with two or more, the next stage is gathered while this one
    computes. Every stage is resharded at the end. Keeps the order of all other steps.

    Args:
        program: any program without UNSHARD and RESHARD.
        max_active_stages: the most stages of a rank that are unsharded at a time; an overlapped
            pair that computes on more stages unshards them all.
        unshard_lookahead: how many of the nearest stages are gathered, also by rank; ``"full"``
            for all that may be unsharded, ``"auto"`` for 2 on the first rank and one more on each
            next rank, at most all.

    Raises:
        ScheduleError: the program already has sharding, ``max_active_stages`` is below 1, or
            ``unshard_lookahead`` is not between 1 and ``max_active_stages``.
    """
    refuse_present(program, SHARDING, "insert_sharding()")
    if not is_count(max_active_stages):
        raise ScheduleError(f"max_active_stages is {max_active_stages!r}; at least 1 is needed")
    most, num_ranks = max_active_stages, program.num_ranks
    lookaheads = unshard_lookahead
    if isinstance(lookaheads, int):
        lookaheads = (lookaheads,) * num_ranks
    elif not isinstance(lookaheads, Sequence):
        lookaheads = ()
    elif isinstance(lookaheads, str):
        first = {"full": most, "auto": 2}.get(lookaheads, 0)
        lookaheads = tuple(min(first + rank, most) for rank in range(num_ranks))
    if len(lookaheads) != num_ranks or any(each not in range(1, most + 1) for each in lookaheads):
        raise ScheduleError(
            f"unshard_lookahead={unshard_lookahead!r}: expected 'full', 'auto', or a number from "
            f"1 to {most}, or one for each of {num_ranks} ranks"
        )
    ranks = []
    for steps, lookahead in zip(program.ranks, lookaheads, strict=True):
        sharded: list[Step] = []
        present: tuple[int, ...] = ()
        for step, wanted in zip(steps, _windows(steps, max_active_stages), strict=True):
            # Resharding first keeps within the limit.
            sharded += [action(s, Op.RESHARD) for s in present if s not in wanted]
            near = wanted[: max(lookahead, len({a.stage for a in step.parts}))]
            sharded += [action(s, Op.UNSHARD) for s in near if s not in present]
            sharded.append(step)
            present = tuple(s for s in wanted if s in present or s in near)
        ranks.append([*sharded, *(action(s, Op.RESHARD) for s in present)])
    return program.with_ranks(ranks)


def _windows(steps: tuple[Step, ...], most: int) -> list[tuple[int, ...]]:
    """For each step, the stages of this and the following steps, nearest first."""
    windows: list[tuple[int, ...]] = []
    upcoming: tuple[int, ...] = ()
    for step in reversed(steps):
        needed = tuple(dict.fromkeys(a.stage for a in step.parts if a.op in COMPUTE))
        if needed != upcoming[: len(needed)]:
            upcoming = needed + tuple(s for s in upcoming if s not in needed)
        windows.append(upcoming[: max(most, len(needed))])
    return windows[::-1]


def forward_only(program: Program) -> Program:
    """Keep only the forwards, in their order: no backwards, transfers, sharding or reductions.

        before   0F0 0SEND_F0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0B1        after   0F0 0F1

    Forwards depend only on forwards, so the result of a valid program is valid.
    """
    refuse_no_program(program, "forward_only()")
    return program.with_ranks(
        [act for step in steps for act in step.parts if act.op is Op.FORWARD]
        for steps in program.ranks
    )


def keep_microbatches(program: Program, num_microbatches: int) -> Program:
    """Keep the first microbatches, for a batch with fewer rows than microbatches.

        before   0F0 0F1 0F2 (0F3;0B0)OVERLAP_F_B 0B1 0B2 0B3        after, 2   0F0 0F1 0B0 0B1

    Keeps the order of the remaining actions: a valid program stays valid, if a microbatch of each
    copy of the model remains.
    """
    refuse_no_program(program, "keep_microbatches()")
    if num_microbatches == program.num_microbatches:
        return program
    ranks = []
    for steps in program.ranks:
        kept: list[Step] = []
        for step in steps:
            parts = [a for a in step.parts if (a.microbatch or 0) < num_microbatches]
            kept += [step] if len(parts) == len(step.parts) else parts
        ranks.append(kept)
    return replace(program.with_ranks(ranks), num_microbatches=num_microbatches)


def recompute(program: Program, *, stages: Iterable[int] | None = None) -> Program:
    """Recompute the forward of stages, right before the backward that needs their activations.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0RECOMPUTE0 0B0 0RECOMPUTE1 0B1

    From F to RECOMPUTE a stage holds only the microbatch's inputs. The recomputation for an
    overlapped pair comes before the pair. The last stage's loss function also runs twice.

    Args:
        program: any program with backwards, with or without transfers.
        stages: the stages that recompute; None for all.

    Raises:
        ScheduleError: a stage does not exist, or is already recomputed or offloaded.

    Source: arXiv:1604.06174.
    """
    chosen = _chosen(program, stages, "recompute()")
    if not any(act.op in INPUT_GRADS for act in program.actions()):
        raise ScheduleError(f"program {program.name!r} has no backwards to recompute for")

    def before(step: Step) -> list[Step]:
        return [
            action(act.stage, Op.RECOMPUTE, act.microbatch)
            for act in step.parts
            if act.op in INPUT_GRADS and act.stage in chosen
        ]

    return program.with_ranks(
        [each for step in steps for each in (*before(step), step)] for steps in program.ranks
    )


def offload(program: Program, *, stages: Iterable[int] | None = None, ahead: int = 1) -> Program:
    """Offload activations to the host after the forward, and reload them for the backward.

        before   0F0            0F1          0F2          0B0 0B1
        after    0F0 0OFFLOAD0  0F1 0RELOAD0 0F2 0RELOAD1 0B0 0B1

    An OFFLOAD stands right after its F, a RELOAD ``ahead`` computations before its backward, so
    that both copies run beside the compute. An activation stays on the device if its backward comes
    too soon to offload it for at least one computation.

    Args:
        program: any program with or without transfers.
        stages: the stages whose activations are offloaded; None for all.
        ahead: the number of computations between a RELOAD and its backward, at least 1.

    Raises:
        ScheduleError: a stage does not exist, or is already recomputed or offloaded; or ``ahead``
            is below 1.

    Source: arXiv:2503.01328, sec. 3.
    """
    chosen = _chosen(program, stages, "offload()")
    if not is_count(ahead):
        raise ScheduleError(f"ahead={ahead!r}: expected a whole number of computations, at least 1")
    return program.with_ranks(_offloaded(steps, chosen, ahead) for steps in program.ranks)


def _offloaded(steps: tuple[Step, ...], stages: frozenset[int], ahead: int) -> list[Step]:
    computing = [step for step in steps if any(act.op in COMPUTE for act in step.parts)]
    forwards: dict[tuple[int, int | None], int] = {}
    chosen: set[tuple[int, int | None]] = set()
    for place, step in enumerate(computing):
        for act in step.parts:
            made = forwards.setdefault((act.stage, act.microbatch), place)
            if act.op in INPUT_GRADS and act.stage in stages and place - ahead > made + 1:
                chosen.add((act.stage, act.microbatch))
    moved: list[Step] = []
    later = iter(computing[ahead:])
    for step in steps:
        if any(act.op in COMPUTE for act in step.parts) and (coming := next(later, None)):
            for act in coming.parts:
                if act.op in INPUT_GRADS and (act.stage, act.microbatch) in chosen:
                    moved.append(action(act.stage, Op.RELOAD, act.microbatch))
        moved.append(step)
        for act in step.parts:
            if act.op is Op.FORWARD and (act.stage, act.microbatch) in chosen:
                moved.append(action(act.stage, Op.OFFLOAD, act.microbatch))
    return moved


def _chosen(program: Program, stages: Iterable[int] | None, caller: str) -> frozenset[int]:
    """The requested stages, all if None; refuses stages that a pass has already changed."""
    refuse_no_program(program, caller)
    if stages is not None and not isinstance(stages, Iterable):
        raise ScheduleError(f"stages={stages!r}: expected numbers of stages, such as [0, 2]")
    every = range(program.num_stages)
    chosen = frozenset(every if stages is None else stages)
    unknown = sorted(chosen - set(every))
    if unknown:
        raise ScheduleError(f"no stages {unknown}; its stages are 0 to {every[-1]}")
    ops = (Op.RECOMPUTE, Op.OFFLOAD)
    taken = sorted({a.stage for a in program.actions() if a.op in ops and a.stage in chosen})
    if taken:
        raise ScheduleError(
            f"stages {taken} are recomputed or offloaded already; pass stages= to choose others"
        )
    return chosen


def insert_transfers(program: Program) -> Program:
    """Insert a send and a receive for every value that crosses ranks.

        before   0F0 0F1 0B0 0B1       after   0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1
                 1F0 1B0 1F1 1B1               1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1

    A send stands right after the step that makes the value. A receive is posted one computing step
    ahead of the step that uses the value, so that the value travels while the step before computes,
    or earlier: to keep the same order at both ends of a directed pair of ranks, or to prevent a
    deadlock. Keeps the order of all other steps. The result passes ``check``: it completes even if
    a send blocks until the matching receive is posted.

    Args:
        program: a program without transfers.

    Raises:
        ScheduleError: the program already has transfers, or ``check`` finds problems.

    Examples:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(insert_transfers(parse_csv("0F0,0B0\\n1F0,1B0\\n"))), end="")
        0RECV_B0,0F0,0SEND_F0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
    """
    refuse_present(program, TRANSFERS, "insert_transfers()")
    if not isinstance(program, CheckedProgram):
        check(program)
    computed = index_program(program)
    width = program.num_microbatches
    # By id, the action of a transfer; None for other ids and, counted from the end, for pairs.
    made: list[Action | None] = [None] * computed.size
    for row, transfer in enumerate(computed.transfers()):
        if transfer is not None:
            op, stage = computed.op_and_stage(row)
            made[row * width : (row + 1) * width] = [action(stage, op, m) for m in range(width)]
    ranks = []
    for steps, queue in zip(program.ranks, _just_ahead(computed), strict=True):
        kept = iter(steps)
        ranks.append([made[number] or next(kept) for number in queue])
    return program.with_ranks(ranks)


def _just_ahead(computed: IndexedProgram) -> list[list[int]]:
    """For each rank its ids, with each receive one step ahead, or earlier if necessary."""
    width, receives, sends = computed.num_microbatches, computed.receives(), computed.sends()
    computes = [op in COMPUTE for op, _ in computed.rows()]
    # The place of each receive, and the receives of directed pairs of ranks by order of sending.
    post_at: dict[int, int] = {}
    messages: dict[tuple[int, int], list[int]] = {}
    for rank, queue in enumerate(computed.queues):
        ahead: int | None = None
        outgoing: defaultdict[int, list[int]] = defaultdict(list)
        for place, step in enumerate(queue):
            for part in (step,) if step >= 0 else computed.parts(step):
                row = part // width
                for offset in receives[row]:
                    post_at[part + offset] = place if ahead is None else ahead
                if (send := sends[row]) is not None:
                    outgoing[send[2]].append(part + send[1])
            if step < 0 or computes[step // width]:
                ahead = place
        messages.update({(rank, target): channel for target, channel in outgoing.items()})
    # By rank its receives; without a container per place, for the garbage collector's sake.
    arriving: list[list[int]] = [[] for _ in computed.queues]
    for (_, target), channel in messages.items():
        # No receive is posted later than receives of messages sent after it.
        earliest = post_at[channel[-1]]
        for receive in reversed(channel):
            earliest = post_at[receive] = min(earliest, post_at[receive])
        arriving[target] += channel
    queues = []
    for queue, receives_here in zip(computed.queues, arriving, strict=True):
        merged: list[int] = []
        # From the last to the first, to be popped; those of one place by rank of origin.
        unposted = sorted(receives_here, key=post_at.__getitem__)[::-1]
        for place, step in enumerate(queue):
            while unposted and post_at[unposted[-1]] == place:
                merged.append(unposted.pop())
            merged.append(step)
            for part in (step,) if step >= 0 else computed.parts(step):
                if (send := sends[part // width]) is not None:
                    merged.append(part + send[0])
        queues.append(merged)
    return _without_deadlock(replace(computed, queues=queues))


def _without_deadlock(placed: IndexedProgram) -> list[list[int]]:
    """The queues, with receives moved ahead where ranks would wait for each other.

    Computations have no cycle, so some rank of a deadlock waits in a send; its receive is posted at
    the current step of the receiving rank. The lowest blocked rank is unblocked first, so that the
    result does not depend on the order of the replay.
    """
    width = placed.num_microbatches
    # By row of receives, the rank that posts the receive.
    posts = [None if each is None or each.is_send else each.rank for each in placed.transfers()]
    replay = blocking_replay(placed, transfers=True)
    # By rank and place in its queue, the receives moved there.
    moved: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    stopped, looked_at = list[int](), 0
    while not replay.play():
        # A rank reaches a send by completing the previous step, so it has had a turn since the
        # last check.
        for rank in replay.turns[looked_at:]:
            heapq.heappush(stopped, rank)
        looked_at = len(replay.turns)
        receive = target = None
        while target is None:
            if not stopped:
                raise InternalError("a valid program is stuck, and no rank waits in a send")
            receive = replay.awaits[heapq.heappop(stopped)]
            target = None if receive is None else posts[receive // width]
        assert receive is not None
        moved[target][replay.positions[target]].append(receive)
        replay.fulfil(receive)
    queues = list(placed.queues)
    for rank, by_place in moved.items():
        early = set(chain(*by_place.values()))
        queues[rank] = [
            number
            for place, step in enumerate(queues[rank])
            for number in (*by_place.get(place, ()), *(() if step in early else (step,)))
        ]
    return queues
