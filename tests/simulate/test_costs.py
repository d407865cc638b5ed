"""Costs: numbers or one per stage, by value, checked when made."""

import math

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.simulate.costs import Costs


def test_numbers_and_sequences_are_kept_in_one_form() -> None:
    assert Costs(forward=1) == Costs(forward=1.0) == Costs()
    assert Costs(forward=[1, 2], latency=(0, 3)) == Costs(forward=(1.0, 2.0), latency=[0.0, 3.0])
    assert hash(Costs(forward=[1, 2])) == hash(Costs(forward=(1, 2)))
    assert Costs(overlap=2) != Costs()


def test_a_full_backward_costs_both_of_its_halves() -> None:
    costs = Costs(input_grad=[1, 2, 3], weight_grad=10)
    assert costs.of(Op.FULL_BACKWARD, num_stages=3) == (11.0, 12.0, 13.0)
    assert costs.of(Op.INPUT_GRAD, num_stages=3) == (1.0, 2.0, 3.0)
    assert costs.of(Op.WEIGHT_GRAD, num_stages=3) == (10.0, 10.0, 10.0)


@pytest.mark.parametrize("op", [Op.SEND_F, Op.RECV_B, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD])
def test_what_does_not_compute_costs_nothing(op: Op) -> None:
    assert Costs(latency=5).of(op, num_stages=2) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["forward", "input_grad", "weight_grad", "latency", "overlap"])
@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "fast", [1, -0.5], [1, None]])
def test_what_is_no_cost_is_refused(name: str, wrong: object) -> None:
    with pytest.raises(ScheduleError, match=rf"Costs\({name}=\.\.\.\): .* is not a finite number"):
        Costs(**{name: wrong})  # type: ignore[arg-type]


def test_no_cost_at_all_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=\.\.\.\) is empty"):
        Costs(forward=[])


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"Costs\(forward=.* has 2 numbers, .* has 3 stages"):
        Costs(forward=[1, 2]).of(Op.FORWARD, num_stages=3)
