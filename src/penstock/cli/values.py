"""Parse the text of options, and format the numbers of tables.

This module doesn't interpret numbers: the library checks costs and sizes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.errors import PartitionError, ScheduleError
from penstock.simulate.costs import Cost, Costs, MessageCost

__all__ = [
    "OTHER_COSTS",
    "bytes_text",
    "number",
    "parse_bytes",
    "percent",
    "read_cost",
    "read_message_cost",
    "read_other_costs",
    "seconds_text",
]

_WITH_OPTIONS = ("forward", "input_grad", "weight_grad", "latency", "overlap")

OTHER_COSTS = tuple(each.name for each in fields(Costs) if each.name not in _WITH_OPTIONS)
"""The fields of ``Costs`` without an option of their own, given as ``--cost name=value``."""

_SWITCHES = tuple(each.name for each in fields(Costs) if isinstance(each.default, bool))
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def read_other_costs(texts: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` texts as fields of ``Costs``.

    Raises:
        ScheduleError: an unknown or repeated name, or a malformed value.

    Example:
        >>> read_other_costs(["bandwidth=2", "transfers-overlap=false"])
        {'bandwidth': 2.0, 'transfers_overlap': False}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.replace("-", "_")
        if name in found:
            raise ScheduleError(f"--cost {text!r}: {name} is given twice; give it once")
        if name not in OTHER_COSTS:
            raise ScheduleError(
                f"--cost {text!r}: expected NAME=VALUE; names are: {', '.join(OTHER_COSTS)}"
            )
        if name in _SWITCHES:
            if value.lower() not in ("true", "false"):
                raise ScheduleError(f"--cost {text!r}: expected {name}=true or {name}=false")
            found[name] = value.lower() == "true"
        else:
            found[name] = read_message_cost(f"--cost {name}", value)
    return found


def read_message_cost(flag: str, text: str) -> MessageCost:
    """Parse costs of edges, as ``1-2=5,2-3=1``, or what ``read_cost`` takes.

    Raises:
        ScheduleError: a malformed number or edge, or a repeated edge.
    """
    if "=" not in text:
        return read_cost(flag, text)
    edges: dict[tuple[int, int], float] = {}
    for part in text.split(","):
        try:
            edge, cost = part.split("=")
            one, two = map(int, edge.split("-"))
            value = float(cost)
        except ValueError as error:
            raise ScheduleError(
                f"{flag} {part!r}: expected the cost of an edge, such as 1-2=5"
            ) from error
        if (one, two) in edges:
            raise ScheduleError(f"{flag} {part!r}: this edge is given twice; give it once")
        edges[one, two] = value
    return edges


def read_cost(flag: str, text: str) -> Cost:
    """Parse one number, or one per stage as ``1,2,1``; ``flag`` is named in errors.

    Raises:
        ScheduleError: a part that is not a number.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"{flag} {text!r}: expected a number, or one per stage as 1,2,1"
        ) from error
    return numbers[0] if len(numbers) == 1 else numbers


def parse_bytes(text: str) -> float:
    """Parse a number of bytes.

    Args:
        text: a number, with or without a unit (kB, MB, GB, TB, KiB, MiB, GiB, TiB).

    Raises:
        PartitionError: not a positive, finite number of bytes.

    Example:
        >>> parse_bytes("16GB"), parse_bytes("1.5 GiB"), parse_bytes("300")
        (16000000000.0, 1610612736.0, 300.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    try:
        value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise PartitionError(f"{text!r} is no number of bytes; write it as 16GB or 300MiB")
    return value


def bytes_text(value: float) -> str:
    """Format a number of bytes with three digits.

    Example:
        >>> bytes_text(0), bytes_text(1234), bytes_text(27e9), bytes_text(999_999)
        ('0 B', '1.23 kB', '27.0 GB', '1.00 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    digits = 0 if unit == "B" else 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """Format a duration with three digits.

    Example:
        >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(4e-6)
        ('12.3 ms', '2.5 s', '4 µs')
    """
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def number(value: float) -> str:
    """Format a simulated time or an amount.

    Example:
        >>> number(51.0), number(0.1 + 0.2), number(1234567.0)
        ('51', '0.3', '1234567')
    """
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def percent(ratio: float) -> str:
    """Format a ratio in per cent.

    Example:
        >>> percent(0.2727)
        '27.27%'
    """
    return f"{ratio:.2%}"
