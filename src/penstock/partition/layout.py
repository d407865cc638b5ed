"""Layout strings and rules: splits as users of Megatron and DeepSpeed write them.

    Et*3|(tt|)*2,m|L      E  embedding   t  layer   m  multi-token prediction   L  head and loss
                          |  the next stage begins   *n  n times   ( )  together   ,  for the eye

    stages  Ettt  tt  tt  m  L

    uniform          so many layers per stage       type:regex   so many layers of these classes
    parameters       so many parameters per stage

Here they are read and written; measured costs are no business of theirs. It imports no torch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from penstock.errors import PartitionError
from penstock.partition.balance import balance
from penstock.partition.costs import BlockCosts, BlockKind
from penstock.partition.plan import shortened

__all__ = ["Layout", "Rule", "RuleKind"]

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
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        return cls(stages=tuple(kinds[e - n : e] for e, n in zip(ends, counts, strict=True)))

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


Placed = tuple[str, int]
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

    def read(self) -> list[Placed]:
        """Everything, with repetitions written out."""
        found = self._items(opened_at=None)
        if not found:
            raise wrong(self.text, 0, "the layout is empty; give each stage its letters")
        return found

    def _items(self, opened_at: int | None) -> list[Placed]:
        found: list[Placed] = []
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


def check_letters(letters: Sequence[Placed], text: str) -> None:
    """Refuse empty stages, letters out of order, and a second E or L."""
    before: Placed | None = None
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


# --- rules -------------------------------------------------------------------------------------


class RuleKind(Enum):
    """What a rule deals out evenly."""

    UNIFORM = "uniform"
    PARAMETERS = "parameters"
    TYPE = "type"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule that splits any model.

    Args:
        kind: what is dealt out evenly.
        pattern: of ``type``, the classes that count: a regular expression found anywhere in
            their names, in upper or lower case; else empty.

    Raises:
        PartitionError: the pattern is no regular expression, or there is one without ``type``.

    Example:
        >>> rule = Rule.parse("type:linear|conv")
        >>> rule.kind, rule.pattern, str(rule)
        (<RuleKind.TYPE: 'type'>, 'linear|conv', 'type:linear|conv')
        >>> Rule.parse("uniform").counts([BlockCosts()] * 5, num_stages=2)
        (3, 2)

    Source: the ``partition_method`` of DeepSpeed's ``PipelineModule``.
    """

    kind: RuleKind
    pattern: str = ""

    def __post_init__(self) -> None:
        is_type = self.kind is RuleKind.TYPE
        if is_type != bool(self.pattern):
            raise PartitionError(
                f"the rule {self} has {'no' if is_type else 'a'} pattern; write type:regex, "
                "or one of uniform and parameters"
            )
        try:
            re.compile(self.pattern)
        except re.error as error:
            column = len(self.kind.value) + 1 + (error.pos or 0)
            raise wrong(str(self), column, f"no regular expression: {error.msg}") from error

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule.

        Args:
            text: ``uniform``, ``parameters`` or ``type:regex``.

        Raises:
            PartitionError: with the column where it goes wrong, counted from 1.
        """
        name, colon, pattern = text.strip().partition(":")
        kinds = {kind.value: kind for kind in RuleKind}
        kind = kinds.get(name.strip().lower())
        if kind is None:
            known = "uniform, parameters, type:regex"
            raise wrong(text.strip(), 0, f"no rule begins with {name!r}; known are {known}")
        if kind is RuleKind.TYPE and not pattern:
            raise wrong(text.strip(), len(text.strip()), "a regular expression is missing here")
        if kind is not RuleKind.TYPE and colon:
            raise wrong(text.strip(), len(name), f"{kind.value} takes nothing behind it")
        return cls(kind=kind, pattern=pattern)

    def __str__(self) -> str:
        """The rule as it is written."""
        return f"{self.kind.value}:{self.pattern}" if self.pattern else self.kind.value

    def counts(self, blocks: Sequence[BlockCosts], *, num_stages: int) -> tuple[int, ...]:
        """The number of blocks per stage.

        Args:
            blocks: the blocks of the model.
            num_stages: how many stages to make.

        Raises:
            PartitionError: there are more stages than blocks, or no class fits the pattern.
        """
        weights = [self._weight(block) for block in blocks]
        if self.kind is RuleKind.TYPE and not any(weights):
            classes = sorted({name for block in blocks for name in block.classes})
            raise PartitionError(
                f"the rule {self} fits none of the model's classes, which are {shortened(classes)}"
            )
        return balance(weights, num_stages).counts

    def _weight(self, block: BlockCosts) -> float:
        match self.kind:
            case RuleKind.UNIFORM:
                return 1.0
            case RuleKind.PARAMETERS:
                return float(block.parameters)
            case RuleKind.TYPE:
                found = (re.search(self.pattern, name, re.IGNORECASE) for name in block.classes)
                return float(any(found))
