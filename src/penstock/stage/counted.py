"""Which parameters of this process are a copy of one that counts elsewhere.

A parameter that stages on several ranks have in common is there on each of them, with the same
gradient; what adds up over ranks (the norm of all gradients) must take it once. The mark is an
attribute of the parameter itself, so that it goes where the parameter goes. This module decides
for none.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["counts_here", "set_counts_here"]

_MARK = "_penstock_counts_elsewhere"


def counts_here(param: Tensor) -> bool:
    """Whether sums over ranks take ``param`` here, and not on another rank.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> counts_here(weight)
        True
        >>> set_counts_here(weight, False)
        >>> counts_here(weight)
        False
    """
    return not getattr(param, _MARK, False)


def set_counts_here(param: Tensor, counts: bool) -> None:
    """Say so."""
    if counts != counts_here(param):
        setattr(param, _MARK, not counts)
