"""Rules: splits as users of DeepSpeed write them.

    uniform          so many layers per stage       type:regex   so many layers of these classes
    parameters       so many parameters per stage

Measured costs are no business of theirs. It imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.errors import PartitionError
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts
from penstock.partition.balance.layout import wrong
from penstock.partition.balance.plan import shortened

__all__ = ["Rule", "RuleKind"]


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
