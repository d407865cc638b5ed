"""The worked example: P = 4, M = 8, tF = tB = tW = 1, no latency.

For V ≥ 2 the unit is one chunk (a stage of a microbatch), so that the ideal is 24·V. Figures are
those of the published methods, computed by hand or taken from their papers.
"""

import pytest

from penstock.schedule.registry import build
from penstock.simulate.simulation import simulate

TABLE = [
    # name, V, makespan, bubble, span, peak per rank
    ("gpipe", 1, 33, 0.2727, 33, (8, 8, 8, 8)),
    ("1f1b", 1, 33, 0.2727, 33, (4, 3, 2, 1)),
    # Two splits: the unit is a chunk.
    ("seq1f1b", 1, 57, 0.1579, 57, (5, 4, 3, 2)),
    ("eager-1f1b", 1, 33, 0.2727, 33, (7, 5, 3, 1)),
    ("zb-h1", 1, 27, 0.1111, 27, (4, 4, 4, 4)),
    ("zb-1p", 1, 27, 0.1111, 27, (4, 4, 4, 4)),
    ("zb-h2", 1, 27, 0.1111, 24, (7, 7, 7, 7)),
    ("zb-2p", 1, 27, 0.1111, 24, (8, 8, 8, 8)),
    ("interleaved-1f1b", 2, 57, 0.1579, 57, (11, 9, 7, 5)),
    ("interleaved-1f1b", 4, 105, 0.0857, 105, (19, 17, 15, 13)),
    ("looped-bfs", 2, 57, 0.1579, 57, (16, 16, 16, 16)),
    ("interleaved-zb", 1, 27, 0.1111, 27, (4, 4, 4, 4)),
    ("interleaved-zb", 2, 51, 0.0588, 51, (8, 8, 8, 8)),
    ("zbv", 2, 51, 0.0588, 48, (8, 8, 8, 8)),
    ("v-zb", 2, 51, 0.0588, 48, (8, 8, 8, 8)),
    ("v-half", 2, 53, 0.0943, 53, (6, 6, 6, 6)),
    ("v-min", 2, 59, 0.1864, 59, (4, 4, 4, 4)),
    ("1f1b-v", 2, 63, 0.2381, 63, (6, 6, 6, 6)),
    ("gis", 2, 54, 0.1111, 54, (8, 7, 6, 5)),
    ("gis-h", 2, 56, 0.1429, 56, (6, 5, 4, 3)),
    # Below 18 chunks, V(P - 1)T; and GIS's.
    ("po-h", 2, 58, 0.1724, 58, (4, 3, 3, 2)),
    ("po-f", 2, 54, 0.1111, 54, (3, 3, 2, 2)),
    ("dualpipev", 2, 54, 0.1111, 54, (9, 9, 9, 9)),
    ("dualpipe", 1, 26, 0.0769, 26, (5, 5, 5, 5)),
    ("chimera", 1, 30, 0.2, 30, (3, 4, 4, 3)),
]


@pytest.mark.parametrize(("name", "virtual", "makespan", "bubble", "span", "peak"), TABLE)
def test_figures(
    name: str,
    virtual: int,
    makespan: int,
    bubble: float,
    span: int,
    peak: tuple[int, ...],
) -> None:
    result = simulate(build(name, ranks=4, microbatches=8, virtual=virtual))
    ideal = 24 * virtual * result.program.num_splits
    assert result.makespan == makespan
    assert round(result.bubble_ratio, 4) == bubble
    assert result.span == span
    assert result.span_bubble_ratio == pytest.approx(1 - ideal / span)
    assert result.peak_in_flight == peak


def test_every_figure_agrees_with_the_trace() -> None:
    for name, virtual, *_ in TABLE:
        result = simulate(build(name, ranks=4, microbatches=8, virtual=virtual))
        trace = result.trace
        assert (trace.makespan, trace.span) == (result.makespan, result.span)
        assert trace.bubble_ratio == pytest.approx(result.bubble_ratio)
        assert trace.span_bubble_ratio == pytest.approx(result.span_bubble_ratio)


def test_forwards_alone_wait_once_for_the_pipeline_to_fill() -> None:
    assert simulate(build("forward-only", ranks=4, microbatches=8)).makespan == 8 + 3
    assert simulate(build("forward-only", ranks=4, microbatches=8, virtual=2)).makespan == 16 + 3


@pytest.mark.parametrize(
    ("name", "virtual", "messages"),
    [
        ("1f1b", 1, 2 * 8 * 3),
        ("interleaved-1f1b", 2, 2 * 8 * (4 * 2 - 1)),
        ("interleaved-zb", 2, 2 * 8 * (4 * 2 - 1)),
        ("zbv", 2, 2 * 8 * 2 * (4 - 1)),
        ("dualpipev", 2, 2 * 8 * 2 * (4 - 1)),
        ("dualpipe", 1, 2 * 8 * 3),
        ("chimera", 1, 2 * 8 * 3),
        ("forward-only", 2, 8 * (4 * 2 - 1)),
    ],
)
def test_messages_between_ranks(name: str, virtual: int, messages: int) -> None:
    assert simulate(build(name, ranks=4, microbatches=8, virtual=virtual)).messages == messages
