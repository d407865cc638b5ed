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
ONCE = (BlockKind.EMBEDDING.value, BlockKind.HEAD.value)
MOST_LETTERS = 100_000
TOKEN = re.compile(r"\*[,\s]*([0-9]{1,9})|.", re.S)

Token = tuple[str, int]
"""A letter or |, and its column from 0."""


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
        if not self.stages or any("|" in stage for stage in self.stages):
            raise PartitionError(
                f'the stages are {self.stages}; give each its letters, as in ("Et", "tL")'
            )
        text = "|".join(self.stages)
        _check([(letter, column) for column, letter in enumerate(text)], text)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout string.

        Args:
            text: as in ``"Et*3|(tt|)*29,m|L"``; spaces and commas are ignored.

        Raises:
            PartitionError: with the column of the mistake, counted from 1.
        """
        tokens = _read(text)
        if not tokens:
            raise _wrong(text, 0, "the layout is empty; give each stage its letters")
        _check(tokens, text)
        return cls(stages=tuple("".join(letter for letter, _ in tokens).split("|")))

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


def _read(text: str) -> list[Token]:
    """The letters of a layout string, with repetitions expanded.

    items = { ( letter | "|" | "(" items ")" ) [ "*" number ] }
    """
    groups: list[tuple[int, list[Token]]] = [(0, [])]  # the open parentheses
    item: list[Token] = []  # what a * repeats
    for found in TOKEN.finditer(text):
        here, column, group = found[0], found.start(), groups[-1][1]
        if here in ", \t\n":
            continue
        if here in LETTERS or here == "|":
            item = [(here, column)]
            group += item
        elif here == "(":
            groups.append((column, []))
        elif here == ")":
            opened_at, item = groups.pop()
            if not groups:
                raise _wrong(text, column, "this ) closes nothing")
            if not item:
                raise _wrong(text, opened_at, "there is nothing between ( and )")
            groups[-1][1].extend(item)
        elif here[0] != "*" or not item:
            raise _wrong(text, column, f"{here[0]!r} is none of {', '.join(LETTERS)} | ( ) * and ,")
        elif found[1] is None:
            raise _wrong(text, column, "a number has to follow this *")
        else:
            times = int(found[1])
            if times < 1:
                raise _wrong(text, found.start(1), "repeat at least once, or leave it out")
            if times * len(item) + len(group) > MOST_LETTERS:
                raise _wrong(text, found.start(1), f"more than {MOST_LETTERS} letters")
            group += item * (times - 1)
            item = []
    if len(groups) > 1:
        raise _wrong(text, groups[-1][0], "this ( is never closed")
    return groups[0][1]


def _check(tokens: Sequence[Token], text: str) -> None:
    """Refuse empty stages, letters out of order, and a second E or L."""
    before, previous = "", "|"
    for letter, column in tokens:
        if letter == "|":
            if previous == "|":
                raise _wrong(text, column, "the stage that this | ends is empty")
        elif letter not in LETTERS:
            raise _wrong(text, column, f"{letter!r} is none of {', '.join(LETTERS)}")
        elif before and LETTERS.index(letter) < LETTERS.index(before):
            message = f"{letter} can't run behind {before}; the order is {LETTERS}"
            raise _wrong(text, column, message)
        elif letter == before and letter in ONCE:
            raise _wrong(text, column, f"a second {letter}; a model has one")
        else:
            before = letter
        previous = letter
    if previous == "|":
        raise _wrong(text, len(text), "the last stage is empty; leave out the | before it")


def _wrong(text: str, column: int, what: str) -> PartitionError:
    """An error that points at a column of the text."""
    return PartitionError(f"column {column + 1}: {what}\n    {text}\n    {' ' * column}^")
