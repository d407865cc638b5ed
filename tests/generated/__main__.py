"""Run many scripts by hand: ``python -m tests.generated --seeds 0:1000``.

Each seed whose script goes wrong is printed, with what was wrong; ``--show`` prints what the script
is, and ``--without`` leaves features out of it.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections import Counter
from collections.abc import Iterator
from pprint import pformat

from tests.generated.drawing import draw_case
from tests.generated.draws import FEATURES
from tests.generated.ranks import Grid, told_of, told_over

AT_ONCE = 20  # by one set of processes


def main() -> None:
    """Print each seed whose script goes wrong, and how many did."""
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="FROM:TO, or one")
    parser.add_argument("--without", default="", help="by commas: " + " ".join(FEATURES))
    parser.add_argument("--ranks", type=int, help="as processes over gloo; else in one process")
    parser.add_argument("--wrapper", default="", help="ddp, fsdp or replicate, in two replicas")
    parser.add_argument("--show", action="store_true", help="print each script")
    asked = parser.parse_args()
    begin, _, end = asked.seeds.partition(":")
    seeds = range(int(begin), int(end or int(begin) + 1))
    without = frozenset(filter(None, asked.without.split(",")))
    grid = Grid(ranks=asked.ranks, wrapper=asked.wrapper)
    logging.getLogger("penstock").setLevel(logging.ERROR)
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    if asked.show:
        for seed in seeds:
            case = draw_case(seed, without, ranks=grid.ranks, replicas=grid.wrapper)
            print(pformat(case, width=100))
    for seed, told in run(grid, seeds, without):
        if told:
            print(f"seed {seed}: {told}\n", flush=True)
        outcomes[kind_of(told)] += 1
    print(dict(outcomes), f"{time.monotonic() - started:.0f} s")


def run(grid: Grid, seeds: range, without: frozenset[str]) -> Iterator[tuple[int, str]]:
    """What was wrong, by seed."""
    if grid.ranks is None:
        for seed in seeds:
            yield seed, told_of(draw_case(seed, without))
        return
    for begin in range(seeds.start, seeds.stop, AT_ONCE):
        some = range(begin, min(begin + AT_ONCE, seeds.stop))
        every = told_over(grid, some, without, timeout_s=60 * AT_ONCE)
        for seed, told in zip(some, every, strict=True):
            if told and grid.wrapper:
                # One that fails takes the connections of those after it along.
                (told,) = told_over(grid, range(seed, seed + 1), without)
            yield seed, told


def kind_of(told: str) -> str:
    """Right, wrong, refused by Penstock, or not to be played by the plain model either."""
    return next((k for k in ("unplayable", "refused") if k in told), "wrong" if told else "right")


if __name__ == "__main__":
    main()
