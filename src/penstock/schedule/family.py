"""A family of schedules: its builder, and the numbers of ranks, stages and microbatches it
supports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.schedule.wording import is_count

__all__ = ["Arrangement", "Family", "parse_options", "refuse_option", "refuse_sizes"]

# With their backwards so many take 20 to 30 GB of memory; the largest clusters run some millions.
_MOST_FORWARDS = 10**8


class Arrangement(Enum):
    """The placement of stages on ranks (drawn in ``penstock.schedule.placement``)."""

    LINEAR = "linear"
    LOOPED = "looped"
    V_SHAPE = "v-shape"
    WAVE = "wave"
    BIDIRECTIONAL = "bidirectional"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of schedules.

    Args:
        name: the canonical name, which its programs carry.
        builder: called with ``ranks``, ``microbatches``, the family's options, and ``virtual``
            if the family takes more than one number of stages per rank.
        arrangement: the placement of stages on ranks, which implies ``num_directions``.
        default_virtual: stages per rank by default.
        virtuals: the supported numbers of stages per rank, rising; None for any.
        summary: a one-line summary.
        source: the publication of the method.
        aliases: other names.
        options: the builder's further arguments: for each name, a line about it.
        costs: the options whose values are costs of ``penstock.Costs``, filled in from them.
        rule: the supported ranks P and microbatches M, in words; empty for all.
        doc: a longer description: timeline, formulas, source.
        nearest: a function from ranks and microbatches to the nearest supported numbers.
    """

    name: str
    builder: Callable[..., Program]
    arrangement: Arrangement
    default_virtual: int
    virtuals: Sequence[int] | None
    summary: str
    source: str
    aliases: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    costs: tuple[str, ...] = ()
    rule: str = ""
    doc: str = field(default="", repr=False)
    nearest: Callable[[int, int], tuple[int, int]] = lambda p, m: (p, m)

    @property
    def num_directions(self) -> int:
        """The number of copies of the model that its ranks hold (see ``Placement``)."""
        return 2 if self.arrangement is Arrangement.BIDIRECTIONAL else 1

    @property
    def virtuals_text(self) -> str:
        """The supported numbers of stages per rank, in words."""
        match self.virtuals:
            case None:
                return "any"
            case range(step=2):
                return "any even number"
            case several:
                return " or ".join(map(str, several))


def refuse_sizes(caller: str, **sizes: object) -> None:
    """Refuse, in the name of ``caller``, numbers of ranks, stages or microbatches that are not
    positive integers, or whose product, the forwards, is too large."""
    numbers: list[int] = []
    for what, number in sizes.items():
        if not is_count(number):
            raise ScheduleError(
                f"{caller}: {what}={number!r} must be a whole number from 1 on", parameter=what
            )
        numbers.append(number)
    if prod(numbers) > _MOST_FORWARDS:
        forwards = f"{' · '.join(sizes)} forwards, more than a machine holds"
        raise ScheduleError(f"{caller}: {forwards}; at most {_MOST_FORWARDS} can be planned")


def refuse_option(
    family: str, name: str, value: object, least: int, most: int | None = None
) -> None:
    """Raise a ScheduleError for an option that is not a whole number within these bounds."""
    if not (is_count(value, least) and (most is None or value <= most)):
        bounds = f"{least} on" if most is None else f"{least} to {most}"
        raise ScheduleError(
            f"{family}: {name}={value!r} does not work; give a whole number from {bounds}, or "
            "leave it out"
        )


def parse_options(texts: Iterable[str]) -> dict[str, object]:
    """Parse ``name=value`` texts as a schedule's options: numbers, true, false, none, or text.

    Examples:
        >>> parse_options(["group=4", "tail=keep"])
        {'group': 4, 'tail': 'keep'}
    """
    found: dict[str, object] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if not (name and value):
            raise ScheduleError(f"option {text!r}: expected NAME=VALUE, such as group=4")
        if name in found:
            raise ScheduleError(f"option {text!r}: {name} is given twice; give it once")
        found[name] = value
        written = {"true": "true", "false": "false", "none": "null"}.get(value.lower(), value)
        with suppress(ValueError):
            found[name] = json.loads(written)
    return found
