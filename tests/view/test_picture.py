"""The picture: what is drawn where, read back from SVG, whose text stays text."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest

from penstock import Costs, PenstockError, build, simulate
from penstock.schedule.action import Op
from penstock.schedule.passes import recompute
from penstock.trace import Trace
from penstock.view.palette import FRAME, LOOKS, shade
from penstock.view.picture import draw


def trace_of(name: str, *, ranks: int = 4, microbatches: int = 8) -> Trace:
    return simulate(build(name, ranks=ranks, microbatches=microbatches)).trace


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def boxes(svg: str, colour: str) -> int:
    """How many boxes have this colour; the legend's patch is one of them."""
    groups = re.findall(r'<g id="(?:PolyCollection|FillBetweenPoly)[^"]*">.*?</g>', svg, re.S)
    return sum(len(re.findall(rf"fill: {colour}", group)) for group in groups)


def test_boxes_labels_and_lanes_are_those_of_the_trace(tmp_path: Path) -> None:
    draw(trace_of("1f1b"), tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text()
    assert [w for w in words(svg) if w.startswith("rank")] == [f"rank {r}" for r in range(4)]
    assert boxes(svg, LOOKS[Op.FORWARD].colour) == 4 * 8
    assert boxes(svg, LOOKS[Op.FULL_BACKWARD].colour) == 4 * 8
    assert words(svg).count("F7") == words(svg).count("B7") == 4
    assert "1f1b, 4 ranks: makespan 33, bubble 27.3%" in words(svg)
    assert {"forward", "backward", "idle"} <= set(words(svg))
    assert "weight gradient" not in words(svg)
    assert "a rank's first, last stage" not in words(svg)


def test_stages_of_one_rank_differ_in_shade(tmp_path: Path) -> None:
    draw(trace_of("zbv"), tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text()
    for op in (Op.FORWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD):
        assert boxes(svg, shade(LOOKS[op].colour, 0, 2)) == 4 * 8
        assert boxes(svg, shade(LOOKS[op].colour, 1, 2)) == 4 * 8
    assert "a rank's first, last stage" in words(svg)
    legend = svg.partition('id="legend_1"')[2]
    assert all(shade(LOOKS[Op.FORWARD].colour, step, 2) in legend for step in (0, 1))


def test_a_recomputation_bears_a_letter_as_all_else(tmp_path: Path) -> None:
    result = simulate(recompute(build("1f1b", ranks=2, microbatches=4)))
    draw(result.trace, tmp_path / "t.svg")
    found = words((tmp_path / "t.svg").read_text())
    assert [found.count(f"{letter}3") for letter in "FRB"] == [2, 2, 2]


def test_labels_are_left_out_where_there_is_no_room(tmp_path: Path) -> None:
    draw(trace_of("gpipe", microbatches=200), tmp_path / "t.svg", width=5)
    svg = (tmp_path / "t.svg").read_text()
    assert boxes(svg, LOOKS[Op.FORWARD].colour) == 4 * 200
    assert "199" not in words(svg)


def test_several_traces_share_one_time_axis(tmp_path: Path) -> None:
    both = [trace_of("1f1b"), trace_of("zbv")]
    draw(both, tmp_path / "t.svg", titles=["one above", "one below"])
    found = words((tmp_path / "t.svg").read_text())
    assert {"one above", "one below"} <= set(found)
    assert sum(w.startswith("rank") for w in found) == 8
    assert found.count("50") == 2


@pytest.mark.parametrize("ending", ["png", "svg", "SVG", "pdf"])
def test_equal_traces_give_equal_files_at_any_time(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tmp_path / f"{i}.{ending}" for i in range(2))
    for time, path in enumerate((first, second)):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", str(time))
        draw(trace_of("zbv"), path)
    assert first.read_bytes() == second.read_bytes()


def test_a_folder_is_made(tmp_path: Path) -> None:
    draw(trace_of("gpipe"), tmp_path / "new" / "t.png", dpi=40)
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")


def test_mixed_units_and_missing_titles_are_refused(tmp_path: Path) -> None:
    measured = Trace(name="x", num_ranks=1, unit="s", spans=())
    with pytest.raises(ValueError, match="one unit"):
        draw([trace_of("gpipe"), measured], tmp_path / "t.png")
    with pytest.raises(ValueError, match="1 titles for 2 traces"):
        draw([measured, measured], tmp_path / "t.png", titles=["one"])
    with pytest.raises(ValueError, match="one or more traces"):
        draw([], tmp_path / "t.png")


def test_without_matplotlib_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(PenstockError, match=r"pip install 'penstock\[view\]'"):
        draw(trace_of("gpipe"), tmp_path / "t.png")


def test_pairs_are_framed_and_copies_drawn_beside_the_compute(tmp_path: Path) -> None:
    trace = trace_of("dualpipev")
    draw(trace, tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text()
    assert svg.count(f"stroke: {FRAME}") == len(trace.overlapped_pairs) + 1
    assert "overlapped pair" in words(svg)
    offloading = simulate(build("po-f", ranks=2, microbatches=4), Costs(offload=0.5, reload=0.25))
    draw(offloading.trace, tmp_path / "t.svg")
    svg = (tmp_path / "t.svg").read_text()
    copies = sum(act.op is Op.OFFLOAD for act in offloading.program.actions())
    for op in (Op.OFFLOAD, Op.RELOAD):
        assert sum(boxes(svg, shade(LOOKS[op].colour, step, 2)) for step in range(2)) == copies > 0
    assert {"offload to the host", "reload from the host"} <= set(words(svg))
    assert "overlapped pair" not in words(svg)
