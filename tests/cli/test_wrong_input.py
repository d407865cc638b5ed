"""Whatever is written behind the command, it ends with a message, or with what was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Command

VALUES = (
    "", "x", "-1", "nan", "inf", "-inf", "1e400", "1,2", "1,,2", ",", "1=2", "1-2", "é", "²",
    "0x10", " ", "[bold]", "\x1b[31m", "\x00", "\udcff",
)  # fmt: skip
OPTIONS = (
    "--ranks", "--microbatches", "--virtual", "--option", "--memory", "--forward", "--input-grad",
    "--weight-grad", "--latency", "--overlap", "--cost",
)  # fmt: skip
NAMED = (
    "--cost=bandwidth", "--cost=transfers_overlap", "--cost=offload", "--option=group",
    "--option=splits", "--option=ahead", "--option=forward",
)  # fmt: skip
FAMILY = {
    "group": "interleaved-1f1b", "splits": "seq1f1b", "ahead": "po-h", "forward": "zb-1p",
}  # fmt: skip


def is_one_line_error(output: Any) -> bool:
    """A message of a line, that changes nothing of the terminal."""
    lines = output.err.splitlines()
    one = len(lines) == 1 and lines[0].startswith("error: ") and lines[0].isprintable()
    return bool(output.code == 2 and one)


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_taken_or_refused_in_one_line(penstock: Command, value: str) -> None:
    for option in OPTIONS:
        output = penstock("simulate", "po-h", option, value)
        assert (output.code == 0) != is_one_line_error(output), (option, output)
    for option in NAMED:
        name = FAMILY.get(option.partition("=")[2], "1f1b")
        output = penstock("simulate", name, f"{option}={value}")
        assert (output.code == 0) != is_one_line_error(output), (option, output)
    for arguments in (
        ["simulate", value], ["compare", value], ["compare", f"1f1b:{value}"], ["check", value],
        ["render", value, "-o", "x.html"], ["render", "1f1b", "-o", value],
        ["search", "--objective", value], ["compare", "1f1b", "--per", value], [value],
    ):  # fmt: skip
        assert is_one_line_error(penstock(*arguments)), arguments


EVENT = {"ph": "X", "name": "0F0", "pid": 0, "ts": 0, "dur": 1, "args": {}}
HEADER = {"schedule": "x", "ranks": 1, "unit": "s"}


def a_trace(**event: object) -> bytes:
    document = {"otherData": HEADER, "traceEvents": [{**EVENT, **event}]}
    return json.dumps(document).encode()


FILES = {
    "binary.csv": bytes(range(256)),
    "binary.json": bytes(range(128, 256)),
    "empty.csv": b"",
    "empty.json": b"",
    "nul.csv": b"0F0\0,0B0\n",
    "escape.csv": b"0F0\x1b[31m,0B0\n",
    "lines.csv": b"\n\n\n",
    "utf16.csv": "0F0,0B0\n".encode("utf-16"),
    "huge.csv": b"99999999F0\n",
    "block.csv": b"()OVERLAP_F_B,0F0,0B0\n",
    "digits.csv": b"0F0,0B" + b"9" * 5000 + b"\n",
    "open.csv": b'0F0,"0B0\n',
    "inside.csv": b'0F0,0"B0\n',
    "behind.csv": b'"0F0" ,0B0\n',
    "long.csv": b"0F0," + b"x" * 200_000 + b"\n",
    "list.json": b"[]",
    "digits.json": a_trace(ts=0).replace(b'"ts": 0', b'"ts": ' + b"9" * 5000),
    "deep.json": b"[" * 100_000,
    "program.json": b'{"format":"penstock program 1"}',
    "event.json": a_trace(name=5),
    "rank.json": a_trace(pid=7),
    "time.json": a_trace(ts=10**400),
    "nan.json": a_trace(dur=float("nan")),
    "negative.json": a_trace(dur=-5),
    "args.json": a_trace(args=5),
    "no-pair.json": a_trace(args={"pair": 7}),
    "no-events.json": json.dumps({"otherData": HEADER, "traceEvents": []}).encode(),
    "ranks.json": json.dumps(
        {"otherData": {**HEADER, "ranks": 10**12}, "traceEvents": [EVENT]}
    ).encode(),
}


@pytest.mark.parametrize("name", [*FILES, "missing.csv", "missing.json", "folder.csv"])
def test_invalid_files_are_refused_by_name(penstock: Command, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name])
    elif name.startswith("folder"):
        path.mkdir()
    for command in (["check"], ["simulate"], ["compare"], ["render", "-o", str(path) + ".png"]):
        output = penstock(*command, str(path))
        assert is_one_line_error(output), output
        assert str(path) in output.err
        assert len(output.err) < 1000 + len(str(path))


def test_running_out_of_memory_is_reported(
    penstock: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("penstock.cli.programs.load_program", out_of_memory)
    output = penstock("simulate", "1f1b")
    assert is_one_line_error(output)
    assert "take fewer ranks or microbatches" in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulat"], "No such command 'simulat'"),
        (["simulate"], "Missing argument 'schedule'"),
        (["simulate", "1f1b", "--rank"], "No such option: --rank"),
        (
            ["simulate", "1f1b", "--input-grad", "-1"],
            "--input-grad: Costs(input_grad=...): -1.0 is not a finite",
        ),
        (
            ["simulate", "1f1b", "--cost", "reload=1,2"],
            "--cost reload: Costs(reload=...) has 2 numbers",
        ),
        (
            ["simulate", "1f1b", "--cost", "transfers-overlap=2"],
            "--cost transfers_overlap: Costs(transfers_overlap=...): 2 is not True or False",
        ),
        (["simulate", "po-h", "-O", "ahead=1.5"], "expected a whole number of computations"),
        (["compare", "1f1b", "gpipe", "--virtual", "4"], "No such option: --virtual"),
        (["compare", "1f1b:"], "option '': expected NAME=VALUE"),
        (["compare", "zbv:virtual=abc"], "--virtual: zbv: virtual='abc' must be a whole number"),
        (["compare", "zbv:virtual=-1"], "--virtual: zbv: virtual=-1 must be a whole number"),
        (["split", ":model", "--stages", "2"], ":model: Empty module name"),
        (["search", "--option", "group=4"], "No such option: --option"),
        (["simulate", "1f1b", "-O", "ranks=3"], "1f1b has no option 'ranks'; it has none"),
        (["compare", "1f1b:microbatches=3"], "1f1b has no option 'microbatches'"),
        (["compare", "1f1b", "zbv", "-O", "group=4"], "No such option: -O"),
        (["compare", "1f1b:name=x"], "1f1b has no option 'name'; it has none"),
        (["compare", "gis:costs=3"], "gis has no option 'costs'; its options are: group"),
        (
            ["search", "--time-limit", "-1"],
            "--time-limit: search: time_limit_s=-1.0 must be a finite number above 0",
        ),
        (["search", "--ranks", "0"], "--ranks: search: ranks=0 must be a whole number from 1 on"),
        (
            ["search", "--forward", "1,2,3"],
            "share evenly; pass placements, or costs for a multiple of the ranks",
        ),
        (
            ["simulate", "chimera", "-p", "3"],
            "--ranks: chimera: ranks=3 and microbatches=8 do not work, it",
        ),
        (
            ["simulate", "1f1b", "--forward", "1e308", "--json"],
            "--forward: Costs(forward=...): 1e+308 is out of range",
        ),
        (
            ["search", "--latency", "1e308"],
            "--latency: Costs(latency=...): 1e+308 is out of range",
        ),
        (
            ["simulate", "1f1b", "--cost", "bandwidth=1e-320"],
            "--cost bandwidth: Costs(bandwidth=...): 9.99989e-321 is out of range",
        ),
    ],
)
def test_messages_name_the_flags(penstock: Command, arguments: list[str], message: str) -> None:
    output = penstock(*arguments)
    assert is_one_line_error(output)
    assert message in output.err


def test_endings_are_understood_in_capitals(penstock: Command, tmp_path: Path) -> None:
    assert penstock("render", "1f1b", "-o", str(tmp_path / "X.SVG")).code == 0
    assert (tmp_path / "X.SVG").read_bytes().startswith(b"<?xml")
