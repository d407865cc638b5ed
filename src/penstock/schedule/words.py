"""Numbers of things, in messages. This module knows no message."""

from __future__ import annotations

__all__ = ["number_of", "numbers_of"]


def number_of(number: int, thing: str) -> str:
    """A number of things, in words.

    Args:
        number: how many.
        thing: what each of them is, such as "rank": a word whose plural ends with an s.

    Example:
        >>> number_of(1, "rank"), number_of(2, "microbatch"), number_of(0, "copy")
        ('1 rank', '2 microbatches', '0 copies')
    """
    if number == 1:
        return f"1 {thing}"
    if thing.endswith("y"):
        return f"{number} {thing[:-1]}ies"
    return f"{number} {thing}{'es' if thing.endswith('ch') else 's'}"


def numbers_of(**numbers: int) -> str:
    """Numbers of several things, in words.

    Args:
        numbers: by thing, how many.

    Example:
        >>> numbers_of(rank=4, stage=4, microbatch=1)
        '4 ranks, 4 stages, 1 microbatch'
    """
    return ", ".join(number_of(number, thing) for thing, number in numbers.items())
