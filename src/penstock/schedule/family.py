"""What is known of a family of schedules beside its builder.

This module knows no family; ``penstock.schedule.catalog`` lists them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.schedule.program import Program

__all__ = ["Arrangement", "Family"]


class Arrangement(Enum):
    """How a family lays its stages on ranks (drawn in ``penstock.schedule.placement``)."""

    LINEAR = "linear"
    LOOPED = "looped"
    V_SHAPE = "v-shape"
    WAVE = "wave"
    BIDIRECTIONAL = "bidirectional"


# What every schedule is built with has names that no option can have.
_NO_OPTIONS = ("name", "ranks", "microbatches", "virtual")


def _the_same(ranks: int, microbatches: int) -> tuple[int, int]:
    """Any numbers work."""
    return ranks, microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of schedules.

    Args:
        name: the canonical name, which its programs carry.
        builder: called with ``ranks``, ``microbatches``, the family's options, and ``virtual``
            where the family takes more than one number of stages per rank.
        arrangement: how stages lie on ranks, and with that in how many copies.
        default_virtual: stages per rank where none is asked for.
        virtuals: the numbers of stages per rank that work, rising; None for any.
        summary: one line for people.
        doc: more for people: a timeline drawn, formulas, the source.
        source: where the method was published.
        aliases: other names, beside those that differ in case, separators or a leading
            "Schedule" alone.
        options: the builder's further arguments: each one's name, and in a line what it is.
        any_option: whether it takes options of any other name, too.
        rule: which ranks P and microbatches M work, in words; empty where all do.
        splits_sequences: whether its programs split sequences (``Program.num_splits``), so that
            stages hand their state from piece to piece.
        nearest: for ranks and microbatches the nearest numbers that work, which are these
            themselves where they do.
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
    any_option: bool = False
    rule: str = ""
    splits_sequences: bool = False
    doc: str = field(default="", repr=False)
    nearest: Callable[[int, int], tuple[int, int]] = _the_same

    @property
    def copies(self) -> int:
        """How often its ranks hold the model (see ``Placement``)."""
        return 2 if self.arrangement is Arrangement.BIDIRECTIONAL else 1

    @property
    def virtuals_text(self) -> str:
        """The numbers of stages per rank that work, in words."""
        match self.virtuals:
            case None:
                return "any"
            case range(step=2):
                return "any even number"
            case several:
                return " or ".join(map(str, several))

    def virtuals_near(self, virtual: int) -> Sequence[int]:
        """The nearest numbers of stages per rank that work, one to each side where there are.

        Args:
            virtual: a number that does not work.
        """
        assert self.virtuals is not None
        at = bisect(self.virtuals, virtual)
        return self.virtuals[max(at - 1, 0) : at + 1]

    def takes_option(self, name: str) -> bool:
        """Whether ``name`` is one of its options."""
        return name in self.options or (self.any_option and name not in _NO_OPTIONS)

    def works(self, *, ranks: int, microbatches: int) -> bool:
        """Whether it can be built for so many."""
        return self.nearest(ranks, microbatches) == (ranks, microbatches)
