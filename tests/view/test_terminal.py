"""The timeline in colour, as a terminal gets it."""

from __future__ import annotations

import re

import pytest
from rich.text import Text

from penstock import Costs, build, check, simulate
from penstock.schedule.action import Op
from penstock.schedule.text import parse_csv
from penstock.trace import Trace
from penstock.view.palette import LOOKS
from penstock.view.terminal import timeline
from penstock.view.text import to_text


def trace_of(name: str, *, ranks: int = 2, microbatches: int = 2) -> Trace:
    return simulate(build(name, ranks=ranks, microbatches=microbatches)).trace


def coloured(text: Text, colour: str) -> str:
    """All text on this background, joined."""
    found = []
    for span in text.spans:
        back = getattr(span.style, "bgcolor", None)
        if back is not None and back.name == colour:
            found.append(text.plain[span.start : span.end])
    return "".join(found)


@pytest.mark.parametrize("width", [40, 200])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "po-f"])
def test_it_is_the_plain_text(name: str, width: int) -> None:
    program = build(name, ranks=2, microbatches=4)
    trace = simulate(program, Costs(offload=1, reload=1)).trace
    assert timeline(trace, width=width).plain == to_text(trace, width=width)


def test_a_terminal_too_narrow_for_any_drawing() -> None:
    trace = trace_of("1f1b")
    assert timeline(trace, width=15).plain == to_text(trace, width=20)


def test_cells_have_the_colour_of_their_op() -> None:
    text = timeline(trace_of("1f1b"), width=80)
    assert coloured(text, LOOKS[Op.FORWARD].colour) == " F0 F1 F0 F1"
    assert coloured(text, LOOKS[Op.FULL_BACKWARD].colour) == " B0 -- B1 -- B0 -- B1 --"
    program = build("po-f", ranks=2, virtual=1, microbatches=4)
    copied = timeline(simulate(program, Costs(offload=1, reload=1)).trace, width=120)
    for op in (Op.OFFLOAD, Op.RELOAD):
        assert coloured(copied, LOOKS[op].colour).split()


def test_a_program_is_a_line_in_a_console_and_a_timeline_in_a_notebook() -> None:
    program = build("interleaved-1f1b", ranks=2, microbatches=4)
    line = "Program interleaved-1f1b: 2 ranks, 4 stages, 4 microbatches"
    assert repr(program) == f"<{line}>"
    assert repr(check(program)) == f"<Checked{line}>"
    html = program._repr_html_()
    shown = re.sub("<[^>]+>", "", html)
    assert html.startswith("<pre") and shown.startswith(f"&lt;{line}&gt;\nrank 0")
    assert "rank 1" in shown and "2F0" in shown
    # A stage of each rank is dark, the other light.
    assert len(set(re.findall(r"background-color: (#\w+)", html))) == 4


def test_a_program_that_can_not_go_on_says_why_in_a_notebook() -> None:
    html = parse_csv("0F0,0B0\n1B0,1F0\n")._repr_html_()
    assert "deadlock: waits for 1B0 of rank 1" in html
