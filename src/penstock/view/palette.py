"""The colours and words of a timeline, shared by all views.

The colours follow the figures of the zero-bubble papers (Source: arXiv:2401.10241, fig. 2):
forwards blue, backwards teal, weight gradients green; what is idle stays white.
"""

from __future__ import annotations

from penstock.schedule.action import Op

__all__ = ["COLOURS", "NAMES", "shade"]

COLOURS: dict[Op, str] = {
    Op.FORWARD: "#4f86d9",
    Op.FULL_BACKWARD: "#2a9d97",
    Op.INPUT_GRAD: "#7fd1c9",
    Op.WEIGHT_GRAD: "#6bb35a",
}

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
