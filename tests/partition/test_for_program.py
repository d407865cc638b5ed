"""The split for a program: its simulated step beside that of every other split."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise

import pytest

from penstock import build
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.balance.for_program import balance_for, rank_times, step_s

# As GPT-2 on one core: layers of 77 ms, and a head of nearly seven.
LAYERS = [(0.026, 0.027, 0.024)] * 12
TIMES = [(0.001, 0.0, 0.08), *LAYERS, (0.17, 0.19, 0.16)]
GPT2 = Profile(
    blocks=tuple(
        BlockCosts(modules=(f"b{i}",), forward_s=f, input_grad_s=b, weight_grad_s=w)
        for i, (f, b, w) in enumerate(TIMES)
    )
)
SCHEDULES = ["zbv", "interleaved-1f1b", "interleaved-zb", "dualpipev", "looped-bfs"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_split_of_all_makes_a_much_shorter_step(name: str) -> None:
    program = build(name, ranks=2, microbatches=12)
    num_blocks, num_stages = len(GPT2.blocks), program.num_stages
    best = min(
        step_s(GPT2, [j - i for i, j in pairwise((0, *cuts, num_blocks))], program)
        for cuts in combinations(range(1, num_blocks), num_stages - 1)
    )
    assert step_s(GPT2, balance_for(GPT2, program), program) <= 1.02 * best


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_balanced_by_themselves_take_longer(name: str, ranks: int) -> None:
    program = build(name, ranks=ranks, microbatches=12)
    found = balance_for(GPT2, program)
    alone = balance(GPT2, program.num_stages)
    assert step_s(GPT2, found, program) < 0.98 * step_s(GPT2, alone.counts, program)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_with_a_stage_on_each_rank_it_is_the_bottleneck(name: str) -> None:
    program = build(name, ranks=4, microbatches=8)
    assert balance_for(GPT2, program) == balance(GPT2, 4).counts


def test_a_model_in_two_copies_is_cut_once() -> None:
    program = build("dualpipe", ranks=4, microbatches=8)
    found = balance_for(GPT2, program)
    assert len(found) == program.placement.num_model_stages == 4
    assert len(rank_times(GPT2, found, program.placement)) == 4
    assert step_s(GPT2, found, program) > 0


def test_it_needs_no_torch() -> None:
    code = "import sys, penstock.partition.balance.for_program; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
