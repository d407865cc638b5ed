"""The colours: those of the papers' figures, on the page's boxes, on white."""

from __future__ import annotations

import colorsys

import pytest

from penstock import Costs, build, simulate
from penstock.schedule.action import Op
from penstock.view.layout import arrange
from penstock.view.palette import LOOKS, shade
from penstock.view.timeline import Timeline


def hue(colour: str) -> float:
    """In degrees."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 360 * colorsys.rgb_to_hsv(red, green, blue)[0]


@pytest.mark.parametrize(
    ("op", "lowest", "highest"),
    [
        (Op.FORWARD, 200, 240),
        (Op.FULL_BACKWARD, 160, 195),
        (Op.INPUT_GRAD, 160, 195),
        (Op.WEIGHT_GRAD, 90, 140),
    ],
)
def test_hues_are_those_of_the_papers(op: Op, lowest: float, highest: float) -> None:
    """Forwards blue, backwards green-blue, weight gradients green; so are shades of them."""
    for colour in (LOOKS[op].colour, shade(LOOKS[op].colour, 0, 2), shade(LOOKS[op].colour, 1, 2)):
        assert lowest <= hue(colour) <= highest


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_the_page_s_boxes_have_these_colours_on_white(name: str) -> None:
    timeline = Timeline()
    result = simulate(build(name, ranks=4, microbatches=8), Costs())
    timeline.show(arrange(result))
    boxes = timeline.boxes.data
    stages = result.program.num_stages // 4
    for op in {act.op for act in result.program.actions()}:
        fills = {
            f"#{fill >> 8:06x}"
            for kind, fill in zip(boxes["kind"], boxes["fill"], strict=True)
            if kind == LOOKS[op].name
        }
        assert fills == {shade(LOOKS[op].colour, step, stages) for step in range(stages)}
    assert timeline.box.glyph.fill_color == "fill"
    assert timeline.plot.background_fill_color == "#ffffff"
