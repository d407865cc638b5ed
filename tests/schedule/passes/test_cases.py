"""Every file under cases/: a pass by name, a program before it, the program after it.

A file is a few lines of why, then ``pass <name> [<option>=<value> ...]``, ``before`` and ``after``,
with a program in CSV under each of the last two.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from penstock.schedule import passes
from penstock.schedule.check import problems
from penstock.schedule.text import format_csv, parse_csv

CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
CASE = re.compile(
    r".+?\n\npass (?P<name>\w+)(?P<options>.*)\n\nbefore\n(?P<before>.+)\n\nafter\n(?P<after>.+)\n",
    re.DOTALL,
)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_pass_makes_the_program_after_of_the_program_before(path: Path) -> None:
    case = CASE.fullmatch(path.read_text())
    assert case is not None, f"{path.name} is not in the form of a case"
    options = dict(option.split("=") for option in case["options"].split())
    values = {name: ast.literal_eval(value) for name, value in options.items()}
    before = parse_csv(case["before"])
    kept = format_csv(before)

    after = getattr(passes, case["name"])(before, **values)

    assert format_csv(after) == case["after"] + "\n"
    assert format_csv(before) == kept
    assert (after.name, after.placement, after.num_microbatches) == (
        before.name,
        before.placement,
        before.num_microbatches,
    )
    assert problems(before) == ()
    assert problems(after) == ()


def test_every_pass_has_a_case() -> None:
    assert {path.stem for path in CASES} >= set(passes.__all__) - {
        "insert_sharding",
        "insert_transfers",
        "keep_microbatches",
    }
    assert any(path.stem.startswith("insert_transfers") for path in CASES)
    assert any(path.stem.startswith("insert_sharding") for path in CASES)
