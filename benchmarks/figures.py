"""A measured figure beside its bound; tables and files of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "save_figures", "show_figures", "write_page"]

# What lies between these lines of a page is written by ``write_page``.
_BEGIN, _END = "<!-- figures: written by make bench -->", "<!-- end of figures -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure.

    Args:
        group: what was measured, such as ``"step time, tiny stages"``.
        name: which case of it.
        over: what it is compared with.
        value: the figure.
        bound: the most that it may be; None where nothing is asked of it.
        unit: ``""`` for a ratio.
        spread: half the distance between the quartiles of the repeated measurement; 0 where it
            was not repeated.
    """

    group: str
    name: str
    over: str
    value: float
    bound: float | None = None
    unit: str = ""
    spread: float = 0.0

    @classmethod
    def median_of(cls, samples: Sequence[float], **what: Any) -> Figure:
        """The median of repeated measurements, with its spread; ``what`` are the other fields."""
        low, middle, high = quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
        return cls(value=middle, spread=(high - low) / 2, **what)

    @property
    def holds(self) -> bool:
        """Whether the figure is within its bound."""
        return self.bound is None or self.value <= self.bound


def show_figures(figures: Sequence[Figure], console: Console) -> None:
    """A table of the figures, with bound and verdict."""
    table = Table(title=f"Penstock, torch {torch.__version__}, {os.cpu_count()} cores")
    for name, justify in (("what", "left"), ("case", "left"), ("over", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("measured", "±", "bound", "verdict"):
        table.add_column(name, justify="right")
    before = ""
    for figure in figures:
        bound = "" if figure.bound is None else f"≤ {figure.bound:.2f}"
        verdict = "" if figure.bound is None else ("holds" if figure.holds else "FAILS")
        unit = f" {figure.unit}" if figure.unit else ""
        table.add_row(
            figure.group if figure.group != before else "",
            figure.name,
            figure.over,
            f"{figure.value:.3f}{unit}",
            f"{figure.spread:.3f}" if figure.spread else "",
            bound,
            verdict,
            style="red" if not figure.holds else None,
            end_section=False,
        )
        before = figure.group
    console.print(table)


def save_figures(figures: Sequence[Figure], path: Path) -> None:
    """Write the figures with what they were measured on."""
    document = {
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        "figures": [{**asdict(figure), "holds": figure.holds} for figure in figures],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_page(figures: Sequence[Figure], page: Path) -> None:
    """Put the figures into a page, between its two marker lines, where their groups stand in the
    table of this version of torch.

    Rows of other groups and tables of other versions stay as they are.

    Raises:
        ValueError: the page lacks a marker.
    """
    text = page.read_text(encoding="utf-8")
    if _BEGIN not in text or _END not in text:
        raise ValueError(f"{page} lacks the line {_BEGIN!r} or {_END!r}")
    head, rest = text.split(_BEGIN, 1)
    told, tail = rest.split(_END, 1)
    tables: dict[str, list[str]] = {}  # by version of torch
    for line in told.strip().splitlines():
        if line.startswith("torch "):
            tables[_version_of(line)] = lines = []
        lines.append(line)
    version = f"torch {torch.__version__}"
    rows: dict[str, list[str]] = {}
    for line in tables.get(_version_of(version), []):
        if line.startswith("| ") and not line.startswith("| what |"):
            rows.setdefault(line.split("|")[1].strip(), []).append(line)
    rows |= {figure.group: [] for figure in figures}
    for figure in figures:
        rows[figure.group].append(_row(figure))
    tables[_version_of(version)] = [
        f"{version}, Python {platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "| what | case | over | measured | ± | bound |",
        "|---|---|---|---:|---:|---:|",
        *chain.from_iterable(rows.values()),
    ]
    shown = "\n\n".join("\n".join(lines).strip() for lines in tables.values())
    page.write_text(f"{head}{_BEGIN}\n{shown}\n{_END}{tail}", encoding="utf-8")


def _version_of(line: str) -> str:
    """``2.13`` of a line that begins with ``torch 2.13.0+cpu``."""
    return ".".join(line.split()[1].split(".")[:2])


def _row(figure: Figure) -> str:
    unit = f" {figure.unit}" if figure.unit else ""
    spread = f"{figure.spread:.3f}" if figure.spread else ""
    bound = "" if figure.bound is None else f"≤ {figure.bound:.2f}"
    value = f"{figure.value:.3f}{unit}"
    shown = value if figure.holds else f"**{value}** (does not hold)"
    cells = (figure.group, figure.name, figure.over, shown, spread, bound)
    return f"| {' | '.join(cells)} |"
