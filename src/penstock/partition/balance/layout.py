"""Layout strings: splits as users of Megatron-LM write them.

    Et*3|(tt|)*2,m|L      E  embedding   t  layer   m  multi-token prediction   L  head and loss
                          |  the next stage begins   *n  n times   ( )  together   ,  for the eye

    stages  Ettt  tt  tt  m  L

Here they are read and written; measured costs are no business of theirs. It imports no torch.
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

__all__ = ["Layout", "wrong"]

LETTERS = "".join(kind.value for kind in BlockKind)  # in the order in which they run
ONCE = (BlockKind.EMBEDDING.value, BlockKind.HEAD.value)
MOST_LETTERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which kinds of blocks each stage has.

    Args:
        stages: per stage its letters, such as ``"Ett"``.

    Raises:
        PartitionError: an empty stage, an unknown letter, or letters out of order.

    Example:
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
        check_letters([(letter, column) for column, letter in enumerate(text)], text)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout string.

        Args:
            text: as in ``"Et*3|(tt|)*29,m|L"``; spaces and commas say nothing.

        Raises:
            PartitionError: with the column where it goes wrong, counted from 1.
        """
        letters = Reader(text).read()
        check_letters(letters, text)
        return cls(stages=tuple("".join(letter for letter, _ in letters).split("|")))

    def __str__(self) -> str:
        """The layout string, as short as repetitions make it; ``parse`` reads it back."""
        runs = [(stage, len(list(same))) for stage, same in groupby(self.stages)]
        text = ""
        for index, (stage, times) in enumerate(runs):
            is_last = index == len(runs) - 1
            repeated = times - 1 if is_last else times  # the last stage has no | behind it
            if repeated > 1:
                text += f"({folded(stage)}|)*{repeated},"
            else:
                text += f"{folded(stage)}|" * repeated
            text += folded(stage) if is_last else ""
        return text

    @classmethod
    def of(cls, blocks: Sequence[BlockCosts], counts: Sequence[int]) -> Layout:
        """The layout of so many blocks per stage.

        Args:
            blocks: the blocks of the model.
            counts: the number of blocks per stage.

        Raises:
            PartitionError: an empty stage.
        """
        kinds = "".join(block.kind.value for block in blocks)
        return cls(stages=tuple("".join(letters) for letters in split_by_counts(kinds, counts)))

    def counts(self, blocks: Sequence[BlockCosts]) -> tuple[int, ...]:
        """The number of blocks per stage in a model of these blocks.

        Args:
            blocks: the blocks of the model.

        Raises:
            PartitionError: the layout is that of a model with other blocks.
        """
        has = Counter(block.kind.value for block in blocks)
        asks = Counter("".join(self.stages))
        if has != asks:
            differences = ", ".join(
                f"{asks[letter]} {letter} for the model's {has[letter]}"
                for letter in LETTERS
                if has[letter] != asks[letter]
            )
            raise PartitionError(
                f"the layout {self} does not fit the model, whose blocks are "
                f"{folded(''.join(block.kind.value for block in blocks))}: it has {differences}"
            )
        return tuple(len(stage) for stage in self.stages)


def folded(stage: str) -> str:
    """``ttt`` as ``t*3``."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(letter * times if times < 3 else f"{letter}*{times}" for letter, times in runs)


Token = tuple[str, int]
"""A letter or |, and in which column it stands, from 0."""


class Reader:
    """Reads one layout string.

        items = { ( letter | "|" | "(" items ")" ) [ "*" number ] }

    Args:
        text: the string.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def read(self) -> list[Token]:
        """Everything, with repetitions written out."""
        found = self._items(opened_at=None)
        if not found:
            raise wrong(self.text, 0, "the layout is empty; give each stage its letters")
        return found

    def _items(self, opened_at: int | None) -> list[Token]:
        found: list[Token] = []
        while True:
            here = self._peek()
            if here == "":
                if opened_at is not None:
                    raise wrong(self.text, opened_at, "this ( is never closed")
                return found
            start = self.at
            self.at += 1
            if here == ")":
                if opened_at is None:
                    raise wrong(self.text, start, "this ) closes nothing")
                if not found:
                    raise wrong(self.text, opened_at, "there is nothing between ( and )")
                return found
            if here == "(":
                item = self._items(opened_at=start)
            elif here in LETTERS or here == "|":
                item = [(here, start)]
            else:
                raise wrong(
                    self.text, start, f"{here!r} is none of {', '.join(LETTERS)} | ( ) * and ,"
                )
            found += item * self._times(len(item) + len(found))

    def _times(self, length: int) -> int:
        """The number behind a ``*``, if one comes."""
        if self._peek() != "*":
            return 1
        star = self.at
        self.at += 1
        self._peek()
        digits = re.compile(r"[0-9]+").match(self.text, self.at)
        if digits is None:
            raise wrong(self.text, star, "a number has to follow this *")
        self.at = digits.end()
        times = int(digits.group())
        if times < 1:
            raise wrong(self.text, digits.start(), "repeat at least once, or leave it out")
        if times * length > MOST_LETTERS:
            raise wrong(self.text, digits.start(), f"more than {MOST_LETTERS} letters")
        return times

    def _peek(self) -> str:
        """The next character that means something; "" at the end."""
        while self.at < len(self.text) and self.text[self.at] in ", \t\n":
            self.at += 1
        return self.text[self.at : self.at + 1]


def check_letters(letters: Sequence[Token], text: str) -> None:
    """Refuse empty stages, letters out of order, and a second E or L."""
    before: Token | None = None
    previous = "|"
    for letter, column in letters:
        if letter == "|":
            if previous == "|":
                raise wrong(text, column, "the stage that this | ends is empty")
        elif letter not in LETTERS:
            raise wrong(text, column, f"{letter!r} is none of {', '.join(LETTERS)}")
        elif before is not None and LETTERS.index(letter) < LETTERS.index(before[0]):
            raise wrong(
                text, column, f"{letter} can't run behind {before[0]}; the order is {LETTERS}"
            )
        elif before is not None and letter == before[0] and letter in ONCE:
            raise wrong(text, column, f"a second {letter}; a model has one")
        else:
            before = (letter, column)
        previous = letter
    if previous == "|":
        raise wrong(text, len(text), "the last stage is empty; leave out the | before it")


def wrong(text: str, column: int, what: str) -> PartitionError:
    """An error that points into the text."""
    return PartitionError(f"column {column + 1}: {what}\n    {text}\n    {' ' * column}^")
