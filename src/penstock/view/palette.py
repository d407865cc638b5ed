"""The colours and words of a timeline, shared by all views.

The colours follow the figures of the zero-bubble papers (Source: arXiv:2401.10241, fig. 2):
forwards blue, backwards green-blue, weight gradients green; what is idle stays white. Where there
is room, a letter says the same.
"""

from __future__ import annotations

from penstock.schedule.action import Op
from penstock.trace import Trace

__all__ = [
    "ANSI",
    "COLOURS",
    "FRAME",
    "NAMES",
    "colour_of",
    "ink",
    "letter_of",
    "name_of",
    "shade",
    "shades",
]

COLOURS: dict[Op, str] = {
    Op.FORWARD: "#4f86d9",
    Op.FULL_BACKWARD: "#1f9c8d",
    Op.INPUT_GRAD: "#6cc9d8",
    Op.WEIGHT_GRAD: "#6bb35a",
    Op.RECOMPUTE: "#8f9bb3",
    Op.OFFLOAD: "#8e6bbf",
    Op.RELOAD: "#d98ac0",
}

ANSI: dict[Op, tuple[str, str]] = {
    Op.FORWARD: ("blue", "bright_white"),
    Op.FULL_BACKWARD: ("cyan", "black"),
    Op.INPUT_GRAD: ("bright_cyan", "black"),
    Op.WEIGHT_GRAD: ("green", "black"),
    Op.RECOMPUTE: ("white", "black"),
    Op.OFFLOAD: ("magenta", "bright_white"),
    Op.RELOAD: ("bright_magenta", "black"),
}
"""For terminals of 16 colours each op's, and that of what stands on it: by their ANSI names.

The nearest of the 16 to ``COLOURS``, and to their shades above all, is one for several ops."""

FRAME = "#1c2733"
"""The frame around what is one block."""

NAMES: dict[Op, str] = {
    Op.FORWARD: "forward",
    Op.FULL_BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
    Op.SEND_F: "send activations",
    Op.RECV_F: "receive activations",
    Op.SEND_B: "send gradients",
    Op.RECV_B: "receive gradients",
    Op.UNSHARD: "gather parameters",
    Op.RESHARD: "release parameters",
    Op.REDUCE_GRAD: "reduce gradients",
    Op.RECOMPUTE: "recompute",
    Op.OFFLOAD: "offload to the host",
    Op.RELOAD: "reload from the host",
}


def shade(colour: str, step: int, num_steps: int) -> str:
    """``colour``, darker for the first of several stages on a rank, lighter for the last.

    Args:
        colour: as ``#rrggbb``.
        step: which of the rank's stages, from 0.
        num_steps: how many stages the rank holds.

    Example:
        >>> shade("#4f86d9", 0, 1)
        '#4f86d9'
        >>> shade("#808080", 0, 2), shade("#808080", 1, 2)
        ('#636363', '#b0b0b0')
    """
    if num_steps < 2:
        return colour
    mix = step / (num_steps - 1)
    rgb = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # From three quarters of each channel to a bit more than a third of the way to white.
    mixed = (round((1 - mix) * 0.776 * c + mix * (c + 0.378 * (255 - c))) for c in rgb)
    return "#" + "".join(f"{c:02x}" for c in mixed)


_OTHER_COLOUR = "#c9b28f"


def colour_of(op: Op) -> str:
    """The colour of an op; one for all that have none of their own.

    Example:
        >>> colour_of(Op.FORWARD), colour_of(Op.SEND_F)
        ('#4f86d9', '#c9b28f')
    """
    return COLOURS.get(op, _OTHER_COLOUR)


def name_of(op: Op) -> str:
    """The words for an op; its text form in words where none stand in ``NAMES``.

    Example:
        >>> name_of(Op.INPUT_GRAD)
        'input gradient'
    """
    return NAMES.get(op, op.value.lower().replace("_", " "))


def letter_of(op: Op) -> str:
    """The op in one letter, as boxes bear it.

    Example:
        >>> letter_of(Op.INPUT_GRAD), letter_of(Op.RECOMPUTE)
        ('I', 'R')
    """
    return op.value[0]


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on ``colour``.

    Args:
        colour: as ``#rrggbb``.

    Example:
        >>> ink("#3d68a8"), ink("#aed6ef")
        ('#ffffff', '#000000')
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    # Luminance as in ITU-R BT.601.
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 145 else "#ffffff"


def shades(trace: Trace) -> dict[tuple[int, Op, int], str]:
    """For each rank, op and stage of a trace its colour, darkest for the first stage of a rank."""
    held: dict[int, set[int]] = {}
    for span in trace.spans:
        held.setdefault(span.rank, set()).add(span.action.stage)
    order = {rank: sorted(stages) for rank, stages in held.items()}
    used = {(span.rank, span.action.op, span.action.stage) for span in trace.spans}
    return {
        (rank, op, stage): shade(colour_of(op), order[rank].index(stage), len(order[rank]))
        for rank, op, stage in used
    }
