"""The timeline in colour, as a terminal gets it."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.text import Text

from penstock import Costs, build, check, simulate
from penstock.schedule.action import Op
from penstock.schedule.passes import recompute
from penstock.schedule.text import parse_csv
from penstock.trace import Trace
from penstock.view.palette import LOOKS
from penstock.view.terminal import legend, timeline
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


def test_boxes_carry_the_microbatch_on_the_colour_of_their_op() -> None:
    text = timeline(trace_of("1f1b"), width=80)
    assert text.plain == (
        "rank 0   0 1     0     1  \n"  #
        "rank 1     0 0   1 1      \n"
    )
    assert coloured(text, LOOKS[Op.FORWARD].colour) == " 0 1 0 1"
    assert coloured(text, LOOKS[Op.FULL_BACKWARD].colour) == " 0   1   0   1  "


def test_without_room_colours_stand_alone() -> None:
    text = timeline(trace_of("gpipe", microbatches=40), width=60)
    assert set("".join(line[8:] for line in text.plain.splitlines())) == {" "}
    assert max(map(len, text.plain.splitlines())) <= 60


def test_without_colours_it_is_the_plain_text() -> None:
    trace = trace_of("zbv")
    assert timeline(trace, width=80, colour=False).plain == to_text(trace, width=80)


def test_the_legend_names_the_drawn_ops() -> None:
    assert legend(trace_of("zbv")).plain.split() == [
        "forward", "input", "gradient", "weight", "gradient",
    ]  # fmt: skip


def test_a_plus_joins_the_parts_of_a_block() -> None:
    trace = trace_of("dualpipev", microbatches=4)
    text = timeline(trace, width=120)
    assert " 3+1  " in text.plain
    assert text.plain.count("+") == len(trace.overlapped_pairs)
    assert "+ joins a block" in legend(trace).plain
    assert "block" not in legend(trace_of("1f1b")).plain


def test_host_transfers_have_separate_lanes_and_colours() -> None:
    program = build("po-f", ranks=2, virtual=1, microbatches=4)
    trace = simulate(program, Costs(offload=1, reload=1)).trace
    text = timeline(trace, width=120)
    assert text.plain.count("to host") == text.plain.count("back") == 1
    for op in (Op.OFFLOAD, Op.RELOAD):
        copied = [span.action for span in trace.spans if span.action.op is op]
        assert len(coloured(text, LOOKS[op].colour).split()) == len(copied) > 0
    assert "offload to the host" in legend(trace).plain
    assert "reload from the host" in legend(trace).plain


@pytest.mark.parametrize("name", ["1f1b", "zbv", "po-h", "recomputed"])
def test_where_there_are_16_colours_no_two_ops_share_one(name: str) -> None:
    program = (
        recompute(build("po-h", ranks=2, microbatches=4), stages=[2, 3])
        if name == "recomputed"
        else build(name, ranks=2, microbatches=4)
    )
    trace = simulate(program, Costs(offload=1, reload=1)).trace
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=120)
    with console.capture() as shown:
        console.print(legend(trace, shaded=False))
    with console.capture() as drawn:
        console.print(timeline(trace, width=120, shaded=False))
    chips = re.findall(r"\x1b\[([\d;]+)m  \x1b", shown.get())
    words = re.findall(r"[a-z]{3,}(?: [a-z]+)*", shown.get())
    assert len(set(chips)) == len(chips) == len(words) > 1
    assert set(re.findall(r"\x1b\[([\d;]+)m", drawn.get())) - {"0"} == set(chips)


def test_a_program_is_a_line_in_a_console_and_a_timeline_in_a_notebook() -> None:
    program = build("interleaved-1f1b", ranks=2, microbatches=4)
    line = "Program interleaved-1f1b: 2 ranks, 4 stages, 4 microbatches"
    assert repr(program) == f"<{line}>"
    assert repr(check(program)) == f"<Checked{line}>"
    html = program._repr_html_()
    shown = re.sub("<[^>]+>", "", html)
    assert html.startswith("<pre") and shown.startswith(f"&lt;{line}&gt;\nrank 0")
    assert "rank 1" in shown and "backward" in shown
    # A stage of each rank is dark, the other light.
    assert len(set(re.findall(r"background-color: (#\w+)", html))) == 4


def test_a_program_that_can_not_go_on_says_why_in_a_notebook() -> None:
    html = parse_csv("0F0,0B0\n1B0,1F0\n")._repr_html_()
    assert "deadlock: waits for rank 1 to do 1B0" in html
