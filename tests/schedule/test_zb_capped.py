"""ZB-1p and ZB-2p: the best of several tries, of which few are played to their end."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.schedule.families import zb_capped
from penstock.schedule.list_schedule import Scheduled, list_schedule

COSTS = [{}, {"forward": 2, "input_grad": 3, "weight_grad": 1.5}, {"forward": 0.3}]


@pytest.mark.parametrize("builder", [zb_capped.zb_1p, zb_capped.zb_2p])
def test_tries_that_can_not_win_are_left_and_the_same_one_wins(
    builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [
        {"ranks": p, "microbatches": m, **c} for p in (1, 3, 6) for m in (2, 7, 24) for c in COSTS
    ]
    played: list[Scheduled] = []

    def noted(*args: Any, **options: Any) -> Scheduled:
        played.append(list_schedule(*args, **options))
        return played[-1]

    def to_the_end(*args: Any, within: float, **options: Any) -> Scheduled:
        return noted(*args, **options)

    monkeypatch.setattr(zb_capped, "list_schedule", noted)
    quick = [builder(**size) for size in sizes]
    num_whole = sum(len(each.order) > 0 for each in played)
    played.clear()
    monkeypatch.setattr(zb_capped, "list_schedule", to_the_end)
    monkeypatch.setattr(zb_capped, "_least", lambda *_: (0.0, 0.0))
    assert quick == [builder(**size) for size in sizes]
    assert num_whole < 0.8 * len(played)
