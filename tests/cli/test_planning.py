"""schedules, simulate, compare: what they say is what the library says."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Costs, build, schedules, simulate
from penstock.schedule.text import save_csv

from .conftest import Command


def test_every_schedule_is_listed_with_its_rules(
    penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    output = penstock("schedules")
    assert (output.code, output.err) == (0, "")
    for each in schedules():
        (rules,) = re.findall(rf"^ {each.name} +(.+?)   ", output.out, re.M)
        assert each.arrangement.value in rules and f"{each.virtuals_text} per rank" in rules
        assert ("per rank and direction" in rules) == (each.num_directions > 1)
        assert each.rule in rules
        for option in each.options:
            assert f"{option}=" in rules
    assert penstock("schedules", "--names").out.split() == [each.name for each in schedules()]


def test_schedules_describes_one_schedule(penstock: Command) -> None:
    output = penstock("schedules", "ZBV")
    assert output.code == 0 and "    rank 0  F0 F1 F2 f0 i0 w0" in output.out
    for each in schedules():
        assert "rank 0  " in each.doc and "Source: " in each.doc
        assert re.search(r"\bbubble", each.doc, re.I), each.name
        assert re.search(r"\b(holds?|memory)\b.*\b(activation|chunk)", each.doc, re.S), each.name
    assert "did you mean 'zbv'" in penstock("schedules", "zbvv").err


def test_simulate_prints_the_timeline_and_the_figures(penstock: Command) -> None:
    output = penstock("simulate", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert output.out == (
        "1f1b, 2 ranks, 2 stages, 2 microbatches\n"
        "\n"
        "rank 0  F0 F1 .. .. B0 -- .. B1 --\n"
        "rank 1  .. F0 B0 -- F1 B1 -- .. ..\n"
        "\n"
        "makespan 9, bubble 33.33%; span 9, bubble 33.33%; 4 messages\n"
        "peak activations per rank: 2,1\n"
    )


@pytest.mark.parametrize(
    ("terminal", "colours"),
    # Of F, I and W, shaded for two stages; and none where there are 16 colours.
    [("xterm-256color", 6), ("xterm", 0)],
)
def test_simulate_writes_in_colour_to_a_terminal(terminal: str, colours: int) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": terminal, "COLUMNS": "120"}
    for name in ("NO_COLOR", "COLORTERM", "FORCE_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "penstock", "simulate", "zbv", "-p", "2", "-m", "4"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        told = b"".join(iter(lambda: _read(ours), b"")).decode()
    os.close(ours)
    assert process.returncode == 0
    assert len(set(re.findall(r"\x1b\[38;5;\d+;48;5;\d+m", told))) == colours
    for word in ("0F0", "3I2", "2W3", "rank 1"):
        assert word in told


def _read(terminal: int) -> bytes:
    """Read from a terminal; nothing once its other end is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # so Linux says that
        return b""


def test_json_is_one_object_with_the_figures(penstock: Command) -> None:
    output = penstock(
        "simulate", "interleaved-1f1b", "--ranks", "4", "--microbatches", "8", "--virtual", "2",
        "--forward", "1", "--input-grad", "1.5", "--weight-grad", "0.5", "--latency", "0.1",
        "--option", "group=8", "--json",
    )  # fmt: skip
    program = build("interleaved-1f1b", ranks=4, microbatches=8, virtual=2, group=8)
    costs = Costs(forward=1, input_grad=1.5, weight_grad=0.5, latency=0.1)
    result = simulate(program, costs)
    assert json.loads(output.out) == {
        "makespan": result.makespan,
        "span": result.span,
        "bubble_ratio": result.bubble_ratio,
        "span_bubble_ratio": result.span_bubble_ratio,
        "peak_in_flight": list(result.peak_in_flight),
    }


def test_costs_may_differ_from_stage_to_stage(penstock: Command) -> None:
    output = penstock("simulate", "1f1b", "--ranks", "2", "--forward", "1,3", "--json")
    program = build("1f1b", ranks=2, microbatches=8)
    assert json.loads(output.out)["makespan"] == simulate(program, Costs(forward=[1, 3])).makespan


def test_other_costs_are_given_by_name(penstock: Command) -> None:
    output = penstock(
        "simulate", "1f1b", "--cost", "message-bytes=4", "--cost", "bandwidth=2",
        "--cost", "activation_bytes=10", "--cost", "transfers_overlap=false", "--json",
    )  # fmt: skip
    costs = Costs(message_bytes=4, bandwidth=2, activation_bytes=10, transfers_overlap=False)
    result = simulate(build("1f1b", ranks=4, microbatches=8), costs)
    assert json.loads(output.out)["makespan"] == result.makespan
    assert json.loads(output.out)["peak_bytes"] == [40, 30, 20, 10] == list(result.peak_bytes)
    wrong = penstock("simulate", "1f1b", "--cost", "bandwith=2")
    assert wrong.code == 2
    assert "--cost bandwith=...: expected NAME=VALUE; names are: " in wrong.err


def test_edges_have_costs_of_their_own(penstock: Command) -> None:
    output = penstock(
        "simulate", "1f1b", "--latency", "0,5,1,0", "--cost", "message-bytes=4",
        "--cost", "bandwidth=2,8,8,8", "--json",
    )  # fmt: skip
    costs = Costs(latency=[0, 5, 1, 0], message_bytes=4, bandwidth=[2, 8, 8, 8])
    result = simulate(build("1f1b", ranks=4, microbatches=8), costs)
    assert json.loads(output.out)["makespan"] == result.makespan != 33


def test_a_memory_limit_is_compared_with_the_peak(penstock: Command) -> None:
    output = penstock("simulate", "1f1b", "--memory", "2")
    assert (output.code, output.err) == (0, "over the memory limit of 2 on ranks 0 to 1\n")
    assert penstock("simulate", "1f1b", "--memory", "2", "--json").err == output.err
    assert penstock("simulate", "1f1b", "--memory", "4").err == ""


def test_compare_marks_schedules_over_the_memory_limit(penstock: Command) -> None:
    output = penstock("compare", "gpipe", "1f1b", "zb-h2", "--memory", "4")
    rows = cells(output.out)
    assert rows["gpipe"][-3:] == ["8,8,8,8", "over", "48"]
    assert rows["1f1b"][-2:] == ["4,3,2,1", "48"]
    assert output.err == (
        "gpipe: over the memory limit of 4 on ranks 0 to 3\n"
        "zb-h2: over the memory limit of 4 on ranks 0 to 3\n"
    )
    assert penstock("compare", "gpipe", "1f1b", "--memory", "8").err == ""
    # Peaks of a rank's whole part, as the table shows them: 5.5 here, from 11 of half the size.
    half = penstock("compare", "interleaved-1f1b", "--per", "rank", "--memory", "5.25")
    assert half.err == "interleaved-1f1b: over the memory limit of 5.25 on rank 0\n"
    assert penstock("compare", "interleaved-1f1b", "--per", "rank", "--memory", "5.5").err == ""
    bytes_given = ("--cost", "activation_bytes=10")
    output = penstock("compare", "1f1b", *bytes_given, "--memory", "39")
    assert output.err == "1f1b: over the memory limit of 39 on rank 0\n"
    output = penstock(
        "compare", "interleaved-1f1b", "--per", "rank", *bytes_given, "--memory", "55"
    )
    assert output.err == ""


def test_a_file_takes_nothing_that_its_program_has_already(
    penstock: Command, tmp_path: Path
) -> None:
    file = tmp_path / "mine.csv"
    save_csv(build("gpipe", ranks=2, microbatches=4), file)
    output = penstock("simulate", str(file), "--ranks", "8", "-m", "3", "--virtual", "7")
    assert (output.code, output.out) == (2, "")
    assert "takes no --ranks, --microbatches, --virtual or --option" in output.err
    assert penstock("simulate", str(file), "--ranks", "0").code == 2
    assert penstock("render", str(file), "-O", "group=4", "-o", "x.html").code == 2
    assert penstock("compare", str(file), "--ranks", "2").code == 2
    # Beside a schedule, that is the schedule's.
    rows = cells(penstock("compare", str(file), "1f1b", "--ranks", "2", "-m", "6").out)
    assert rows["1f1b"][1] == "21"


def test_a_file_with_a_program_stands_for_a_schedule(penstock: Command, tmp_path: Path) -> None:
    program = build("zbv", ranks=2, microbatches=4)
    save_csv(program, tmp_path / "mine.csv")
    output = penstock("simulate", str(tmp_path / "mine.csv"), "--json")
    assert json.loads(output.out)["makespan"] == simulate(program).makespan


def cells(out: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}


def test_compare_sets_schedules_side_by_side(penstock: Command) -> None:
    names = ("gpipe", "1f1b", "interleaved-1f1b:virtual=4", "zbv")
    output = penstock("compare", *names)
    assert output.out.startswith("The same model for all: costs are those of a rank's part of it")
    rows = cells(output.out)
    assert rows["gpipe"] == ["1", "33", "27.27%", "33", "27.27%", "8,8,8,8", "48"]
    assert rows["1f1b"][-2] == "4,3,2,1"
    assert rows["interleaved-1f1b:virtual=4"][:3] == ["4", "26.25", "8.57%"]
    assert rows["zbv"] == ["2", "25.5", "5.88%", "24", "0.00%", "4,4,4,4", "96"]
    output = penstock("compare", *names, "--per", "stage")
    assert output.out.startswith(
        "The same costs for every stage: a rank with V stages does V times"
    )
    rows = cells(output.out)
    assert rows["1f1b"][:3] == ["1", "33", "27.27%"]
    assert rows["interleaved-1f1b:virtual=4"][:3] == ["4", "105", "8.57%"]
    assert rows["zbv"] == ["2", "51", "5.88%", "48", "0.00%", "8,8,8,8", "96"]


@pytest.mark.parametrize("columns", ["120", "80", "50", "9"])
def test_numbers_never_wrap_on_narrow_terminals(
    penstock: Command, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    output = penstock("compare", "zb-h1", "gis:virtual=4", "--ranks", "8", "--microbatches", "32")
    for figures in (("103", "6.80%", "448"), ("99.5", "3.52%", "1984")):
        assert set(figures) <= set(output.out.split())


def test_a_comparison_fits_80_columns(penstock: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options stand below their schedule, and of the peaks the highest, where there is no room."""
    monkeypatch.setenv("COLUMNS", "80")
    names = ["1f1b", "zbv", "interleaved-1f1b:virtual=4", "interleaved-zb:virtual=4"]
    sizes = ["--ranks", "8", "--microbatches", "32", "--memory", "9"]
    for more in ([], ["--ranks", "64", "--microbatches", "64", "--forward", "0.00123"]):
        output = penstock("compare", *names, *sizes, *more).out
        assert max(map(len, output.splitlines())) <= 80
        assert [line.split()[0] for line in output.splitlines()[-6:]] == [
            "1f1b", "zbv", "interleaved-1f1b", ":virtual=4", "interleaved-zb", ":virtual=4",
        ]  # fmt: skip
    rows = cells(penstock("compare", *names, *sizes).out)
    assert rows["1f1b"] == ["1", "117", "17.95%", "117", "17.95%", "8", "448"]
    assert rows["interleaved-1f1b"][-3:] == ["9.75", "over", "1984"]


def test_options_follow_the_schedules_that_take_them(penstock: Command) -> None:
    rows = cells(penstock("compare", "1f1b", "interleaved-1f1b:virtual=4,group=8").out)
    program = build("interleaved-1f1b", ranks=4, microbatches=8, virtual=4, group=8)
    assert rows["1f1b"][0] == "1"
    expected = ["4", f"{simulate(program).makespan / 4:.4g}"]
    assert rows["interleaved-1f1b:virtual=4,group=8"][:2] == expected
    assert "has no option 'gruop'" in penstock("compare", "1f1b", "interleaved-1f1b:gruop=8").out


def test_one_model_is_compared_over_more_or_fewer_stages(penstock: Command) -> None:
    output = penstock(
        "compare", "1f1b", "interleaved-1f1b", "--forward", "2", "--input-grad", "2",
        "--weight-grad", "2",
    )  # fmt: skip
    rows = cells(output.out)
    assert rows["1f1b"][1] == "66"
    assert rows["interleaved-1f1b"][1] == "57"
    assert rows["interleaved-1f1b"][-2] == "5.5,4.5,3.5,2.5"
    stages = ("--forward", "1,2,3,4,5,6,7,8")
    wrong = penstock("compare", "zbv", *stages)
    assert (wrong.code, "forward is given per stage" in wrong.err) == (2, True)
    assert penstock("compare", "zbv", *stages, "--per", "stage").code == 0
    # A rank's whole part is its one stage.
    assert penstock("compare", "1f1b", "--forward", "1,2,3,4").code == 0


def test_costs_of_a_rank_are_divided_among_its_stages(penstock: Command) -> None:
    whole = ("--per", "rank", "--forward", "2", "--input-grad", "2", "--weight-grad", "2")
    copies = ("--cost", "offload=2", "--cost", "reload=2")
    assert cells(penstock("compare", "po-f", *whole, *copies).out)["po-f"][1] == "54"
    held = ("--cost", "activation_bytes=4", "--cost", "weight_grad_bytes=4")
    for schedule, limit in (("interleaved-zb", "16"), ("interleaved-zb:virtual=3", "17.34")):
        output = penstock("compare", schedule, "--per", "rank", *held, "--memory", limit)
        assert (output.code, output.err) == (0, ""), schedule
    # In activations, what is held for W is a part of one, however small one is.
    part = ("--per", "rank", "--cost", "weight_grad_bytes=1", "--memory", "4")
    assert penstock("compare", "interleaved-zb", *part).err == ""


def test_memory_is_told_where_it_differs_from_the_activations(penstock: Command) -> None:
    sizes = ("-p", "3", "-m", "6")
    peaks = "peak activations per rank: 5,5,5"
    whole = penstock("simulate", "zb-h2", *sizes).out
    part = penstock("simulate", "zb-h2", *sizes, "--cost", "weight_grad_bytes=0.25").out
    assert whole.splitlines()[-1] == peaks
    assert part.splitlines()[-1] == f"{peaks}; memory in activations: 5,3.5,2"


def test_copies_on_ranks_of_their_own_hold_less_than_a_stage_for_each(
    penstock: Command, tmp_path: Path
) -> None:
    (tmp_path / "two.csv").write_text("0F0,0B0\n1F0,1B0\n2F1,2B1\n3F1,3B1")
    rows = cells(penstock("compare", str(tmp_path / "two.csv"), "--per", "rank").out)
    # Each of four ranks has a fourth of the model for each microbatch, but the two of a copy
    # share it: its stages are twice as large.
    assert rows["two"] == ["1", "12", "50.00%", "12", "50.00%", "2,2,2,2", "4"]


def test_compare_lists_schedules_that_can_not_be_built(penstock: Command, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0B0\n1B0,1F0\n")
    output = penstock("compare", "dualpipe", "1f1b", str(tmp_path / "bad.csv"), "zbv", "-p", "3")
    assert (output.code, output.err) == (0, "")
    rows = cells(output.out)
    assert " ".join(rows["dualpipe"]).startswith(
        "--ranks: ranks=3 and microbatches=8 do not work, it"
    )
    assert "program 'bad' has 2 problems" in " ".join(rows[str(tmp_path / "bad.csv")])
    assert rows["1f1b"][1] == "30" and rows["zbv"][0] == "2"
    none = penstock("compare", "dualpipe", "chimera", "-p", "3")
    assert (none.code, none.out) == (2, "")
    assert none.err.startswith("error: --ranks: dualpipe: ranks=3")


def test_the_name_of_a_schedule_goes_before_a_file_of_that_name(
    penstock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("1f1b", "mine"):
        Path(name).write_text("0F0,0B0\n")
    assert json.loads(penstock("simulate", "1f1b", "--json").out)["makespan"] == 33
    assert cells(penstock("compare", "1f1b", "mine").out)["1f1b"][1] == "33"
    for name in ("./1f1b", "mine", str(tmp_path / "1f1b")):
        assert json.loads(penstock("simulate", name, "--json").out)["makespan"] == 3
    assert "its folder, as ./1f1b" in penstock("check", "1f1b").err
    assert penstock("check", "./1f1b").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "zvb"], "there is no schedule 'zvb'; did you mean 'zbv'?"),
        (
            ["simulate", "1f1b", "--virtual", "2"],
            "--virtual: 1f1b: virtual=2 stages per rank do not work",
        ),
        (
            ["simulate", "1f1b", "--ranks", "0"],
            "--ranks: 1f1b: ranks=0 must be a whole number from 1 on",
        ),
        (["simulate", "1f1b", "--forward", "-1"], "-1.0 is not a finite number ≥ 0"),
        (["simulate", "1f1b", "--forward", "nan"], "nan is not a finite number ≥ 0"),
        (["simulate", "1f1b", "--forward", "one"], "--forward 'one': expected a number, or"),
        (["simulate", "1f1b", "--forward", "1,2,3"], "has 3 numbers, but the program has 4"),
        (["simulate", "1f1b", "-O", "group=4"], "1f1b has no option 'group'"),
        (
            ["simulate", "interleaved-1f1b", "-O", "group=x"],
            "group='x' does not work; give a whole number from 4 to 8",
        ),
        (["simulate", "interleaved-1f1b", "-O", "group=4.5"], "give a whole number from 4 to 8"),
        (["simulate", "1f1b", "--memory", "nan"], "--memory nan: expected a number ≥ 0"),
        (["compare", "1f1b", "--memory", "-1"], "--memory -1: expected a number ≥ 0"),
        (
            ["simulate", "1f1b", "--latency", "1-2"],
            "'1-2': expected a number, or one per",
        ),
        (["simulate", "1f1b", "--latency", "1-2=5"], "'1-2=5': expected a number, or one per"),
        (["simulate", "1f1b", "--latency", "1,nan"], "nan is not a finite number ≥ 0"),
        (["simulate", "1f1b", "--cost", "reload=1", "--cost", "reload=2"], "reload is given twice"),
        (
            ["simulate", "interleaved-1f1b", "-O", "group=4", "-O", "group=8"],
            "option 'group=8': group is given twice; give it once",
        ),
        (["simulate", "interleaved-1f1b", "-O", "group"], "option 'group': expected NAME=VALUE"),
        (["simulate", "no-such-file.csv"], "no-such-file.csv: No such file or directory"),
        (["compare", "1f1b", "zvb"], "did you mean 'zbv'?"),
    ],
)
def test_errors_are_one_message_with_exit_code_2(
    penstock: Command, arguments: list[str], message: str
) -> None:
    output = penstock(*arguments)
    assert output.code == 2
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert message in output.err
    assert "Traceback" not in output.err


@pytest.mark.parametrize("arguments", [["simulat"], ["simulate"], ["simulate", "1f1b", "--rank"]])
def test_a_wrong_command_line_is_exit_code_2(penstock: Command, arguments: list[str]) -> None:
    assert penstock(*arguments).code == 2


def test_help_names_all_subcommands(penstock: Command) -> None:
    out = penstock("--help").out
    for name in ("schedules", "simulate", "compare", "check", "render", "search", "playground"):
        assert re.search(rf"\b{name}\b", out)
        assert penstock(name, "--help").code == 0


def test_planning_loads_no_torch_and_no_bokeh() -> None:
    code = (
        "import sys\n"
        "from penstock.cli.app import main\n"
        "try:\n"
        "    main(['simulate', 'zbv', '--json'])\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code\n"
        "heavy = {'torch', 'bokeh', 'matplotlib', 'ortools', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "simulate", "gpipe", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout)["makespan"] == 33
