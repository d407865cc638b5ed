"""Regions of a captured graph under another grad mode or under autocast.

captured    wrap_with_set_grad_enabled(False, body, x)      one node, which can't be cut
in a stage  token = enter_grad(False)                       ordinary nodes, which can: each
            ...the body's nodes...                          stage enters the regions of its
            leave(token)                                    own nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local
from typing import Any

import torch
from torch import fx

__all__ = ["Region", "leaving_all", "region_of", "weave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region of a graph: ``enter(*args)`` enters it, and returns the argument for ``leave``."""

    enter: Callable[..., Any]
    args: tuple[Any, ...]


class _Open(local):
    """The contexts that this thread has entered, outermost first."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_open = _Open()


def _enter(context: Any) -> Any:
    context.__enter__()
    _open.contexts.append(context)
    return context


def enter_grad(enabled: bool) -> Any:
    """Enter a region with gradients enabled or disabled."""
    return _enter(torch.enable_grad() if enabled else torch.no_grad())


def enter_autocast(device: str, dtype: Any, enabled: bool, cache: bool) -> Any:
    """Enter a region with autocast enabled or disabled."""
    return _enter(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))


def leave(context: Any) -> None:
    """Leave the innermost region."""
    _open.contexts.remove(context)
    context.__exit__(None, None, None)


@contextmanager
def leaving_all() -> Iterator[None]:
    """Leave the regions that an exception in this block left open."""
    depth = len(_open.contexts)
    try:
        yield
    except BaseException:
        while len(_open.contexts) > depth:
            _open.contexts.pop().__exit__(None, None, None)
        raise


def region_of(target: Any, args: Sequence[Any]) -> tuple[Region, Any, Sequence[Any]] | None:
    """The region, body and operands of a node that wraps a region; None for other nodes."""
    ops: Any = torch.ops.higher_order
    if target is ops.wrap_with_set_grad_enabled:
        enabled, body, *operands = args
        return Region(enter=enter_grad, args=(enabled,)), body, operands
    if target is ops.wrap_with_autocast:
        device, dtype, enabled, cache, body, *operands = args
        args = (device, dtype, enabled, cache)
        return Region(enter=enter_autocast, args=args), body, operands
    return None


def weave(graph: fx.Graph, now: list[tuple[Region, Any]], wanted: tuple[Region, ...]) -> None:
    """Append nodes that leave and enter regions to ``graph``, until it is in ``wanted``.

    Args:
        graph: the graph under construction.
        now: the open regions with the nodes that entered them, outermost first; updated in place.
        wanted: the regions of the next node.
    """
    common = 0
    while common < min(len(now), len(wanted)) and now[common][0] == wanted[common]:
        common += 1
    while len(now) > common:
        graph.call_function(leave, (now.pop()[1],))
    for region in wanted[common:]:
        now.append((region, graph.call_function(region.enter, region.args)))
