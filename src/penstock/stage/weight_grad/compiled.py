"""Compiled modules run as they were compiled, also while weight gradients are put off.

    F of the stage     attention   compiled block   head
    deferral           on          off              on

The compiler traces through whatever looks at operations while it compiles, and what is to be put
off would break its graphs apart. Parameters inside get their gradients in I, with the inputs'.
Functions that are compiled on their own are not found here, and are traced through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from penstock._torch_compat import WRAPPERS_KEEP_UNDER, without_modes
from penstock.stage.weight_grad.deferred import DeferredWeights

__all__ = ["keep_compiled"]


def keep_compiled(module: nn.Module) -> None:
    """Have each compiled part of a module run outside of ``DeferredWeights``; twice does no more.

    Args:
        module: a stage's module, parts of which went through ``torch.compile`` or were compiled
            in place by ``Module.compile``.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> layer.compile(backend="eager")
        >>> keep_compiled(nn.Sequential(layer))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    for layer in module.modules():
        if layer._compiled_call_impl is not None:
            layer._compiled_call_impl = _aside(layer._compiled_call_impl)
        elif WRAPPERS_KEEP_UNDER[0] in layer._modules:
            layer.forward = _aside(layer.forward)


class _Aside:
    """A compiled call during which nothing is put off."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        wraps(call)(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # inside of another compiled region, which is aside already
            return self.call(*args, **kwargs)
        with without_modes(DeferredWeights):
            return self.call(*args, **kwargs)


def _aside(call: Callable[..., Any]) -> Callable[..., Any]:
    return call if isinstance(call, _Aside) else _Aside(call)
