"""The playground: a local page on which a schedule follows sliders.

Bokeh's server holds one ``Playground`` per browser tab. It listens on 127.0.0.1 only, and refuses
cross-origin connections.
"""

from __future__ import annotations

import socket
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule.family import parse_options
from penstock.schedule.program import sizes_text
from penstock.schedule.registry import family, refuse_options, schedules
from penstock.simulate.costs import Costs, build_for, costs_divisor, per_stage_costs
from penstock.simulate.memory import exceeds
from penstock.simulate.simulation import Simulation, simulate
from penstock.view import page
from penstock.view.layout import arrange
from penstock.view.palette import SAME_MODEL, SAME_STAGES, amount
from penstock.view.timeline import STRETCHED, Timeline, bk

__all__ = ["Playground", "serve"]

ADDRESS = "127.0.0.1"
_COMPARED = ["gpipe", "1f1b", "interleaved-1f1b", "zbv"]
# An empty field has no value; one beyond the slider's ends is set to the nearer end.
_SET_BOTH = """
if (this.value !== null) {
  slider.value = entry.value = Math.min(slider.end, Math.max(slider.start, this.value))
}
"""
_COLUMNS = ("schedule", "stages per rank", "makespan", "bubble", "span bubble", "peak held")


class Playground:
    """The widgets, plot and tables of one browser tab."""

    def __init__(self, document: Any) -> None:
        names = [each.name for each in schedules()]
        self.document = document
        self.schedule = _choice(bk.Select, "schedule", "1f1b", options=names)
        self.ranks = _slider("ranks", 4, 1, 64, 1)
        self.microbatches = _slider("microbatches", 8, 1, 128, 1)
        self.virtual = _slider("stages per rank", 1, 1, 8, 1)
        self.options = _choice(bk.TextInput, "options of the schedule", "", placeholder="none")
        self.per = bk.RadioButtonGroup(labels=["per rank", "per stage"], active=0, name="per")
        self.forward = _slider("forward F", 1.0, 0.0, 5.0, 0.1)
        self.input_grad = _slider("input gradient I", 1.0, 0.0, 5.0, 0.1)
        self.weight_grad = _slider("weight gradient W", 1.0, 0.0, 5.0, 0.1)
        self.latency = _slider("latency of a message", 0.0, 0.0, 2.0, 0.05)
        self.memory = _slider("memory limit (0: none)", 0, 0, 128, 1)
        self.compared = _choice(bk.MultiChoice, "compare with", _COMPARED, options=names)
        self.compared.name = "compared"
        # So low that the time axis and the comparison are in view at 1280 × 800.
        self.timeline, self.heading, self.legend = Timeline(height=320), page.div(), page.div()
        self.figures, self.comparison = page.div(name="figures"), page.div(name="comparison")
        self.error = page.div(visible=False, name="error")
        sizes = [self.ranks, self.microbatches, self.virtual, self.options]
        times = [self.forward, self.input_grad, self.weight_grad, self.latency]
        self.schedule.on_change("value", self._reset_schedule)
        for widget in (*sizes, *times, self.memory, self.compared):
            widget.on_change("value", self._start_drawing)
        self.per.on_change("active", self._start_drawing)
        # The drawing in progress, until all is drawn.
        self._drawing: Iterator[None] | None = self._draw()
        self._continue_drawing()
        document.title = "Penstock playground"
        titles = ("costs", "memory and comparison")
        costs, rest = (page.div(f'<div class="title">{title}</div>') for title in titles)
        heading = page.div(page.heading_html("Penstock", "playground"))
        panel = bk.Column(
            heading, self.schedule, *map(_with_entry, sizes), costs, self.per,
            *map(_with_entry, times), rest, _with_entry(self.memory), self.compared, width=270,
        )  # fmt: skip
        view = bk.Column(
            self.heading, self.figures, self.comparison, self.error,
            page.legend_row([self.timeline], self.legend), self.timeline.plot, spacing=10,
            **STRETCHED,
        )  # fmt: skip
        look = page.page_look()
        document.add_root(bk.Row(panel, view, spacing=26, stylesheets=[look], **STRETCHED))

    def _reset_schedule(self, attr: str, old: object, new: str) -> None:
        """Start a newly chosen schedule with its default number of stages and no options."""
        chosen = family(new)
        self.virtual.value = chosen.default_virtual
        self.options.value = ""
        self.options.placeholder = ", ".join(f"{name}=..." for name in chosen.options) or "none"
        self._start_drawing(attr, old, new)

    def _start_drawing(self, attr: str, old: object, new: object) -> None:
        """Draw anew from the next tick on, once for all changes until then."""
        if self._drawing is None:
            self.document.add_next_tick_callback(self._continue_drawing)
        self._drawing = self._draw()

    def _continue_drawing(self) -> None:
        """Take one step of the drawing; its changes reach the browser in one message."""
        drawing, self._drawing = self._drawing, None
        assert drawing is not None
        self.document.hold("combine")
        try:
            next(drawing)
            self._drawing = drawing
            self.document.add_timeout_callback(self._continue_drawing, 1)  # after messages
        except StopIteration:
            pass
        finally:
            self.document.unhold()

    def _draw(self) -> Iterator[None]:
        """Draw the step, then the comparison; yields after each simulation, so that sliders that
        move meanwhile are followed at once."""
        name, limit = self.schedule.value, self.memory.value or None
        outcomes: dict[str, Simulation | str] = {}
        for each in dict.fromkeys([name, *self.compared.value]):
            try:
                outcomes[each] = self._simulate(each)
            except PenstockError as error:
                outcomes[each] = str(error)
            if each == name:
                self._draw_step(name, outcomes[name], limit)
            yield
        title = SAME_STAGES if self.per.active else SAME_MODEL
        table = _comparison_html(outcomes, memory=limit, chosen=name)
        self.comparison.text = f'<div class="title">{title}</div>{table}'

    def _simulate(self, name: str) -> Simulation:
        """Simulate a schedule; only the drawn one gets the stages per rank and the options."""
        virtual, options = None, dict[str, object]()
        if name == self.schedule.value:
            virtual = int(self.virtual.value)
            options = parse_options(filter(None, map(str.strip, self.options.value.split(","))))
        refuse_options(family(name), options)
        # With a size, activations are shared among a rank's stages like times.
        costs = Costs(
            forward=self.forward.value, input_grad=self.input_grad.value, activation_bytes=1.0,
            weight_grad=self.weight_grad.value, latency=self.latency.value,
        )  # fmt: skip
        per_rank = not self.per.active
        sizes = {"ranks": int(self.ranks.value), "microbatches": int(self.microbatches.value)}
        program = build_for(costs, name, per_rank=per_rank, virtual=virtual, **sizes, **options)
        share = costs_divisor(program) if per_rank else 1.0
        return simulate(program, per_stage_costs(costs, share))

    def _draw_step(self, name: str, outcome: Simulation | str, limit: float | None) -> None:
        failed = isinstance(outcome, str)
        self.error.visible, self.timeline.plot.visible = failed, not failed
        if isinstance(outcome, str):
            self.error.text = f'<div role="alert" class="card error">{escape(outcome)}</div>'
            self.heading.text = page.heading_html(name, "")
            self.figures.text = self.legend.text = ""
            return
        self.timeline.show(arrange(outcome))
        self.heading.text = page.heading_html(outcome.program.name, sizes_text(outcome.program))
        self.legend.text = page.legend_html([outcome.trace])
        self.figures.text = page.figures_html(page.figures_of([outcome], limit=limit))


def _choice(kind: Any, title: str, value: Any, **more: Any) -> Any:
    return kind(title=title, value=value, name=title.split()[0], width=255, **more)


def _slider(title: str, value: float, start: float, end: float, step: float) -> Any:
    return _choice(bk.Slider, title, value, start=start, end=end, step=step, show_value=False)


def _with_entry(widget: Any) -> Any:
    """A slider beside a field that takes the same number; another widget as it is."""
    if not isinstance(widget, bk.Slider):
        return widget
    widget.width = 175
    entry = bk.Spinner(
        value=widget.value, step=widget.step, width=70, name=f"{widget.name} entry", align="end",
        mode="int" if widget.step == 1 else "float",
    )  # fmt: skip
    args = {"slider": widget, "entry": entry}
    for changed in (widget, entry):
        changed.js_on_change("value", bk.CustomJS(args=args, code=_SET_BOTH))
    return bk.Row(widget, entry)


def _comparison_html(
    outcomes: Mapping[str, Simulation | str], *, memory: float | None, chosen: str
) -> str:
    """A table of schedules, smallest bubble first; of each the simulated step, or the reason why it
    has none. The drawn schedule is bold, a peak above the memory limit red."""
    results = {name: each for name, each in outcomes.items() if isinstance(each, Simulation)}
    ratios = {name: each.bubble_ratio for name, each in results.items()}
    peaks = {name: max(each.peak_bytes) for name, each in results.items()}
    rows = ""
    for name in sorted(outcomes, key=lambda name: ratios.get(name, 2.0)):
        outcome, shown = outcomes[name], escape(name)
        rows += f"<tr><td>{f'<b>{shown}</b>' if name == chosen else shown}</td>"
        if isinstance(outcome, str):
            rows += f'<td colspan="5">{escape(outcome.removeprefix(f"{name}: "))}</td></tr>'
            continue
        colour = "#d64545" if exceeds(peaks[name], memory) else "#d9a441"
        cells = (
            str(outcome.program.num_stages // outcome.program.num_ranks),
            amount(outcome.makespan),
            _bar(f"{ratios[name]:.1%}", ratios[name], max(ratios.values()), "#4f86d9"),
            f"{outcome.span_bubble_ratio:.1%}",
            _bar(amount(peaks[name]), peaks[name], max(peaks.values()), colour),
        )
        rows += "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    # Beyond some schedules the table scrolls, so that the timeline stays in view.
    return f'<div class="card" style="max-height:180px;overflow-y:auto">{table}</div>'


def _bar(text: str, value: float, most: float, colour: str) -> str:
    width = 110 * value / most if most > 0 else 0
    return f'<span>{text}</span><i style="width:{width:.1f}px;background:{colour}"></i>'


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
    from bokeh.server.server import Server

    try:
        # Bokeh would leave the socket of a port in use open, and needs the number of a free one.
        with socket.create_server((ADDRESS, port)) as probe:
            port = probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        raise PenstockError(
            f"port {port} of {ADDRESS} is not available ({error}); take another with --port, or "
            "any that is free with --port 0"
        ) from error
    origins = [f"{ADDRESS}:{port}", f"localhost:{port}"]
    server = Server({"/": _open}, address=ADDRESS, port=port, allow_websocket_origin=origins)
    url = f"http://{ADDRESS}:{port}/"
    server.start()
    ready(url)
    if browser:
        webbrowser.open(url)
    try:
        server.io_loop.start()
    except KeyboardInterrupt:
        server.stop()


def _open(document: Any) -> None:
    Playground(document)
