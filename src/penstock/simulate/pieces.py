"""What tables take up where sequences are split: the pieces of one wait for each other.

    F2 ───► F3 ───► ...  ───► I3 ───► I2          pieces 2 and 3 are one sequence (k = 2)

These waits hang on the microbatch, while rows are the same for all; so each action gets a row of
its own. Where sequences are whole this costs nothing. This module knows neither events nor times.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schedule.program import Program
from penstock.simulate.channels import per_action
from penstock.simulate.tables import Tables

__all__ = ["join_pieces"]


def join_pieces(tables: Tables, program: Program) -> Tables:
    """Let the pieces of a sequence wait for each other.

    Args:
        tables: any tables of the program.
        program: the program of the tables.

    Returns:
        Tables with a row for each action; the same ones where sequences are whole.
    """
    if program.num_splits == 1:
        return tables
    if tables.width > 1:
        tables = per_action(tables)
    needs = list(tables.needs)
    row, joined = -1, needs[0]
    # An action's slot is its code; those of one stage that do the same need the same.
    for code, other in tables.coding.required_chunks().items():
        if code // program.num_microbatches != row:
            row, joined = code // program.num_microbatches, (*needs[code], (other - code, 0.0))
        needs[code] = joined
    return replace(tables, needs=tuple(needs))
