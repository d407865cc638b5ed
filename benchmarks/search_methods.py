"""What each method of search brings, and how far results are from the best that is known.

.venv/bin/python -m benchmarks.search_methods ablation   forty cases, each method by itself
.venv/bin/python -m benchmarks.search_methods sweep      small steps beside a search 6 times as long

Work alone ends a search here, not the clock, so the figures do not depend on the machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from statistics import fmean
from typing import Any
from unittest.mock import patch

from penstock import Costs, SearchResult, search
from penstock.schedule.placement import looped, wave
from penstock.search import engine
from penstock.search.state import Budget

# Each method: the function that runs it, the cases that it is there for, and how it signs results.
METHODS = {
    "closed forms": ("_closed_forms", "any", ("closed form",)),
    "periodic patterns": ("_tune_patterns", "any", ("periodic",)),
    "local search": ("_search_locally", "any", ("local",)),
    "window search": ("_search_windows", "small", ("window",)),
    "exact search": ("_search_exactly", "small", ("exact",)),
    "memory reduction": ("reduce_memory", "reduced", ("recompute", "offload")),
}
SECONDS = 0.3


def drawn_costs(draw: random.Random, stages: int, spread: float, **more: Any) -> Costs:
    """Costs of stages that differ by up to ``spread`` from 1."""

    def around(mean: float) -> list[float]:
        return [round(mean * draw.uniform(1 - spread, 1 + spread), 2) for _ in range(stages)]

    return Costs(forward=around(1), input_grad=around(1.1), weight_grad=around(0.8), **more)


def small_case(number: int) -> dict[str, Any]:
    """A step of P ≤ 4 and M ≤ 8, on one placement; most have little memory."""
    draw = random.Random(number)
    ranks, virtual = draw.choice([2, 3, 4, 4, 4]), draw.choice([1, 2, 2])
    placement = draw.choice([looped(ranks, virtual), *([wave(ranks, 1)] if virtual == 2 else [])])
    usual = ranks * virtual
    return {
        "costs": drawn_costs(
            draw, usual, draw.choice([0, 0.2, 0.6]), latency=draw.choice([0, 0.1, 0.3, 1])
        ),
        "ranks": ranks,
        "microbatches": draw.choice([ranks, 5, 6, 7, 8, 8, 8, 8]),
        "placements": [placement],
        "memory_limit": draw.choice([draw.randint(virtual, usual)] * 3 + [2 * usual, None]),
        "objective": draw.choice(["makespan", "span"]),
    }


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Forty cases, P 2 to 8 and M 4 to 16 but for two large steps; the name says what for."""
    for number in range(40):
        draw = random.Random(number)
        ranks, virtual = draw.choice([2, 3, 4, 5, 6, 8]), 1 + number % 2
        microbatches = draw.choice([4, 6, 8, 12, 16])
        usual = ranks * virtual
        # A tight limit, that of 1F1B, and none.
        limit = draw.choice([max(virtual + 1, usual * 6 // 10), usual, None])
        name, more, options = "any", {"latency": draw.choice([0, 0.1, 0.5])}, {}
        if number >= 38:
            name, ranks, microbatches, usual, limit = "large", 32, 144 // virtual, 32 * virtual, 32
        elif number >= 34:
            more["overlap"] = 1.5
        elif number >= 28:
            name, limit = "reduced", virtual + number % 3 // 2
            options = {"recompute": number % 2 == 0, "offload": number % 2 == 1}
            more |= {"offload": 0.5, "reload": 0.5}
        elif 3 * usual * microbatches <= 400:
            name = "small"
        options |= {"ranks": ranks, "microbatches": microbatches, "memory_limit": limit}
        options["virtual"] = virtual
        options["objective"] = "span" if number % 3 == 0 else "makespan"
        costs = drawn_costs(draw, usual, draw.choice([0, 0.2, 0.4]), **more)
        yield name, {"costs": costs, **options}


def found(
    case: dict[str, Any], without: Sequence[str] = (), seconds: float = SECONDS
) -> SearchResult:
    """The result of a search without some methods."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Budget, "left_s", property(lambda self: 1e6)))
        for method in without:
            nothing = patch.object(engine, METHODS[method][0], lambda *_, **__: None)
            stack.enter_context(nothing)
        return search(**case, time_limit_s=seconds)


def ablate(number: int) -> dict[str, Any]:
    """The figures of one case: what decides it, and what each method brings by itself."""
    name, case = list(cases())[number]
    row: dict[str, Any] = {"method": found(case).method}
    over = [method for method in METHODS if method != "exact search"]
    base = found(case, over)
    for method in over:
        if METHODS[method][1] in ("any", name):
            more = found(case, [each for each in over if each != method])
            row[method] = 1 - more.value / base.value
    return row


def deviation(number: int) -> tuple[float, int]:
    """How much longer a program of the default search is than that of six times the work."""
    case = small_case(number)
    return found(case, seconds=10).value / found(case, seconds=60).value, number


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table of docs/search.md."""
    print("| method | decides | cases | mean gain | largest gain |")
    print("|---|---:|---:|---:|---:|")
    for method, (*_, signs) in METHODS.items():
        decides = sum(row["method"].startswith(signs) for row in rows)
        gains = [row[method] for row in rows if method in row]
        figures = f"{fmean(gains):.1%} | {max(gains):.1%}" if gains else "|"
        print(f"| {method} | {decides} | {len(gains)} | {figures} |")


def main(what: str, count: int = 40) -> None:
    with get_context("spawn").Pool(2) as pool:
        if what == "ablation":
            show(pool.map(ablate, range(40), chunksize=1))
        else:
            ratios = pool.map(deviation, range(count), chunksize=1)
            late = sum(ratio > 1.01 for ratio, _ in ratios)
            print(f"{count} cases, {late} beyond 1 %, worst (ratio, case): {max(ratios)}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
