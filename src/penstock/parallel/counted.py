"""Which parameters of this process are a copy of one that counts elsewhere, and among how many.

A parameter that stages on several ranks have in common is there on each of them, with the same
gradient; what adds up over ranks (the norm of all gradients) must take it once, and over the ranks
of its pipeline. The marks are attributes of the parameter itself, so that they go where the
parameter goes. This module decides for none.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["counts_here", "pipeline_size", "set_counts_here", "set_pipeline_size"]

_MARK = "_penstock_counts_elsewhere"
_SIZE = "_penstock_pipeline_size"


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


def pipeline_size(param: Tensor) -> int | None:
    """How many processes the pipeline of ``param`` runs over; None if it is in none.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> set_pipeline_size(weight, 2)
        >>> pipeline_size(weight)
        2
    """
    return getattr(param, _SIZE, None)


def set_pipeline_size(param: Tensor, num_processes: int) -> None:
    """Say so."""
    setattr(param, _SIZE, num_processes)
