"""Train clients through Penstock and through torch.distributed.pipelining, and compare.

    make clients                                                    all, a quarter of an hour
    .venv-clients/bin/python -m clients.run torchtitan              a client
    .venv-clients/bin/python -m clients.run torchtitan ZBV FSDP2    its runs with these words

Prints a table. A run of all cases writes it into docs/frameworks.md. Fails where Penstock's losses
or gradients are wrong: neither those of torch.distributed.pipelining nor near those without a
pipeline.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from clients import SIDE, Case

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "frameworks.md"
RECORDS = HERE.parent.absolute() / "runs" / "clients"
# What lies between these lines of the page is written here.
BEGIN, END = "<!-- runs: written by make clients -->", "<!-- end of runs -->"

TOLERANCE = 1e-5  # of gradients from those without a pipeline, whose sums have another order

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run of a client beside the same run on torch.distributed.pipelining.

    Differences are the largest over all steps; of gradients over all tensors too, relative to the
    largest element of each. None where there is nothing to compare with.

    Args:
        client: its name and version.
        case: what was run.
        losses, gradients: how far Penstock's are from those of torch.distributed.pipelining.
        plain: how far its gradients of the first step are from those without a pipeline. In later
            steps rounding grows: by Adam, and where tokens choose experts.
        peer_plain: how far torch.distributed.pipelining's are from those.
        error: what Penstock raised.
        peer_error: what torch.distributed.pipelining raised.
    """

    client: str
    case: Case
    losses: float | None = None
    gradients: float | None = None
    plain: float | None = None
    peer_plain: float | None = None
    error: str = ""
    peer_error: str = ""

    @property
    def holds(self) -> bool:
        """Whether the run is right."""
        equal = self.losses == 0 and self.gradients == 0
        near = self.plain is not None and self.plain <= TOLERANCE
        return not self.error and (equal or near)

    def cells(self) -> list[str]:
        """What a table tells of it."""
        errors = (self.peer_error, self.error)
        told = [number(value) for value in (self.losses, self.gradients)]
        if any(errors):
            told = ["", ""]
        pairs = zip((self.plain, self.peer_plain), (self.error, self.peer_error), strict=True)
        told += [error.partition(":")[0] or number(value) for value, error in pairs]
        return [self.client, self.case.composition, str(self.case.schedule), *told]


HEADER = ["client", "composition", "schedule", "losses", "gradients"]
HEADER += ["Penstock, no pipeline", "torch, no pipeline"]


def number(value: float | None) -> str:
    """A difference as it stands in the table."""
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def difference(ours: Record, theirs: Record, kind: str) -> float:
    """The largest relative difference of a kind of the records' values."""
    a, b = ours[kind], theirs[kind]
    if a.keys() != b.keys() or not a:
        return math.inf
    largest = 0.0
    for name in a:
        x, y = (torch.as_tensor(side[name], dtype=torch.float64) for side in (a, b))
        scale = y.abs().max().item() if y.numel() else 1.0
        apart = (x - y).abs().max().item() if y.numel() else 0.0
        if not math.isfinite(apart):
            return math.inf
        largest = max(largest, apart / scale if scale else apart)
    return largest


def first_step(record: Record) -> Record:
    """The first step's gradients."""
    gradients = record["gradients"].items()
    return {"gradients": {name: value for name, value in gradients if name.startswith("1/")}}


def load(folder: Path, side: str, case: Case) -> Record | None:
    """The record of a case; None where it was not run."""
    path = folder / f"{side}: {case}.pt"
    return torch.load(path, weights_only=True) if path.exists() else None


def compare(client: str, case: Case, plain: Record | None, folder: Path) -> Row | None:
    """The row of a case; None where it was not run."""
    ours, theirs = load(folder, "penstock", case), load(folder, "torch", case)
    if ours is None or theirs is None:
        return None
    told: dict[str, Any] = {}
    if "error" not in ours and "error" not in theirs:
        told["losses"] = difference(ours, theirs, "losses")
        told["gradients"] = difference(ours, theirs, "gradients")
    for record, name, error in ((ours, "plain", "error"), (theirs, "peer_plain", "peer_error")):
        if "error" in record:
            told[error] = record["error"]
        elif plain is not None and "error" not in plain:
            told[name] = difference(first_step(record), first_step(plain), "gradients")
    return Row(client=client, case=case, **told)


def gather(name: str, folder: Path) -> list[Row]:
    """The rows of the client's records."""
    client: Any = import_module(f"clients.{name}")
    rows: list[Row] = []
    plain: Record | None = None
    for case in client.CASES:
        if case.schedule is None:
            plain = load(folder, "torch", case)
            if plain is not None and "error" in plain:
                print(f"{case}: {plain['error']}")
        elif (row := compare(client.TITLE, case, plain, folder)) is not None:
            rows.append(row)
    return rows


def run_client(name: str, words: Sequence[str]) -> list[Row]:
    """A client's rows, of runs whose records are left in RECORDS."""
    folder = RECORDS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "clients.side", name, str(folder), *words]
    for sides in (["prepare"], ["torch", "penstock"]):
        environments = [{**os.environ, SIDE: side} for side in sides]
        processes = [subprocess.Popen(command, env=environment) for environment in environments]
        exit_codes = [process.wait() for process in processes]
        if any(exit_codes):
            raise RuntimeError(f"{name}: {' or '.join(sides)} failed")
    return gather(name, folder)


def show(rows: Sequence[Row]) -> None:
    """The rows as a table, then errors in full."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"torch {torch.__version__}")
    for name in [*HEADER, "holds"]:
        table.add_column(name)
    for row in rows:
        table.add_row(*row.cells(), "yes" if row.holds else "NO")
    console.print(table)
    for row in rows:
        for side, error in (("Penstock", row.error), ("torch", row.peer_error)):
            if error:
                console.print(f"{row.case}, {side}: {error}", markup=False, highlight=False)


def write_page(rows: Sequence[Row]) -> None:
    """The rows into the page."""
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    lines = [HEADER, ["---"] * len(HEADER), *(row.cells() for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")


def main() -> None:
    clients = sorted(path.stem for path in HERE.glob("*.py"))
    clients = [name for name in clients if name not in ("__init__", "run", "side")]
    chosen, words = sys.argv[1:2] or clients, sys.argv[2:]
    if unknown := set(chosen) - set(clients):
        sys.exit(f"no such client: {unknown.pop()}; there are: {', '.join(clients)}")
    start = time.monotonic()
    rows = [row for name in chosen for row in run_client(name, words)]
    show(rows)
    print(f"{len(rows)} runs in {time.monotonic() - start:.0f} s")
    if chosen == clients and not words:
        write_page(rows)
    if not all(row.holds for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
