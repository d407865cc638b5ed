"""Draws the pictures of the guides: `.venv/bin/python -m docs.images.make`. Needs a Chromium."""

from __future__ import annotations

import io
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console
from torch import nn

from penstock import Costs, Pipeline, build, simulate
from penstock.cli.output import figures_text, peaks_text
from penstock.simulate.measured import costs_from_trace, program_from_trace
from penstock.view.page import save_page
from penstock.view.perfetto import from_perfetto, to_perfetto
from penstock.view.picture import draw
from penstock.view.terminal import timeline
from tests.processes import run_ranks

HERE = Path(__file__).parent
RANKS, MICROBATCHES = 4, 8


def timelines() -> None:
    """1F1B above ZB-V. A stage of ZB-V is half as long: each rank holds two."""
    one = simulate(
        build("1f1b", ranks=4, microbatches=8), Costs(forward=2, input_grad=2, weight_grad=2)
    )
    two = simulate(build("zbv", ranks=4, microbatches=8), Costs())
    titles = [
        f"{name}: 4 ranks, 8 microbatches, time {run.makespan:.0f}, bubble {run.bubble_ratio:.1%}"
        for name, run in (("1F1B", one), ("ZB-V, two stages per rank", two))
    ]
    draw([one.trace, two.trace], HERE / "timelines.png", titles=titles)


def pairs() -> None:
    """Overlapped pairs, and offloads beside the computations."""
    one = simulate(build("dualpipev", ranks=4, microbatches=8))
    draw(one.trace, HERE / "pairs.png", width=12)
    two = simulate(build("po-f", ranks=4, microbatches=4), Costs(offload=0.8, reload=0.8))
    draw(two.trace, HERE / "offload.png", width=12)


def terminal(browser: Browser) -> None:
    """The output of ``penstock simulate``, in colour."""
    console = Console(
        file=io.StringIO(), record=True, width=96, force_terminal=True, color_system="truecolor"
    )
    result = simulate(build("zb-h1", ranks=6, microbatches=8))
    command = "$ penstock simulate zb-h1 --ranks 6 --microbatches 8"
    console.print(f"[bold]{command}[/]\n", highlight=False)
    console.print(timeline(result.trace, width=96), end="")
    console.print(f"\n{figures_text(result)}\n{peaks_text(result)}", highlight=False)
    with page_of(browser, width=1200, height=400) as page:
        page.set_content(f"<body style='margin:0'>{console.export_svg(title='penstock')}</body>")
        page.locator("svg").first.screenshot(path=HERE / "terminal.png", omit_background=True)


class Work(nn.Module):
    """A layer that takes as long as a device would: its rank sleeps meanwhile."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.forward_s, self.backward_s = forward_s, backward_s
        self.register_full_backward_hook(lambda *_: time.sleep(self.backward_s))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_s)
        return self.linear(x)


def measured_step(rank: int, num_ranks: int) -> str:
    """A real step over processes, as text: the quickest, where nothing else was at work."""
    layers = [Work(0.012 + 0.004 * (i == 2), 0.024) for i in range(num_ranks)]
    pipe = Pipeline(
        nn.Sequential(*layers),
        loss_fn=nn.functional.mse_loss,
        schedule="1f1b",
        n_microbatches=MICROBATCHES,
        split=[1] * num_ranks,
    )
    batch = torch.randn(4 * MICROBATCHES, 8)
    traces = []
    for _ in range(10):
        pipe.step(batch, target=batch)
        traces.append(pipe.trace())
    return to_perfetto(min(traces, key=lambda trace: trace.makespan))


def pages(browser: Browser) -> None:
    """The page: small with the critical path, large, and a measured step beside a simulated."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.html")
        save_page(simulate(build("zb-h1", ranks=4, microbatches=12), Costs(latency=0.2)), path)
        with page_of(browser, width=1280, height=560) as page:
            show(page, path.as_uri())
            page.get_by_text("critical path", exact=True).click()
            page.wait_for_timeout(300)
            point(page, 11.4, 1.3)
            page.screenshot(path=HERE / "page.png")
        save_page(simulate(build("interleaved-1f1b", ranks=64, microbatches=128)), path)
        with page_of(browser, width=1280, height=800, scale=1) as page:
            show(page, path.as_uri())
            page.screenshot(path=HERE / "page-64.png")
        trace = from_perfetto(run_ranks(measured_step, RANKS)[0].result())
        program = program_from_trace(trace)
        save_page(trace, path, beside=simulate(program, costs_from_trace(trace, RANKS)))
        with page_of(browser, width=1280, height=900) as page:
            show(page, path.as_uri())
            point(page, 200, 1.3)
            page.screenshot(path=HERE / "beside.png")


def playground(browser: Browser) -> None:
    """The playground, with a few sliders moved."""
    import asyncio

    from penstock.view.playground import serve

    found: list[str] = []

    def run() -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        serve(browser=False, ready=found.append)

    threading.Thread(target=run, daemon=True).start()
    while not found:
        time.sleep(0.05)
    with page_of(browser, width=1280, height=800) as page:
        show(page, found[0])
        page.get_by_label("schedule", exact=True).select_option("zbv")
        for name, value in (("ranks", 6), ("microbatches", 9), ("latency", 0.15), ("memory", 8)):
            page.evaluate(
                "([name, value]) => { Bokeh.documents[0].get_model_by_name(name).value = value }",
                [name, value],
            )
        page.wait_for_timeout(2500)
        page.screenshot(path=HERE / "playground.png")


@contextmanager
def page_of(browser: Browser, *, width: int, height: int, scale: float = 1.5) -> Iterator[Page]:
    context = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=scale
    )
    yield context.new_page()
    context.close()


def show(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_function(
        "window.Bokeh && Bokeh.documents.length == 1 && Bokeh.documents[0].is_idle"
    )
    page.wait_for_timeout(500)


def point(page: Page, x: float, y: float) -> None:
    """Put the mouse on a point of the timeline."""
    left, top = page.evaluate(
        """([x, y]) => {
          const view = Bokeh.index.find_one(Bokeh.documents[0].get_model_by_name("timeline"))
          const at = view.canvas_view.el.getBoundingClientRect()
          return [at.x + view.frame.x_scale.compute(x), at.y + view.frame.y_scale.compute(y)]
        }""",
        [x, y],
    )
    page.mouse.move(left - 2, top)
    page.mouse.move(left, top)
    page.wait_for_timeout(400)


if __name__ == "__main__":
    timelines()
    pairs()
    names = ("chromium", "google-chrome", "google-chrome-stable")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=next(filter(None, map(shutil.which, names)), None),
            args=["--no-sandbox", "--headless", "--disable-gpu"],
        )
        terminal(chromium)
        pages(chromium)
        playground(chromium)
        chromium.close()
