"""Random numbers that are drawn between a model's modules, seen in its dry run.

    noise = torch.rand(4)        every stage runs this code, and would draw its own
    x = x + noise                so x comes from a draw: two stages that need it are refused

This module knows no stage.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._torch_compat import is_random, mutated_arguments
from penstock.errors import PartitionError
from penstock.partition.forward.absent import Absent, Origin, Source, SourceKind, draws

__all__ = ["GlueDraws"]


class GlueDraws(TorchDispatchMode):
    """Within it, what is drawn becomes absent, with the values that were drawn.

    Attributes:
        seen: whether something was drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def leave(self) -> None:
        """See nothing for now: a module runs."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def again(self) -> None:
        """See again."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not is_random(func, args, kwargs):
            return result
        self.seen = True
        if any(type(x) is not Absent for x in mutated_arguments(func, args, kwargs)):
            raise PartitionError(
                f"the code between the model's parts draws random numbers into a tensor ({func}), "
                "and each stage would draw its own; use an nn.Dropout module there, which runs "
                "once, or draw within a module"
            )
        source = Source(SourceKind.DRAW, next(draws), 0, str(func))
        return optree.tree_map(lambda leaf: _drawn(leaf, source), result, none_is_leaf=True)


def _drawn(leaf: Any, source: Source) -> Any:
    if not isinstance(leaf, Tensor) or type(leaf) is Absent:
        return leaf
    return Absent(leaf, torch.device(leaf.device), Origin({source}))
