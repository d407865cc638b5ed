"""The playground: a local page on which a schedule follows sliders.

Bokeh's server holds one ``Playground`` per browser tab. It listens on 127.0.0.1 only, and refuses
cross-origin connections.
"""

from __future__ import annotations

import socket
import time
import webbrowser
from collections.abc import Callable, Mapping
from functools import lru_cache
from html import escape
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.server.server import Server

from penstock.errors import PenstockError
from penstock.schedule.family import parse_options
from penstock.schedule.messages import numbers_of
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, refuse_options, schedules
from penstock.simulate.costs import Costs, costs_divisor, per_stage_costs, wanted_costs
from penstock.simulate.simulation import Simulation, simulate
from penstock.view.page import CARD, figures_html, figures_of, heading_html, legend_html, tag
from penstock.view.palette import FONT, amount
from penstock.view.timeline import STRETCHED, Timeline, bk, page_of, toggle_row

__all__ = ["Playground", "serve"]

ADDRESS = "127.0.0.1"
_COMPARED = ["gpipe", "1f1b", "interleaved-1f1b", "zbv"]
_SLICE_S = 0.1
_ERROR = (
    f"font:14px {FONT};color:#8a1c2c;background:#fdeeee;border:1px solid #f1c4c4;"
    "border-radius:8px;padding:10px 14px;white-space:pre-wrap"
)
_BARE_TITLE = "font:600 13px system-ui,sans-serif;color:#3a4652;margin-top:6px"
_HEAD = "text-align:left;font-weight:500;color:#66727f;padding:4px 14px 6px 0;white-space:nowrap"
_CELL = "padding:3px 14px 3px 0;white-space:nowrap"
_COLUMNS = ("schedule", "stages per rank", "makespan", "bubble", "span bubble", "peak held")

_Options = tuple[tuple[str, object], ...]


class Playground:
    """The widgets, plot and tables of one browser tab."""

    def __init__(self, document: Document) -> None:
        names = [each.name for each in schedules()]
        wide, self.document = {"width": 255}, document
        self.schedule = bk.Select(
            title="schedule", value="1f1b", options=names, name="schedule", **wide
        )
        self.ranks = _slider("ranks", 4, 1, 64, 1)
        self.microbatches = _slider("microbatches", 8, 1, 128, 1)
        self.virtual = _slider("stages per rank", 1, 1, 8, 1)
        self.options = bk.TextInput(
            title="options of the schedule", placeholder="none", name="options", **wide
        )
        self.per = bk.RadioButtonGroup(labels=["per stage", "per rank"], active=0, name="per")
        self.forward = _slider("forward F", 1.0, 0.0, 5.0, 0.1)
        self.input_grad = _slider("input gradient I", 1.0, 0.0, 5.0, 0.1)
        self.weight_grad = _slider("weight gradient W", 1.0, 0.0, 5.0, 0.1)
        self.latency = _slider("latency of a message", 0.0, 0.0, 2.0, 0.05)
        self.memory = _slider("memory limit (0: none)", 0, 0, 128, 1)
        self.compared = bk.MultiChoice(
            title="compare with", value=[name for name in _COMPARED if name in names],
            options=names, name="compared", **wide,
        )  # fmt: skip
        self.timeline = Timeline(num_ranks=4)
        self.heading, self.legend = bk.Div(**STRETCHED), bk.Div(**STRETCHED)
        self.figures, self.comparison = (
            bk.Div(name=name, **STRETCHED) for name in ("figures", "comparison")
        )
        self.error = bk.Div(visible=False, name="error", **STRETCHED)
        # The comparison so far, and the schedules still to simulate.
        self._outcomes: dict[str, Simulation | str] = {}
        self._pending: list[str] = []
        self._draw_scheduled = self._compare_scheduled = False
        sizes = [self.ranks, self.microbatches, self.virtual, self.options]
        times = [self.forward, self.input_grad, self.weight_grad, self.latency]
        self.schedule.on_change("value", self._reset_schedule)
        for widget in (*sizes, *times, self.memory, self.compared):
            widget.on_change("value", self._schedule_draw)
        self.per.on_change("active", self._schedule_draw)
        self._draw()
        document.title = "Penstock playground"
        costs, rest = (tag("div", _BARE_TITLE, s) for s in ("costs", "memory and comparison"))
        panel = column(
            bk.Div(text=heading_html("Penstock", "playground")), self.schedule, *sizes,
            bk.Div(text=costs), self.per, *times, bk.Div(text=rest), self.memory, self.compared,
            width=270,
        )  # fmt: skip
        view = column(
            self.heading, self.figures, toggle_row([self.timeline], self.legend), self.error,
            self.timeline.plot, self.comparison, spacing=10, **STRETCHED,
        )  # fmt: skip
        document.add_root(page_of(panel, view, arrange=row, spacing=26))

    def _reset_schedule(self, attr: str, old: object, new: str) -> None:
        """Start a newly chosen schedule with its default number of stages and no options."""
        chosen = family(new)
        self.virtual.value = chosen.default_virtual
        self.options.value = ""
        self.options.placeholder = ", ".join(f"{name}=..." for name in chosen.options) or "none"
        self._schedule_draw(attr, old, new)

    def _schedule_draw(self, attr: str, old: object, new: object) -> None:
        """Draw at the next tick, once for all changes until then; sliders fire at every step."""
        if not self._draw_scheduled:
            self._draw_scheduled = True
            self.document.add_next_tick_callback(self._draw)

    def _simulate(self, name: str) -> Simulation:
        """Simulate a schedule; only the drawn one gets the stages per rank and the options."""
        virtual, options = None, dict[str, object]()
        if name == self.schedule.value:
            virtual = int(self.virtual.value)
            options = parse_options(filter(None, map(str.strip, self.options.value.split(","))))
        costs = Costs(
            forward=self.forward.value,
            input_grad=self.input_grad.value,
            weight_grad=self.weight_grad.value,
            latency=self.latency.value,
        )
        built = name, int(self.ranks.value), int(self.microbatches.value), virtual
        options |= wanted_costs(costs, name)
        return _simulated(*built, tuple(options.items()), costs, self.per.active == 1)

    def _draw(self) -> None:
        """Draw the step; all changes reach the browser in one message."""
        self._draw_scheduled = False
        self.document.hold("combine")
        try:
            self._draw_step()
        finally:
            self.document.unhold()

    def _draw_step(self) -> None:
        name = self.schedule.value
        try:
            result = self._simulate(name)
        except PenstockError as error:
            self.error.text = tag('div role="alert"', _ERROR, escape(str(error)))
            self.heading.text = heading_html(name, "")
            self.figures.text = self.legend.text = ""
            self.error.visible, self.timeline.plot.visible = True, False
        else:
            self.error.visible, self.timeline.plot.visible = False, True
            program = result.program
            self.timeline.show(result)
            sizes = numbers_of(
                rank=program.num_ranks,
                stage=program.num_stages,
                microbatch=program.num_whole_microbatches,
            )
            self.heading.text = heading_html(program.name, sizes)
            self.legend.text = legend_html([result.trace])
            self.figures.text = figures_html(figures_of([result], limit=self.memory.value or None))
        self._outcomes, self._pending = {}, list(dict.fromkeys([name, *self.compared.value]))
        if not self._compare_scheduled:
            self._compare_scheduled = True
            self.document.add_next_tick_callback(self._compare)

    def _compare(self) -> None:
        """Simulate the schedules to compare, then show the table.

        Runs in slices after the timeline is drawn, so that many schedules do not delay the
        timeline. A slider that moves meanwhile restarts the comparison.
        """
        began = time.monotonic()
        while self._pending and time.monotonic() - began < _SLICE_S:
            name = self._pending.pop(0)
            try:
                self._outcomes[name] = self._simulate(name)
            except PenstockError as error:
                self._outcomes[name] = str(error).removeprefix(f"{name}: ")
        if self._pending:
            self.document.add_next_tick_callback(self._compare)
            return
        self._compare_scheduled = False
        self.comparison.text = _comparison_html(
            self._outcomes, memory=self.memory.value or None, chosen=self.schedule.value
        )


def _slider(title: str, value: float, start: float, end: float, step: float) -> Any:
    name = title.split()[0]
    return bk.Slider(
        title=title, value=value, start=start, end=end, step=step, name=name, width=255
    )


@lru_cache(maxsize=64)
def _simulated(
    name: str, ranks: int, microbatches: int, virtual: int | None, options: _Options, costs: Costs,
    per_rank: bool,
) -> Simulation:  # fmt: skip
    """Simulate a schedule; cached, since one slider changes few of the compared schedules.

    With ``per_rank``, costs are for a rank's whole part of the model, not for a stage.
    """
    program = _built(name, ranks, microbatches, virtual, options)
    return simulate(program, per_stage_costs(costs, costs_divisor(program)) if per_rank else costs)


@lru_cache(maxsize=64)
def _built(
    name: str, ranks: int, microbatches: int, virtual: int | None, options: _Options
) -> Program:
    """Build a schedule; cached, since most costs do not change the program."""
    refuse_options(family(name), dict(options))
    return build(name, ranks=ranks, microbatches=microbatches, virtual=virtual, **dict(options))


def _comparison_html(
    outcomes: Mapping[str, Simulation | str], *, memory: float | None, chosen: str
) -> str:
    """A table of schedules with a bar per figure, smallest bubble first.

    Args:
        outcomes: by schedule name, its simulated step, or the reason why it has none.
        memory: memory limit of a rank, above which a peak is red; None for none.
        chosen: name of the schedule that is drawn, in bold.
    """
    results = {name: each for name, each in outcomes.items() if isinstance(each, Simulation)}
    ratios = {name: each.bubble_ratio for name, each in results.items()}
    peaks = {name: max(each.peak_bytes) for name, each in results.items()}
    body = ""
    for name in sorted(outcomes, key=lambda name: ratios.get(name, 2.0)):
        outcome, weight = outcomes[name], 650 if name == chosen else 400
        cells = [tag("td", f"{_CELL};font-weight:{weight}", escape(name))]
        if isinstance(outcome, str):
            style = f"{_CELL};color:#8a97a3;white-space:normal"
            cells.append(tag('td colspan="5"', style, escape(outcome)))
        else:
            ratio, peak = ratios[name], peaks[name]
            colour = "#d64545" if memory is not None and peak > memory else "#d9a441"
            figures = (
                str(outcome.program.num_stages // outcome.program.num_ranks),
                amount(outcome.makespan),
                _bar(f"{ratio:.1%}", ratio, max(ratios.values()), "#4f86d9"),
                f"{outcome.span_bubble_ratio:.1%}",
                _bar(amount(peak), peak, max(peaks.values()), colour),
            )
            cells += [tag("td", _CELL, figure) for figure in figures]
        body += f"<tr>{''.join(cells)}</tr>"
    head = "".join(tag("th", _HEAD, name) for name in _COLUMNS)
    style = f"border-collapse:collapse;font:13px {FONT};color:#1c2733"
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return tag("div", CARD, tag("table", style, parts))


def _bar(text: str, value: float, most: float, colour: str) -> str:
    width = 110 * value / most if most > 0 else 0
    bar = f"display:inline-block;height:11px;border-radius:2px;width:{width:.1f}px"
    return tag(
        "span",
        "display:inline-flex;align-items:center;gap:8px",
        tag("span", "display:inline-block;width:52px;text-align:right", text),
        tag("span", f"{bar};background:{colour}"),
    )


# --- the server ---------------------------------------------------------------------------------


def serve(
    *, port: int = 0, browser: bool = True, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve the playground on 127.0.0.1 until the process is interrupted.

    Args:
        port: port to listen on; 0 for any free one.
        browser: if True, opens the page in the user's browser.
        ready: called with the address once the server is up.

    Raises:
        PenstockError: the port is taken.
    """
    port = _reserved(port)
    server = Server(
        {"/": _open},
        address=ADDRESS,
        port=port,
        allow_websocket_origin=[f"{ADDRESS}:{port}", f"localhost:{port}"],
    )
    url = f"http://{ADDRESS}:{port}/"
    server.start()
    ready(url)
    if browser:
        webbrowser.open(url)
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        server.stop()


def _open(document: Document) -> None:
    Playground(document)


def _reserved(port: int) -> int:
    """A free port for 0; refuses a port in use, since Bokeh would leave its socket open."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except (OSError, OverflowError) as error:
            raise PenstockError(
                f"port {port} of {ADDRESS} can't be had ({error}); take another with --port, or "
                "any that is free with --port 0"
            ) from error
        return int(probe.getsockname()[1])
