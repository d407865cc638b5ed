"""Schedules built for given costs: ZB-1p, ZB-2p and ZB-V, with published bubbles, and patterns."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.placement import v_shape
from penstock.schedule.registry import build
from penstock.simulate.costs import Costs, build_for
from penstock.simulate.memory import StageMemory, peaks
from penstock.simulate.simulation import Simulation, simulate

# P, M; the measured times of F, I, W and a message; the bubbles of ZB-1p and ZB-2p.
# Source: arXiv:2401.10241, tables 5 and 9.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.1585, 0.0433),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 0.1242, 0.0039),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 0.0674, 0.0026),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 0.1323, 0.0029),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 0.1045, 0.0022),
    (8, 64, (29.935, 29.621, 19.388, 0.535), 0.0554, 0.0010),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.1397, 0.0066),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 0.1088, 0.0054),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 0.1421, 0.0038),
]


def run(name: str, ranks: int, microbatches: int, costs: Costs) -> Simulation:
    return simulate(build_for(costs, name, ranks=ranks, microbatches=microbatches), costs)


@pytest.mark.parametrize(("ranks", "microbatches", "times", "one", "two"), PUBLISHED)
def test_published_bubbles(
    ranks: int, microbatches: int, times: tuple[float, ...], one: float, two: float
) -> None:
    forward, input_grad, weight_grad, latency = times
    costs = Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)
    for name, published in (("zb-1p", one), ("zb-2p", two)):
        result = run(name, ranks, microbatches, costs)
        assert 1 - microbatches * sum(times[:3]) / result.span <= published + 0.0015
    assert max(run("zb-1p", ranks, microbatches, costs).peak_in_flight) <= ranks
    # As the paper counts memory: W needs a part of an activation.
    held = StageMemory.of(Costs(activation_bytes=1, weight_grad_bytes=0.4), ranks)
    assert max(peaks(result.program, held)) <= 2 * ranks + 1e-9


def test_2p_with_equal_costs_holds_whole_activations() -> None:
    for microbatches in (8, 16, 40):
        result = run("zb-2p", 4, microbatches, Costs())
        assert max(result.peak_in_flight) <= 8
        assert result.span == 3 * microbatches


@pytest.mark.parametrize("times", [row[2] for row in PUBLISHED])
def test_zbv_is_built_for_its_costs(times: tuple[float, ...]) -> None:
    forward, input_grad, weight_grad, latency = times
    costs = Costs(
        forward=forward / 2,
        input_grad=input_grad / 2,
        weight_grad=weight_grad / 2,
        latency=latency,
    )
    built, fixed = (
        simulate(program, costs)
        for program in (
            build_for(costs, "zbv", ranks=8, microbatches=24),
            build("zbv", ranks=8, microbatches=24),
        )
    )
    assert built.span <= fixed.span
    assert max(built.peak_in_flight) <= 16 and built.program.placement == v_shape(8)
    assert build_for(Costs(), "zbv", ranks=8, microbatches=24) == fixed.program


@pytest.mark.parametrize(
    "messages",
    [
        {"latency": 0.5},
        {"latency": [0.1, 0.9, 0.2, 0.3]},
        {"latency": [0, 2.0, 0, 0]},
        {"message_bytes": [1, 4, 2, 1], "bandwidth": 2, "latency": [0.5, 0, 0, 0]},
    ],
)
@pytest.mark.parametrize("name", ["zb-1p", "zb-2p"])
def test_messages_of_any_kind_are_reckoned_with(name: str, messages: dict[str, object]) -> None:
    costs = Costs(weight_grad=0.7, **messages)  # type: ignore[arg-type]
    plain = build(name, ranks=4, microbatches=9, weight_grad=0.7)
    result = run(name, 4, 9, costs)
    assert result.span <= simulate(plain, costs).span
    assert {act.op for act in result.program.actions()} == {
        Op.FORWARD,
        Op.INPUT_GRAD,
        Op.WEIGHT_GRAD,
    }


@pytest.mark.parametrize("name", ["v-half", "v-min", "v-zb", "1f1b-v"])
@pytest.mark.parametrize("latency", [0.2, 0.5, 1.0])
def test_patterns_make_up_for_latency(name: str, latency: float) -> None:
    costs = Costs(latency=latency)
    for ranks in (4, 6):
        built = run(name, ranks, 3 * ranks, costs)
        plain = simulate(build(name, ranks=ranks, microbatches=3 * ranks), costs)
        assert built.span <= plain.span
        assert max(built.peak_in_flight) <= max(plain.peak_in_flight)
        gained = {"v-half": 0.95, "1f1b-v": 0.95 if ranks == 6 else 1.0}.get(name, 1.0)
        assert latency != 0.5 or built.makespan <= gained * plain.makespan


@pytest.mark.parametrize("latency", [-1, [0.1, 0.2], {(0, 1): float("nan")}])
def test_no_latency(latency: object) -> None:
    with pytest.raises(ScheduleError, match="latency"):
        build("zb-1p", ranks=4, microbatches=4, latency=latency)
