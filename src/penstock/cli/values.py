"""What is written behind options, as numbers and names.

This module knows what texts mean, and not what the numbers are for: whether a cost may be negative
is the library's affair.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from penstock.errors import ScheduleError
from penstock.simulate.costs import Cost, Costs, MessageCost

__all__ = [
    "OTHER_COSTS",
    "in_options",
    "read_cost",
    "read_message_cost",
    "read_options",
    "read_other_costs",
]

_WITH_OPTIONS = ("forward", "input_grad", "weight_grad", "latency", "overlap")

OTHER_COSTS = tuple(each.name for each in fields(Costs) if each.name not in _WITH_OPTIONS)
"""The costs that have no option of their own, and are given by name."""

_SETTING = ("ranks", "microbatches", "virtual")

_MOST = 1e100  # of costs

# Arguments of the library, as the command line has them.
_ARGUMENTS = {
    **{name: f"--{name}" for name in _SETTING},
    "jitter": "--jitter",
    "memory_limit": "--memory",
    "time_limit_s": "--time-limit",
}
_ARGUMENT = re.compile(rf"(?<![\w'\"(-])({'|'.join(_ARGUMENTS)})=(?=[^\s,;)])")
# What only the library can do, and what is left to do.
_LIBRARY_ONLY = {
    "pass placements, or costs for": "give costs for",
    ", or pass exact=False to search without": "",
}

_SWITCHES = tuple(each.name for each in fields(Costs) if isinstance(each.default, bool))


def read_other_costs(texts: Sequence[str]) -> dict[str, Any]:
    """``name=value`` texts as fields of ``Costs``.

    Args:
        texts: each as ``name=value``.

    Raises:
        ScheduleError: no such cost, one that is given twice, or a value that it can't have.

    Example:
        >>> read_other_costs(["bandwidth=2", "transfers-overlap=false"])
        {'bandwidth': 2.0, 'transfers_overlap': False}
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        name = name.replace("-", "_")
        if name not in OTHER_COSTS:
            raise ScheduleError(
                f"--cost {text!r}: expected NAME=VALUE; names are: {', '.join(OTHER_COSTS)}"
            )
        if name in found:
            raise ScheduleError(f"--cost {text!r}: {name} is given twice; give it once")
        if name in _SWITCHES:
            if value.lower() not in ("true", "false"):
                raise ScheduleError(f"--cost {text!r}: expected {name}=true or {name}=false")
            found[name] = value.lower() == "true"
        else:
            found[name] = read_message_cost(f"cost {name}", value)
    return found


def read_options(texts: Sequence[str], *, own: bool = False) -> dict[str, object]:
    """``name=value`` texts as arguments: whole numbers, numbers, true and false, else text.

    Args:
        texts: each as ``name=value``.
        own: whether they are one schedule's of several, which may have its own stages per rank.

    Raises:
        ScheduleError: a text without a name or a value, a name that is given twice, or what the
            command line has an option of its own for.

    Example:
        >>> read_options(["group=4", "tail=keep"])
        {'group': 4, 'tail': 'keep'}
    """
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.replace("-", "_")
        if not (name and equals and value):
            raise ScheduleError(f"option {text!r}: expected NAME=VALUE, such as group=4")
        if name in found:
            raise ScheduleError(f"option {text!r}: {name} is given twice; give it once")
        if name in _SETTING and not (own and name == "virtual"):
            raise ScheduleError(
                f"option {text!r}: {name} is no option of a schedule; give --{name} {value}"
            )
        found[name] = _value(value)
    return found


def _value(text: str) -> object:
    known: dict[str, object] = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def read_message_cost(name: str, text: str) -> MessageCost:
    """A cost of messages: of edges, as ``1-2=5,2-3=1``, or as ``read_cost``.

    Args:
        name: the option's, without its dashes.
        text: what stands behind it.

    Raises:
        ScheduleError: neither of both, or an edge that is given twice.
    """
    if "=" not in text:
        return read_cost(name, text)
    edges: dict[tuple[int, int], float] = {}
    for part in text.split(","):
        try:
            edge, cost = part.split("=")
            one, two = map(int, edge.split("-"))
            number = float(cost)
        except ValueError as error:
            raise ScheduleError(
                f"--{name} {part!r}: expected the cost of an edge, such as 1-2=5"
            ) from error
        if (one, two) in edges:
            raise ScheduleError(f"--{name} {part!r}: this edge is given twice; give it once")
        _refuse_far(name, number)
        edges[one, two] = number
    return edges


def read_cost(name: str, text: str) -> Cost:
    """A number, or one per stage as ``1,2,1``.

    Args:
        name: the option's, without its dashes.
        text: what stands behind it.

    Raises:
        ScheduleError: a part that is no number, or too far from 1.
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ScheduleError(
            f"--{name} {text!r}: expected a number, or one per stage as 1,2,1"
        ) from error
    for number in numbers:
        _refuse_far(name, number)
    return numbers[0] if len(numbers) == 1 else numbers


def _refuse_far(name: str, number: float) -> None:
    """Refuse what, added up or divided by, would be more than a number can hold."""
    if math.isfinite(number) and number and not 1 / _MOST <= abs(number) <= _MOST:
        raise ScheduleError(
            f"--{name} {number:g}: expected 0, or a number from {1 / _MOST:g} to {_MOST:g}; give "
            "costs in another unit"
        )


def in_options(message: str) -> str:
    """A message that speaks of arguments, in the words of the command line.

    Example:
        >>> in_options("Costs(input_grad=...): -1.0 is not a finite number ≥ 0")
        '--input-grad: -1.0 is not a finite number ≥ 0'
        >>> in_options("Costs(reload=...) has 2 numbers, but the program has 4 stages")
        '--cost reload has 2 numbers, but the program has 4 stages'
        >>> in_options("offload=True, at no cost; pass Costs(offload=..., reload=...)")
        '--offload, at no cost; pass --cost offload=... --cost reload=...'
        >>> in_options("no program meets memory_limit=1: .. with recompute=True, 1 would do")
        'no program meets --memory 1: .. with --recompute, 1 would do'
        >>> in_options("search: time_limit_s=0 must be a finite number above 0")
        'search: --time-limit 0 must be a finite number above 0'
    """

    def option(found: re.Match[str]) -> str:
        name = found[1]
        return f"--{name.replace('_', '-')}" if name in _WITH_OPTIONS else f"--cost {name}"

    def options(found: re.Match[str]) -> str:
        return re.sub(
            r"(\w+)(?:=\.\.\.)(?:, )?", lambda one: f"{option(one)}=... ", found[1]
        ).strip()

    message = re.sub(r"Costs\((\w+)=\.\.\.\)", option, message)
    message = re.sub(r"Costs\(((?:\w+=\.\.\.(?:, )?)+)\)", options, message)
    message = re.sub(r"\b(recompute|offload)=True\b", r"--\1", message)
    for said, left in _LIBRARY_ONLY.items():
        message = message.replace(said, left)
    return _ARGUMENT.sub(lambda found: f"{_ARGUMENTS[found[1]]} ", message)
