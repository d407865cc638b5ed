"""Every builder: its timeline as its file draws it, and the laws that hold for all of them."""

import sys
from collections import Counter
from textwrap import dedent, indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule.action import Op, Overlap
from penstock.schedule.catalog import Arrangement, Family, build, family, schedules
from penstock.schedule.check import check
from penstock.schedule.passes import lower
from penstock.schedule.placement import bidirectional, linear, looped, v_shape, wave
from penstock.schedule.program import Program
from penstock.schedule.rules import COPIES
from penstock.simulate.engine import simulate
from penstock.simulate.memory import peak_in_flight
from tests.schedule.drawing import draw

TIMELINES = [
    (
        "forward-only",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. ..
        rank 1  .. F0 F1 F2 F3 ..
        rank 2  .. .. F0 F1 F2 F3
        """,
    ),
    (
        "forward-only",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 F2 F3 f2 f3 ..
        rank 1  .. F0 F1 f0 f1 F2 F3 f2 f3
        """,
    ),
    (
        "gpipe",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0 -- B1 -- B2 -- B3 --
        rank 1  .. F0 F1 F2 F3 .. .. .. B0 -- B1 -- B2 -- B3 -- .. ..
        rank 2  .. .. F0 F1 F2 F3 B0 -- B1 -- B2 -- B3 -- .. .. .. ..
        """,
    ),
    (
        "1f1b",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
        """,
    ),
    (
        "seq1f1b",
        3,
        2,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. .. B1 -- .. B0 -- .. B3 -- B2 --
        rank 1  .. F0 F1 F2 .. .. B1 -- F3 B0 -- .. B3 -- B2 -- .. ..
        rank 2  .. .. F0 F1 B1 -- F2 B0 -- F3 B3 -- B2 -- .. .. .. ..
        """,
    ),
    (
        "interleaved-1f1b",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 F2 .. b0 -- F3 b1 -- f2 B0 -- f3 B1 -- .. b2 -- .. b3 -- B2 -- B3 --
        rank 1  .. F0 F1 f0 b0 -- f1 b1 -- F2 B0 -- F3 B1 -- f2 b2 -- f3 b3 -- B2 -- B3 -- .. ..
        """,
    ),
    (
        "looped-bfs",
        2,
        3,
        2,
        """
        rank 0  F0 F1 F2 f0 f1 f2 .. .. .. b0 -- b1 -- b2 -- B0 -- B1 -- B2 --
        rank 1  .. F0 F1 F2 f0 f1 f2 b0 -- b1 -- b2 -- B0 -- B1 -- B2 -- .. ..
        """,
    ),
    (
        "interleaved-zb",
        3,
        5,
        1,
        """
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        "interleaved-zb",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 i3 w3 I2 W2 I3 W3
        rank 1  .. F0 F1 f0 i0 f1 i1 w0 F2 I0 w1 F3 I1 W0 f2 i2 W1 f3 i3 w2 I2 w3 I3 W2 W3
        """,
    ),
    (
        "zbv",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 F3 I0 W0 f2 i2 w2 I1 W1 f3 i3 w3 I2 W2 I3 W3 ..
        rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 w2 I2 i3 I3 W2 w3 W3
        """,
    ),
    (
        "dualpipev",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 F3+b1 -- .. f2+B0 -- b2 -- .. f3+B1 -- b3 -- I2 W2 I3 W3
        rank 1  .. F0 f0 F1 f1 F2 b0 -- f2+B0 -- F3+b1 -- f3+B1 -- b2 -- B2 -- .. i3 I3 w3 W3
        """,
    ),
    (
        "dualpipe",
        4,
        8,
        1,
        """
        rank 0  F0 F2 F4 f1 i1 w1 f3 F6+b3 -- .. f5+B0 -- b5 -- .. f7+B2 -- b7 -- I4 W4 I6 W6
        rank 1  .. F0 f1 F2 f3 F4 b1 -- f5+B0 -- F6+b3 -- f7+B2 -- b5 -- B4 -- .. i7 I6 w7 W6
        rank 2  .. f1 F0 f3 F2 f5 B0 -- F4+b1 -- f7+B2 -- F6+b3 -- B4 -- b5 -- .. I6 i7 W6 w7
        rank 3  f1 f3 f5 F0 I0 W0 F2 f7+B2 -- .. F4+b1 -- B4 -- .. F6+b3 -- B6 -- i5 w5 i7 w7
        """,
    ),
    (
        "chimera",
        4,
        4,
        1,
        """
        rank 0  F0 F2 .. f1 b1 -- f3 b3 -- .. B0 -- .. .. B2 --
        rank 1  .. F0 f1 F2 f3 .. b1 -- B0 -- b3 -- B2 -- .. ..
        rank 2  .. f1 F0 f3 F2 .. B0 -- b1 -- B2 -- b3 -- .. ..
        rank 3  f1 f3 .. F0 B0 -- F2 B2 -- .. b1 -- .. .. b3 --
        """,
    ),
    (
        "eager-1f1b",
        3,
        4,
        1,
        """
        rank 0  F0 F1 F2 F3 .. .. .. B0 -- .. B1 -- .. B2 -- .. B3 --
        rank 1  .. F0 F1 F2 .. B0 -- F3 B1 -- .. B2 -- .. B3 -- .. ..
        rank 2  .. .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .. .. .. ..
        """,
    ),
    (
        "zb-h1",
        3,
        5,
        1,
        """
        rank 0  F0 F1 F2 .. .. I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
        rank 1  .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
        rank 2  .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4
        """,
    ),
    (
        "zb-h2",
        3,
        6,
        1,
        """
        rank 0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .. ..
        rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 ..
        rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        """,
    ),
    (
        "zb-2p",
        3,
        6,
        1,
        """
        rank 0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .. ..
        rank 1  .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 ..
        rank 2  .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5
        """,
    ),
    (
        "gis",
        2,
        4,
        2,
        """
        rank 0  F0 F1 f0 f1 .. i0 w0 F2 i1 w1 F3 I0 W0 f2 I1 W1 f3 i2 w2 .. i3 w3 I2 W2 I3 W3
        rank 1  .. F0 F1 f0 i0 w0 f1 i1 w1 F2 I0 W0 F3 I1 W1 f2 i2 w2 f3 i3 w3 I2 W2 I3 W3 ..
        """,
    ),
    (
        "po-h",
        2,
        3,
        2,
        """
        rank 0  F0 .. f0 F1 .. .. b0 -- f1 F2 .. .. b1 -- f2 B0 -- .. b2 -- B1 -- B2 --
        rank 1  .. F0 .. f0 b0 -- F1 .. .. f1 b1 -- F2 B0 -- f2 b2 -- B1 -- B2 -- .. ..
        """,
    ),
    (
        "v-zb",
        2,
        4,
        2,
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 I3 W2 W3 ..
        rank 1  .. F0 f0 F1 f1 i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
        """,
    ),
    (
        "v-half",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 i0 F2 w0 f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 f3 i3 I2 W1 I3 w3 W2 W3
        rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 F3 I1 W1 f3 i2 I2 i3 I3 w2 W2 w3 W3
        """,
    ),
    (
        "v-min",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 i0 f1 w0 I0 i1 F2 W0 w1 I1 f2 i2 F3 W1 w2 I2 f3 i3 W2 w3 I3 W3
        rank 1  .. F0 f0 F1 f1 i0 I0 w0 W0 i1 F2 I1 f2 w1 W1 i2 F3 I2 f3 w2 W2 i3 I3 w3 W3
        """,
    ),
    (
        "1f1b-v",
        2,
        4,
        2,
        """
        rank 0  F0 F1 .. f0 b0 -- f1 b1 -- F2 B0 -- f2 b2 -- F3 B1 -- f3 b3 -- .. B2 -- .. .. B3 --
        rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- F2 f2 b1 -- B1 -- F3 f3 b2 -- B2 -- b3 -- B3 -- .. ..
        """,
    ),
    (
        "hanayo",
        2,
        3,
        2,
        """
        rank 0  F0 F1 F2 f0 b0 -- f1 b1 -- .. B0 -- .. .. B1 -- f2 b2 -- .. .. .. .. B2 --
        rank 1  .. F0 f0 F1 f1 .. b0 -- B0 -- b1 -- B1 -- F2 f2 .. .. .. b2 -- B2 -- .. ..
        """,
    ),
]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "virtual", "drawn"), TIMELINES)
def test_timeline_is_as_drawn(
    name: str, ranks: int, microbatches: int, virtual: int, drawn: str
) -> None:
    program = build(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    timeline = dedent(drawn).strip()
    assert draw(program) == timeline
    documentation = sys.modules[family(name).builder.__module__].__doc__
    assert documentation is not None and indent(timeline, "    ") in documentation


NAMES = [each.name for each in schedules()]
TRAINING = [name for name in NAMES if name != "forward-only"]


@st.composite
def programs(draw: st.DrawFn, names: list[str] = NAMES) -> Program:
    """A program of any family, for any numbers that it works with."""
    name = draw(st.sampled_from(names))
    virtuals = (family(name).virtuals or (1, 2, 3, 4))[:4]
    ranks, microbatches = family(name).nearest(draw(st.integers(1, 9)), draw(st.integers(1, 30)))
    return build(
        name,
        ranks=ranks,
        microbatches=microbatches,
        virtual=draw(st.sampled_from(virtuals)),
    )


def whole(program: Program) -> list[str]:
    """What every step of training does, once each: F, and B or else I and W."""
    found = []
    for act in program.actions():
        if act.op in COPIES:
            continue
        found.append(f"{act.stage} {act.op.value} {act.microbatch}")
        if act.op is Op.FULL_BACKWARD:
            found[-1:] = [f"{act.stage} {half} {act.microbatch}" for half in "IW"]
    return sorted(found)


@settings(deadline=None, max_examples=150)
@given(programs())
def test_each_microbatch_goes_once_through_each_stage_and_back(program: Program) -> None:
    ops = "F" if program.name == "forward-only" else "FIW"
    assert whole(program) == sorted(
        f"{stage} {op} {microbatch}"
        for stage in range(program.num_stages)
        for op in ops
        for microbatch in range(program.num_microbatches)
        if program.placement.passes(microbatch, stage)
    )


@settings(deadline=None, max_examples=100)
@given(programs())
def test_program_is_valid_before_and_after_lowering(program: Program) -> None:
    check(program)
    check(lower(program))


@settings(deadline=None, max_examples=150)
@given(programs())
def test_simulation_ends_and_no_rank_is_busier_than_the_makespan(program: Program) -> None:
    result = simulate(program)
    virtual = program.placement.num_model_stages // program.num_ranks
    chunks = virtual * program.num_microbatches
    work = chunks * (1 if program.name == "forward-only" else 3)
    assert result.busy == work * program.num_ranks
    assert result.makespan >= result.span >= work


@settings(deadline=None, max_examples=150)
@given(programs(TRAINING))
def test_gradients_are_summed_in_the_order_of_microbatches(program: Program) -> None:
    """One device sums them in that order: only so are sums equal to the last bit.

    Where sequences are split there is no such order on one device: their last pieces come first.
    """
    summed: dict[int, list[int | None]] = {}
    for act in program.actions():
        if act.op in (Op.FULL_BACKWARD, Op.WEIGHT_GRAD):
            summed.setdefault(act.stage, []).append(act.microbatch)
    placement, splits = program.placement, program.num_splits
    order = [
        piece
        for whole in range(0, program.num_microbatches, splits)
        for piece in reversed(range(whole, whole + splits))
    ]
    assert summed == {
        stage: [m for m in order if placement.passes(m, stage)]
        for stage in range(program.num_stages)
    }


def largest_group(ranks: int, microbatches: int) -> int:
    """The largest of ⌊M / P⌋ even groups: P where P divides M."""
    return -(-microbatches // max(1, microbatches // ranks))


def largest_asked(ranks: int, microbatches: int, group: int) -> int:
    """The largest group where ``group`` is asked for and none may be below ``ranks``."""
    for number in range(-(-microbatches // group), 0, -1):
        if number == 1 or microbatches >= number * ranks:
            even = -(-microbatches // number)
            rest = microbatches % group or group
            return max(even, group) if ranks <= rest and number * group >= microbatches else even
    raise AssertionError("one group always works")


@settings(deadline=None, max_examples=300)
@given(programs(TRAINING))
def test_memory_stays_in_its_bound(program: Program) -> None:
    ranks, microbatches = program.num_ranks, program.num_microbatches
    virtual = program.num_stages // ranks
    group = largest_group(ranks, microbatches)
    for rank, peak in enumerate(simulate(program).peak_in_flight):
        bound = {
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


@pytest.mark.parametrize("name", NAMES)
def test_every_builder_at_hundreds_of_numbers(name: str) -> None:
    """Proven with transfers, played to the end, and within what its rank can hold at all."""
    virtuals = [v for v in (1, 2, 3, 4) if (family(name).virtuals or (1, 2, 3, 4)).count(v)]
    two_ways = family(name).copies > 1  # for even numbers alone
    sizes = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17) if len(virtuals) > 2 else range(1, 27)
    played = set()
    for ranks in range(1, 17 if two_ways else 9):
        for microbatches in range(1, 65, 2) if two_ways else sizes:
            for virtual in virtuals:
                taken = (*family(name).nearest(ranks, microbatches), virtual)
                if taken in played:
                    continue
                played.add(taken)
                program = build(name, ranks=taken[0], microbatches=taken[1], virtual=virtual)
                lowered = check(lower(program))
                assert simulate(lowered).makespan == simulate(program).makespan
                assert max(peak_in_flight(program)) <= program.num_microbatches * virtual * (
                    1 + two_ways
                )
    assert len(played) >= (150 if two_ways else 200)


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


@settings(deadline=None, max_examples=100)
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
    assert program.placement.copies == each.copies
    assert program.name == each.name
    assert program.num_whole_microbatches == microbatches
    assert (program.num_splits > 1) == each.splits_sequences


@settings(deadline=None, max_examples=100)
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
    assert result.makespan == 3 * microbatches * virtual + 3 * (ranks - 1)
    largest = largest_asked(ranks, microbatches, group)
    assert result.peak_in_flight == tuple(
        min(virtual * microbatches, (virtual - 1) * largest + 2 * (ranks - rank - 1) + 1)
        for rank in range(ranks)
    )


@pytest.mark.parametrize(
    ("microbatches", "group", "works"),
    [(8, 3, "groups of 4 to 8 work"), (8, 9, "groups of 4 to 8 work"), (2, 2, "leave it out")],
)
def test_a_group_that_can_not_keep_ranks_busy_is_refused(
    microbatches: int, group: int, works: str
) -> None:
    with pytest.raises(ScheduleError, match=works):
        build("interleaved-1f1b", ranks=4, microbatches=microbatches, group=group)


def test_dualpipev_overlaps_a_forward_with_a_full_backward_in_its_steady_state() -> None:
    program = build("dualpipev", ranks=4, microbatches=20)
    for rank, steps in enumerate(program.ranks):
        blocks = [step for step in steps if isinstance(step, Overlap)]
        assert all(
            [part.op for part in block.parts] == [Op.FORWARD, Op.FULL_BACKWARD] for block in blocks
        )
        # 2 (M - 2P + r + 1) in the steady state, less the lone pair at the turn of the V, and
        # P - 1 - r in the cool-down.
        assert len(blocks) == 2 * (20 - 8 + rank + 1) - (rank == 3) + 3 - rank


def test_microbatches_are_dropped_where_a_v_is_not_full() -> None:
    few = build("zbv", ranks=3, microbatches=2)
    many = build("zbv", ranks=3, microbatches=6)
    for rank in range(3):
        kept = [act for act in many.ranks[rank] if str(act)[-1] in "01"]
        assert list(few.ranks[rank]) == kept
    assert Counter(act.op for act in few.actions())[Op.FORWARD] == 12
