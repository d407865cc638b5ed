"""How long it takes to plan, prove and simulate a large step, and to import Penstock."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.figures import Figure
from penstock import build, schedules, simulate
from penstock.schedule.check import check
from penstock.schedule.passes import lower

__all__ = ["measure_check", "measure_import", "measure_planning", "measure_simulation"]

# Interleaved, backwards split: 3 x 64 x 4 x 1024 = 786,432 computations.
_LARGE = {"ranks": 64, "microbatches": 1024, "virtual": 4}
_PROVE = """
import time
from penstock import build, check
program = build("interleaved-zb", **{large})
start = time.process_time()
check(program)
seconds = time.process_time() - start
# Not ru_maxrss, which begins at that of the process that started this one.
status = dict(line.split(":") for line in open("/proc/self/status"))
print(seconds, status["VmHWM"].split()[0])
"""
_IMPORT = """
import gc, time
import torch
gc.disable()
start = time.process_time()
import penstock
penstock.Pipeline, penstock.Schedule1F1B
print(time.process_time() - start)
"""
# Simulated actions per second of CPU time that are asked for.
_ACTIONS_PER_S = 300_000


def measure_planning(rounds: int) -> list[Figure]:
    """Build, lower and check each schedule with P=64, M=512, and V=2 if it takes that: CPU time of
    Interleaved1F1B, and of the slowest."""
    medians: dict[str, float] = {}
    for family in schedules():
        virtual = 2 if family.virtuals is None or 2 in family.virtuals else None
        times = []
        for _ in range(rounds):
            start = time.process_time()
            check(lower(build(family.name, ranks=64, microbatches=512, virtual=virtual)))
            times.append(time.process_time() - start)
        medians[family.name] = statistics.median(times)
    return [
        Figure(
            group="planning",
            name=f"build, lower, check: {name}, P=64 V=2 M=512",
            over="",
            value=medians[family],
            bound=3.0,
            unit="s",
        )
        for name, family in (
            ("interleaved-1f1b", "interleaved-1f1b"),
            ("slowest of all schedules", max(medians, key=medians.__getitem__)),
        )
    ]


def measure_check(rounds: int) -> list[Figure]:
    """Prove a program of 786,432 computations, in a process of its own: CPU time, peak memory."""
    found = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", _PROVE.format(large=_LARGE)],
            check=True,
            capture_output=True,
            text=True,
        )
        seconds, peak = map(float, done.stdout.split())
        found.append((seconds, peak / 1024))
    times, peaks = zip(*found, strict=True)
    name = "786,432 computations, P=64 V=4 M=1024"
    return [
        Figure(
            group="check",
            name=name,
            over="",
            value=statistics.median(times),
            bound=20.0,
            unit="s",
        ),
        Figure(
            group="check",
            name=f"{name}: peak, with the program",
            over="",
            value=max(peaks),
            bound=2048.0,
            unit="MB",
        ),
    ]


def measure_simulation(rounds: int) -> list[Figure]:
    """Simulate programs without transfers: CPU time of 300,000 actions."""
    figures = []
    for name, numbers in (
        ("1f1b", {"ranks": 8, "microbatches": 2048}),
        ("interleaved-1f1b", {"ranks": 64, "microbatches": 512, "virtual": 2}),
        ("dualpipev", {"ranks": 16, "microbatches": 512}),
    ):
        program = build(name, **numbers)
        actions = sum(1 for _ in program.actions())
        times = []
        for _ in range(rounds):
            start = time.process_time()
            simulate(program)
            times.append(time.process_time() - start)
        figures.append(
            Figure(
                group="simulate",
                name=f"{_ACTIONS_PER_S:,} actions of {name}",
                over="",
                value=statistics.median(times) / actions * _ACTIONS_PER_S,
                bound=1.0,
                unit="s",
            )
        )
    return figures


def measure_import(rounds: int) -> list[Figure]:
    """``import penstock`` with the names that training needs, after ``import torch``."""
    times = [_import_s() for _ in range(rounds + 1)]
    # The first round fills the caches of compiled modules and of files.
    return [
        Figure.median_of(
            times[1:],
            group="import",
            name="import penstock; penstock.Pipeline",
            over="import torch",
            bound=0.15,
            unit="s",
        )
    ]


def _import_s() -> float:
    """CPU seconds in a fresh interpreter.

    Without the garbage collector, which looks through all of torch once in a while, for 0.05 s: in
    which import, is chance.
    """
    result = subprocess.run(
        [sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True
    )
    return float(result.stdout)
