"""Exchanges of neighbours, in rounds: a little from several orders, more from those that gain most.

    9 orders ─► 3 tenths of the work ─► 3 ─► 3 tenths ─► 1 ─► 4 tenths ─► the best

Which order leads furthest is not the one that is best to begin with. This module exchanges nothing
itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from penstock.search.known import Known, meets
from penstock.search.problem import Order, SearchProblem, order_of
from penstock.search.swaps import Swapper

__all__ = ["exchange_in_rounds"]

# The part of the work of each round; how many orders of a kind enter the first, how much worse than
# the best they may be, and which part of them goes on.
_ROUNDS, _OF_A_KIND, _NEAR_BEST, _GO_ON = (0.3, 0.3, 0.4), 3, 1.1, 3
# After how many exchanges the clock is looked at; from which part of the work on it tells.
_LOOK, _TELLING = 64, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entrant:
    problem: SearchProblem
    order: Order
    value: float


def exchange_in_rounds(
    known: Known, *, share: float, keep_s: float, done_share: float, seed: int
) -> None:
    """Improve the best orders that are known, of all placements.

    Args:
        known: what is known; what comes of it is noted there.
        share: of all the work, what this may take.
        keep_s: seconds that are to be left for others.
        done_share: of all the work, what is behind.
        seed: of random choices.
    """
    entrants = _entrants(known)
    left = sum(_ROUNDS)
    for number, part in enumerate(_ROUNDS):
        if not entrants or known.is_over():
            return
        known.tell(done_share + share * (1 - left), "exchanges")
        work = known.budget.actions * share * part / len(entrants)
        time_s = max(0.0, known.budget.left_s - keep_s)
        time_s *= part / left / len(entrants)
        ended = [_improved(known, each, work, time_s, seed + number) for each in entrants]
        ended.sort(key=lambda entrant: entrant.value)
        known.note_order(ended[0].problem, ended[0].order, "exchanges")
        entrants = ended[: -(-len(ended) // _GO_ON)]
        left -= part


def _entrants(known: Known) -> list[_Entrant]:
    """The best orders of each kind within the limit, where something better may be found yet.

    Orders of one kind are much alike; that of a schedule of the catalog may be further from the
    best at first, and lead nearer.
    """
    best = known.best()
    assert best is not None
    problems = {
        problem.placement: problem
        for problem in known.problems
        if not meets(best.value, known.bound(problem))
    }
    entrants: dict[Order, _Entrant] = {}
    entered: Counter[str] = Counter()
    for found in known.plain():
        problem, kind = problems.get(found.placement), found.method.partition(":")[0]
        if found.value > best.value * _NEAR_BEST:
            break
        if problem is not None and entered[kind] < _OF_A_KIND:
            order = order_of(problem, found.program)
            if order not in entrants and problem.keeps_limit(order):
                entered[kind] += 1
                entrants[order] = _Entrant(problem=problem, order=order, value=found.value)
    return list(entrants.values())


def _improved(known: Known, entrant: _Entrant, work: float, time_s: float, seed: int) -> _Entrant:
    """What exchanges make of an order; less work where the machine is too slow for all of it."""
    swapper = Swapper(entrant.problem, entrant.order, seed=seed, work=work)
    began_s, tried = known.budget.left_s, 0
    while swapper.step():
        tried += 1
        if tried % _LOOK or swapper.worked < _TELLING * swapper.work:
            continue
        if known.is_late(times=2):
            break
        needed_s = (began_s - known.budget.left_s) * swapper.work / swapper.worked
        if needed_s > 1.2 * time_s:
            # An end that is cooled down is worth more than a longer way there.
            swapper.work = max(swapper.worked, swapper.work * time_s / needed_s)
            known.budget.cut_short = True
    return _Entrant(problem=entrant.problem, order=swapper.best, value=swapper.value)
