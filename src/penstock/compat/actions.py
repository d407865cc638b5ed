"""Torch's actions: Penstock's by the names and in the form of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum, global_enum
from typing import Any, NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Step
from penstock.schedule.passes import lower
from penstock.schedule.program import Program
from penstock.schedule.registry import build
from penstock.schedule.text import is_wait, parse_csv, parse_step
from penstock.simulate.simulation import simulate

__all__ = [
    "ComputationType", "PipelineOrder", "TorchAction", "get_schedule_ops", "order_of",
    "program_from_order",
]  # fmt: skip


@global_enum
class ComputationType(StrEnum):
    """The kind of an action by torch's name; waits have no counterpart here."""

    FORWARD = "F"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"
    FULL_BACKWARD = "B"
    OVERLAP_F_B = "OVERLAP_F_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    WAIT_REDUCE_GRAD = "WAIT_REDUCE_GRAD"
    # Penstock's own.
    RECOMPUTE = "RECOMPUTE"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"

    @staticmethod
    def from_str(action: str) -> ComputationType:
        """The kind with this text, such as ``"F"``."""
        return ComputationType(action)


class TorchAction(NamedTuple):
    """An action, or an overlapped pair, whose ``sub_actions`` are its parts and whose stage is -1.

    Examples:
        >>> TorchAction(2, ComputationType.FORWARD, 3), TorchAction.from_str("0UNSHARD")
        (2F3, 0UNSHARD)
    """

    stage_index: int
    computation_type: ComputationType
    microbatch_index: int | None = None
    sub_actions: tuple[TorchAction, ...] | None = None

    def __repr__(self) -> str:
        """The text form of torch and of Penstock."""
        if self.sub_actions is not None:
            return f"({';'.join(map(repr, self.sub_actions))}){self.computation_type.value}"
        mb = "" if self.microbatch_index is None else self.microbatch_index
        return f"{self.stage_index}{self.computation_type.value}{mb}"

    @property
    def is_compute_op(self) -> bool:
        """True for forwards, backwards and overlapped pairs."""
        return self.computation_type.value in ("F", "B", "I", "W", "OVERLAP_F_B")

    @staticmethod
    def from_str(action_string: str) -> TorchAction | None:
        """Read a text form; None for an empty one, and for a wait: the runtime waits by itself.

        Raises:
            ScheduleError: the text is not an action.
        """
        text = action_string.strip()
        return TorchAction.of(parse_step(text)) if text and not is_wait(text) else None

    @staticmethod
    def of(step: Step) -> TorchAction:
        """The form of Penstock's step."""
        if isinstance(step, Action):
            kind = ComputationType(step.op.value)
            return TorchAction(step.stage, kind, step.microbatch)
        parts = tuple(map(TorchAction.of, step.parts))
        return TorchAction(-1, ComputationType.OVERLAP_F_B, None, parts)


PipelineOrder = dict[int, list[TorchAction | None]]
"""By rank its actions in order; None is idle time."""


def order_of(program: Program) -> PipelineOrder:
    """The order of a program, without idle time."""
    return {r: [TorchAction.of(step) for step in steps] for r, steps in enumerate(program.ranks)}


def program_from_order(
    order: Mapping[int, Sequence[Any]], num_microbatches: int, name: str = "order"
) -> Program:
    """The program of an order, unchecked; idle time and waits are left out.

    Raises:
        ScheduleError: an item is no action, or no placement of stages fits.
    """
    rows = [["" if each is None else str(each) for each in order[rank]] for rank in sorted(order)]
    text = "".join(",".join(cells) + "\n" for cells in rows)
    return parse_csv(text, num_microbatches=num_microbatches, name=name)


def get_schedule_ops(
    schedule: Any,
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,
    with_comms: bool = False,
    defer_pp_recv: bool = False,
) -> list[list[TorchAction | None]]:
    """The actions of each rank under a schedule.

    Args:
        schedule: the name of a schedule, or its class.
        pp_degree: the number of ranks.
        num_microbatches: the number of microbatches.
        num_stages_per_rank: stages per rank; the schedule's default if None.
        add_spacing: whether to fill idle time with None, where a forward takes one unit of time,
            and so does each half of a backward.
        with_comms: whether to include sends, receives, gathers and reductions.
        defer_pp_recv: no effect, as of schedules.

    Raises:
        ScheduleError: the schedule is unknown, or does not fit these numbers.

    Examples:
        >>> get_schedule_ops("1F1B", 2, 2, add_spacing=True)
        [[0F0, 0F1, None, None, 0B0, None, 0B1], [None, 1F0, 1B0, 1F1, 1B1]]
    """
    if add_spacing and with_comms:
        raise ScheduleError("add_spacing=True and with_comms=True: choose one")
    name = getattr(schedule, "schedule_name", schedule)
    if not isinstance(name, str):
        raise ScheduleError(f"{schedule!r} is no schedule by name; see its pipeline_order")
    program = build(
        name, ranks=pp_degree, microbatches=num_microbatches, virtual=num_stages_per_rank
    )
    if with_comms:
        program = lower(program, sharding=True)
    order = order_of(program)
    if add_spacing:
        timed = simulate(program)
        for rank, steps in enumerate(program.ranks):
            times, now = iter(zip(timed.starts[rank], timed.ends[rank], strict=True)), 0.0
            order[rank] = []
            for step in steps:
                spans = [next(times) for _ in step.parts]
                idle: list[TorchAction | None] = [None] * round(spans[0][0] - now)
                order[rank] += [*idle, TorchAction.of(step)]
                now = spans[-1][1]
    return list(order.values())
