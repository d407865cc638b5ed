"""Tables that others published, row by row, where their rows hold as formulas.

Bubble *rates* are shares of the ideal time, bubble *ratios* shares of the whole. B stands for a
full backward in the tables of Megatron, Chimera and DualPipe, and for the input gradient alone in
that of zero bubble; costs here are always tF, tI, tW.
"""

from fractions import Fraction

import pytest

from penstock.schedule.registry import build
from penstock.simulate.costs import Costs
from penstock.simulate.simulation import Simulation, simulate

RANKS = (2, 4, 8)


def run(name: str, ranks: int, microbatches: int, virtual: int, *costs: int) -> Simulation:
    forward, input_grad, weight_grad = costs
    return simulate(
        build(name, ranks=ranks, microbatches=microbatches, virtual=virtual),
        Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad),
    )


def bubble(time: float, microbatches: int, virtual: int, *costs: int) -> float:
    return time - microbatches * virtual * sum(costs)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_megatron_bubble_rates(ranks: int, times: int, virtual: int) -> None:
    """1F1B: (p - 1) / m; interleaved: (p - 1) / (v m). Source: arXiv:2104.04473, sec. 2.2."""
    microbatches = times * ranks
    name = "1f1b" if virtual == 1 else "interleaved-1f1b"
    costs = (2, 3, 1)
    result = run(name, ranks, microbatches, virtual, *costs)
    ideal = microbatches * virtual * sum(costs)
    rate = Fraction(int(result.makespan) - ideal, ideal)
    assert rate == Fraction(ranks - 1, virtual * microbatches)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("virtual", [2, 3, 4])
def test_memory_of_interleaving(ranks: int, virtual: int) -> None:
    """The first rank holds 1 + (p - 1) / (p v) of what 1F1B's does, its stages a v-th as large.

    Source: arXiv:2205.05198, of the schedule of arXiv:2104.04473.
    """
    peaks = run("interleaved-1f1b", ranks, 2 * ranks, virtual, 1, 1, 1).peak_in_flight
    plain = run("1f1b", ranks, 2 * ranks, 1, 1, 1, 1).peak_in_flight
    share = Fraction(max(peaks), virtual) / max(plain)
    assert peaks[0] == max(peaks)
    assert share == 1 + Fraction(ranks - 1, ranks * virtual)


@pytest.mark.parametrize("ranks", RANKS)
def test_gpipe_bubble_ratio(ranks: int) -> None:
    """(K - 1) / (M + K - 1). Source: arXiv:1811.06965, sec. 2.3."""
    for microbatches in (1, ranks, 4 * ranks):
        result = run("gpipe", ranks, microbatches, 1, 1, 1, 1)
        expected = (ranks - 1) / (microbatches + ranks - 1)
        assert result.bubble_ratio == pytest.approx(expected)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("costs", [(1, 1, 1), (3, 3, 2), (4, 5, 3)])
def test_zero_bubble_bubbles_and_peaks(ranks: int, costs: tuple[int, int, int]) -> None:
    """1F1B, ZB-H1, ZB-H2: bubbles, and peaks in activations of the first stage.

    Source: arXiv:2401.10241, table 2.
    """
    forward, input_grad, weight_grad = costs
    microbatches = 4 * ranks
    for name, size, peak in (
        ("1f1b", forward + input_grad + weight_grad, ranks),
        ("zb-h1", forward + input_grad - weight_grad, ranks),
        ("zb-h2", forward + input_grad - 2 * weight_grad, 2 * ranks - 1),
    ):
        result = run(name, ranks, microbatches, 1, *costs)
        time = result.span if name == "zb-h2" else result.makespan
        assert bubble(time, microbatches, 1, *costs) == (ranks - 1) * size
        assert max(result.peak_in_flight) == peak


@pytest.mark.parametrize("ranks", RANKS)
def test_dualpipe_bubbles_and_peaks(ranks: int) -> None:
    """1F1B, ZB1P and DualPipe, B the full backward, F&B a pair as long as its parts.

    Source: arXiv:2412.19437 (DeepSeek-V3), table 2.
    """
    forward, input_grad, weight_grad = costs = (2, 2, 1)
    full, both = input_grad + weight_grad, forward + input_grad + weight_grad
    microbatches = 4 * ranks
    for name, size, peak in (
        ("1f1b", (ranks - 1) * (forward + full), ranks),
        ("zb-h1", (ranks - 1) * (forward + full - 2 * weight_grad), ranks),
        ("dualpipe", (ranks // 2 - 1) * (both + full - 3 * weight_grad), ranks + 1),
    ):
        result = run(name, ranks, microbatches, 1, *costs)
        assert bubble(result.makespan, microbatches, 1, *costs) == size
        assert max(result.peak_in_flight) == peak


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 10, 16])
@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_chimera_bubble_ratios_and_memory(ranks: int, units: int) -> None:
    """Forward and backward equally long: (D - 2) / (2N + D - 2); DAPPLE (D - 1) / (N + D - 1).

    Activations are held D/2 + 1 to D times.

    Source: arXiv:2107.06925, table 2.
    """
    equal, microbatches = (2, 1, 1), units * ranks
    chimera = run("chimera", ranks, microbatches, 1, *equal)
    ratio = (ranks - 2) / (2 * microbatches + ranks - 2)
    assert chimera.bubble_ratio == pytest.approx(ratio)
    assert set(chimera.peak_in_flight) == set(range(ranks // 2 + 1, ranks + 1))
    dapple = run("1f1b", ranks, microbatches, 1, *equal)
    assert dapple.bubble_ratio == pytest.approx((ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("ranks", [6, 12, 18])
def test_memory_of_v_schedules(ranks: int) -> None:
    """Peaks as shares of 1F1B's, up to a constant: V-Min 1/3, V-Half 1/2, V-ZB all.

    Source: arXiv:2405.15362, table 1.
    """
    full = max(run("1f1b", ranks, 4 * ranks, 1, 1, 1, 1).peak_in_flight)
    for name, share in (("v-min", Fraction(1, 3)), ("v-half", Fraction(1, 2)), ("v-zb", 1)):
        result = run(name, ranks, 4 * ranks, 2, 1, 1, 1)
        # Two chunks of a rank are one stage of 1F1B's.
        held = Fraction(max(result.peak_in_flight), 2)
        assert share * full <= held <= share * full + Fraction(4, 3)
