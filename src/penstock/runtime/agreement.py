"""Do all ranks play the same program, in the same way? Asked once, before the first step.

It knows neither programs nor stages: only what each rank says of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ScheduleError
from penstock.runtime.comm.base import Transport

__all__ = ["digest", "agree"]


def digest(text: str) -> str:
    """A short name for a long text, for people to compare.

    Example:
        >>> digest("0F0,0B0")
        'b83c824ac403bb94'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(
    facts: Mapping[str, Any], transports: Sequence[Transport], shown: Mapping[str, str]
) -> None:
    """Compare what every rank says; every rank calls.

    Args:
        facts: by what it is, as a message would call it, this process's value, as JSON has it.
            The first that differs is told.
        transports: one per rank that this process plays.
        shown: what is told of a fact in place of its value, where that says little.

    Raises:
        ScheduleError: the ranks differ; the same on every rank.
    """
    mine = json.dumps([facts, {**facts, **shown}]).encode()
    brief = digest(json.dumps(facts)).encode()
    for transport in transports:
        # Facts may be long and ranks many: they are told in full where they differ alone.
        if len(set(transport.all_gather_bytes(brief))) == 1:
            continue
        everyones = [json.loads(note) for note in transport.all_gather_bytes(mine)]
        for what in facts:
            values = [theirs[what] for theirs, _ in everyones]
            if any(value != values[0] for value in values):
                told = ", ".join(f"rank {r}: {each[what]}" for r, (_, each) in enumerate(everyones))
                raise ScheduleError(
                    f"the ranks do not agree on {what} ({told}); pass the same on every rank"
                )
