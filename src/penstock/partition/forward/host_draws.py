"""Random numbers of Python's ``random`` and of NumPy, drawn between a model's modules.

    scale = random.random()      every stage runs this code, and would draw its own
    x = self.a(x) * scale        stage 0
    x = self.b(x) * scale        stage 1: the same, since both go on from one seed

The first stage draws a seed per microbatch, which crosses with the values. What modules draw comes
from the process's own generators, as ever. This module knows no stage.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.stage.rng import host_random_states, set_host_random_states

__all__ = ["HostDraws", "HostStream", "draw_seeds"]


class HostDraws:
    """Sees in a dry run which of the generators are drawn from between the modules.

    Attributes:
        seen: their names, in order.
    """

    def __init__(self) -> None:
        self.seen: tuple[str, ...] = ()
        self._before = host_random_states()

    def look(self) -> None:
        """See what was drawn since the last look, or since a module has run."""
        now = host_random_states()
        drawn = {name for name, state in now.items() if not _same(self._before.get(name), state)}
        self.seen = tuple(sorted({*self.seen, *drawn}))
        self._before = now

    def skip(self) -> None:
        """A module has run: what it has drawn is its own affair."""
        self._before = host_random_states()


def _same(one: Any, other: Any) -> bool:
    # NumPy's state holds an array.
    return one is None or all(map(_alike, one, other))


def _alike(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def draw_seeds(names: Sequence[str]) -> list[int]:
    """A seed for each of these generators, drawn from it."""
    return [
        random.getrandbits(32)
        if name == "random"
        else int(sys.modules["numpy"].random.randint(1 << 32, dtype="uint32"))
        for name in names
    ]


class HostStream:
    """What the code between the modules draws from, for one microbatch on one stage.

    Args:
        names: the generators that it draws from.
        seeds: where they begin, alike on every stage.
    """

    def __init__(self, names: Sequence[str], seeds: Sequence[int]) -> None:
        self._other = host_random_states()
        for name, seed in zip(names, seeds, strict=True):
            if name == "random":
                random.seed(seed)
            else:
                sys.modules["numpy"].random.seed(seed)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A module runs."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def leave(self) -> None:
        """The process's own generators again."""
        set_host_random_states(self._other)

    def _swap(self) -> None:
        now = host_random_states()
        set_host_random_states(self._other)
        self._other = now
