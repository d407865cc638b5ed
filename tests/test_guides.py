"""The README and the guides: their Python runs, what they print is so, their links lead on."""

from __future__ import annotations

import importlib.util
import logging.handlers
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

import penstock
from penstock.schedule import registry
from tests.processes import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


def run_quietly(rank: int, num_ranks: int, code: str) -> list[str]:
    """What a script logs on this rank."""
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("penstock").addHandler(told)
    torch.manual_seed(rank)  # a process of its own begins anywhere
    exec(compile(code, "train.py", "exec"), {"__name__": "page"})
    return [record.getMessage() for record in told.buffer if record.levelno > logging.INFO]


def script_under(heading: str) -> str:
    section = PAGES[0].read_text().partition(f"## {heading}\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_first_script_of_the_readme_runs_quietly_on_every_rank() -> None:
    for outcome in run_ranks(run_quietly, 2, script_under("A first script")):
        assert outcome.result() == []


@pytest.mark.parametrize("heading", ["A first script", "Any model"])
def test_scripts_of_the_readme_draw_the_same_in_every_process(heading: str) -> None:
    """Each alone, not after the page's other scripts."""
    drawn = []
    for start in (1, 2):
        torch.manual_seed(start)
        names: dict[str, Any] = {"__name__": "page"}
        exec(compile(script_under(heading), "train.py", "exec"), names)
        drawn.append([names[n] for n in ("inputs", "labels", "ids") if n in names])
        drawn[-1].append(names["loss"])
    assert len(drawn[0]) > 1
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))


def test_the_plan_of_the_readme_is_given_with_an_example(tmp_path: Path) -> None:
    """Without one, nothing says that the model computes its loss."""
    assert 'Pipeline(model, split="plan.toml", example=microbatch)' in PAGES[0].read_text()
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=3, n_head=2)
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(64, (8, 8))
    microbatch, path = {"input_ids": ids[:1], "labels": ids[:1]}, tmp_path / "plan.toml"
    penstock.Plan(
        stages=(
            ("transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"),
            ("transformer.h.1", "transformer.h.2", "transformer.ln_f", "lm_head"),
        )
    ).save(path)
    without = penstock.Pipeline(model, split=str(path))
    with pytest.raises(penstock.StageError, match=r"there is no loss.* for the example="):
        without.step(input_ids=ids, labels=ids)
    pipe = penstock.Pipeline(model, split=str(path), example=microbatch)
    assert pipe.step(input_ids=ids, labels=ids) > 0


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


def test_every_public_name_has_its_entry_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    entries = re.findall(r"^::: penstock\.(?:\w+\.)*(\w+)$", pages, re.M)
    assert set(penstock.__all__) <= set(entries)
    assert len(entries) == len(set(entries))


def test_the_state_of_cuda_stands_in_the_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:20]
    assert "The CUDA path has not run on a device yet." in first_screen
