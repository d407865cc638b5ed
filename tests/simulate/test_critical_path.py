"""Causes that are read off the times of a trace."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock import Costs, build, simulate
from penstock.simulate.critical_path import causes_of


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_causes_seen_from_times_are_those_of_the_simulation(name: str, latency: float) -> None:
    """A measured step has nothing but its times."""
    result = simulate(
        build(name, ranks=4, microbatches=8),
        Costs(forward=1, input_grad=1.5, weight_grad=0.7, latency=latency),
    )
    causes = causes_of(result.trace)
    for rank in range(4):
        before = None
        for span in result.trace.compute(rank):
            told = result.waited_for(span)
            seen = causes.cause(span)
            if told is None:
                assert seen == before
            else:
                assert seen is not None
                assert (seen.action.stage, seen.action.microbatch) == (told.stage, told.microbatch)
            before = span
    path = causes.critical_path()
    assert path[0].start == 0
    assert path[-1].end == pytest.approx(result.makespan)
    gaps = [b.start - a.end for a, b in pairwise(path)]
    assert all(math.isclose(gap, 0, abs_tol=1e-9) or gap == pytest.approx(latency) for gap in gaps)
