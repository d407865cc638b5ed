"""The page in a browser: what is drawn, what the mouse shows, what buttons do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright import sync_api

from penstock import Costs, build, simulate
from penstock.schedule.passes import recompute
from penstock.simulate.simulation import Simulation
from penstock.trace import Span, Trace
from penstock.view.page import save_page

from .conftest import PLACE, Tab, tab_of

MODEL = "(name) => Bokeh.documents[0].get_model_by_name(name)"
AXIS = f"() => {{ const r = ({MODEL})('timeline').x_range; return [r.start, r.end] }}"


def step(name: str = "zbv", *, ranks: int = 4, microbatches: int = 8) -> Simulation:
    return simulate(build(name, ranks=ranks, microbatches=microbatches))


def hover(tab: Tab, x: float, y: float, *texts: str) -> None:
    """Move to a point of the plot, and wait for a tooltip with these texts."""
    left, top = tab.page.evaluate(PLACE, [x, y])
    tab.page.mouse.move(left - 3, top)
    tab.page.mouse.move(left, top)
    for text in texts:
        tab.page.locator(".tooltip", has_text=text).wait_for(timeout=5000)


@pytest.fixture(scope="module")
def tab_1f1b(browser: sync_api.Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """The page of 1F1B, opened once."""
    path = tmp_path_factory.mktemp("pages") / "page.html"
    save_page(step("1f1b"), path)
    with tab_of(browser) as tab:
        tab.open(path.as_uri())
        yield tab


def test_the_tooltip_shows_an_action_and_its_cause(tab_1f1b: Tab) -> None:
    tab = tab_1f1b
    hover(
        tab, 10.5, 0.3, "0B0 backward", "rank 0 · stage 0 · microbatch 0",
        "start 10 · end 12 · lasts 2", "waited for 1B0 of rank 1, idle for 6",
    )  # fmt: skip
    hover(tab, 1.5, 0.3, "0F1 forward", "waited for its rank, busy with 0F0")
    hover(tab, 0.5, 0.3, "0F0 forward", "waited for nothing")
    for word in ("makespan", "33", "27.27%", "forward", "idle", "memory held"):
        assert tab.page.get_by_text(word, exact=True).first.is_visible()


def test_a_button_shows_the_critical_path(tab_1f1b: Tab) -> None:
    page = tab_1f1b.page
    seen = f"() => ({MODEL})('timeline path').visible"
    assert page.evaluate(seen) is False
    before = page.screenshot()
    page.get_by_text("critical path", exact=True).click()
    assert page.evaluate(seen) is True
    assert page.screenshot() != before
    page.get_by_text("critical path", exact=True).click()
    assert page.evaluate(seen) is False


def test_the_wheel_zooms_into_time(tab_1f1b: Tab) -> None:
    page = tab_1f1b.page
    x, y = page.evaluate(PLACE, [25, 0.3])
    page.mouse.move(x, y)
    page.keyboard.down("Control")
    for _ in range(3):
        page.mouse.wheel(0, -300)
        page.wait_for_timeout(50)
    page.keyboard.up("Control")
    start, end = page.evaluate(AXIS)
    assert 0 < start < 25 < end < 33
    hover(tab_1f1b, 25.2, 0.3, "rank 0")


def test_64_ranks_fit_into_a_window_and_the_wheel_scrolls_a_longer_page(
    tab: Tab, tmp_path: Path
) -> None:
    for ranks, height in ((64, 800), (128, 600)):
        tab.page.set_viewport_size({"width": 1280, "height": height})
        save_page(step("1f1b", ranks=ranks, microbatches=8), tmp_path / "page.html")
        page = tab.open((tmp_path / "page.html").as_uri())
        x, top = page.evaluate(PLACE, [5, 0])
        # Ticks and the title of the time axis stand above the lanes.
        assert 240 < top < 300
        foot = page.evaluate(PLACE, [5, ranks])[1]
        assert (foot < height) == (ranks == 64)
    before = page.evaluate(AXIS)
    page.mouse.move(x, top + 200)
    page.mouse.wheel(0, 200)
    page.wait_for_function("window.scrollY == 200")
    assert page.evaluate(AXIS) == before


def test_labels_appear_in_wide_boxes(tab: Tab, tmp_path: Path) -> None:
    save_page(step("1f1b", ranks=8, microbatches=128), tmp_path / "page.html")
    page = tab.open((tmp_path / "page.html").as_uri())
    labels = f"() => ({MODEL})('timeline labels').data.x.length"
    assert page.evaluate(labels) == 0
    page.evaluate(f"() => {{ const r = ({MODEL})('timeline').x_range; r.end = 30 }}")
    page.wait_for_function(f"({labels})() > 40")


def test_labels_stay_within_their_boxes(tab: Tab, tmp_path: Path) -> None:
    save_page(simulate(recompute(build("1f1b", ranks=2, microbatches=4))), tmp_path / "page.html")
    page = tab.open((tmp_path / "page.html").as_uri())
    shown = page.evaluate(f"() => ({MODEL})('timeline labels').data.text")
    assert sorted(shown) == sorted(2 * [f"{letter}{m}" for letter in "FRB" for m in range(4)])


def test_a_large_page_opens_and_stays_usable(tab: Tab, tmp_path: Path) -> None:
    save_page(step("zbv", ranks=64, microbatches=128), tmp_path / "page.html")
    page = tab.open((tmp_path / "page.html").as_uri())
    assert page.evaluate(f"() => ({MODEL})('timeline boxes').data.left.length") == 64 * 128 * 6
    hover(tab, 0.5, 0.3, "0F0 forward")
    names = page.evaluate(
        f"() => [...({MODEL})('timeline').left[0].major_label_overrides.values()]"
    )
    assert "rank 63" in names
    # From one move of the axis until it is drawn.
    taken = page.evaluate(
        f"""async () => {{
          const plot = ({MODEL})('timeline')
          const began = performance.now()
          plot.x_range.setv({{start: 100, end: 200}})
          await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
          return performance.now() - began
        }}"""
    )
    assert taken < 3000


def measured(result: Simulation, *, slower: float) -> Trace:
    """As if the step had been run, in seconds, each action slower than planned."""
    spans = tuple(
        Span(rank=s.rank, action=s.action, start=s.start * slower, end=s.end * slower)
        for s in result.trace.spans
    )
    return Trace(name="1f1b", num_ranks=4, unit="s", spans=spans)


def test_a_measured_step_is_drawn_above_the_simulated_one(tab: Tab, tmp_path: Path) -> None:
    planned = simulate(
        build("1f1b", ranks=4, microbatches=8),
        Costs(forward=0.001, input_grad=0.001, weight_grad=0.001),
    )
    save_page(measured(planned, slower=1.5), tmp_path / "page.html", beside=planned)
    page = tab.open((tmp_path / "page.html").as_uri())
    hover(tab, 15.5, 0.3, "0B0 backward", "start 15 · end 18 · lasts 3")
    for words in ("makespan, measured | simulated", "49.5 ms | 33 ms", "1.500"):
        assert page.get_by_text(words, exact=True).first.is_visible()
    simulated = page.evaluate(f"() => Math.max(...({MODEL})('beside boxes').data.right)")
    assert (page.evaluate(AXIS)[1], simulated) == pytest.approx((49.5 * 1.005, 33))


def test_pairs_are_framed_and_boxes_bear_letters(tab: Tab, tmp_path: Path) -> None:
    result = step("dualpipev", ranks=2, microbatches=4)
    save_page(result, tmp_path / "page.html")
    page = tab.open((tmp_path / "page.html").as_uri())
    assert page.get_by_text("overlapped pair", exact=True).is_visible()
    frames = f"() => ({MODEL})('timeline frame').data_source.data.left.length"
    assert page.evaluate(frames) == len(result.trace.overlapped_pairs)
    shown = page.evaluate(f"() => ({MODEL})('timeline labels').data.text")
    assert {"F0", "B1", "I2", "W2"} <= set(shown)
    hover(tab, 7.5, 0.3, "0F3 forward", "paired with 3B1")
    page.evaluate(
        f"() => {{ const r = ({MODEL})('timeline').x_range; r.bounds = null; r.end = 90 }}"
    )
    page.wait_for_function(f"() => ({MODEL})('timeline labels').data.text.includes('0')")


def test_sequence_chunks_are_no_microbatches(tmp_path: Path) -> None:
    save_page(step("seq1f1b"), tmp_path / "page.html")
    assert "4 ranks, 4 stages, 8 microbatches" in (tmp_path / "page.html").read_text()
