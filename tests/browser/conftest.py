"""A headless Chromium, and tabs that record errors and requests.

The browser is the system's, or Playwright's own (`make browser` gets one). Where there is none
the tests are skipped, unless PENSTOCK_NEEDS_BROWSER is set: then that is an error.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright import sync_api

_NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")
_ARGUMENTS = """
    --no-sandbox --headless --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync
"""
# The position on the screen of a point of the plot.
PLACE = """([x, y]) => {
  const view = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name("timeline"))
  const at = view.canvas_view.el.getBoundingClientRect()
  return [at.x + view.frame.x_scale.compute(x), at.y + view.frame.y_scale.compute(y)]
}"""
_LOCAL = ("file:", "data:", "blob:", "http://127.0.0.1:", "ws://127.0.0.1:")


class Tab:
    """A page, with its errors and its requests to other sites."""

    def __init__(self, page: sync_api.Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.other_sites: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._on_request)
        page.on("websocket", self._on_request)

    def _on_console(self, message: sync_api.ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def _on_request(self, request: sync_api.Request | sync_api.WebSocket) -> None:
        if not request.url.startswith(_LOCAL):
            self.other_sites.append(request.url)

    def open(self, url: str) -> sync_api.Page:
        """Go there, and wait until all is drawn."""
        self.page.goto(url)
        self.page.wait_for_function(
            "window.Bokeh && Bokeh.documents.length == 1 && Bokeh.documents[0].is_idle"
        )
        return self.page

    def finish(self) -> None:
        """Check that the page raised no error and requested nothing from other sites."""
        assert self.errors == []
        assert self.other_sites == []


@pytest.fixture(scope="session")
def browser() -> Iterator[sync_api.Browser]:
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=_ARGUMENTS.split())
        except sync_api.Error as error:
            reason = f"no Chromium could be started ({error}); `make browser` gets one"
            if os.environ.get("PENSTOCK_NEEDS_BROWSER"):
                pytest.fail(reason)
            pytest.skip(reason)
        yield opened
        opened.close()


@contextmanager
def tab_of(browser: sync_api.Browser) -> Iterator[Tab]:
    """A new tab, which must end without errors."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    tab = Tab(context.new_page())
    yield tab
    context.close()
    tab.finish()


@pytest.fixture
def tab(browser: sync_api.Browser) -> Iterator[Tab]:
    with tab_of(browser) as tab:
        yield tab
