"""From what is computed to what runs: the passes that the runtime applies, in their order."""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.schedule.check import TWO_WAY, Channels
from penstock.schedule.passes.insert_sharding import insert_sharding
from penstock.schedule.passes.insert_transfers import insert_transfers
from penstock.schedule.passes.reduce_gradients import reduce_gradients
from penstock.schedule.program import Program, refuse_no_program
from penstock.schedule.rules import TRANSFERS

__all__ = ["lower"]


def lower(
    program: Program,
    *,
    sharding: bool = False,
    max_unsharded_stages: int = 3,
    channels: Channels = TWO_WAY,
) -> Program:
    """Add gradient reductions, sharding where asked for, and transfers.

    What the program spells out itself, if only in part, is left as it is, so that a program from
    a file runs as written and lowering twice is lowering once.

    Args:
        program: any program that ``check`` accepts.
        sharding: whether to say when sharded parameters are gathered and let go.
        max_unsharded_stages: see ``insert_sharding``.
        channels: how messages travel, see ``insert_transfers``.

    Returns:
        The program that runs, once checked.

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
    if sharding and used.isdisjoint({Op.UNSHARD, Op.RESHARD}):
        program = insert_sharding(program, max_unsharded_stages=max_unsharded_stages)
    if used.isdisjoint(TRANSFERS):
        program = insert_transfers(program, channels=channels)
    return program
