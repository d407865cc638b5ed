"""Sees the units of a model run: which, in which order, from what to what.

    enter wte   enter wpe   enter h.0        enter h.1        enter lm_head
    │ segment   │ segment   │ segment        │ segment        │ segment, to the end

A unit's *segment* lasts from its first call to that of the next unit, so that segments fill the
whole forward: what a model does between its modules counts with the module before. It changes
nothing, and knows neither clocks nor costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from penstock.partition.blocks import LeafModule

__all__ = ["UnitWatch"]

OnUnit = Callable[[int, Any], None]


def ignore(index: int, value: Any) -> None:
    """What is done where nobody asks."""


class UnitWatch:
    """The first call of each unit in one forward.

    Args:
        units: the units of the model.
        enter: called with the segment's number and ``(args, kwargs)`` before a unit's first call.
        leave: called with the segment's number and the output after it.

    Attributes:
        order: the names of the units whose segments have begun.
    """

    def __init__(
        self, units: Sequence[LeafModule], *, enter: OnUnit = ignore, leave: OnUnit = ignore
    ) -> None:
        self.units = units
        self.order: list[str] = []
        self._enter = enter
        self._leave = leave
        self._names: dict[int, list[str]] = {}
        for unit in units:
            self._names.setdefault(id(unit.module), []).append(unit.name)
        self._calls: list[int | None] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, the calls of the units are seen."""
        with ExitStack() as around:
            for module in {id(unit.module): unit.module for unit in self.units}.values():
                if module._compiled_call_impl is not None:
                    around.enter_context(self._around_compiled(module))
                else:
                    before = module.register_forward_pre_hook(self._before, with_kwargs=True)
                    around.callback(before.remove)
                    around.callback(module.register_forward_hook(self._after).remove)
            yield

    @contextmanager
    def _around_compiled(self, module: nn.Module) -> Iterator[None]:
        """The same for a module that is compiled in place, its hooks with it."""
        compiled = module._compiled_call_impl
        assert compiled is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            self._before(module, args, kwargs)
            output = compiled(*args, **kwargs)
            self._after(module, args, output)
            return output

        module._compiled_call_impl = call
        try:
            yield
        finally:
            module._compiled_call_impl = compiled

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # A layer that stands in several places is called by its names in turn.
        names = self._names[id(module)]
        if not names:
            self._calls.append(None)
            return
        self._calls.append(len(self.order))
        self.order.append(names.pop(0))
        self._enter(len(self.order) - 1, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        call = self._calls.pop()
        if call is not None:
            self._leave(call, output)
