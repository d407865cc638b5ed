"""Costs: numbers or one per stage, by value, checked when made."""

import math
from array import array
from collections import deque
from dataclasses import fields

import numpy as np
import pytest
import torch

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.placement import linear
from penstock.schedule.registry import build
from penstock.simulate.bounds import lower_bounds
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import simulate


def test_numbers_and_sequences_are_kept_in_one_form() -> None:
    assert Costs(forward=1) == Costs(forward=1.0) == Costs()
    assert Costs(forward=[1, 2], latency=(0, 3)) == Costs(forward=(1.0, 2.0), latency=[0.0, 3.0])
    assert hash(Costs(forward=[1, 2])) == hash(Costs(forward=(1, 2)))
    assert Costs(overlap=2) != Costs()


@pytest.mark.parametrize(
    "numbers",
    [np.array([1, 2]), torch.tensor([1.0, 2.0]), array("d", [1, 2]), deque([1, 2]), range(1, 3)],
    ids=lambda numbers: type(numbers).__name__,
)
def test_whatever_holds_numbers_in_order_is_a_sequence(numbers: object) -> None:
    assert Costs(forward=numbers) == Costs(forward=(1.0, 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [np.float32(2), np.array(2), torch.tensor(2)])
def test_whatever_is_one_number_is_a_number(number: object) -> None:
    assert Costs(forward=number) == Costs(forward=2.0)  # type: ignore[arg-type]


def test_a_full_backward_costs_both_of_its_halves() -> None:
    costs = Costs(input_grad=[1, 2, 3], weight_grad=10)
    assert costs.of(Op.FULL_BACKWARD, num_stages=3) == (11.0, 12.0, 13.0)
    assert costs.of(Op.INPUT_GRAD, num_stages=3) == (1.0, 2.0, 3.0)
    assert costs.of(Op.WEIGHT_GRAD, num_stages=3) == (10.0, 10.0, 10.0)


@pytest.mark.parametrize("op", [Op.SEND_F, Op.RECV_B, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
def test_actions_other_than_computations_cost_nothing(op: Op) -> None:
    assert Costs(latency=5).of(op, num_stages=2) == (0.0, 0.0)


SWITCHES = ("transfers_overlap", "one_message_at_a_time")
NUMBERS = [field.name for field in fields(Costs) if field.name not in SWITCHES]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "wrong",
    [
        *(-1, math.nan, math.inf, -math.inf, 10**400, True, "fast", "2", b"2"),
        *([1, -0.5], [1, None], [math.nan], [True], [[1, 2]], {1, 2}, {(0, 1): 1}),
    ],
)
def test_invalid_costs_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(ScheduleError, match=rf"Costs\({name}=\.\.\.\): .* is not a finite number"):
        Costs(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("far", [1e308, 1e101, 1e-101, 5e-324])
def test_numbers_whose_sums_or_quotients_may_not_be_are_refused(far: float) -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=\.\.\.\): .* is out of range; give 0"):
        Costs(forward=[1, far])
    with pytest.raises(ScheduleError, match=r"Costs\(latency=\.\.\.\): .* is out of range"):
        Costs(latency=far)


def test_the_greatest_and_the_least_costs_can_be_simulated() -> None:
    program = build("1f1b", ranks=2, microbatches=4)
    assert 1e100 < simulate(program, Costs(forward=1e100, message_bytes=1e100)).makespan < math.inf
    slow = Costs(message_bytes=1e100, bandwidth=1e-100)
    assert simulate(program, slow).makespan < math.inf


def test_no_cost_at_all_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=\.\.\.\) is empty"):
        Costs(forward=[])


def test_costs_of_messages_hold_between_a_stage_and_the_next() -> None:
    costs = Costs(latency=[1, 5, 9], bandwidth=[3, 2, 1], message_bytes=6)
    ways = [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert [costs.latency_between(*way, num_stages=3) for way in ways] == [1, 1, 5, 5]
    assert [costs.transfer(*way, num_stages=3) for way in ways] == [2, 2, 3, 3]


def test_no_edge_takes_a_bandwidth_of_0() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(bandwidth=.* 0 moves nothing"):
        Costs(bandwidth=[1, 0])


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("wrong", [None, 1, "no", math.nan])
def test_values_other_than_booleans_are_refused(name: str, wrong: object) -> None:
    with pytest.raises(ScheduleError, match=rf"Costs\({name}=\.\.\.\): .* is not True or False"):
        Costs(**{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in NUMBERS if Costs.__dataclass_fields__[n].default])
def test_a_cost_that_always_is_can_t_be_none(name: str) -> None:
    with pytest.raises(
        ScheduleError, match=rf"Costs\({name}=\.\.\.\): None is not a finite number"
    ):
        Costs(**{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("length", [1, 3, 5])
def test_any_cost_for_another_number_of_stages_is_refused(name: str, length: int) -> None:
    costs = Costs(**{name: [1.0] * length})  # type: ignore[arg-type]
    message = rf"Costs\({name}=\.\.\.\) has {length} numbers?, but the program has 4 stages"
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", ranks=4, microbatches=4), costs)
    with pytest.raises(ScheduleError, match=message):
        lower_bounds(costs, linear(4), microbatches=4)


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=.* has 2 numbers, .* has 3 stages"):
        Costs(forward=[1, 2]).of(Op.FORWARD, num_stages=3)
