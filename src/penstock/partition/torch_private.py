"""The private torch attributes around hooks on modules, in one place.

Seen to work on torch 2.13.0 (``tests/partition/test_sequential.py`` says so again on each run).
"""

from __future__ import annotations

from torch import nn

__all__ = ["has_forward_hooks"]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs hooks beside its forward, in the forward or the backward."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )
