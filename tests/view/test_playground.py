"""The playground without a browser: what its widgets ask for is drawn, or told."""

from __future__ import annotations

import pytest
from bokeh.document import Document

import penstock
from penstock.schedule import catalog
from penstock.schedule.program import Program
from penstock.view.playground import Playground


def settled(document: Document) -> None:
    """Do what the document is to do at its next ticks, until there is nothing left."""
    while document.session_callbacks:
        document.session_callbacks[0].callback()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("virtual=4", "option &#x27;virtual=4&#x27;: there is a slider for stages per rank"),
        ("ranks=3", "there is a slider for ranks"),
        ("group=nan", "expected name=number, such as group=4"),
        ("group=1e400", "expected name=number, such as group=4"),
        ("name=3", "interleaved-1f1b has no option &#x27;name&#x27;"),
        ("costs=3", "interleaved-1f1b has no option &#x27;costs&#x27;"),
    ],
)
def test_an_option_that_can_not_be_is_told_on_the_page(options: str, message: str) -> None:
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


def test_a_schedule_of_ones_own_that_fails_is_told_on_the_page() -> None:
    @penstock.schedule("only-four")
    def only_four(*, ranks: int, microbatches: int) -> Program:
        raise ZeroDivisionError

    try:
        document = Document()
        page = Playground(document)
        page.schedule.value = "only-four"
        settled(document)
    finally:
        catalog.remove("only-four")
    assert "only-four: its function failed for 4 ranks and 8 microbatches" in page.error.text
    assert "its function failed" in page.comparison.text and "gpipe" in page.comparison.text
