"""The playground: a local page on which a schedule follows sliders.

Bokeh's server holds one ``Playground`` per browser tab. It listens on 127.0.0.1 only, and refuses
cross-origin connections.
"""

from __future__ import annotations

import socket
import time
import webbrowser
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from bokeh.document import Document
from bokeh.layouts import column, row
from bokeh.models import GlobalInlineStyleSheet
from bokeh.models.ui import UIElement
from bokeh.models.widgets.groups import RadioButtonGroup
from bokeh.models.widgets.inputs import MultiChoice, Select, TextInput
from bokeh.models.widgets.markups import Div
from bokeh.models.widgets.sliders import Slider
from bokeh.server.server import Server

from penstock.errors import PenstockError
from penstock.schedule.family import parse_options
from penstock.schedule.messages import numbers_of
from penstock.schedule.program import Program
from penstock.schedule.registry import build, family, refuse_options, schedules
from penstock.simulate.costs import Costs, share_of, share_out, wanted_costs
from penstock.simulate.simulation import Simulation, simulate
from penstock.view.html import (
    PAGE_CSS,
    comparison_html,
    error_html,
    figures_html,
    figures_of,
    heading_html,
    legend_html,
)
from penstock.view.timeline import Timeline, toggles

__all__ = ["Playground", "serve"]

ADDRESS = "127.0.0.1"
_COMPARED = ["gpipe", "1f1b", "interleaved-1f1b", "zbv"]
_SLICE_S = 0.1
_STRETCHED: dict[str, Any] = {"sizing_mode": "stretch_width"}
_BARE_TITLE = "font:600 13px system-ui,sans-serif;color:#3a4652;margin-top:6px"

_Options = tuple[tuple[str, object], ...]


class Playground:
    """The widgets, plot and tables of one browser tab."""

    def __init__(self, document: Document) -> None:
        names: list[Any] = [each.name for each in schedules()]
        self.document = document
        self.schedule = Select(
            title="schedule", value="1f1b", options=names, name="schedule", width=255
        )
        self.ranks = _slider("ranks", 4, 1, 64, 1)
        self.microbatches = _slider("microbatches", 8, 1, 128, 1)
        self.virtual = _slider("stages per rank", 1, 1, 8, 1)
        self.options = TextInput(
            title="options of the schedule", placeholder="none", name="options", width=255
        )
        self.per = RadioButtonGroup(labels=["per stage", "per rank"], active=0, name="per")
        self.forward = _slider("forward F", 1.0, 0.0, 5.0, 0.1)
        self.input_grad = _slider("input gradient I", 1.0, 0.0, 5.0, 0.1)
        self.weight_grad = _slider("weight gradient W", 1.0, 0.0, 5.0, 0.1)
        self.latency = _slider("latency of a message", 0.0, 0.0, 2.0, 0.05)
        self.memory = _slider("memory limit (0: none)", 0, 0, 128, 1)
        self.compared = MultiChoice(
            title="compare with", value=[n for n in _COMPARED if n in names], options=names,
            name="compared", width=255,
        )  # fmt: skip
        self.timeline = Timeline(num_ranks=4)
        self.heading = Div(**_STRETCHED)
        self.figures = Div(name="figures", **_STRETCHED)
        self.legend = Div(**_STRETCHED)
        self.error = Div(visible=False, name="error", **_STRETCHED)
        self.comparison = Div(name="comparison", **_STRETCHED)
        # The comparison so far, and the schedules still to simulate.
        self._outcomes: dict[str, Simulation | str] = {}
        self._pending: list[str] = []
        self._draw_scheduled = self._compare_scheduled = False
        self._add_callbacks()
        self._draw()
        document.title = "Penstock playground"
        document.add_root(self._layout())

    def _add_callbacks(self) -> None:
        self.schedule.on_change("value", self._reset_schedule)
        for widget in (
            self.ranks, self.microbatches, self.virtual, self.forward, self.input_grad,
            self.weight_grad, self.latency, self.memory, self.options, self.compared,
        ):  # fmt: skip
            widget.on_change("value", self._schedule_draw)
        self.per.on_change("active", self._schedule_draw)

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
        is_chosen = name == self.schedule.value
        costs = Costs(
            forward=self.forward.value,
            input_grad=self.input_grad.value,
            weight_grad=self.weight_grad.value,
            latency=self.latency.value,
        )
        return _simulated(
            name,
            int(self.ranks.value),
            int(self.microbatches.value),
            int(self.virtual.value) if is_chosen else None,
            tuple(self._options().items()) if is_chosen else (),
            costs,
            self.per.active == 1,
        )

    def _options(self) -> dict[str, object]:
        """The options of the schedule, parsed from one line."""
        return parse_options(filter(None, map(str.strip, self.options.value.split(","))))

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
            self.error.text = error_html(str(error))
            self.error.visible = True
            self.timeline.plot.visible = False
            self.heading.text = heading_html(name, "")
            self.figures.text = self.legend.text = ""
        else:
            self.error.visible = False
            self.timeline.plot.visible = True
            self._show(result)
        self._outcomes, self._pending = {}, list(dict.fromkeys([name, *self.compared.value]))
        if not self._compare_scheduled:
            self._compare_scheduled = True
            self.document.add_next_tick_callback(self._compare)

    def _show(self, result: Simulation) -> None:
        program = result.program
        self.timeline.show(result)
        subtitle = numbers_of(
            rank=program.num_ranks,
            stage=program.num_stages,
            microbatch=program.num_whole_microbatches,
        )
        self.heading.text = heading_html(program.name, subtitle)
        self.legend.text = legend_html([result.trace])
        self.figures.text = figures_html(figures_of([result], limit=self.memory.value or None))

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
        self.comparison.text = comparison_html(
            self._outcomes, memory=self.memory.value or None, chosen=self.schedule.value
        )

    def _layout(self) -> UIElement:
        panel = column(
            Div(text=heading_html("Penstock", "playground")),
            self.schedule, self.ranks, self.microbatches, self.virtual, self.options,
            Div(text=f'<div style="{_BARE_TITLE}">costs</div>'),
            self.per, self.forward, self.input_grad, self.weight_grad, self.latency,
            Div(text=f'<div style="{_BARE_TITLE}">memory and comparison</div>'),
            self.memory, self.compared,
            width=270,
        )  # fmt: skip
        view = column(
            self.heading,
            self.figures,
            row(*toggles([self.timeline]), self.legend, **_STRETCHED),
            self.error,
            self.timeline.plot,
            self.comparison,
            spacing=10,
            **_STRETCHED,
        )
        look = GlobalInlineStyleSheet(css=PAGE_CSS)
        return row(panel, view, spacing=26, stylesheets=[look], **_STRETCHED)


def _slider(title: str, value: float, start: float, end: float, step: float) -> Slider:
    return Slider(
        title=title, value=value, start=start, end=end, step=step, width=255, name=title.split()[0]
    )


@lru_cache(maxsize=64)
def _simulated(
    name: str,
    ranks: int,
    microbatches: int,
    virtual: int | None,
    options: _Options,
    costs: Costs,
    per_rank: bool,
) -> Simulation:
    """Simulate a schedule; cached, since one slider changes few of the compared schedules.

    With ``per_rank``, costs are for a rank's whole part of the model, not for a stage.
    """
    wanted = tuple(wanted_costs(costs, name).items())
    program = _built(name, ranks, microbatches, virtual, (*wanted, *options))
    return simulate(program, share_out(costs, share_of(program)) if per_rank else costs)


@lru_cache(maxsize=64)
def _built(
    name: str, ranks: int, microbatches: int, virtual: int | None, options: _Options
) -> Program:
    """Build a schedule; cached, since most costs do not change the program."""
    refuse_options(family(name), dict(options))
    return build(name, ranks=ranks, microbatches=microbatches, virtual=virtual, **dict(options))


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
    """Return a free port for 0, and refuse a port in use, since Bokeh would leave its socket
    open."""
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
