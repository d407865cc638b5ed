"""Looks for the block whose urgencies give the best order, by changing its knobs.

First knobs that are known to be good somewhere, then random ones, then changes of the best. Where
there are many microbatches the search is for fewer: the steady state repeats a block whatever
their number, so that its period, once found, is stretched to any.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import assert_never

from penstock.search.blocks import Guise, Knobs, lay_block, legs
from penstock.search.greedy import Placed, place, replay
from penstock.search.problem import SearchProblem
from penstock.simulate.costs import Costs

__all__ = ["Tuned", "Tuner", "few_microbatches", "run_block"]

_POOL = 8
_STRETCHES = (-1.0, -0.5, 0.0, 0.0, 0.0, 0.5, 1.0, 2.0)
_DELAYS = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)
_SLOPES = (0.0, 0.0, 1.0, 2.0, 4.0, 16.0)
_LONGER = (1.0, 1.0, 1.0, 1.05, 1.1, 1.2)
_WIDTHS = (None, 1.0, 1.0, 1.1, 1.2, 1.35, 1.5, 2.0)
_EXTRAS = (0, 0, 0, 1, 2)
_PATIENCE = (0.0, 0.0, 0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Knobs, and what they come to.

    Args:
        knobs: the knobs.
        estimate: the objective with all microbatches, as far as fewer tell.
    """

    knobs: Knobs
    estimate: float


def few_microbatches(problem: SearchProblem) -> int:
    """How many microbatches show the steady state; all where that is not much less."""
    few = max(24, 5 * problem.placement.num_ranks // 2)
    return few if 2 * problem.num_microbatches > 3 * few else problem.num_microbatches


def run_block(problem: SearchProblem, knobs: Knobs) -> Placed:
    """The order that the block of these knobs gives."""
    match knobs.guise:
        case Guise.OWN:
            return _run(problem, knobs)
        case Guise.MEAN:
            shown = problem.costing(_mean(problem))
        case Guise.UNIT:
            shown = problem.costing(Costs())
        case _:
            assert_never(knobs.guise)
    replayed = replay(problem, _run(shown, knobs).order)
    assert replayed is not None, "what can be played at some costs can be played at all"
    return replayed


def _run(problem: SearchProblem, knobs: Knobs) -> Placed:
    block = lay_block(problem, knobs)
    return place(
        problem,
        block.priorities(problem.num_microbatches),
        windows=None if knobs.width is None else block.windows(knobs.width, knobs.extra),
        patience=knobs.patience * sum(problem.durations) / problem.num_kinds,
    )


def _mean(problem: SearchProblem) -> Costs:
    """Each cost's mean over the stages; of delays, over the messages between ranks."""
    stages = problem.placement.num_stages
    means = [sum(problem.durations[n : n + stages]) / stages for n in (0, stages, 2 * stages)]
    delays = [delay for feeds in problem.feeds for _, delay in feeds]
    latency = sum(delays) / len(delays) if delays else 0.0
    forward, input_grad, weight_grad = means
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)


class Tuner:
    """A search for knobs, one step at a time.

    Args:
        problem: what to run, with all microbatches.
        seed: of its random choices.

    Attributes:
        whole: the problem, with all microbatches.
        best: the best so far, the best first, none twice.
        placed: how many actions were placed.
        tried: how many blocks were tried.
        stale: how many of the last ones were no better than the best before.
    """

    def __init__(self, problem: SearchProblem, *, seed: int) -> None:
        self.whole = problem
        self._problem = problem.resized(few_microbatches(problem))
        self._random = random.Random(seed)
        self._legs = max(legs(problem)) + 1
        self._guises = tuple(Guise) if len(set(problem.durations)) > 1 else (Guise.OWN,)
        self._seen: set[Knobs] = set()
        self._firsts = self._known()
        self.tried = 0
        self.best: list[Tuned] = []
        self.placed = 0
        self.stale = 0

    def step(self) -> None:
        """Try one more block."""
        # What is known is half of what is tried, as long as it lasts, so that few steps see both.
        knobs = next(self._firsts, None) if self.tried % 2 == 0 or self.tried < 12 else None
        self.tried += 1
        self.stale += 1
        if knobs is None:
            knobs = self._random_knobs() if self.tried % 3 == 0 else self._changed()
        if knobs in self._seen:
            self.placed += self._problem.num_kinds
            return
        self._seen.add(knobs)
        self.placed += self._problem.size
        placed = run_block(self._problem, knobs)
        estimate = self._estimate(placed)
        if not self.best or estimate < self.best[0].estimate * (1 - 1e-9):
            self.stale = 0
        self.best.append(Tuned(knobs=knobs, estimate=estimate))
        self.best.sort(key=lambda tuned: tuned.estimate)
        del self.best[_POOL:]

    def _estimate(self, placed: Placed) -> float:
        few, all_of_them = self._problem.num_microbatches, self.whole.num_microbatches
        if few == all_of_them:
            return placed.value
        # The steady state, as the middle third shows it.
        low, high = few // 3, 2 * few // 3
        periods = [(ends[high] - ends[low]) / (high - low) for ends in placed.ends]
        return placed.value + max(periods) * (all_of_them - few)

    def _known(self) -> Iterator[Knobs]:
        """What is good somewhere: blocks that are tight or loose, weight gradients soon or late."""
        for width, packed, (delay, slope), back, guise in product(
            (1.0, None, 1.5),
            (True, False),
            ((0.0, 0.0), (0.0, 4.0), (1.0, 16.0), (2.0, 2.0)),
            (0.0, 1.0),
            reversed(self._guises),
        ):
            yield Knobs(
                stretch=(0.0,) * self._legs + (back,) * self._legs,
                weight_delay=delay,
                weight_slope=slope,
                packed=packed,
                width=width,
                guise=guise,
            )

    def _random_knobs(self) -> Knobs:
        choice = self._random.choice
        return Knobs(
            stretch=tuple(choice(_STRETCHES) for _ in range(2 * self._legs)),
            weight_delay=choice(_DELAYS),
            weight_slope=choice(_SLOPES),
            packed=choice((True, False)),
            longer=choice(_LONGER),
            guise=choice(self._guises),
            width=choice(_WIDTHS),
            extra=choice(_EXTRAS),
            patience=choice(_PATIENCE),
        )

    def _changed(self) -> Knobs:
        """One of the best, with one knob turned."""
        if not self.best:
            return self._random_knobs()
        knobs, other = self._random.choice(self.best).knobs, self._random_knobs()
        turned = self._random.randrange(8)
        match turned:
            case 0:
                return replace(knobs, weight_delay=other.weight_delay)
            case 1:
                return replace(knobs, weight_slope=other.weight_slope)
            case 2:
                return replace(knobs, packed=other.packed, longer=other.longer)
            case 3:
                return replace(knobs, width=other.width, extra=other.extra)
            case 4:
                return replace(knobs, patience=other.patience)
            case 5:
                return replace(knobs, guise=other.guise)
            case _:
                leg = self._random.randrange(2 * self._legs)
                stretch = list(knobs.stretch)
                stretch[leg] = other.stretch[leg]
                return replace(knobs, stretch=tuple(stretch))
