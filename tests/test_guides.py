"""The README and the guides: their Python runs, what they print is so, their links lead on."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import penstock
from penstock.schedule import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_of(page: Path) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if python_of(p)], ids=named)
def test_the_code_on_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    known = {each.name for each in penstock.schedules()}
    exec(compile(python_of(page), named(page), "exec"), {"__name__": "page"})
    for each in penstock.schedules():
        if each.name not in known:
            registry.remove(each.name)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["schedules.md", "gallery.md", "cli.md", "sequences.md"])
def test_commands_print_the_output_in_the_guide(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command with its output, and a section with a timeline for each schedule."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / name).read_text()
    assert "$ penstock" in page or "<!-- families -->" in page
    assert generator().written(page) == page, "run .venv/bin/python docs/make.py"


def test_every_schedule_has_its_section() -> None:
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    drawn = gallery.partition("<!-- families -->")[2].partition("<!-- -->")[0]
    sections = re.findall("^### (.*)$", drawn, re.M)
    assert sections == [each.name for each in penstock.schedules()]
    page = (ROOT / "docs" / "schedules.md").read_text()
    formulas = page.partition("## Formulas")[2].partition("## ")[0]
    rows = " ".join(re.findall(r"^\| ([a-z0-9][^|]*) \|", formulas, re.M))
    assert {each.name for each in penstock.schedules()} <= set(re.split("[ ,]+", rows))
