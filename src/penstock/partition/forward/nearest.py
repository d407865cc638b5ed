"""The nearest place that works, where a model can't be cut at one.

    cuts      before layers.2            before layers.5
    places    ... layers.1  layers.2  layers.3 ...           tried from the nearest on
                            fails     works

Of a graph and of modules alike: who asks brings the places, and says what works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Cut", "Move", "nearest_place"]

# So many places are tried; each costs about a millisecond.
MOST_TRIED = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place to cut.

    Args:
        label: what users know it as, such as ``"before layers.2"``.
        position: how many pieces of work come before it.
    """

    label: str
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One cut moved to where it works."""

    wrong: Cut
    right: Cut

    def __str__(self) -> str:
        """``the nearest place that works is 'before layers.3', instead of 'before layers.2'``."""
        said = f"the nearest place that works is {self.right.label!r}"
        return said if self.wrong.label == "" else f"{said}, instead of {self.wrong.label!r}"


def nearest_place(
    cuts: Sequence[Cut],
    places: Sequence[Cut],
    works: Callable[[Sequence[Cut]], bool],
    boundaries: Iterable[int] | None = None,
) -> Move | None:
    """Move one cut to the nearest place where all cuts work together.

    Args:
        cuts: the cuts, in order.
        places: where there could be one.
        works: whether a model can be cut so.
        boundaries: which cuts may move; all if None.

    Returns:
        The move; None if none helps.

    Example:
        >>> cuts = [Cut(label="before 2", position=2), Cut(label="before 5", position=5)]
        >>> places = [Cut(label=f"before {i}", position=i) for i in range(1, 7)]
        >>> str(nearest_place(cuts, places, lambda moved: moved[0].position >= 4))
        "the nearest place that works is 'before 4', instead of 'before 2'"
    """
    moves = []
    for boundary in range(len(cuts)) if boundaries is None else boundaries:
        before = cuts[boundary - 1].position if boundary else 0
        after = cuts[boundary + 1].position if boundary + 1 < len(cuts) else float("inf")
        moves += [
            (abs(place.position - cuts[boundary].position), boundary, place)
            for place in places
            if before < place.position < after and place.label != cuts[boundary].label
        ]
    for _, boundary, place in sorted(moves, key=lambda move: move[:2])[:MOST_TRIED]:
        if works([*cuts[:boundary], place, *cuts[boundary + 1 :]]):
            return Move(wrong=cuts[boundary], right=place)
    return None
