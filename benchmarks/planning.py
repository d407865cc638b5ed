"""How long it takes to plan a large step, and to import Penstock."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time

from benchmarks.figures import Figure
from penstock import build
from penstock.schedule.check import check
from penstock.schedule.passes import lower

__all__ = ["measure_import", "measure_planning"]


def measure_planning(rounds: int) -> list[Figure]:
    """Build, lower and check Interleaved1F1B for 64 ranks, V = 2 and 512 microbatches: CPU time."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        check(lower(build("interleaved-1f1b", ranks=64, microbatches=512, virtual=2)))
        times.append(time.process_time() - start)
    return [
        Figure(
            group="planning",
            name="build, lower, check: Interleaved1F1B, P=64 V=2 M=512",
            over="",
            value=statistics.median(times),
            bound=3.0,
            unit="s",
        )
    ]


def measure_import(rounds: int) -> list[Figure]:
    """``import penstock`` with the names that training needs, over ``import torch`` alone."""
    both = ("import torch", "import penstock; penstock.Pipeline; penstock.Schedule1F1B")
    extra = []
    for index in range(rounds + 1):
        torch_s, penstock_s = map(_cpu_s, both)
        # The first round fills the caches of compiled modules and of files.
        if index:
            extra.append(penstock_s - torch_s)
    low, middle, high = statistics.quantiles(extra, n=4)
    return [
        Figure(
            group="import",
            name="import penstock; penstock.Pipeline",
            over="import torch",
            value=middle,
            bound=0.15,
            unit="s",
            spread=(high - low) / 2,
        )
    ]


def _cpu_s(code: str) -> float:
    """CPU seconds of a fresh interpreter: what else runs on the machine hardly counts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
