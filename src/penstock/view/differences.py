"""Two steps of one program, action by action: what each did earlier, later, faster, slower."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from bokeh.models import ColumnDataSource
from bokeh.models.widgets.tables import (
    DataTable,
    HTMLTemplateFormatter,
    NumberFormatter,
    StringFormatter,
    TableColumn,
)

from penstock.schedule.action import Action
from penstock.schedule.rules import COMPUTE
from penstock.trace import Span, Trace
from penstock.view.palette import name_of
from penstock.view.style import time_text

__all__ = ["Differences"]

_SIGNED = """<span style="color:<%= value > 0 ? '#b3261e' : '#1b7a3d' %>;float:right">
<%= (value > 0 ? '+' : '') + value.toPrecision(3) %></span>"""


@dataclass(frozen=True, kw_only=True)
class Differences:
    """What two traces of the same actions have in common, and where they part.

    Args:
        one: the first trace, such as a measured one.
        other: the second, such as the simulated one, in the same unit.
        names: what to call the two.
    """

    one: Trace
    other: Trace
    names: tuple[str, str]

    @cached_property
    def pairs(self) -> tuple[tuple[Span, Span], ...]:
        """The spans of each action that both computed, each step begun at 0."""
        here, there = _from_zero(self.one), _from_zero(self.other)
        return tuple((span, there[act]) for act, span in here.items() if act in there)

    @cached_property
    def texts(self) -> dict[str, str]:
        """For each action, a line for its tooltip."""
        unit = self.one.unit
        found = {}
        for mine, its in self.pairs:
            lasts = (mine.end - mine.start) - (its.end - its.start)
            found[str(mine.action)] = (
                f"{self.names[0]} − {self.names[1]}: starts "
                f"{_signed(mine.start - its.start, unit)}, lasts {_signed(lasts, unit)}"
            )
        return found

    def table(self) -> DataTable:
        """All actions, to be sorted by any column."""
        scale = 1e3 if self.one.unit == "s" else 1.0
        suffix = ", ms" if self.one.unit == "s" else ""
        first, second = self.names
        pairs = self.pairs
        data = {
            "action": [str(mine.action) for mine, _ in pairs],
            "kind": [name_of(mine.action.op) for mine, _ in pairs],
            "rank": [mine.rank for mine, _ in pairs],
            "start": [mine.start * scale for mine, _ in pairs],
            "start_other": [its.start * scale for _, its in pairs],
            "later": [(mine.start - its.start) * scale for mine, its in pairs],
            "lasts": [(mine.end - mine.start) * scale for mine, _ in pairs],
            "lasts_other": [(its.end - its.start) * scale for _, its in pairs],
            "longer": [
                ((mine.end - mine.start) - (its.end - its.start)) * scale for mine, its in pairs
            ],
        }
        plain, number = StringFormatter(), NumberFormatter(format="0,0.000", text_align="right")
        signed = HTMLTemplateFormatter(template=_SIGNED)
        columns = [
            ("action", "action", plain),
            ("kind", "kind", plain),
            ("rank", "rank", NumberFormatter(text_align="right")),
            ("start", f"start {first}{suffix}", number),
            ("start_other", f"start {second}{suffix}", number),
            ("later", f"later by{suffix}", signed),
            ("lasts", f"lasts {first}{suffix}", number),
            ("lasts_other", f"lasts {second}{suffix}", number),
            ("longer", f"longer by{suffix}", signed),
        ]
        return DataTable(
            source=ColumnDataSource(data),
            columns=[
                TableColumn(field=field, title=title, formatter=formatter)
                for field, title, formatter in columns
            ],
            index_position=None,
            height=340,
            sizing_mode="stretch_width",
            name="differences",
        )


def _from_zero(trace: Trace) -> dict[Action, Span]:
    """By action what was computed, counted from the first computation on."""
    computes = [span for span in trace.spans if span.action.op in COMPUTE]
    origin = min((span.start for span in computes), default=0.0)
    return {
        span.action: replace(span, start=span.start - origin, end=span.end - origin)
        for span in computes
    }


def _signed(value: float, unit: str) -> str:
    return f"{'+' if value >= 0 else '−'}{time_text(abs(value), unit)}"
