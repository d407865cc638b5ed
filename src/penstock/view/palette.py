"""Colours, names and number formats that all views share.

The colours follow the figures of the zero-bubble papers (Source: arXiv:2401.10241, fig. 2):
forwards blue, backwards green-blue, weight gradients green, idle time white.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schedule.action import Op
from penstock.trace import Trace

__all__ = [
    "FONT", "FRAME", "LOOKS", "Look", "SAME_MODEL", "SAME_STAGES", "amount", "ink", "shade",
    "shades", "time_text",
]  # fmt: skip

FRAME = "#1c2733"
"""The colour of the frame around an overlapped pair."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
"""The font of pages."""

SAME_MODEL = (
    "The same model for all: costs are those of a rank's part of it, so that a stage of V per rank "
    "costs and holds 1/V."
)
SAME_STAGES = "The same costs for every stage: a rank with V stages does V times the work."
"""Above a comparison of schedules, the meaning of its costs."""


class Look(NamedTuple):
    """The name of an op in words, and its colour."""

    name: str
    colour: str = "#c9b28f"


LOOKS: dict[Op, Look] = {
    Op.FORWARD: Look("forward", "#4f86d9"),
    Op.FULL_BACKWARD: Look("backward", "#1f9c8d"),
    Op.INPUT_GRAD: Look("input gradient", "#6cc9d8"),
    Op.WEIGHT_GRAD: Look("weight gradient", "#6bb35a"),
    Op.RECOMPUTE: Look("recompute", "#8f9bb3"),
    Op.OFFLOAD: Look("offload to the host", "#8e6bbf"),
    Op.RELOAD: Look("reload from the host", "#d98ac0"),
    Op.SEND_F: Look("send activations"),
    Op.RECV_F: Look("receive activations"),
    Op.SEND_B: Look("send gradients"),
    Op.RECV_B: Look("receive gradients"),
    Op.UNSHARD: Look("gather parameters"),
    Op.RESHARD: Look("release parameters"),
    Op.REDUCE_GRAD: Look("reduce gradients"),
}
"""How each op is drawn."""


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def shade(colour: str, step: int, num_steps: int) -> str:
    """The shade of ``#rrggbb`` for one of several stages of a rank, darkest for the first.

    Examples:
        >>> shade("#808080", 0, 1), shade("#808080", 0, 2), shade("#808080", 1, 2)
        ('#808080', '#636363', '#b0b0b0')
    """
    if num_steps < 2:
        return colour
    mix = step / (num_steps - 1)
    # From three quarters of each channel to a bit more than a third of the way to white.
    mixed = (
        round((1 - mix) * 0.776 * c + mix * (c + 0.378 * (255 - c))) for c in _channels(colour)
    )
    return "#" + "".join(f"{c:02x}" for c in mixed)


def shades(trace: Trace) -> dict[tuple[int, Op, int], str]:
    """The colour of every rank, op and stage of a trace."""
    used = {(span.rank, span.action.op, span.action.stage) for span in trace.spans}
    stages: dict[int, list[int]] = {}
    for rank, stage in sorted({(rank, stage) for rank, _, stage in used}):
        stages.setdefault(rank, []).append(stage)
    return {
        (rank, op, stage): shade(LOOKS[op].colour, stages[rank].index(stage), len(stages[rank]))
        for rank, op, stage in used
    }


def ink(colour: str) -> str:
    """Black or white, for better contrast with a background colour."""
    red, green, blue = _channels(colour)
    # Luminance by ITU-R BT.601.
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 145 else "#ffffff"


def amount(value: float) -> str:
    """Format an amount with four digits, and a unit prefix from a million on.

    Examples:
        >>> amount(8), amount(0.12345), amount(1536), amount(3.2e9)
        ('8', '0.1235', '1536', '3.2 G')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.4g} {letter}"
    return f"{value:.0f}" if value == round(value) else f"{value:.4g}"


def time_text(value: float, unit: str) -> str:
    """Format a time of a trace in its unit: ``12.35 ms`` for seconds, else an ``amount``."""
    return f"{value * 1e3:.4g} ms" if unit == "s" else amount(value)
