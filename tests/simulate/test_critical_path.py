"""Causes that are read off the times of a trace."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from penstock import Costs, build, simulate
from penstock.simulate.critical_path import StepCauses


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb", "zbv"])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_causes_seen_from_times_are_those_of_the_simulation(name: str, latency: float) -> None:
    """A measured step has nothing but its times."""
    result = simulate(
        build(name, ranks=4, microbatches=8),
        Costs(forward=1, input_grad=1.5, weight_grad=0.7, latency=latency),
    )
    causes = StepCauses(result.trace)
    for rank in range(4):
        for span in result.trace.compute(rank):
            assert causes.cause(span) == result.causes.cause(span)
    path = causes.critical_path()
    assert path[0].start == 0
    assert path[-1].end == pytest.approx(result.makespan)
    gaps = [b.start - a.end for a, b in pairwise(path)]
    assert all(math.isclose(gap, 0, abs_tol=1e-9) or gap == pytest.approx(latency) for gap in gaps)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv", "po-f"])
@pytest.mark.parametrize("unit", [2.0**-60, 2.0**-40, 2.0**40])
def test_causes_do_not_depend_on_the_unit_of_the_costs(name: str, unit: float) -> None:
    """Powers of two, so that times are the same to the last bit."""
    program = build(name, ranks=4, microbatches=8)

    def causes(unit: float) -> list[object]:
        costs = Costs(
            forward=unit,
            input_grad=1.5 * unit,
            weight_grad=0.7 * unit,
            latency=0.3 * unit,
            offload=0.8 * unit,
            reload=0.9 * unit,
            message_bytes=0.1,
            bandwidth=1 / unit,
            transfers_overlap=False,
        )
        result = simulate(program, costs)
        paths = result.critical_path, StepCauses(result.trace).critical_path()
        found = [result.causes.cause(span) for span in result.trace.spans]
        return [[span and span.action for span in spans] for spans in (*paths, found)]

    assert causes(unit) == causes(1.0)
