"""Hypothesis strategies for programs: any placement, any order that the rules allow.

No schedule family stands behind these programs, so what holds for them holds for programs that
nobody has thought of. This is the only module that imports Hypothesis; it knows no torch.
"""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.schedule.action import Action, Op, Overlap, Step, action
from penstock.schedule.placement import Placement
from penstock.schedule.program import Program
from penstock.schedule.rules import COVERS
from tests.readiness import prerequisites

__all__ = ["computed_programs", "placements"]


@st.composite
def placements(draw: st.DrawFn, *, max_ranks: int = 4, max_stages: int = 6) -> Placement:
    """Placements in which every rank holds a stage, and any rank may hold any; with one copy of
    the model, or two.

    Args:
        draw: given by Hypothesis.
        max_ranks: the most ranks.
        max_stages: the most stages, at least ``max_ranks``.
    """
    num_ranks = draw(st.integers(1, max_ranks))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=max_stages - num_ranks))
    stage_ranks = draw(st.permutations([*range(num_ranks), *more]))
    copies = 2 if len(stage_ranks) % 2 == 0 and draw(st.booleans()) else 1
    return Placement(num_ranks=num_ranks, stage_ranks=tuple(stage_ranks), num_directions=copies)


@st.composite
def computed_programs(
    draw: st.DrawFn,
    *,
    max_ranks: int = 4,
    max_stages: int = 6,
    max_microbatches: int = 4,
    backward: bool | None = None,
    max_splits: int = 1,
) -> Program:
    """Valid programs without transfers: actions taken one by one from those that are ready.

    Each backward is whole or in two, as drawn; where a forward and a backward of one rank are
    ready together, they may be drawn as one overlapped block.

    Args:
        draw: given by Hypothesis.
        max_ranks: the most ranks.
        max_stages: the most stages.
        max_microbatches: the most microbatches, at least 2.
        backward: whether there are backwards; None for either.
        max_splits: into how many pieces sequences are split at most, where the model is there in
            one copy; microbatches are then as many as there are pieces, up to so many times
            ``max_microbatches``.
    """
    placement = draw(placements(max_ranks=max_ranks, max_stages=max_stages))
    num_microbatches = draw(st.integers(placement.num_directions, max_microbatches))
    num_splits = draw(st.integers(1, max_splits)) if placement.num_directions == 1 else 1
    num_microbatches *= num_splits
    if backward is None:
        backward = draw(st.booleans())
    waiting: list[Action] = []
    for stage in range(placement.num_stages):
        for microbatch in range(num_microbatches):
            if not placement.passes(microbatch, stage):
                continue
            ops = [Op.FORWARD]
            if backward:
                whole = draw(st.booleans())
                ops += [Op.FULL_BACKWARD] if whole else [Op.INPUT_GRAD, Op.WEIGHT_GRAD]
            waiting += [action(stage, op, microbatch) for op in ops]
    done: set[Action] = set()
    ranks: list[list[Step]] = [[] for _ in range(placement.num_ranks)]
    while waiting:
        ready = [
            act
            for act in waiting
            if done.issuperset(prerequisites(act, placement, num_splits=num_splits))
        ]
        first = draw(st.sampled_from(ready))
        step: Step = first
        others = [act for act in ready if _may_overlap(first, act, placement)]
        overlapped = draw(st.booleans()) if others else False
        if overlapped:
            step = Overlap(parts=(first, draw(st.sampled_from(others))))
        ranks[placement.rank_of(first.stage)].append(step)
        for act in step.parts:
            waiting.remove(act)
            done |= {act, *(action(act.stage, op, act.microbatch) for op in COVERS.get(act.op, ()))}
    return Program(
        name="drawn",
        placement=placement,
        num_microbatches=num_microbatches,
        num_splits=num_splits,
        ranks=tuple(map(tuple, ranks)),
    )


def _may_overlap(act: Action, other: Action, placement: Placement) -> bool:
    one_is_forward = (act.op is Op.FORWARD) != (other.op is Op.FORWARD)
    return one_is_forward and placement.same_rank(act.stage, other.stage)
