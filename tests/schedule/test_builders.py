"""Every builder: the laws that hold for all of them, and what single ones promise beside."""

from collections import Counter
from itertools import groupby, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Overlap
from penstock.schedule.check import check
from penstock.schedule.family import Arrangement, Family
from penstock.schedule.passes import lower
from penstock.schedule.placement import bidirectional, linear, looped, v_shape, wave
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, schedules
from penstock.schedule.rules import HOST_TRANSFERS
from penstock.simulate.memory import peak_in_flight
from penstock.simulate.simulation import Simulation, simulate

NAMES = [each.name for each in schedules()]


def numbers(name: str) -> list[tuple[int, int, int]]:
    """Some 96 ranks, microbatches and stages per rank: all that are small, and larger ones."""
    each = family(name)
    virtuals = [v for v in (1, 2, 3, 4) if each.virtuals is None or v in each.virtuals]
    # Of two copies of the model, numbers are even.
    even = each.num_directions > 1
    ranks, microbatches = (8, 32) if even else (4, 18 // len(virtuals))
    small = product(range(1, ranks + 1), range(1, microbatches + 1), virtuals)
    taken = {(*each.nearest(p, m), v): None for p, m, v in small}
    random = Random(name)
    while len(taken) < 96:
        # Most of them smaller: what takes long is to prove the largest.
        most = random.choice((8, 8, 8, 8, 8, 8, 8, 16))
        near = each.nearest(random.randint(1, most), random.randint(1, 72 if even else 18))
        taken[*near, random.choice(virtuals)] = None
    return list(taken)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A program of any family, for any numbers that it works with."""
    name = draw(st.sampled_from(NAMES))
    virtuals = (family(name).virtuals or (1, 2, 3, 4))[:4]
    ranks, microbatches = family(name).nearest(draw(st.integers(1, 9)), draw(st.integers(1, 30)))
    return build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual=draw(st.sampled_from(virtuals)),
    )


# --- laws ---------------------------------------------------------------------------------------


def each_microbatch_goes_once_through_each_stage_and_back(result: Simulation) -> None:
    program, found = result.program, []
    for act in program.actions():
        if act.op is Op.FULL_BACKWARD:
            found += [(act.stage, half, act.microbatch) for half in "IW"]
        elif act.op not in HOST_TRANSFERS:
            found.append((act.stage, act.op.value, act.microbatch))
    assert sorted(found) == sorted(
        (stage, op, microbatch)
        for stage in range(program.num_stages)
        for op in ("F" if program.name == "forward-only" else "FIW")
        for microbatch in range(program.num_microbatches)
        if program.placement.passes(microbatch, stage)
    )


def gradients_are_summed_in_the_order_of_microbatches(result: Simulation) -> None:
    """One device sums them in that order: only so are sums equal to the last bit.

    Where sequences are split there is no such order on one device: their last chunks come first.
    """
    program = result.program
    summed: dict[int, list[int | None]] = {stage: [] for stage in range(program.num_stages)}
    for act in program.actions():
        if act.op in (Op.FULL_BACKWARD, Op.WEIGHT_GRAD):
            summed[act.stage].append(act.microbatch)
    placement, splits = program.placement, program.num_splits
    order = [
        chunk
        for whole in range(0, program.num_microbatches, splits)
        for chunk in reversed(range(whole, whole + splits))
    ]
    trains = program.name != "forward-only"
    assert summed == {
        stage: [m for m in order if trains and placement.passes(m, stage)]
        for stage in range(program.num_stages)
    }


def it_is_proven(result: Simulation) -> None:
    check(result.program)


def it_is_proven_with_its_messages(result: Simulation) -> None:
    assert simulate(check(lower(result.program))).makespan == result.makespan


def ranks_are_as_busy_as_the_work_is_long(result: Simulation) -> None:
    program = result.program
    chunks = program.placement.num_model_stages // program.num_ranks * program.num_microbatches
    work = chunks * (1 if program.name == "forward-only" else 3)
    assert result.busy == work * program.num_ranks
    assert result.bounds is not None and result.makespan >= result.bounds.makespan
    assert result.makespan >= result.span >= work


def messages_cross_where_the_next_stage_is_elsewhere(result: Simulation) -> None:
    program = result.program
    ranks, virtual = program.num_ranks, program.placement.num_model_stages // program.num_ranks
    crossings = {
        Arrangement.LINEAR: ranks - 1,
        Arrangement.BIDIRECTIONAL: ranks - 1,
        Arrangement.LOOPED: ranks * virtual - 1 if ranks > 1 else 0,
        # At the turns, the next stage is on the same rank.
        Arrangement.V_SHAPE: virtual * (ranks - 1),
        Arrangement.WAVE: virtual * (ranks - 1),
    }[family(program.name).arrangement]
    ways = 1 if program.name == "forward-only" else 2
    assert result.messages == ways * program.num_microbatches * crossings


def largest_group(ranks: int, microbatches: int) -> int:
    """The largest of ⌊M / P⌋ even groups: P where P divides M."""
    return -(-microbatches // max(1, microbatches // ranks))


def memory_stays_in_its_bound(result: Simulation) -> None:
    program = result.program
    ranks, microbatches = program.num_ranks, program.num_microbatches
    virtual = program.num_stages // ranks
    group = largest_group(ranks, microbatches)
    for rank, peak in enumerate(result.peak_in_flight):
        bound = {
            "forward-only": 1,
            "gpipe": microbatches,
            "1f1b": ranks - rank,
            "seq1f1b": ranks - rank + 1,
            "interleaved-1f1b": (virtual - 1) * group + 2 * (ranks - rank - 1) + 1,
            "looped-bfs": virtual * microbatches,
            "interleaved-zb": (virtual - 1) * group + ranks,
            "zbv": 2 * ranks,
            "dualpipev": 2 * ranks + 1,
            "dualpipe": ranks + 1,
            "chimera": ranks,
            "eager-1f1b": 2 * (ranks - rank) - 1,
            "zb-h1": ranks,
            "zb-h2": 2 * ranks - 1,
            "zb-1p": ranks,
            "zb-2p": 2 * ranks,
            "gis": ranks * virtual - rank,
            "gis-h": -(-ranks // 2) * (virtual - 1) + ranks - rank,
            "po-h": (virtual + 2) * ranks / 8 + 4,
            "po-f": 3,
            "v-zb": 2 * ranks,
            "v-half": 2 * ((ranks + 2) // 2),
            "v-min": 2 * ((ranks + 4) // 3),
            "1f1b-v": 2 * ((2 * ranks + 2) // 3),
            "hanayo": ranks * virtual,
        }[program.name]
        assert peak <= min(bound, virtual * microbatches)


LAWS = (
    each_microbatch_goes_once_through_each_stage_and_back,
    gradients_are_summed_in_the_order_of_microbatches,
    it_is_proven,
    it_is_proven_with_its_messages,
    ranks_are_as_busy_as_the_work_is_long,
    messages_cross_where_the_next_stage_is_elsewhere,
    memory_stays_in_its_bound,
)

# Proofs of many messages take longest: every so many are made.
EVERY = {it_is_proven_with_its_messages: 2}


@pytest.mark.parametrize("name", NAMES)
def test_every_builder_keeps_every_law_at_hundreds_of_numbers(name: str) -> None:
    for i, (ranks, microbatches, virtual) in enumerate(numbers(name)):
        program = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        result = simulate(program)
        for law in LAWS:
            if i % EVERY.get(law, 1) == 0:
                law(result)


@settings(deadline=None, max_examples=max(100, settings().max_examples))
@given(programs())
def test_every_law_holds_at_any_number(program: Program) -> None:
    result = simulate(program)
    for law in LAWS:
        law(result)


# --- numbers and options ------------------------------------------------------------------------

REPEATED = ("v-zb", "v-half", "v-min", "1f1b-v", "hanayo", "zb-1p", "zb-2p")


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("ranks", [16, 17, 18, 33, 64])
def test_many_ranks(name: str, ranks: int) -> None:
    """What is laid out slot by slot, and limited in memory, must come to its end for any P."""
    limits = {
        "v-half": 2 * ((ranks + 2) // 2),
        "v-min": 2 * ((ranks + 4) // 3),
        "1f1b-v": 2 * ((2 * ranks + 2) // 3),
        "zb-1p": ranks,
    }
    for microbatches in (ranks // 2, ranks + 3):
        program = build(name, ranks=ranks, microbatches=microbatches)
        check(program)
        assert max(peak_in_flight(program)) <= limits.get(name, 2 * ranks)


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(["gis", "gis-h"]),
    ranks=st.integers(1, 12),
    microbatches=st.integers(1, 40),
    virtual=st.integers(1, 4),
    more=st.integers(0, 12),
)
def test_any_group_from_half_of_the_ranks_on_works(
    name: str, ranks: int, microbatches: int, virtual: int, more: int
) -> None:
    group = max(1, ranks // 2) + more
    program = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual, group=group)
    check(program)
    for rank, peak in enumerate(peak_in_flight(program)):
        assert peak <= min(virtual * microbatches, group * (virtual - 1) + ranks - rank)


@pytest.mark.parametrize("each", schedules(), ids=lambda each: each.name)
def test_stages_lie_as_the_catalog_says(each: Family) -> None:
    ranks, microbatches = each.nearest(3, 7)
    program = build(each.name, ranks=ranks, microbatches=microbatches)
    virtual = each.default_virtual
    expected = {
        Arrangement.LINEAR: linear(3),
        Arrangement.LOOPED: looped(3, virtual),
        Arrangement.V_SHAPE: v_shape(3),
        Arrangement.WAVE: wave(3, max(1, virtual // 2)),
        Arrangement.BIDIRECTIONAL: bidirectional(ranks),
    }[each.arrangement]
    assert program.placement == expected
    assert program.placement.num_directions == each.num_directions
    assert program.name == each.name
    assert program.num_whole_microbatches == microbatches
    assert (program.num_splits > 1) == ("splits" in each.options)


@settings(deadline=None, max_examples=60)
@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 24),
    virtual=st.integers(1, 4),
    more=st.integers(0, 20),
)
def test_any_group_from_ranks_to_microbatches_works(
    ranks: int, microbatches: int, virtual: int, more: int
) -> None:
    microbatches += ranks
    group = min(ranks + more, microbatches)
    program = build(
        "interleaved-1f1b", ranks=ranks, microbatches=microbatches, virtual=virtual, group=group
    )
    check(program)
    result = simulate(program)
    number = -(-microbatches // group)
    bubble = result.makespan - 3 * microbatches * virtual
    rest = microbatches % group or group
    if rest >= ranks or number * ranks <= microbatches:
        assert bubble == 3 * (ranks - 1)
    else:
        # No groups are small enough and all large enough.
        assert bubble <= 3 * (ranks - 1) + 3 * (virtual - 1) * (ranks - rest)
    for rank, peak in enumerate(result.peak_in_flight):
        most = (virtual - 1) * group + 2 * (ranks - rank - 1) + 1
        assert peak <= min(virtual * microbatches, most)
        if rest == group:
            assert peak == min(virtual * microbatches, most)


@pytest.mark.parametrize(
    ("ranks", "microbatches", "group", "sizes"),
    [
        (4, 9, None, [5, 4]),
        (4, 16, 6, [6, 6, 4]),
        (4, 14, 6, [5, 5, 4]),
        (4, 7, 6, [6, 1]),
        (2, 10, 3, [3, 3, 2, 2]),
    ],
)
def test_leftover_microbatches_are_grouped_as_documented(
    ranks: int, microbatches: int, group: int | None, sizes: list[int]
) -> None:
    options = {} if group is None else {"group": group}
    program = build("interleaved-1f1b", ranks=ranks, microbatches=microbatches, **options)
    forwards = [a.stage for a in program.actions() if a.op is Op.FORWARD and a.stage % ranks == 0]
    assert [len(list(run)) for stage, run in groupby(forwards) if stage == 0] == sizes


@pytest.mark.parametrize(
    ("microbatches", "group", "works"),
    [
        (8, 3, "give a whole number from 4 to 8"),
        (8, 9, "give a whole number from 4 to 8"),
        (2, 2, "leave it out"),
    ],
)
def test_a_group_that_can_not_keep_ranks_busy_is_refused(
    microbatches: int, group: int, works: str
) -> None:
    with pytest.raises(ScheduleError, match=works):
        build("interleaved-1f1b", ranks=4, microbatches=microbatches, group=group)


def test_dualpipev_overlaps_a_forward_with_a_full_backward_in_its_steady_state() -> None:
    program = build("dualpipev", ranks=4, microbatches=20)
    for rank, steps in enumerate(program.ranks):
        pairs = [step for step in steps if isinstance(step, Overlap)]
        assert all(
            [part.op for part in pair.parts] == [Op.FORWARD, Op.FULL_BACKWARD] for pair in pairs
        )
        # 2 (M - 2P + r + 1) in the steady state, less the lone pair at the turn of the V, and
        # P - 1 - r in the cool-down.
        assert len(pairs) == 2 * (20 - 8 + rank + 1) - (rank == 3) + 3 - rank


def test_microbatches_are_dropped_where_a_v_is_not_full() -> None:
    few = build("zbv", ranks=3, microbatches=2)
    many = build("zbv", ranks=3, microbatches=6)
    for rank in range(3):
        kept = [act for act in many.ranks[rank] if str(act)[-1] in "01"]
        assert list(few.ranks[rank]) == kept
    assert Counter(act.op for act in few.actions())[Op.FORWARD] == 12
