"""check, render, search: what they read and write."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from torch.nn import functional as F

from penstock import Costs, Op, Pipeline, build, check, load_csv, simulate
from penstock.schedule.passes import lower, recompute
from penstock.schedule.passes import offload as move_to_host
from penstock.schedule.registry import family
from penstock.schedule.text import save_csv
from penstock.search.state import Budget
from penstock.simulate.measured import costs_from_trace, program_from_trace
from penstock.trace import Span, Trace
from penstock.view.perfetto import from_perfetto, save_perfetto
from tests.models import features, mlp

from .conftest import Command


def test_check_describes_a_valid_program(penstock: Command, tmp_path: Path) -> None:
    program = build("zbv", ranks=2, microbatches=4)
    save_csv(program, tmp_path / "mine.csv")
    output = penstock("check", str(tmp_path / "mine.csv"))
    assert output.code == 0
    assert output.out == (
        "ok mine: 2 ranks, 4 stages, 4 microbatches, 48 actions (48 computations), "
        "transfers to be inserted\n"
    )
    save_csv(lower(check(program)), tmp_path / "full.csv")
    assert "with its transfers" in penstock("check", str(tmp_path / "full.csv")).out


def test_check_lists_all_problems_with_exit_code_1(penstock: Command, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1,1B1\n")
    output = penstock("check", str(tmp_path / "mine.csv"))
    assert output.code == 1
    assert output.out.startswith("wrong mine: 2 ranks")
    assert "program 'mine' has 2 problems:" in output.out
    assert "rank 1, step 4 (1B1): 1B1 again, first done at step 3; once is enough" in output.out


def test_check_knows_no_room_for_messages(penstock: Command, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    blocked = penstock("check", str(path))
    assert blocked.code == 1
    assert "deadlock: waits for 1RECV_F1 of rank 1" in blocked.out
    path.write_text("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert penstock("check", str(path)).code == 0
    # The runtime needs a program that ends without room for messages; nothing less is proven.
    assert penstock("check", str(path), "--channels", "unbounded").code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0X0\n", "mine.csv: row 1, column 2: '0X0'"),
        ("", "mine.csv: no steps: stages 0 are computed nowhere"),
        ('0F0\n1F0,"0B0\n', "mine.csv: row 2: not CSV"),
        ("0F0,0B0\r1F0,1Q0\r", "mine.csv: row 2, column 2: '1Q0' is not an action"),
        ("0F0,999F0,0B0\n", "mine.csv: stages 1 to 998 are computed nowhere"),
    ],
)
def test_errors_of_files_name_row_and_column(
    penstock: Command, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "mine.csv").write_text(text)
    output = penstock("check", str(tmp_path / "mine.csv"))
    assert output.code == 2
    assert message in output.err
    assert output.err.startswith(f"error: {tmp_path}") and output.err.count("mine.csv") == 1
    assert penstock("check", "1f1b").code == 2


def test_render_writes_the_format_of_the_suffix(penstock: Command, tmp_path: Path) -> None:
    starts = {
        "page.html": b"<!DOCTYPE html>",
        "picture.png": b"\x89PNG",
        "picture.svg": b"<?xml",
        "trace.json": b'{"displayTimeUnit"',
    }
    for name, start in starts.items():
        path = tmp_path / "new" / name
        output = penstock("render", "zbv", "--ranks", "2", "-m", "4", "-o", str(path))
        assert (output.code, output.out) == (0, f"wrote {path}\n")
        assert path.read_bytes().lstrip().startswith(start)
    page = (tmp_path / "new" / "page.html").read_text()
    assert "zbv" in page
    assert "cdn.bokeh.org" not in page
    wrong = penstock("render", "zbv", "-o", str(tmp_path / "page.gif"))
    assert (wrong.code, "don't know how to write '.gif'; take .html" in wrong.err) == (2, True)


def test_a_program_in_a_csv_file_is_drawn_as_it_is(penstock: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    save_csv(build("zbv", ranks=2, microbatches=4), file)
    for name in ("x.html", "x.png", "x.svg", "x.json"):
        path = tmp_path / name
        output = penstock("render", str(file), "-o", str(path))
        assert (output.code, output.out) == (0, f"wrote {path}\n")
    trace = from_perfetto((tmp_path / "x.json").read_text())
    assert (trace.name, trace.num_ranks, len(trace.spans)) == ("mine", 2, 48)
    assert re.findall(r">([FIW]\d)</text>", (tmp_path / "x.svg").read_text()).count("W3") == 4
    assert "mine" in (tmp_path / "x.html").read_text()


def test_render_takes_costs(penstock: Command, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    arguments = ("render", "1f1b", "-p", "2", "-m", "2", "--forward", "3", "--latency", "1")
    assert penstock(*arguments, "-o", str(path)).code == 0
    program = build("1f1b", ranks=2, microbatches=2)
    wanted = simulate(program, Costs(forward=3, latency=1)).trace
    for drawn, span in zip(from_perfetto(path.read_text()).spans, wanted.spans, strict=True):
        assert (drawn.rank, drawn.action) == (span.rank, span.action)
        assert (drawn.start, drawn.end) == pytest.approx((span.start, span.end))
    assert wanted.makespan > simulate(program).makespan


def measured() -> Trace:
    """A step of 1F1B as if it had run: rank 1 is half as fast as rank 0."""
    spans = tuple(
        Span(rank=s.rank, action=s.action, start=s.start * 1e-3, end=s.end * 1e-3)
        for s in simulate(build("1f1b", ranks=2, microbatches=4)).trace.spans
    )
    return Trace(name="1f1b", num_ranks=2, unit="s", spans=spans)


def test_a_saved_trace_is_read_back(tmp_path: Path) -> None:
    save_perfetto(measured(), tmp_path / "trace.json")
    found = from_perfetto((tmp_path / "trace.json").read_text())
    assert (found.name, found.num_ranks, found.unit) == ("1f1b", 2, "s")
    for read, saved in zip(found.spans, measured().spans, strict=True):
        assert (read.rank, read.action) == (saved.rank, saved.action)
        assert (read.start, read.end) == pytest.approx((saved.start, saved.end))


def test_a_trace_is_compared_with_its_simulated_program(penstock: Command, tmp_path: Path) -> None:
    save_perfetto(measured(), tmp_path / "trace.json")
    page = tmp_path / "page.html"
    assert penstock("render", str(tmp_path / "trace.json"), "-o", str(page)).code == 0
    text = page.read_text()
    assert "makespan, measured | simulated" in text
    penstock("render", str(tmp_path / "trace.json"), "-o", str(tmp_path / "again.json"))
    assert from_perfetto((tmp_path / "again.json").read_text()).spans


def recorded(schedule: str) -> Trace:
    """A step that has run, on two ranks, of six microbatches."""
    virtual = family(schedule).default_virtual
    pipe = Pipeline(
        mlp(2 * virtual), loss_fn=F.mse_loss, schedule=schedule, ranks=2, virtual=virtual,
        n_microbatches=6,
    )  # fmt: skip
    inputs, target = features(12, 0)
    pipe.step(inputs, target=target)
    return pipe.trace()


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "po-h", "po-f"])
def test_a_recorded_step_is_compared_with_its_simulated_program(
    penstock: Command, tmp_path: Path, schedule: str
) -> None:
    ran = build(schedule, ranks=2, microbatches=6)
    save_perfetto(recorded(schedule), tmp_path / "trace.json")
    played = program_from_trace(from_perfetto((tmp_path / "trace.json").read_text()))
    assert played.ranks == ran.ranks
    assert simulate(played).peak_in_flight == simulate(ran).peak_in_flight
    file, page = str(tmp_path / "trace.json"), tmp_path / "page.html"
    output = penstock("render", file, "-o", str(page), "--memory", "1")
    assert output.code == 0
    assert output.err.startswith("over the memory limit of 1 on rank")
    text = page.read_text()
    assert "makespan, measured | simulated" in text
    assert ("offload to the host" in text) == schedule.startswith("po")
    assert penstock("render", file, "-o", str(tmp_path / "x.svg")).code == 0
    assert ran.name in (tmp_path / "x.svg").read_text()


def test_a_part_of_a_step_is_drawn_without_its_simulation(
    penstock: Command, tmp_path: Path
) -> None:
    part = replace(measured(), spans=measured().spans[1:])
    save_perfetto(part, tmp_path / "trace.json")
    page = tmp_path / "page.html"
    output = penstock("render", str(tmp_path / "trace.json"), "-o", str(page), "--memory", "1")
    assert (output.code, "not a whole step, so it is not simulated" in output.err) == (0, True)
    assert "measured | simulated" not in page.read_text()


def test_host_transfers_and_recomputations_become_costs() -> None:
    program = move_to_host(build("gpipe", ranks=2, microbatches=4), stages=[0])
    costs = Costs(forward=2, input_grad=3, weight_grad=1, offload=4, reload=5, recompute=6)
    found = costs_from_trace(simulate(recompute(program, stages=[1]), costs).trace, 2)
    assert found.of(Op.OFFLOAD, num_stages=2) == (4, 0)
    assert found.of(Op.RELOAD, num_stages=2) == (5, 0)
    assert found.of(Op.RECOMPUTE, num_stages=2) == (0, 6)


def test_render_warns_above_the_memory_limit(penstock: Command, tmp_path: Path) -> None:
    page, trace = str(tmp_path / "page.html"), str(tmp_path / "trace.json")
    output = penstock("render", "1f1b", "--memory", "2", "-o", page)
    assert (output.code, output.err) == (0, "over the memory limit of 2 on ranks 0 to 1\n")
    assert penstock("render", "1f1b", "--memory", "4", "-o", page).err == ""
    save_perfetto(measured(), tmp_path / "trace.json")
    output = penstock("render", trace, "--memory", "1", "-o", page)
    assert (output.code, output.err) == (0, "over the memory limit of 1 on rank 0\n")
    output = penstock("render", trace, "--forward", "2", "-o", page)
    assert (output.code, "takes no option but --memory" in output.err) == (2, True)


def test_another_json_is_no_trace(penstock: Command, tmp_path: Path) -> None:
    for text in ('{"traceEvents": []}', '{"traceEvents": 1}', "[1]", "{"):
        (tmp_path / "other.json").write_text(text)
        output = penstock("render", str(tmp_path / "other.json"), "-o", str(tmp_path / "x.png"))
        assert output.code == 2
        assert "other.json: not a trace" in output.err
    save_perfetto(measured(), tmp_path / "trace.json")
    output = penstock("simulate", str(tmp_path / "trace.json"))
    assert (output.code, "a trace, expected a schedule" in output.err) == (2, True)


def test_search_finds_proves_and_writes(penstock: Command, tmp_path: Path) -> None:
    path = tmp_path / "found.csv"
    output = penstock(
        "search", "--ranks", "2", "--microbatches", "4", "--memory", "2",
        "--time-limit", "5", "-o", str(path),
    )  # fmt: skip
    assert output.code == 0
    result = simulate(check(load_csv(path)))
    assert f"makespan {result.makespan:.0f}" in output.out
    assert max(result.peak_in_flight) <= 2
    assert f"wrote {path}" in output.out
    assert "no program of one copy of the model with 1 stage per rank is " in output.out
    found = str(tmp_path / "found.svg")
    assert penstock("search", "-p", "2", "-m", "2", "--time-limit", "1", "-o", found).code == 0
    assert "<svg" in (tmp_path / "found.svg").read_text()
    impossible = penstock("search", "--memory", "0", "--time-limit", "1")
    assert impossible.code == 2
    assert impossible.err.startswith("error: ")
    assert "--memory: search: no program meets memory_limit=0" in impossible.err
    for name in ("x.gif", "x.json"):
        assert penstock("search", "-o", name).code == 2


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work alone ends a search, however slow the machine is."""
    monkeypatch.setattr(Budget, "left_s", property(lambda self: 1e6))


@pytest.mark.usefixtures("no_clock")
def test_search_takes_a_seed_and_a_limit_in_bytes(penstock: Command, tmp_path: Path) -> None:
    arguments = (
        "search", "-p", "2", "-m", "4", "-v", "2", "--cost", "activation_bytes=100", "--forward",
        "1.1,0.8,1.3,0.9", "--time-limit", "1", "--seed", "7",
    )  # fmt: skip
    for name in ("one", "two"):
        path = str(tmp_path / f"{name}.csv")
        assert penstock(*arguments, "--memory", "350", "-o", path).code == 0
    one, two = (load_csv(tmp_path / f"{name}.csv") for name in ("one", "two"))
    assert one.ranks == two.ranks
    assert max(simulate(check(one), Costs(activation_bytes=100)).peak_bytes) <= 350
    refused = penstock(*arguments, "--memory", "99")
    assert refused.code == 2 and "no program meets memory_limit=99" in refused.err


def test_search_recomputes_and_offloads_where_that_is_allowed(penstock: Command) -> None:
    arguments = ("search", "-p", "2", "-m", "4", "-v", "2", "--memory", "1", "--time-limit", "1")
    refused = penstock(*arguments)
    assert refused.code == 2 and "or allow recompute or offload" in refused.err
    output = penstock(*arguments, "--recompute", "--cost", "recompute=0.5")
    assert output.code == 0
    assert "found by recompute, after" in output.out and "without recomputation" not in output.out
    assert (
        "--cost offload: search: offload=True, but costs say nothing of it"
        in penstock(*arguments, "--offload").err
    )
    roomy = ("search", "-p", "2", "-m", "4", "--memory", "1", "--time-limit", "1")
    assert "without recomputation or offload" in penstock(*roomy).out
    away = penstock(*roomy, "--offload", "--cost", "offload=0.1", "--cost", "reload=0.1")
    assert away.code == 0 and "without recomputation" not in away.out


def test_a_port_in_use_is_refused(penstock: Command) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        output = penstock("playground", "--port", str(port), "--no-browser")
    assert output.code == 2
    assert f"port {port} of 127.0.0.1 is not available" in output.err
