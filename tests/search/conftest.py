"""What tests of the search share."""

from __future__ import annotations

import pytest

from penstock.search.state import Budget


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work alone ends a search, however slow the machine is."""
    monkeypatch.setattr(Budget, "left_s", property(lambda self: 1e6))
