"""The playground without a browser: what its widgets ask for is drawn, or told."""

from __future__ import annotations

import pytest
from bokeh.document import Document

import penstock
from penstock.schedule import registry
from penstock.schedule.program import Program
from penstock.view.playground import Playground


def settled(document: Document) -> None:
    """Do what the document is to do at its next ticks, until there is nothing left."""
    while document.session_callbacks:
        document.session_callbacks[0].callback()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("virtual=4", "interleaved-1f1b has no option &#x27;virtual&#x27;"),
        ("ranks=3", "interleaved-1f1b has no option &#x27;ranks&#x27;"),
        ("group=nan", "group=&#x27;nan&#x27; does not work; give a whole number from 4 to 8"),
        ("group=1e400", "group=inf does not work; give a whole number from 4 to 8"),
        ("group", "expected NAME=VALUE, such as group=4"),
        ("name=3", "interleaved-1f1b has no option &#x27;name&#x27;"),
        ("costs=3", "interleaved-1f1b has no option &#x27;costs&#x27;"),
    ],
)
def test_invalid_options_are_reported_on_the_page(options: str, message: str) -> None:
    document = Document()
    page = Playground(document)
    page.schedule.value = "interleaved-1f1b"
    settled(document)
    assert not page.error.visible
    page.options.value = options
    settled(document)
    assert page.error.visible and not page.timeline.plot.visible
    assert message in page.error.text and message in page.comparison.text
    page.options.value = "group=4"
    settled(document)
    assert not page.error.visible


def test_a_failing_custom_schedule_is_reported_on_the_page() -> None:
    @penstock.schedule("only-four")
    def only_four(*, ranks: int, microbatches: int) -> Program:
        raise ZeroDivisionError

    try:
        document = Document()
        page = Playground(document)
        page.schedule.value = "only-four"
        settled(document)
    finally:
        registry.remove("only-four")
    assert "only-four: its function failed for 4 ranks, 8 microbatches" in page.error.text
    assert "its function failed" in page.comparison.text and "gpipe" in page.comparison.text


def shown(page: Playground) -> tuple[list[float], list[float], str, str]:
    """All that a change is to change: boxes, memory, figures, comparison."""
    memory = [float(x) for x in page.timeline.memory_outline.data["x"]]
    ends = [float(x) for x in page.timeline.boxes.data["right"]]
    return ends, memory, page.figures.text, page.comparison.text


@pytest.mark.parametrize("name", ["forward", "input_grad", "weight_grad", "latency", "ranks"])
def test_a_slider_changes_timeline_memory_figures_and_comparison(name: str) -> None:
    document = Document()
    page = Playground(document)
    page.compared.value = ["1f1b", "zb-h1"]
    settled(document)
    before = shown(page)
    getattr(page, name).value += 2
    settled(document)
    for old, new in zip(before, shown(page), strict=True):
        assert new != old
    wanted = penstock.simulate(
        penstock.build(page.schedule.value, ranks=page.ranks.value, microbatches=8),
        penstock.Costs(
            forward=page.forward.value,
            input_grad=page.input_grad.value,
            weight_grad=page.weight_grad.value,
            latency=page.latency.value,
        ),
    )
    assert f">{wanted.makespan:.0f}<" in page.figures.text
    assert f">{wanted.makespan:.0f}<" in page.comparison.text


def test_a_move_is_drawn_before_the_comparison_even_where_that_has_begun() -> None:
    """One tick draws the step; the programs to compare with are built at later ones."""
    document = Document()
    page = Playground(document)
    settled(document)
    compared = page.comparison.text
    for microbatches in (9, 10):
        page.microbatches.value = microbatches
        document.session_callbacks[0].callback()
        assert len(page.timeline.boxes.data["left"]) == 4 * 2 * microbatches
        document.session_callbacks[0].callback()
        assert page.comparison.text == compared
    settled(document)
    assert page.comparison.text != compared


def test_an_exceeded_memory_limit_is_shown() -> None:
    document = Document()
    page = Playground(document)
    page.schedule.value = "1f1b"
    settled(document)
    assert "over the limit" not in page.figures.text and "#d64545" not in page.comparison.text
    page.memory.value = 2
    settled(document)
    assert "4 (over the limit)" in page.figures.text and "#d64545" in page.comparison.text
    page.memory.value = 0
    settled(document)
    assert "over the limit" not in page.figures.text


def test_one_model_is_compared_unless_stages_are() -> None:
    """ZB-V has twice as many stages as 1F1B, each of half the time and half the memory."""
    document = Document()
    page = Playground(document)
    page.schedule.value, page.compared.value, page.memory.value = "zbv", ["1f1b"], 4
    settled(document)
    peaks = page.timeline.plot.right[0].major_label_overrides
    assert ">25.5<" in page.figures.text and ">4<" in page.figures.text
    assert set(peaks.values()) == {"4"} and max(page.timeline.boxes.data["right"]) == 25.5
    assert "The same model for all" in page.comparison.text
    assert "#d64545" not in page.comparison.text
    page.per.active = 1
    settled(document)
    peaks = page.timeline.plot.right[0].major_label_overrides
    assert ">51<" in page.figures.text and "8 (over the limit)" in page.figures.text
    assert set(peaks.values()) == {"8"} and max(page.timeline.boxes.data["right"]) == 51
    assert "a rank with V stages does V times the work" in page.comparison.text
    assert page.comparison.text.count("#d64545") == 1


def test_sums_of_thirds_are_within_the_limit_that_they_add_up_to() -> None:
    document = Document()
    page = Playground(document)
    page.schedule.value = "interleaved-1f1b"
    page.virtual.value, page.memory.value = 3, 5
    settled(document)
    assert ">5<" in page.figures.text and "over the limit" not in page.figures.text


def test_options_named_like_costs_are_the_users_own() -> None:
    given = []

    @penstock.schedule("with-costs")
    def with_costs(*, ranks: int, microbatches: int, recompute: bool = True) -> Program:
        given.append(recompute)
        return penstock.build("gpipe", ranks=ranks, microbatches=microbatches)

    try:
        document = Document()
        page = Playground(document)
        page.schedule.value = "with-costs"
        settled(document)
    finally:
        registry.remove("with-costs")
    assert given and all(each is True for each in given)
