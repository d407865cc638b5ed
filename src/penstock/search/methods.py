"""The methods of searching, each from what those before it found; nothing worse is ever taken.

    first          one block for each placement, so that there is an answer
    closed_forms   every schedule of the catalog on a problem's placement
    retime         list scheduling in their order
    tune           building blocks, tuned on few microbatches, stretched to all
    exchange       neighbours on critical paths of the best orders, in rounds
    polish         CP-SAT, of the whole step or of windows of it

Shares are parts of all the work of a search. How a method works is the affair of its own module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product

from penstock.errors import ScheduleError
from penstock.schedule.program import Program
from penstock.schedule.registry import build, schedules
from penstock.schedule.rules import COMPUTE, INPUT_GRADS
from penstock.search.blocks import Knobs, legs
from penstock.search.budget import Budget
from penstock.search.exact import Exact, improve
from penstock.search.greedy import Placed, place, played
from penstock.search.known import Found, Known, meets
from penstock.search.problem import SearchProblem, order_of
from penstock.search.rounds import exchange_in_rounds
from penstock.search.tune import Tuner, run_block

__all__ = ["Effort", "closed_forms", "exchange", "first", "polish", "retime", "tune"]

# Up to how many actions exact search takes all of a step, and windows of it; actions of a window.
_WHOLE, _WINDOWED, _WINDOW = 400, 4_000, 150
# After how many blocks that are no better tuning stops, for steps that are searched whole and not.
_STALE_WHOLE, _STALE = 300, 2_000
# Up to how many actions neighbours are exchanged; and the whole catalog is tried, late or not.
_EXCHANGED, _SMALL = 12_000, 10_000
# Up to how many stages per rank closed forms are built: some take minutes for hundreds.
_CLOSED = 128
# How much worse than the best one a placement may be to be searched on.
_NEAR_BEST = 1.05
# How many blocks are run with all microbatches, where that takes next to nothing and where not.
_RUN_SMALL, _RUN = 6, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is to be done.

    Args:
        share: of all the work, what this round of methods may take.
        seed: of random choices.
        exact: whether CP-SAT takes part.
        size: actions of a program.
        round_s: seconds that this round may take, on a machine that is slow.
        after_s: seconds that are to be left when it is over.
    """

    share: float
    seed: int
    exact: bool
    size: int
    round_s: float = 0.0
    after_s: float = 0.0

    @property
    def takes_whole(self) -> bool:
        """Whether exact search takes all of a step at once."""
        return self.exact and self.size <= _WHOLE

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of all the work, what blocks, exchanges and exact search may take."""
        parts = (0.35, 0.5, 0.15)
        if self.size > _EXCHANGED:
            parts = (1.0, 0.0, 0.0)
        elif not self.exact or self.size > _WINDOWED:
            parts = (0.35, 0.65, 0.0)
        elif self.takes_whole:
            parts = (0.1, 0.05, 0.85)
        tuning, exchanging, polishing = (self.share * part for part in parts)
        return tuning, exchanging, polishing

    def timed(self, budget: Budget, done_share: float) -> Effort:
        """The same, with its part of the time that is left."""
        round_s = budget.left_s * self.share / max(self.share, 1 - done_share)
        return replace(self, round_s=round_s, after_s=budget.left_s - round_s)

    def keep_s(self, share: float) -> float:
        """Seconds to be left where this share of all the work of the round is to come."""
        return self.after_s + self.round_s * share / self.share


def first(known: Known) -> None:
    """A program within the limit for each placement, as far as the clock allows more than one."""
    for problem in known.problems:
        if known.is_late(times=2):
            return
        tight = Knobs(stretch=(0.0,) * (2 * max(legs(problem)) + 2), packed=True, width=1.0)
        known.note_order(problem, run_block(problem, tight).order, "building blocks")


def closed_forms(known: Known) -> None:
    """Every schedule of the catalog that is a program of one of the problems."""
    some = known.problems[0]
    virtuals = sorted({each.virtual for each in known.problems if each.virtual <= _CLOSED})
    # Those that are made for given costs are searched for themselves: they come last.
    families = sorted(schedules(), key=lambda family: "forward" in family.options)
    for family, virtual in product(families, virtuals):
        # A small step's are tried in any case: nothing found is worse than any of them.
        if some.size > _SMALL and known.is_late(times=2):
            return
        if family.copies > 1:
            continue
        try:
            program = build(
                family.name,
                ranks=some.placement.num_ranks,
                microbatches=some.num_microbatches,
                virtual=virtual,
            )
        except ScheduleError:
            continue
        for problem in known.problems:
            if _solves(program, problem):
                known.note(problem, program, f"closed form: {family.name}")


def retime(known: Known) -> None:
    """List scheduling in the order of the best closed forms, within the limit or not."""
    for problem in known.problems:
        mine = [each for each in known.found if each.placement == problem.placement]
        closed = [each for each in mine if each.method.startswith("closed form")]
        for each in sorted(closed, key=lambda found: found.value)[:3]:
            if known.is_late(times=2):
                return
            urgency: list[list[float]] = [[] for _ in range(problem.num_kinds)]
            for kinds in order_of(problem, each.program):
                for position, kind in enumerate(kinds):
                    urgency[kind].append(position)
            method = f"greedy: in the order of {each.program.name}"
            known.note_order(problem, place(problem, urgency).order, method)


def tune(known: Known, effort: Effort) -> None:
    """Blocks, on few microbatches; then the best ones on all.

    Half of the work goes to all placements alike, the other half to those that are near the best.
    """
    mine, *others = effort.shares
    keep_s = effort.keep_s(sum(others))
    tuners = [Tuner(problem, seed=effort.seed) for problem in known.problems]
    for half in range(2):
        least = min((tuner.best[0].estimate for tuner in tuners if tuner.best), default=math.inf)
        chosen = [t for t in tuners if not t.best or t.best[0].estimate <= _NEAR_BEST * least]
        for number, tuner in enumerate(chosen):
            share = mine / 2
            done = known.done_share + share * (half + number / len(chosen))
            known.tell(done, "building blocks")
            _tune(known, effort, tuner, known.budget.actions * share / len(chosen), keep_s)
    for tuner in tuners:
        for tuned in tuner.best[: _RUN_SMALL if effort.size <= _EXCHANGED else _RUN]:
            if known.is_late(times=2):
                return
            known.note_order(
                tuner.whole, run_block(tuner.whole, tuned.knobs).order, "building blocks"
            )


def _tune(known: Known, effort: Effort, tuner: Tuner, work: float, keep_s: float) -> None:
    """Turn knobs, as long as there is work left and hope."""
    problem, bound = tuner.whole, known.bound(tuner.whole)
    most_stale = _STALE_WHOLE if effort.takes_whole else _STALE
    until = tuner.placed + work - (_RUN if problem.size > _EXCHANGED else 0) * problem.size
    while tuner.placed < until or tuner.tried < 4:
        # The first block of a placement is worth more than time to spare.
        if known.is_late(times=3 if tuner.tried else 2) or (
            tuner.tried and known.budget.out_of_time(keep_s=keep_s)
        ):
            return
        tuner.step()
        if tuner.stale > most_stale or meets(tuner.best[0].estimate, bound):
            return


def _rivals(known: Known) -> list[tuple[SearchProblem, Placed]]:
    """Where something better may be found yet, and the best order there to begin with."""
    best = known.best()
    assert best is not None
    found = []
    for problem in known.problems:
        start = _start(known, problem)
        if start is None or problem.size > _WINDOWED or start.value > _NEAR_BEST * best.value:
            continue
        if not meets(best.value, known.bound(problem)):
            found.append((problem, played(problem, start.program)))
    return found


def _start(known: Known, problem: SearchProblem) -> Found | None:
    """The best program on a placement whose order is within the limit, too."""
    for each in known.plain(problem.placement):
        if problem.keeps_limit(order_of(problem, each.program)):
            return each
    return None


def exchange(known: Known, effort: Effort) -> None:
    """Neighbours on critical paths of the best orders, where steps are not too large for it."""
    tuning, mine, polishing = effort.shares
    if effort.size <= _EXCHANGED:
        exchange_in_rounds(
            known,
            share=mine,
            keep_s=effort.keep_s(polishing),
            done_share=known.done_share + tuning,
            seed=effort.seed,
        )


def polish(known: Known, effort: Effort) -> None:
    """Exact search around the best order of each placement."""
    *_, mine = effort.shares
    rivals = _rivals(known)
    for number, (problem, start) in enumerate(rivals):
        if known.is_over():
            return
        part = mine / len(rivals)
        known.tell(known.done_share + effort.share - mine + number * part, "exact")
        search = _polish_whole if effort.takes_whole else _polish_windows
        search(known, problem, start, part * known.budget.solver_s, effort.seed)


def _polish_whole(
    known: Known, problem: SearchProblem, start: Placed, effort_s: float, seed: int
) -> None:
    """All of a small step at once: it may be proven best.

    A bound on the span is that of ranks that start when they like, and takes a search of its own.
    """
    if problem.objective == "span":
        used = _find_whole(known, problem, start, effort_s / 2, seed)
        best = _start(known, problem)
        if best is None or known.is_over() or meets(best.value, known.bound(problem)):
            return
        start, effort_s = played(problem, best.program), effort_s - used
    _find_whole(known, problem, start, effort_s, seed, late_starts=problem.objective == "span")


def _find_whole(
    known: Known,
    problem: SearchProblem,
    start: Placed,
    effort_s: float,
    seed: int,
    *,
    late_starts: bool = False,
) -> float:
    """One exact search of all of a step, and what effort it took."""
    answer = _improved(known, problem, start, None, effort_s, seed, late_starts=late_starts)
    known.raise_bound(problem, answer.bound)
    if answer.order is not None:
        known.note_order(problem, answer.order, "exact")
    return answer.used_s


def _polish_windows(
    known: Known, problem: SearchProblem, start: Placed, effort_s: float, seed: int
) -> None:
    """Windows of a larger one, from the end to the beginning, as long as that helps."""
    bound, used = known.bound(problem), 0.0
    whole = max(max(ends) for ends in start.ends)
    length = whole * _WINDOW / problem.size
    high, unchanged = whole, 0.0
    while used < effort_s and unchanged < whole:
        if meets(start.value, bound) or known.is_late():
            return
        window = (high - length, high + 1e-9 * whole)
        answer = _improved(known, problem, start, window, min(1.0, effort_s - used), seed)
        # A window that is solved at once still takes a while to be put up.
        used += answer.used_s + 0.05
        unchanged += length / 2
        if answer.order is not None:
            found = known.note_order(problem, answer.order, "exact windows")
            # CP-SAT counts in rounded costs and sizes: by the true ones it may be no better.
            if found is not None and found.value <= start.value and known.keeps(found):
                if found.value < start.value * (1 - 1e-9):
                    unchanged = 0.0
                start = played(problem, found.program)
        high = high - length / 2 if high > length else whole


def _improved(
    known: Known,
    problem: SearchProblem,
    start: Placed,
    window: tuple[float, float] | None,
    effort_s: float,
    seed: int,
    *,
    late_starts: bool = False,
) -> Exact:
    """One exact search, within the clock."""
    answer = improve(
        problem,
        start,
        window=window,
        effort_s=effort_s,
        clock_s=max(0.1, known.budget.left_s - known.closing_s),
        seed=seed,
        at_least=known.bound(problem),
        late_starts=late_starts,
    )
    known.budget.cut_short |= answer.cut_short
    return answer


def _solves(program: Program, problem: SearchProblem) -> bool:
    """Whether a program of the catalog is one of those that are searched among."""
    if program.placement != problem.placement:
        return False
    if program.num_microbatches != problem.num_microbatches:
        return False
    ops = {act.op for act in program.actions()}
    return ops <= COMPUTE and bool(ops & INPUT_GRADS)
