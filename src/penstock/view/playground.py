"""The playground: a local page on which a schedule follows sliders.

Bokeh's server holds one ``Playground`` per browser tab, and sends it what changes. It listens on
127.0.0.1 alone, and takes no connection that another site's page has opened.
"""

from __future__ import annotations

import socket
import time
import webbrowser
from collections.abc import Callable
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
from penstock.schedule.messages import numbers_of
from penstock.schedule.registry import family, schedules
from penstock.simulate.simulation import Simulation
from penstock.view.comparison import Row, table_html
from penstock.view.scene import Scene, read_options, shown_message
from penstock.view.style import (
    PAGE_CSS,
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


class Playground:
    """One tab's widgets, plot and tables.

    Args:
        document: the tab's document; what the widgets ask for is drawn into it.
    """

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
        self._rows: list[Row] = []
        self._left: list[str] = []
        self._asked = self._comparing = False
        self._follow()
        self._draw()
        document.title = "Penstock playground"
        document.add_root(self._layout())

    def _follow(self) -> None:
        self.schedule.on_change("value", self._take_usual)
        sliders = (
            self.ranks, self.microbatches, self.virtual, self.forward, self.input_grad,
            self.weight_grad, self.latency, self.memory, self.options, self.compared,
        )  # fmt: skip
        for widget in sliders:
            widget.on_change("value", self._ask)
        self.per.on_change("active", self._ask)

    def _take_usual(self, attr: str, old: object, new: str) -> None:
        """A schedule just chosen begins with its usual number of stages and no options."""
        chosen = family(new)
        self.virtual.value = chosen.default_virtual
        self.options.value = ""
        self.options.placeholder = ", ".join(f"{name}=..." for name in chosen.options) or "none"
        self._ask(attr, old, new)

    def _ask(self, attr: str, old: object, new: object) -> None:
        """Draw soon, once for all that is asked until then: sliders ask for every step."""
        if not self._asked:
            self._asked = True
            self.document.add_next_tick_callback(self._draw)

    def _scene(self) -> Scene:
        return Scene(
            ranks=int(self.ranks.value),
            microbatches=int(self.microbatches.value),
            forward=self.forward.value,
            input_grad=self.input_grad.value,
            weight_grad=self.weight_grad.value,
            latency=self.latency.value,
            memory=self.memory.value or None,
            per_rank=self.per.active == 1,
        )

    def _draw(self) -> None:
        """Draw the step; the browser hears of it in one message."""
        self._asked = False
        self.document.hold("combine")
        try:
            self._draw_step()
        finally:
            self.document.unhold()

    def _draw_step(self) -> None:
        scene, name = self._scene(), self.schedule.value
        try:
            options = read_options(self.options.value)
            result = scene.play(name, virtual=int(self.virtual.value), options=options)
        except PenstockError as error:
            self.error.text = error_html(shown_message(error))
            self.error.visible = True
            self.timeline.plot.visible = False
            self.heading.text = heading_html(name, "")
            self.figures.text = self.legend.text = ""
        else:
            self.error.visible = False
            self.timeline.plot.visible = True
            self._show(result, scene)
        self._rows, self._left = [], list(dict.fromkeys([name, *self.compared.value]))
        if not self._comparing:
            self._comparing = True
            self.document.add_next_tick_callback(self._compare)

    def _show(self, result: Simulation, scene: Scene) -> None:
        program = result.program
        self.timeline.show(result)
        subtitle = numbers_of(
            rank=program.num_ranks,
            stage=program.num_stages,
            microbatch=program.num_whole_microbatches,
        )
        self.heading.text = heading_html(program.name, subtitle)
        self.legend.text = legend_html([result.trace])
        self.figures.text = figures_html(figures_of([result], limit=scene.memory))

    def _compare(self) -> None:
        """Simulate what is left to compare, and lay out the table once that is nothing.

        The timeline is not to wait for many others, so that this comes after it, and in slices: a
        slider that has moved on meanwhile begins it anew.
        """
        began = time.monotonic()
        while self._left and time.monotonic() - began < _SLICE_S:
            self._rows.append(self._row(self._left.pop(0)))
        if self._left:
            self.document.add_next_tick_callback(self._compare)
            return
        self._comparing = False
        memory = self._scene().memory
        self.comparison.text = table_html(self._rows, memory=memory, chosen=self.schedule.value)

    def _row(self, name: str) -> Row:
        is_chosen = name == self.schedule.value
        virtual = int(self.virtual.value) if is_chosen else None
        outcome: Simulation | str
        try:
            options = read_options(self.options.value if is_chosen else "")
            outcome = self._scene().play(name, virtual=virtual, options=options)
        except PenstockError as error:
            outcome = shown_message(error, beside=name)
        return Row(name=name, outcome=outcome)

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


def _open(document: Document) -> None:
    Playground(document)


def serve(
    *, port: int = 0, browser: bool = True, ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve the playground on 127.0.0.1 until the process is interrupted.

    Args:
        port: where to listen; 0 for any that is free.
        browser: whether to open it in the user's browser.
        ready: called with the address, once it is served.

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


def _reserved(port: int) -> int:
    """The port, or for 0 any that is free; Bokeh leaves its socket open where it is taken."""
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
