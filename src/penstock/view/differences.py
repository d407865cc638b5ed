"""Two steps of one program, action by action: what each did earlier, later, faster, slower."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from bokeh.models import ColumnDataSource
from bokeh.models.widgets.tables import (
    DataTable,
    HTMLTemplateFormatter,
    NumberFormatter,
    StringFormatter,
    TableColumn,
)

from penstock.schedule.rules import COMPUTE
from penstock.simulate.metrics import Difference, compare_traces
from penstock.trace import Trace
from penstock.view.palette import name_of
from penstock.view.style import time_text

__all__ = ["Differences"]

_SIGNED = """<span style="color:<%= value > 0 ? '#b3261e' : '#1b7a3d' %>;float:right">
<%= (value > 0 ? '+' : '') + value.toFixed(3) %></span>"""


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
    def rows(self) -> tuple[Difference, ...]:
        """Of each action that both computed, how it differs; each step begun at 0."""
        compared = compare_traces(self.one, self.other, scale=1.0)
        return tuple(row for row in compared.rows if row.action.op in COMPUTE)

    @cached_property
    def texts(self) -> dict[str, str]:
        """For each action, a line for its tooltip."""
        unit = self.one.unit
        return {
            str(row.action): f"{self.names[0]} − {self.names[1]}: starts "
            f"{_signed(row.later, unit)}, lasts {_signed(row.longer, unit)}"
            for row in self.rows
        }

    def table(self) -> DataTable:
        """All actions, to be sorted by any column."""
        scale = 1e3 if self.one.unit == "s" else 1.0
        suffix = ", ms" if self.one.unit == "s" else ""
        first, second = self.names
        rows = self.rows
        data = {
            "action": [str(row.action) for row in rows],
            "kind": [name_of(row.action.op) for row in rows],
            "rank": [row.rank for row in rows],
            "start": [row.measured.start * scale for row in rows],
            "start_other": [row.simulated.start * scale for row in rows],
            "later": [row.later * scale for row in rows],
            "lasts": [(row.measured.end - row.measured.start) * scale for row in rows],
            "lasts_other": [(row.simulated.end - row.simulated.start) * scale for row in rows],
            "longer": [row.longer * scale for row in rows],
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
            reorderable=False,
            height=340,
            sizing_mode="stretch_width",
            name="differences",
        )


def _signed(value: float, unit: str) -> str:
    return f"{'+' if value >= 0 else '−'}{time_text(abs(value), unit)}"
