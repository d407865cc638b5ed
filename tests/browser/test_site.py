"""The site that `make docs` builds, opened from files: its pages, its search, its API reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright import sync_api

from .conftest import Tab

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A strict build: a link or a reference that leads nowhere fails it. (Not with --quiet, which
    would silence the warnings that count.)"""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def go(tab: Tab, site: Path, page: str) -> sync_api.Page:
    tab.page.goto((site / page).as_uri())
    return tab.page


def test_the_home_page_shows_the_picture_and_the_sections(site: Path, tab: Tab) -> None:
    page = go(tab, site, "index.html")
    picture = page.get_by_alt_text("1F1B above ZB-V")
    assert picture.is_visible() and picture.evaluate("image => image.naturalWidth") > 1000
    tabs = [each.strip() for each in page.locator(".md-tabs__item").all_inner_texts()]
    assert tabs == [
        "Home", "Start", "Guides", "Frameworks", "Gallery", "API", "Architecture", "Performance",
        "From torch",
    ]  # fmt: skip


def test_a_search_leads_to_an_entry_of_the_api(site: Path, tab: Tab) -> None:
    page = go(tab, site, "index.html")
    page.get_by_placeholder("Search").click()
    page.keyboard.type("clip_grad_norm")
    best = page.locator(".md-search-result__item").first
    best.locator(".md-search-result__link", has_text="clip.clip_grad_norm_").first.click()
    heading = page.locator("[id='penstock.training.clip.clip_grad_norm_']")
    sync_api.expect(heading).to_be_in_viewport()


def test_an_entry_of_the_api_has_its_parts(site: Path, tab: Tab) -> None:
    """Signature, parameters, an example as code, and links to the other entries that it names."""
    page = go(tab, site, "reference/training.html")
    entry = page.locator(".doc-class", has=page.locator("[id='penstock.Pipeline']"))
    assert "n_microbatches: int | None = None" in entry.locator(".doc-signature").first.inner_text()
    assert entry.locator("li", has_text="memory_limit").first.is_visible()
    assert ">>> pipe = Pipeline(" in entry.locator("pre").nth(1).inner_text()
    for name in ("Program", "search.engine.search"):
        assert entry.locator(f"a[href='planning.html#penstock.{name}']").first.is_visible()
    entry.locator("a[href='errors.html#penstock.PartitionError']").first.click()
    sync_api.expect(page.locator("[id='penstock.PartitionError']")).to_be_in_viewport()


def test_every_example_in_the_reference_is_code(site: Path) -> None:
    """A heading in a docstring that the reader does not know would make it a quotation."""
    pages = {path.name: path.read_text() for path in (site / "reference").glob("*.html")}
    assert [name for name, page in pages.items() if "<blockquote" in page] == []
    assert sum(page.count("&gt;&gt;&gt;") for page in pages.values()) > 20


def test_a_name_in_a_guide_leads_to_its_entry(site: Path, tab: Tab) -> None:
    page = go(tab, site, "cli.html")
    page.locator("a", has_text="penstock.Costs").first.click()
    sync_api.expect(page.locator("[id='penstock.Costs']")).to_be_in_viewport()
