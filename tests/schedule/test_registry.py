"""Names, and what is said of numbers that don't work."""

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.family import Family
from penstock.schedule.registry import build, choose_sizes, family, schedules


@pytest.mark.parametrize("each", schedules(), ids=lambda each: each.name)
def test_case_and_separators_do_not_count(each: Family) -> None:
    for name in (each.name, *each.aliases):
        for written in (name.upper(), name.replace("-", "_"), name.replace("-", " ").title()):
            assert family(written) is each


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("_ScheduleForwardOnly", "forward-only"),
        ("ScheduleForwardOnly", "forward-only"),
        ("ScheduleGPipe", "gpipe"),
        ("GPipe", "gpipe"),
        ("Schedule1F1B", "1f1b"),
        ("1F1B", "1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved-1f1b"),
        ("Interleaved1F1B", "interleaved-1f1b"),
        ("ScheduleLoopedBFS", "looped-bfs"),
        ("ScheduleInterleavedZeroBubble", "interleaved-zb"),
        ("ScheduleZBVZeroBubble", "zbv"),
        ("ScheduleDualPipeV", "dualpipev"),
    ],
)
def test_class_names_of_torch_are_understood(theirs: str, ours: str) -> None:
    assert family(theirs).name == ours


def test_no_two_families_share_a_name() -> None:
    names = [name for each in schedules() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


def test_an_unknown_name_gets_the_nearest_as_a_hint() -> None:
    with pytest.raises(ScheduleError, match=r"no schedule 'intrleaved'; did you mean 'interleaved"):
        build("intrleaved", ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match=r"no schedule 'q'; the schedules are: forward-only,"):
        build("q", ranks=2, microbatches=2)


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", True, None])
@pytest.mark.parametrize("what", ["ranks", "microbatches"])
def test_numbers_must_be_whole_and_positive(what: str, wrong: object) -> None:
    numbers: dict[str, object] = {"ranks": 2, "microbatches": 2, what: wrong}
    with pytest.raises(ScheduleError, match=f"{what}={wrong!r} must be a whole number from 1 on"):
        build("gpipe", **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrong", "works"),
    [("gpipe", 2, "1 does"), ("1f1b", 3, "1 does"), ("zbv", 1, "2 does"), ("dualpipev", 4, "2 d")],
)
def test_stages_per_rank_that_do_not_work_are_refused(name: str, wrong: int, works: str) -> None:
    with pytest.raises(
        ScheduleError, match=f"virtual={wrong} stages per rank do not work; {works}"
    ):
        build(name, ranks=2, microbatches=4, virtual=wrong)
    with pytest.raises(ScheduleError, match="virtual=0 must be"):
        build(name, ranks=2, microbatches=4, virtual=0)


@pytest.mark.parametrize("name", [None, 4, build])
def test_only_a_name_names_a_schedule(name: object) -> None:
    with pytest.raises(ScheduleError, match="must be a string, not"):
        build(name, ranks=2, microbatches=4)  # type: ignore[arg-type]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ScheduleError, match="gpipe has no option 'group'; it has none"):
        build("gpipe", ranks=2, microbatches=4, group=2)
    with pytest.raises(ScheduleError, match="no option 'groups'; its options are: group"):
        build("interleaved-1f1b", ranks=2, microbatches=4, groups=2)


def test_defaults_are_one_stage_per_rank_where_linear_and_two_elsewhere() -> None:
    stages = {each.name: build(each.name, ranks=4, microbatches=8) for each in schedules()}
    assert {name: program.num_stages // 4 for name, program in stages.items()} == {
        "forward-only": 1,
        "gpipe": 1,
        "1f1b": 1,
        "eager-1f1b": 1,
        "seq1f1b": 1,
        "interleaved-1f1b": 2,
        "looped-bfs": 2,
        "zb-h1": 1,
        "zb-h2": 1,
        "zb-1p": 1,
        "zb-2p": 1,
        "interleaved-zb": 2,
        "gis": 2,
        "gis-h": 2,
        "po-h": 2,
        "po-f": 2,
        "zbv": 2,
        "v-zb": 2,
        "v-half": 2,
        "v-min": 2,
        "1f1b-v": 2,
        "hanayo": 2,
        "dualpipev": 2,
        # One of each direction.
        "dualpipe": 2,
        "chimera": 2,
    }


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "near"),
    [
        ("dualpipe", 3, 8, "ranks=4 and microbatches=8"),
        ("dualpipe", 4, 7, "ranks=4 and microbatches=8"),
        ("dualpipe", 4, 6, "ranks=4 and microbatches=8"),
        ("dualpipe", 1, 9, "ranks=2 and microbatches=10"),
        ("chimera", 5, 3, "ranks=6 and microbatches=3"),
        ("chimera", 2, 1, "ranks=2 and microbatches=2"),
    ],
)
def test_numbers_that_do_not_work_get_the_nearest_that_do(
    name: str, ranks: int, microbatches: int, near: str
) -> None:
    with pytest.raises(ScheduleError, match=rf"it takes even P.*; the nearest that do are {near}$"):
        build(name, ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize(
    ("name", "numbers", "said"),
    [
        ("seq1f1b", {"splits": 1}, r"splits=1 does not work; give a whole number from 2 on"),
        ("seq1f1b", {"splits": 2.0}, r"splits=2.0 does not work; give a whole number from 2 on"),
        ("gis", {"group": 3}, r"group=3 does not work; give a whole number from 4 on"),
        ("gis-h", {"group": 0}, r"group=0 does not work; give a whole number from 4 on"),
        ("gis", {"group": 4.0}, r"group=4.0 does not work"),
        ("hanayo", {"virtual": 3}, r"virtual=3 .*; any even number does, and"),
        ("hanayo", {"virtual": 1}, r"virtual=1 .*; any even number does, and"),
        ("zb-1p", {"forward": -1}, r"forward=-1 must be a finite number from 0 on"),
        ("zb-2p", {"weight_grad": float("nan")}, r"weight_grad=nan must be a finite number"),
        ("zb-2p", {"input_grad": [1, 2]}, r"input_grad has 2 numbers for 8 stages; give one"),
        ("zb-1p", {"forward": ["1"] * 8}, r"forward='1' must be a finite number"),
        ("zb-1p", {"forward": "1,2"}, r"forward='1,2' must be a finite number"),
        ("v-min", {"virtual": 4}, r"virtual=4 stages per rank do not work; 2 does"),
    ],
)
def test_options_that_do_not_work_are_refused(
    name: str, numbers: dict[str, object], said: str
) -> None:
    with pytest.raises(ScheduleError, match=rf"{name}.*: {said}"):
        build(name, ranks=8, microbatches=16, **numbers)  # type: ignore[arg-type]


def test_hanayo_goes_down_and_up_in_waves() -> None:
    program = build("hanayo", ranks=2, microbatches=4, virtual=6)
    assert program.placement.stages_of(0) == (0, 3, 4, 7, 8, 11)


def test_every_option_is_explained() -> None:
    for each in schedules():
        assert all(meaning for meaning in each.options.values()), each.name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("1f1b", {"ranks": 10**30, "microbatches": 2}),
        ("1f1b", {"ranks": 10**400, "microbatches": 1}),
        ("gpipe", {"ranks": 10**4, "microbatches": 10**5}),
        ("zbv", {"ranks": 10**4, "microbatches": 10**4}),
        ("hanayo", {"ranks": 4, "microbatches": 4, "virtual": 2 * 10**7}),
        ("seq1f1b", {"ranks": 4, "microbatches": 10**6, "splits": 10**6}),
    ],
)
def test_more_than_a_machine_holds_is_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(
        ScheduleError, match="forwards, more than a machine holds; at most 100000000"
    ):
        build(name, **sizes)


def test_sizes_follow_from_those_given() -> None:
    assert choose_sizes("x", default_virtual=2, num_stages=8, ranks=None, virtual=None) == (4, 2)
    assert choose_sizes("x", default_virtual=2, num_stages=8, ranks=8, virtual=None) == (8, 1)
    assert choose_sizes("x", default_virtual=2, num_stages=None, ranks=3, virtual=None) == (3, 2)
    with pytest.raises(ScheduleError, match="4 stages, but x on 4 ranks with 0 per rank needs 0"):
        choose_sizes("x", default_virtual=2, num_stages=4, ranks=None, virtual=0)
    with pytest.raises(ScheduleError, match="say on how many ranks to run"):
        choose_sizes("x", default_virtual=2, num_stages=None, ranks=None, virtual=None)
