"""A schedule of the user's own, in the command: listed, simulated, compared, drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as library
from penstock.schedule import registry
from penstock.schedule.program import Program
from penstock.view.perfetto import from_perfetto

from .conftest import Command

PLUGIN = """
import penstock

@penstock.schedule("held-back")
def held_back(*, ranks, microbatches):
    return penstock.build("gpipe", ranks=ranks, microbatches=microbatches)
"""


@pytest.fixture
def mine() -> Iterator[str]:
    """The name of a schedule that is registered by the decorator."""

    @library.schedule("of-my-own")
    def of_my_own(*, ranks: int, microbatches: int) -> Program:
        """GPipe, by another name."""
        return library.build("gpipe", ranks=ranks, microbatches=microbatches)

    yield "of-my-own"
    registry.remove("of-my-own")


def test_a_registered_schedule_is_one_of_the_command(
    penstock: Command, tmp_path: Path, mine: str
) -> None:
    assert mine in penstock("schedules", "--names").out.split()
    assert "GPipe, by another name" in penstock("schedules").out
    assert json.loads(penstock("simulate", mine, "--json").out)["makespan"] == 33
    compared = {
        ln.split()[0]: ln.split()[1:]
        for ln in penstock("compare", mine, "gpipe").out.splitlines()
        if ln.strip()
    }
    assert compared[mine] == compared["gpipe"]
    path = tmp_path / "x.json"
    assert penstock("render", mine, "-p", "2", "-m", "3", "-o", str(path)).code == 0
    trace = from_perfetto(path.read_text())
    assert (trace.name, len(trace.spans)) == (mine, 2 * 2 * 3)


def test_an_option_named_like_a_cost_is_the_users_own(penstock: Command) -> None:
    given: list[tuple[bool, float, str]] = []

    @library.schedule("with-costs")
    def with_costs(
        *,
        ranks: int,
        microbatches: int,
        recompute: bool = True,
        forward: float = 7,
        latency: str = "x",
    ) -> Program:
        given.append((recompute, forward, latency))
        return library.build("gpipe", ranks=ranks, microbatches=microbatches)

    try:
        for command in ("simulate", "compare"):
            assert penstock(command, "with-costs", "--forward", "2", "--latency", "1").code == 0
        set_by_hand = ("-O", "recompute=false", "-O", "forward=3")
        assert penstock("simulate", "with-costs", *set_by_hand, "--forward", "2").code == 0
    finally:
        registry.remove("with-costs")
    assert given == [(True, 7, "x"), (True, 7, "x"), (False, 3, "x")]
    # Penstock's own schedules for given costs take the command's.
    assert json.loads(penstock("simulate", "zb-1p", "--forward", "2", "--json").out)[
        "makespan"
    ] == (
        library.simulate(
            library.build("zb-1p", ranks=4, microbatches=8, forward=2.0), library.Costs(forward=2)
        ).makespan
    )


def test_an_installed_package_s_schedule_is_one_of_the_command(tmp_path: Path) -> None:
    """Found by its metadata, as pip leaves it."""
    (tmp_path / "foo_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "foo-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: foo\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[penstock.schedules]\nheld-back = foo_plugin:held_back\n"
    )
    searched = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))

    path = tmp_path / "x.json"
    commands = (
        ["schedules", "--names"],
        ["simulate", "held-back", "--json"],
        ["render", "held-back", "-p", "2", "-m", "3", "-o", str(path)],
    )
    code = (
        "from contextlib import suppress\n"
        "from penstock.cli.app import main\n"
        f"for arguments in {commands}:\n"
        "    with suppress(SystemExit):\n"
        "        main(arguments)\n"
    )
    *names, figures, wrote = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": searched},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert "held-back" in names
    assert json.loads(figures)["makespan"] == 33
    assert wrote == f"wrote {path}"
    assert from_perfetto(path.read_text()).name == "held-back"
