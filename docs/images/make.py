"""Draws the timelines of the README: `.venv/bin/python docs/images/make.py`."""

from __future__ import annotations

from pathlib import Path

from penstock import Costs, build, simulate
from penstock.view.picture import draw

HERE = Path(__file__).parent

# A stage of ZB-V is half as long as one of 1F1B: each rank holds two.
one = simulate(
    build("1f1b", ranks=4, microbatches=8), Costs(forward=2, input_grad=2, weight_grad=2)
)
two = simulate(build("zbv", ranks=4, microbatches=8), Costs(forward=1, input_grad=1, weight_grad=1))
titles = [
    f"{name}: 4 ranks, 8 microbatches, time {run.makespan:.0f}, bubble {run.bubble_ratio:.1%}"
    for name, run in (("1F1B", one), ("ZB-V, two stages per rank", two))
]
draw([one.trace, two.trace], HERE / "timelines.png", titles=titles)
