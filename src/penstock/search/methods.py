"""The methods of searching, each from what those before it found; nothing worse is ever taken.

    first          one block for each placement, so that there is an answer
    closed_forms   every schedule of the catalog on a problem's placement
    retime         list scheduling in their order
    tune           building blocks, tuned on few microbatches, stretched to all
    exchange       neighbours on the critical path of the best order
    polish         CP-SAT, of the whole step or of windows of it

Shares are parts of all the work of a search. How a method works is the affair of its own module.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from penstock.errors import ScheduleError
from penstock.schedule.action import Op
from penstock.schedule.catalog import build, schedules
from penstock.schedule.program import Program
from penstock.schedule.rules import COMPUTE
from penstock.search.blocks import Knobs, legs
from penstock.search.exact import Exact, improve
from penstock.search.greedy import Placed, place, played
from penstock.search.known import Known, meets
from penstock.search.problem import Problem, order_of
from penstock.search.swaps import Swapper
from penstock.search.tune import Tuner, run_block

__all__ = ["Effort", "closed_forms", "exchange", "first", "polish", "retime", "tune"]

# Up to how many actions exact search takes all of a step, and windows of it; actions of a window.
_WHOLE, _WINDOWED, _WINDOW = 400, 4_000, 150
# After how many blocks that are no better tuning stops, for steps that are searched whole and not.
_STALE_WHOLE, _STALE = 300, 2_000
# How many exchanges are tried at most.
_SWAPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is to be done.

    Args:
        share: of all the work, what this round of methods may take.
        seed: of random choices.
        exact: whether CP-SAT takes part.
        size: actions of a program.
    """

    share: float
    seed: int
    exact: bool
    size: int

    @property
    def takes_whole(self) -> bool:
        """Whether exact search takes all of a step at once."""
        return self.exact and self.size <= _WHOLE

    @property
    def shares(self) -> tuple[float, float, float]:
        """Of all the work, what blocks, exchanges and exact search may take."""
        parts = (0.6, 0.2, 0.2)
        if self.size > _WINDOWED:
            parts = (1.0, 0.0, 0.0)
        elif not self.exact:
            parts = (0.7, 0.3, 0.0)
        elif self.takes_whole:
            parts = (0.1, 0.05, 0.85)
        tuning, exchanging, polishing = (self.share * part for part in parts)
        return tuning, exchanging, polishing


def first(known: Known) -> None:
    """A program within the limit for each placement: from then on the clock may end the search."""
    for problem in known.problems:
        tight = Knobs(stretch=(0.0,) * (2 * max(legs(problem)) + 2), packed=True, width=1.0)
        known.note_order(problem, run_block(problem, tight).order, "building blocks")


def closed_forms(known: Known) -> None:
    """Every schedule of the catalog that is a program of one of the problems."""
    some = known.problems[0]
    virtuals = sorted({problem.virtual for problem in known.problems})
    # Those that are made for given costs are searched for themselves: they come last.
    families = sorted(schedules(), key=lambda family: "forward" in family.options)
    for family, virtual in product(families, virtuals):
        if known.is_late(times=2):
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
    """Blocks, on few microbatches; then the best ones on all."""
    mine, _, _ = effort.shares
    work = known.budget.actions * mine / len(known.problems)
    most_stale = _STALE_WHOLE if effort.takes_whole else _STALE
    for number, problem in enumerate(known.problems):
        tuner, bound = Tuner(problem, seed=effort.seed), known.bound(problem)
        told = 0.0
        while tuner.placed < work - 3 * problem.size or tuner.tried < 4:
            tuner.step()
            done = min(1.0, tuner.placed / work)
            if done > told + 0.05:
                told = done
                part = mine * (number + done) / len(known.problems)
                known.tell(known.done_share + part, "building blocks")
            if tuner.stale > most_stale or meets(tuner.best[0].estimate, bound):
                break
            if known.is_late(times=4):
                break
        for tuned in tuner.best[:2]:
            if known.is_late(times=2):
                break
            order = run_block(problem, tuned.knobs).order
            known.note_order(problem, order, "building blocks")


def _rivals(known: Known) -> list[tuple[Problem, Placed]]:
    """Where something better may be found yet, and the best order there to begin with."""
    best = known.best()
    assert best is not None
    found = []
    for problem in known.problems:
        start = known.best(problem.placement)
        if start is None or problem.size > _WINDOWED:
            continue
        if not meets(best.value, known.bound(problem)):
            found.append((problem, played(problem, start.program)))
    return found


def exchange(known: Known, effort: Effort) -> None:
    """Neighbours on the critical path of the best order of each placement."""
    tuned, mine, _ = effort.shares
    rivals = _rivals(known)
    for number, (problem, start) in enumerate(rivals):
        part = mine / len(rivals)
        known.tell(known.done_share + tuned + number * part, "exchanges")
        steps = min(_SWAPS, int(known.budget.actions * part / problem.size))
        swapper = Swapper(problem, start, seed=effort.seed, steps=steps)
        for _ in range(steps):
            if not swapper.step() or known.is_late(times=2):
                break
        if swapper.best.value < start.value:
            known.note_order(problem, swapper.best.order, "exchanges")


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
    known: Known, problem: Problem, start: Placed, effort_s: float, seed: int
) -> None:
    """All of a small step at once: it may be proven best."""
    answer = _improved(known, problem, start, None, effort_s, seed)
    key = problem.placement, problem.limit
    known.bounds[key] = max(known.bounds[key], answer.bound)
    if answer.order is not None:
        known.note_order(problem, answer.order, "exact")


def _polish_windows(
    known: Known, problem: Problem, start: Placed, effort_s: float, seed: int
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
    problem: Problem,
    start: Placed,
    window: tuple[float, float] | None,
    effort_s: float,
    seed: int,
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
    )
    known.budget.cut_short |= answer.cut_short
    return answer


def _solves(program: Program, problem: Problem) -> bool:
    """Whether a program of the catalog is one of those that are searched among."""
    if program.placement != problem.placement:
        return False
    if program.num_microbatches != problem.num_microbatches:
        return False
    ops = {act.op for act in program.actions()}
    return ops <= COMPUTE and bool(ops & {Op.FULL_BACKWARD, Op.INPUT_GRAD})
