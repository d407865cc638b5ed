"""Schedules that users add: by decorator, and through an entry point."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import ScheduleError
from penstock.schedule import registry
from penstock.schedule.family import Arrangement
from penstock.schedule.passes import recompute
from penstock.schedule.placement import linear
from penstock.schedule.program import Program
from penstock.schedule.text import load_csv, parse_csv, save_csv


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = {each.name for each in registry.schedules()}
    yield
    for each in registry.schedules():
        if each.name not in before:
            registry.remove(each.name)


def one_at_a_time(*, ranks: int, microbatches: int) -> Program:
    """One microbatch at a time.

    More words.
    """
    rows = (
        ",".join(f"{rank}F{m},{rank}B{m}" for m in range(microbatches)) for rank in range(ranks)
    )
    return parse_csv("\n".join(rows))


def test_it_is_built_listed_and_simulated_like_ours() -> None:
    assert penstock.schedule("One-At-A-Time")(one_at_a_time) is one_at_a_time
    assert penstock.schedule("sequential")(one_at_a_time) is one_at_a_time
    program = penstock.build("one at a time", ranks=3, microbatches=4)
    assert isinstance(program, penstock.CheckedProgram)
    assert program.name == "One-At-A-Time"
    assert penstock.simulate(program).makespan == 4 * 3 * 3
    assert penstock.build("sequential", ranks=1, microbatches=1).num_ranks == 1
    (listed,) = (each for each in penstock.schedules() if each.name == "One-At-A-Time")
    assert listed.summary == "One microbatch at a time"
    assert (listed.virtuals, listed.arrangement) == ((1,), Arrangement.LINEAR)


def test_further_arguments_of_the_function_are_its_options() -> None:
    @penstock.schedule("mine", source="nowhere")
    def mine(*, ranks: int, microbatches: int, virtual: int = 3, delay: int = 1) -> Program:
        assert delay in (1, 2)
        return penstock.build("looped-bfs", ranks=ranks, microbatches=microbatches, virtual=virtual)

    assert penstock.build("mine", ranks=2, microbatches=2).num_stages == 6
    assert penstock.build("mine", ranks=2, microbatches=2, virtual=2, delay=2).num_stages == 4
    with pytest.raises(ScheduleError, match="mine has no option 'dely'; its options are: delay"):
        penstock.build("mine", ranks=2, microbatches=2, dely=2)
    with pytest.raises(ScheduleError, match="did you mean 'mine'"):
        penstock.build("mime", ranks=2, microbatches=2)


def test_a_search_takes_none_that_recomputes() -> None:
    """It would be better than all that the search may choose from."""

    @penstock.schedule("recomputing")
    def recomputing(*, ranks: int, microbatches: int) -> Program:
        return recompute(penstock.build("1f1b", ranks=ranks, microbatches=microbatches))

    for limit, best in ((1, 72), (2, 41)):
        found = penstock.search(ranks=4, microbatches=8, memory_limit=limit, time_limit_s=0.1)
        assert found.bound <= best <= found.value
        assert penstock.Op.RECOMPUTE not in {action.op for action in found.program.actions()}


def test_it_trains_like_ours() -> None:
    import torch
    from torch import nn

    penstock.schedule("in-turn")(one_at_a_time)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    inputs, target = torch.randn(6, 4), torch.randn(6, 2)
    loss = nn.functional.mse_loss(layers(inputs), target)
    loss.backward()
    wanted = [p.grad.clone() for p in layers.parameters() if p.grad is not None]
    layers.zero_grad()
    pipe = penstock.Pipeline(
        layers, loss_fn=nn.functional.mse_loss, schedule="in-turn", ranks=2, n_microbatches=3
    )
    pipe.step(inputs, target=target)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], wanted)


def test_a_wrong_program_is_refused_when_it_is_built() -> None:
    @penstock.schedule("wrong")
    def wrong(*, ranks: int, microbatches: int) -> Program:
        return parse_csv("0F0,0B0\n1B0,1F0")

    with pytest.raises(ScheduleError, match="1B0 needs 1F0 before it"):
        penstock.build("wrong", ranks=2, microbatches=1)
    with pytest.raises(ScheduleError, match=r"wrong made a program of \(2, 1, 2, 1\) ranks, micro"):
        penstock.build("wrong", ranks=2, microbatches=2)

    @penstock.schedule("wrong")  # type: ignore[type-var]
    def text(*, ranks: int, microbatches: int) -> str:
        return "0F0"

    with pytest.raises(ScheduleError, match="wrong returned a str, expected a Program"):
        penstock.build("wrong", ranks=2, microbatches=2)


def test_names_of_ours_are_taken() -> None:
    with pytest.raises(
        ScheduleError, match="can't be called '1-F1B': give a name that Penstock has not taken"
    ):
        penstock.schedule("1-F1B")(one_at_a_time)
    with pytest.raises(ScheduleError, match="can't be called 'ScheduleGPipe'"):
        penstock.schedule("ScheduleGPipe")(one_at_a_time)
    with pytest.raises(ScheduleError, match="can't be called 'Breadth-First'"):
        penstock.schedule("Breadth-First")(one_at_a_time)


@pytest.mark.parametrize("name", ["", "-", " _ ", "Schedule", 3, None, one_at_a_time])
def test_invalid_names_are_refused(name: object) -> None:
    known = penstock.schedules()
    with pytest.raises(ScheduleError, match=r"can't be called .*as in @penstock"):
        penstock.schedule(name)  # type: ignore[arg-type]
    assert penstock.schedules() == known


def test_a_csv_file_is_a_schedule_too(tmp_path: Path) -> None:
    save_csv(one_at_a_time(ranks=2, microbatches=3), tmp_path / "mine.csv")
    program = penstock.check(load_csv(tmp_path / "mine.csv"))
    assert penstock.simulate(program).peak_in_flight == (1, 1)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[EntryPoint]]:
    """A package that adds a schedule when its module is imported, and one that is broken."""
    (tmp_path / "penstock_plugin.py").write_text(
        "import penstock\n"
        "@penstock.schedule('from-a-package')\n"
        "def made(*, ranks, microbatches):\n"
        "    return penstock.build('gpipe', ranks=ranks, microbatches=microbatches)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = [
        EntryPoint("from-a-package", "penstock_plugin:made", "penstock.schedules"),
        EntryPoint("broken", "penstock_no_such_module:made", "penstock.schedules"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: found)
    registry._discover.cache_clear()
    yield found
    registry._discover.cache_clear()


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_found_by_name_and_a_broken_one_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert penstock.build("from-a-package", ranks=2, microbatches=2).name == "from-a-package"
    names = [each.name for each in penstock.schedules()]
    assert names.count("from-a-package") == 1
    assert "schedule broken of penstock_no_such_module:made: ModuleNotFound" in caplog.text


def test_errors_of_its_function_name_the_schedule_and_keep_the_cause() -> None:
    @penstock.schedule("four")
    def four(*, ranks: int, microbatches: int) -> Program:
        if ranks != 4:
            raise ValueError("four ranks, no more")
        return one_at_a_time(ranks=ranks, microbatches=microbatches)

    message = r"four: its function failed for 3 ranks, 1 microbatch \(ValueError: four ranks,"
    with pytest.raises(ScheduleError, match=message) as raised:
        penstock.build("four", ranks=3, microbatches=1)
    assert isinstance(raised.value.__cause__, ValueError)
    assert penstock.build("four", ranks=4, microbatches=1).num_ranks == 4


def test_an_option_without_a_default_must_be_given() -> None:
    @penstock.schedule("sized")
    def sized(*, ranks: int, microbatches: int, size: int) -> Program:
        return one_at_a_time(ranks=ranks, microbatches=microbatches * size)

    with pytest.raises(ScheduleError, match=r"sized: its function failed .*missing .*'size'"):
        penstock.build("sized", ranks=2, microbatches=2)
    assert penstock.build("sized", ranks=2, microbatches=2, size=1).num_ranks == 2


def test_a_search_passes_over_schedules_that_can_not_be_built() -> None:
    @penstock.schedule("picky")
    def picky(*, ranks: int, microbatches: int) -> Program:
        raise ZeroDivisionError

    @penstock.schedule("sized")
    def sized(*, ranks: int, microbatches: int, size: int) -> Program:
        raise NotImplementedError

    @penstock.schedule("of-my-own")
    def wanting(*, ranks: int, microbatches: int, **_: object) -> Program:
        raise KeyError("size")

    found = penstock.search(penstock.Costs(), ranks=2, microbatches=2, time_limit_s=0.2)
    assert found.value == 7


def test_options_are_the_parameters_that_a_function_names() -> None:
    @penstock.schedule("passed-on")
    def passed_on(*, ranks: int, microbatches: int, splits: int = 2, **more: int) -> Program:
        more["splits"] = splits
        return penstock.build("seq1f1b", ranks=ranks, microbatches=microbatches, **more)

    assert penstock.build("passed-on", ranks=2, microbatches=2, splits=3).num_splits == 3
    with pytest.raises(ScheduleError, match="passed-on has no option 'more'; its options are: spl"):
        penstock.build("passed-on", ranks=2, microbatches=2, more=1)


@pytest.mark.parametrize("virtual", [0, -1, "x", 1.5, True])
def test_a_number_of_stages_per_rank_that_is_none_is_refused(virtual: object) -> None:
    with pytest.raises(ScheduleError, match="must be a whole number from 1 on"):
        penstock.schedule("mine", virtual=virtual)(one_at_a_time)  # type: ignore[arg-type]

    def mine(*, ranks: int, microbatches: int, virtual: object = virtual) -> Program:
        raise NotImplementedError

    with pytest.raises(ScheduleError, match="must be a whole number from 1 on"):
        penstock.schedule("mine")(mine)


def test_stages_per_rank_that_were_not_asked_for_are_refused() -> None:
    @penstock.schedule("deaf")
    def deaf(*, ranks: int, microbatches: int, virtual: int = 1) -> Program:
        return one_at_a_time(ranks=ranks, microbatches=microbatches)

    assert penstock.build("deaf", ranks=2, microbatches=2).num_stages == 2
    with pytest.raises(
        ScheduleError,
        match=r"deaf made a program of \(2, 2, 2, 1\) ranks, .* expected \(2, 2, 8, 1\)",
    ):
        penstock.build("deaf", ranks=2, microbatches=2, virtual=4)

    @penstock.schedule("two")
    def two(*, ranks: int, microbatches: int) -> Program:
        return penstock.build("zbv", ranks=ranks, microbatches=microbatches)

    with pytest.raises(
        ScheduleError, match=r"\(2, 2, 4, 1\) .* \(2, 2, 2, 1\); virtual= and arrangement="
    ):
        penstock.build("two", ranks=2, microbatches=2)


def test_two_directions_of_a_model_must_be_declared() -> None:
    def mine(*, ranks: int, microbatches: int) -> Program:
        return penstock.build("dualpipe", ranks=ranks, microbatches=microbatches)

    penstock.schedule("mine")(mine)
    with pytest.raises(ScheduleError, match=r"\(2, 4, 2, 2\) .* expected \(2, 4, 2, 1\)"):
        penstock.build("mine", ranks=2, microbatches=4)
    penstock.schedule("mine", arrangement=Arrangement.BIDIRECTIONAL)(mine)
    assert penstock.build("mine", ranks=2, microbatches=4).placement.num_directions == 2
    penstock.schedule("mine", arrangement=Arrangement.BIDIRECTIONAL)(one_at_a_time)
    with pytest.raises(ScheduleError, match=r"\(2, 4, 2, 1\) .* expected \(2, 4, 2, 2\)"):
        penstock.build("mine", ranks=2, microbatches=4)


def test_any_even_number_of_stages_per_rank_is_any() -> None:
    assert (1 << 16) in (registry.family("hanayo").virtuals or ())


def test_steps_that_are_none_are_an_error_of_the_schedule() -> None:
    @penstock.schedule("texts")
    def texts(*, ranks: int, microbatches: int) -> Program:
        steps: Any = (("0F0",),) * ranks
        return Program(
            name="x", placement=linear(ranks), num_microbatches=microbatches, ranks=steps
        )

    with pytest.raises(ScheduleError, match=r"texts: its function failed .*AttributeError"):
        penstock.build("texts", ranks=2, microbatches=2)
    penstock.search(ranks=2, microbatches=2, exact=False, time_limit_s=0.1)
