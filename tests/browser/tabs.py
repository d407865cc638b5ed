"""A headless Chromium, tabs that record errors and requests, and a playground to open in one.

The browser is the system's, or Playwright's own (`make browser` gets one).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
# Sets a slider as its handle would, and resolves when the browser has drawn what came of it.
SET = """([name, value, drawn, property]) => new Promise(done => {
  const model = (name) => Bokeh.documents[0].get_model_by_name(name)
  const began = performance.now()
  model(drawn).properties[property].change.connect(() =>
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - began), 0)))
  model(name).value = value
})"""
TIMELINE, COMPARISON = ["timeline boxes", "data"], ["comparison", "text"]
COMPARE = "names => { Bokeh.documents[0].get_model_by_name('compared').value = names }"


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


@contextmanager
def chromium() -> Iterator[sync_api.Browser]:
    """A browser.

    Raises:
        sync_api.Error: none could be started.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=_ARGUMENTS.split())
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


@contextmanager
def playground() -> Iterator[str]:
    """The address of a playground in a process of its own, as users start it."""
    command = [sys.executable, "-m", "penstock", "playground", "--port", "0", "--no-browser"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"},
    )
    assert process.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    assert found
    yield found[0]
    process.terminate()
    process.wait(timeout=20)
    process.stdout.close()
