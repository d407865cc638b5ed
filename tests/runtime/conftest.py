"""Programs are lowered and proven once: most tests here play the same few."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from penstock.runtime import engine


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """``make``, which depends on its arguments alone, with its results kept."""
    kept = functools.cache(make)

    def made(*args: Any, **kwargs: Any) -> Any:
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return make(*args, **kwargs)
        return kept(*args, **kwargs)

    return made


LOWER, CHECK = once(engine.lower), once(engine.check)


@pytest.fixture(scope="module", autouse=True)
def programs_are_lowered_once() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "lower", LOWER)
        patch.setattr(engine, "check", CHECK)
        yield
