"""Layout strings: splits in the notation of Megatron-LM.

    Et*3|(tt|)*2,m|L      E  embedding   t  layer   m  multi-token prediction   L  head and loss
                          |  the next stage begins   *n  n times   ( )  together   ,  ignored

    stages  Ettt  tt  tt  m  L

This module imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockCosts, BlockKind
from penstock.partition.plan import split_by_counts

__all__ = ["Layout"]

LETTERS = "".join(kind.value for kind in BlockKind)  # in execution order
MOST_LETTERS = 100_000
# Of a letter, or of letters in parentheses, which need no number.
REPEATED = re.compile(
    rf"([{LETTERS}|])[,\s]*\*[,\s]*([0-9]{{1,9}})|\(([{LETTERS}|,\s]+)\)(?:\*[,\s]*([0-9]{{1,9}}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The kinds of blocks of each stage.

    Args:
        stages: per stage its letters, such as ``"Ett"``.

    Raises:
        PartitionError: an empty stage, an unknown letter, or letters out of order.

    Examples:
        >>> layout = Layout.parse("Et*3|(tt|)*2,m|L")
        >>> layout.stages
        ('Ettt', 'tt', 'tt', 'm', 'L')
        >>> str(layout)
        'Et*3|(tt|)*2,m|L'

    Source: the ``--pipeline-model-parallel-layout`` of Megatron-LM.
    """

    stages: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        flat, shown = "".join(self.stages), "|".join(self.stages)
        problem = None
        if not all(self.stages) or not self.stages:
            problem = "a stage is empty; no | goes before the first stage or behind the last"
        elif odd := set(flat) - set(LETTERS):
            problem = f"{min(odd)!r} is none of {', '.join(LETTERS)}"
        elif list(flat) != sorted(flat, key=LETTERS.index):
            problem = f"the order of blocks is {LETTERS}"
        elif flat.count(BlockKind.EMBEDDING.value) > 1 or flat.count(BlockKind.HEAD.value) > 1:
            problem = "a model has one E and one L"
        if problem is not None:
            raise PartitionError(f"the layout {shown!r}: {problem}")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout string.

        Args:
            text: as in ``"Et*3|(tt|)*29,m|L"``; spaces and commas are ignored.

        Raises:
            PartitionError: the text is no layout.
        """
        letters = text
        while found := REPEATED.search(letters):  # the innermost repetitions first
            item, times = found[1] or found[3], int(found[2] or found[4] or 1)
            if not 0 < times * len(item) <= MOST_LETTERS:
                raise PartitionError(
                    f"the layout {text!r}: {found[0][:20]} makes no letters, or more than "
                    f"{MOST_LETTERS}"
                )
            letters = letters[: found.start()] + item * times + letters[found.end() :]
        if odd := re.sub(rf"[{LETTERS}|,\s]", "", letters):
            raise PartitionError(
                f"the layout {text!r}: {odd[0]!r} does not belong there; a layout has the letters "
                f"{', '.join(LETTERS)}, | between stages, and repetitions such as t*3 and (tt|)*2"
            )
        return cls(stages=tuple(re.sub(r"[,\s]", "", letters).split("|")))

    def __str__(self) -> str:
        """The layout string, shortened by repetitions; inverse of ``parse``."""
        *before, last = map(_folded, self.stages)
        runs = [(stage, len(list(same))) for stage, same in groupby(before)]
        # No | after the last stage.
        return "".join(f"({s}|)*{n}," if n > 1 else f"{s}|" for s, n in runs) + last

    @classmethod
    def of(cls, blocks: Sequence[BlockCosts], counts: Sequence[int]) -> Layout:
        """The layout for the given numbers of blocks per stage."""
        kinds = "".join(block.kind.value for block in blocks)
        return cls(stages=tuple("".join(letters) for letters in split_by_counts(kinds, counts)))

    def counts(self, blocks: Sequence[BlockCosts]) -> tuple[int, ...]:
        """The number of blocks per stage for a model with these blocks.

        Raises:
            PartitionError: the model's blocks differ from the layout.
        """
        kinds = "".join(block.kind.value for block in blocks)
        has, expected = Counter(kinds), Counter("".join(self.stages))
        if has != expected:
            differences = ", ".join(
                f"{expected[letter]} {letter} for the model's {has[letter]}"
                for letter in LETTERS
                if has[letter] != expected[letter]
            )
            raise PartitionError(
                f"the layout {self} does not fit the model, whose blocks are {_folded(kinds)}: it "
                f"has {differences}"
            )
        return tuple(len(stage) for stage in self.stages)


def _folded(stage: str) -> str:
    """``ttt`` as ``t*3``."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(letter * times if times < 3 else f"{letter}*{times}" for letter, times in runs)
