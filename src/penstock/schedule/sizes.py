"""How large a program may be: whole numbers, and no more computations than a machine holds."""

from __future__ import annotations

from math import log10, prod

from penstock.errors import ScheduleError

__all__ = ["MOST_FORWARDS", "refuse_sizes"]

# Forwards of a program; with their backwards they take 20 to 30 GB. The largest clusters run
# programs of some millions.
MOST_FORWARDS = 10**8
# Numbers with more digits are told by how many these are.
_DIGITS = 18


def refuse_sizes(asker: str, **sizes: object) -> None:
    """Refuse numbers of which no program is made.

    Args:
        asker: what was asked for, such as a schedule's name.
        sizes: by name, the numbers whose product is how many forwards the program has.

    Raises:
        ScheduleError: one is no whole number from 1 on, or there would be too many forwards.

    Example:
        >>> refuse_sizes("1f1b", ranks=4, microbatches=0)
        Traceback (most recent call last):
        penstock.errors.ScheduleError: 1f1b: microbatches=0 must be a whole number from 1 on
    """
    numbers: list[int] = []
    for what, number in sizes.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(
                f"{asker}: {what}={number!r} must be a whole number from 1 on", parameter=what
            )
        numbers.append(number)
    if prod(numbers) > MOST_FORWARDS:
        given = ", ".join(f"{what}={_shown(n)}" for what, n in zip(sizes, numbers, strict=True))
        raise ScheduleError(
            f"{asker}: {given} are {_shown(prod(numbers))} forwards, more than a machine holds; at "
            f"most {MOST_FORWARDS} can be planned"
        )


def _shown(number: int) -> str:
    """A number, however long."""
    digits = int((number.bit_length() - 1) * log10(2))
    return str(number) if digits < _DIGITS else f"over 10^{digits}"
