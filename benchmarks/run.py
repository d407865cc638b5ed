"""Measure what docs/performance.md tells: ratios in one run, bounds, verdicts.

    make bench                                            all of it, about half an hour
    .venv/bin/python -m benchmarks.run tiny memory        some of it
    .venv/bin/python -m benchmarks.run --quick            few rounds: does it run, not what it says

Two processes over gloo, one thread each. Prints a table, writes benchmarks/results/*.json, and puts
what was measured into docs/performance.md.
Close what else runs: a ratio of two times is only as steady as the machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Before torch starts: one thread per process.
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console

from benchmarks.by_module import measure_by_module
from benchmarks.compiled import measure_compiled_schedules
from benchmarks.figures import Figure, save_figures, show_figures, write_page
from benchmarks.forecast import measure_forecasts
from benchmarks.memory import measure_memory
from benchmarks.planning import (
    measure_check,
    measure_import,
    measure_planning,
    measure_simulation,
)
from benchmarks.search import measure_search
from benchmarks.split_backward import measure as measure_split_widths
from benchmarks.split_backward import measure_compiled
from benchmarks.step_time import measure_compute_bound, measure_sharded, measure_tiny
from benchmarks.trainer import measure_trainer

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def measure_split(scale: float) -> list[Figure]:
    """I + W over the full backward, as figures."""
    figures, group = [], "split backward"
    for row in measure_split_widths(scale):
        name = f"I + W, GPT blocks, dim {row['dim']:.0f}"
        figures += [
            Figure(group=group, name=name, over="full", value=row["ratio"], bound=row["bound"]),
            Figure(group=group, name=f"{name}, torch's own", over="full", value=row["peer_ratio"]),
        ]
    row = measure_compiled(max(3, int(15 * scale)))
    name = f"GPT block compiled, dim {row['dim']:.0f}"
    return [
        *figures,
        Figure(group=group, name=f"I + W, {name}", over="full", value=row["ratio"], bound=1.05),
        Figure(group=group, name=f"I, {name}", over="full", value=row["input_ratio"], bound=0.75),
    ]


def measures(quick: bool) -> dict[str, Callable[[], list[Figure]]]:
    """What can be measured, by name."""
    return {
        "tiny": lambda: measure_tiny(rounds=3 if quick else 25, block=1 if quick else 8),
        "blocks": lambda: measure_compute_bound(rounds=2 if quick else 7),
        "sharded": lambda: measure_sharded(rounds=2 if quick else 9),
        "compiled": lambda: measure_compiled_schedules(rounds=2 if quick else 9),
        "split": lambda: measure_split(0.1 if quick else 1.0),
        "trainer": lambda: measure_trainer(rounds=1 if quick else 5, steps=4 if quick else 8),
        "module": lambda: measure_by_module(rounds=3 if quick else 40),
        "memory": measure_memory,
        "forecast": lambda: measure_forecasts(rounds=1 if quick else 3, steps=2 if quick else 10),
        "planning": lambda: measure_planning(rounds=1 if quick else 3),
        "search": lambda: measure_search(quick),
        "check": lambda: measure_check(rounds=1 if quick else 3),
        "simulate": lambda: measure_simulation(rounds=1 if quick else 5),
        "import": lambda: measure_import(rounds=2 if quick else 7),
    }


def main() -> int:
    """Measure, print, write; returns the exit status: 1 where a bound does not hold."""
    known = measures(quick=False)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", nargs="*", help=f"of {', '.join(known)}; all if none is named")
    parser.add_argument("--quick", action="store_true", help="few rounds; the exit status is 0")
    asked = parser.parse_args()
    unknown = sorted(set(asked.what) - set(known))
    if unknown:
        parser.error(f"nothing is called {', '.join(unknown)}; choose from {', '.join(known)}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    figures: list[Figure] = []
    for name, measure in measures(asked.quick).items():
        if asked.what and name not in asked.what:
            continue
        start = time.monotonic()
        found = measure()
        console.print(f"{name}: measured in {time.monotonic() - start:.0f} s", highlight=False)
        if not asked.quick:
            save_figures(found, RESULTS / f"{name}.json")
        figures += found
    show_figures(figures, console)
    if not asked.quick:
        write_page(figures, PAGE)
    return 0 if asked.quick or all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
