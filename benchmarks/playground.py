"""How long the playground takes to redraw a large step in a browser, after a slider has moved."""

from __future__ import annotations

import statistics

from benchmarks.figures import Figure
from penstock import schedules
from tests.browser.tabs import COMPARE, COMPARISON, SET, TIMELINE, chromium, playground, tab_of

__all__ = ["measure_playground"]

_BOUND_S = 0.5


def measure_playground(rounds: int) -> list[Figure]:
    """ZB-V with 16 ranks and 64 microbatches: from the move of a slider to the drawing.

    The latency gives other costs, the microbatches another program. All is drawn beside the first
    choice of schedules to compare; the timeline alone beside all of them, since it does not wait.
    """
    figures = []
    with playground() as address, chromium() as browser, tab_of(browser) as tab:
        page = tab.open(address)
        page.get_by_label("schedule", exact=True).select_option("zbv")
        page.evaluate(SET, ["ranks", 16, *TIMELINE])
        page.evaluate(SET, ["microbatches", 64, *COMPARISON])
        for what, drawn in (("all", COMPARISON), ("timeline beside all schedules", TIMELINE)):
            if drawn is TIMELINE:
                page.evaluate(COMPARE, [each.name for each in schedules()])
                page.locator("table").get_by_text("po-f", exact=True).wait_for()
            for slider, values in (("latency", (0.05, 0.1)), ("microbatches", (63, 64))):
                times = []
                for round_number in range(2 * rounds):
                    value = values[round_number % 2]
                    times.append(page.evaluate(SET, [slider, value, *drawn]) / 1000)
                low, middle, high = statistics.quantiles(times, n=4)
                figures.append(
                    Figure(
                        group="playground",
                        name=f"{what} redrawn for another {slider}, zbv, P=16 M=64",
                        over="",
                        value=middle,
                        bound=_BOUND_S,
                        unit="s",
                        spread=(high - low) / 2,
                    )
                )
    return figures
