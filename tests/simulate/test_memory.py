"""Peaks: activations held from F to W, or to the full backward, and what is held throughout."""

from dataclasses import replace

from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.passes import lower
from penstock.schedule.placement import linear
from penstock.schedule.program import Program
from penstock.schedule.registry import build
from penstock.simulate.costs import Costs
from penstock.simulate.memory import StageMemory, peak_in_flight, peaks
from penstock.simulate.simulation import simulate

KINDS = {op.value: op for op in Op}


def acts(text: str) -> list[Action]:
    """Actions of stage 0 from a text such as ``F0 F1 B0``."""
    return [action(0, KINDS[word[0]], int(word[1:])) for word in text.split()]


def one_rank(*steps: Step) -> Program:
    return Program(name="test", placement=linear(1), num_microbatches=9, ranks=(steps,))


def test_an_activation_is_held_until_its_weight_gradient() -> None:
    assert peak_in_flight(one_rank(*acts("F0 I0 F1 I1 F2 I2 W0 W1 W2"))) == (3,)
    assert peak_in_flight(one_rank(*acts("F0 I0 W0 F1 I1 W1"))) == (1,)
    assert peak_in_flight(one_rank(*acts("F0 F1 B0 F2 B1 B2"))) == (2,)


def test_a_block_holds_what_it_makes_and_what_it_frees() -> None:
    pair = Overlap(parts=tuple(acts("F1 B0")))
    assert peak_in_flight(one_rank(*acts("F0"), pair, *acts("B1"))) == (2,)
    turned = Overlap(parts=tuple(acts("B0 F1")))
    assert peak_in_flight(one_rank(*acts("F0"), turned, *acts("B1"))) == (2,)


def test_forwards_alone_hold_one_activation_each() -> None:
    assert peak_in_flight(build("forward-only", ranks=3, microbatches=5, virtual=2)) == (1, 1, 1)
    assert peak_in_flight(one_rank()) == (0,)


def test_transfers_hold_nothing() -> None:
    program = build("interleaved-zb", ranks=3, microbatches=6)
    assert peak_in_flight(lower(program)) == peak_in_flight(program) == (6, 6, 6)


def test_the_order_determines_the_peak_where_weight_gradients_hold_more() -> None:
    program = one_rank(*acts("F0 I0 W0"))
    costs = Costs(activation_bytes=2, weight_grad_bytes=3)
    assert peaks(program, StageMemory.of(costs, 1)) == (3,)
    assert simulate(replace(program, num_microbatches=1), costs).peak_bytes == (3,)
