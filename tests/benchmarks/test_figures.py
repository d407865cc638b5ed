"""Figures: verdicts, files, and the page that they are put into."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.figures import Figure, save_figures, write_page

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
FAST = Figure(group="step time", name="1F1B", over="torch", value=0.5, bound=0.92, spread=0.01)
SLOW = replace(FAST, name="ZBV", value=0.93)
FREE = Figure(group="memory", name="M = 8", over="", value=40.0, unit="MB")


def test_a_figure_holds_up_to_its_bound() -> None:
    assert FAST.holds and FREE.holds and replace(FAST, value=0.92).holds
    assert not SLOW.holds


def test_figures_are_written_as_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "figures.json"
    save_figures([FAST, SLOW, FREE], path)
    read = json.loads(path.read_text(encoding="utf-8"))["figures"]
    assert [each.pop("holds") for each in read] == [True, False, True]
    assert [Figure(**each) for each in read] == [FAST, SLOW, FREE]


def test_a_page_gets_the_figures_and_keeps_the_rest(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    write_page([FAST], page)
    write_page([FAST, SLOW, FREE], page)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines.count("| step time | 1F1B | torch | 0.500 | 0.010 | ≤ 0.92 |") == 1
    assert "| step time | ZBV | torch | **0.930** (does not hold) | 0.010 | ≤ 0.92 |" in lines
    assert "| memory | M = 8 |  | 40.000 MB |  |  |" in lines
    assert lines[0] == "# Performance"


def test_unmeasured_figures_stay_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    page = tmp_path / "performance.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    before = rows(page)
    groups = {row.split("|")[1].strip() for row in before}
    write_page([replace(FAST, group="planning")], page)
    assert len(groups) > 5
    measured = [row for row in rows(page) if row not in before]
    assert measured == ["| planning | 1F1B | torch | 0.500 | 0.010 | ≤ 0.92 |"]
    assert [r for r in rows(page) if r not in measured] == [
        r for r in before if not r.startswith("| planning |")
    ]


def rows(page: Path, version: str = "2.13.0") -> list[str]:
    """The rows of the table of a version of torch."""
    minor = ".".join(version.split(".")[:2])
    table = page.read_text(encoding="utf-8").split(f"\ntorch {minor}.")[1].split("\n\n")[1]
    return [row for row in table.splitlines() if row.startswith("| ")][1:]


def test_each_version_of_torch_has_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "performance.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    before = rows(page)
    for figure in (FAST, SLOW):
        monkeypatch.setattr(torch, "__version__", "9.1.0+cpu")
        write_page([figure], page)
    assert rows(page) == before
    assert rows(page, "9.1.0") == [
        "| step time | ZBV | torch | **0.930** (does not hold) | 0.010 | ≤ 0.92 |"
    ]


def test_a_page_without_the_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here", encoding="utf-8")
    with pytest.raises(ValueError, match="lacks the line"):
        write_page([FAST], page)
