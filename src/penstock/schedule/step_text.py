"""The text form of one step, as torch writes it.

    0F1   3B0   1I2   1W2   2SEND_F0   0UNSHARD   (0F3;1B2)OVERLAP_F_B

This module knows no programs; ``penstock.schedule.text`` reads and writes those.
"""

from __future__ import annotations

import re

from penstock.errors import ScheduleError
from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.messages import quoted
from penstock.schedule.rules import COMPUTE, WHOLE_STAGE

__all__ = ["format_step", "parse_action", "parse_step"]

_OVERLAP = "OVERLAP_F_B"
_MOST_DIGITS = 18
_NAMES = {op.value: op for op in Op}
_ACTION = re.compile(rf"([0-9]+)({'|'.join(sorted(_NAMES, key=len, reverse=True))})([0-9]*)")


def parse_action(text: str) -> Action:
    """Read one action.

    Args:
        text: such as ``"2F3"`` or ``"0UNSHARD"``; blanks around it are allowed.

    Returns:
        The action.

    Raises:
        ScheduleError: not an action, a microbatch too many or missing, or trailing text.

    Example:
        >>> parse_action("2SEND_F0").op
        <Op.SEND_F: 'SEND_F'>
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(
            f"{quoted(text)} is not an action; expected a stage, one of {', '.join(_NAMES)}, and a "
            "microbatch, as in 2F3 or 0UNSHARD"
        )
    if max(len(match[1]), len(match[3])) > _MOST_DIGITS:
        raise ScheduleError(
            f"{quoted(text)}: no program has a stage or a microbatch of more than {_MOST_DIGITS} "
            "digits"
        )
    stage, op, microbatch = int(match[1]), _NAMES[match[2]], match[3]
    if op in WHOLE_STAGE:
        if microbatch:
            raise ScheduleError(
                f"{text!r}: {op.value} is about a whole stage; write {stage}{op.value}"
            )
        return action(stage, op)
    if not microbatch:
        raise ScheduleError(f"{text!r}: microbatch missing; write one, as in {stage}{op.value}0")
    return action(stage, op, int(microbatch))


def parse_step(text: str) -> Step:
    """Read one step: an action, or several overlapped ones in a block.

    Args:
        text: such as ``"2F3"`` or ``"(0F3;1B2)OVERLAP_F_B"``; blanks around it are allowed.

    Returns:
        The step.

    Raises:
        ScheduleError: not a step, or trailing text.

    Example:
        >>> [str(a) for a in parse_step("(0F3;1B2)OVERLAP_F_B").parts]
        ['0F3', '1B2']
    """
    stripped = text.strip()
    if not stripped.startswith("("):
        return parse_action(text)
    inner, bracket, kind = stripped[1:].partition(")")
    if not bracket or kind != _OVERLAP:
        raise ScheduleError(
            f"{quoted(text)} is not a block; expected actions parted by ';' in brackets, then "
            f"{_OVERLAP}, as in (0F3;1B2){_OVERLAP}"
        )
    try:
        parts = tuple(parse_action(part) for part in inner.split(";"))
    except ScheduleError as error:
        raise ScheduleError(f"in block {quoted(text)}: {error}") from error
    outside = [str(a) for a in parts if a.op not in COMPUTE]
    if outside:
        raise ScheduleError(
            f"in block {quoted(text)}: only computation can be overlapped, not {', '.join(outside)}"
        )
    return Overlap(parts=parts)


def format_step(step: Step) -> str:
    """Write one step: what ``parse_step`` reads."""
    return str(step)
