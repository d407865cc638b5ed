"""Lower a program of computations to a program that the runtime can run."""

from __future__ import annotations

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.channels import TWO_WAY, Channels
from penstock.schedule.check import last_steps
from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import COMPUTE, TRANSFERS, WEIGHT_GRADS

__all__ = ["insert_sharding", "lower", "reduce_gradients"]

_SHARDING = frozenset({Op.UNSHARD, Op.RESHARD})
_REDUCTION = frozenset({Op.REDUCE_GRAD})


def lower(
    program: Program,
    *,
    sharding: bool = False,
    max_unsharded_stages: int = 3,
    channels: Channels = TWO_WAY,
) -> Program:
    """Insert gradient reductions, sharding if requested, and transfers.

    Reductions, sharding or transfers that the program already contains, even partly, stay as they
    are. So a program from a file runs as written, and lowering is idempotent.

    Args:
        program: any program that ``check`` accepts.
        sharding: if True, inserts UNSHARD and RESHARD for sharded parameters.
        max_unsharded_stages: see ``insert_sharding``.
        channels: the channels of messages, see ``insert_transfers``.

    Raises:
        ScheduleError: ``check`` finds problems in a program without transfers.

    Example:
        >>> from penstock.schedule.text import format_csv, parse_csv
        >>> print(format_csv(lower(parse_csv("0F0,0B0\\n1F0,1B0\\n"))), end="")
        0RECV_B0,0F0,0SEND_F0,0B0,0REDUCE_GRAD
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
    """
    refuse_no_program(program, "lower()")
    used = {act.op for act in program.actions()}
    if Op.REDUCE_GRAD not in used:
        program = reduce_gradients(program)
    if sharding and used.isdisjoint(_SHARDING):
        program = insert_sharding(program, max_unsharded_stages=max_unsharded_stages)
    if used.isdisjoint(TRANSFERS):
        program = insert_transfers(program, channels=channels)
    return program


def reduce_gradients(program: Program) -> Program:
    """Insert a REDUCE_GRAD right after the last weight gradient of each stage.

        before   0F0 0F1 0B0 0B1        after   0F0 0F1 0B0 0B1 0REDUCE_GRAD

    Keeps the order of all steps. A program without backwards stays as it is.

    Raises:
        ScheduleError: the program already has a REDUCE_GRAD.
    """
    _refuse_present(program, _REDUCTION, "reduce_gradients()")
    ranks = []
    for rank, steps in enumerate(program.ranks):
        last = last_steps(steps, WEIGHT_GRADS, len(program.placement.stages_of(rank)))
        reduced = list(steps)
        # From the end, so that earlier positions stay valid. If the last weight gradients of two
        # stages share a pair, the lower stage is reduced first.
        for stage, place in sorted(last.items(), key=lambda item: (item[1], item[0]), reverse=True):
            reduced.insert(place + 1, action(stage, Op.REDUCE_GRAD))
        ranks.append(reduced)
    return program.with_ranks(ranks)


def insert_sharding(program: Program, *, max_unsharded_stages: int = 3) -> Program:
    """Insert UNSHARD before a stage is needed, and RESHARD when other stages are needed sooner.

        before, at most 1   0F0 2F0 2B0 0B0
        after               0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2RESHARD 0UNSHARD 0B0 0RESHARD

    Before each step, a rank holds the stages that it needs next, the nearest
    ``max_unsharded_stages`` of them: with two or more, the next stage is gathered while this one
    computes. Every stage is resharded at the end. Keeps the order of all other steps.

    Args:
        program: any program without UNSHARD and RESHARD.
        max_unsharded_stages: the most stages of a rank that are unsharded at a time; an overlapped
            pair that computes on more stages unshards them all.

    Raises:
        ScheduleError: the program already has sharding, or ``max_unsharded_stages`` is below 1.
    """
    _refuse_present(program, _SHARDING, "insert_sharding()")
    if max_unsharded_stages < 1:
        raise ScheduleError(f"max_unsharded_stages is {max_unsharded_stages}; at least 1 is needed")
    ranks = []
    for steps in program.ranks:
        sharded: list[Step] = []
        present: tuple[int, ...] = ()
        for step, wanted in zip(steps, _windows(steps, max_unsharded_stages), strict=True):
            # Resharding first keeps within the limit.
            sharded += [action(s, Op.RESHARD) for s in present if s not in wanted]
            sharded += [action(s, Op.UNSHARD) for s in wanted if s not in present]
            sharded.append(step)
            present = wanted
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


def _refuse_present(program: Program, ops: frozenset[Op], caller: str) -> None:
    """Refuse a program that already has actions which a pass would insert."""
    refuse_no_program(program, caller)
    if any(act.op in ops for act in program.actions()):
        names = " and ".join(sorted(op.value for op in ops))
        raise ScheduleError(
            f"program {program.name!r} has {names} already; take these actions out, or leave "
            f"{caller} out"
        )
