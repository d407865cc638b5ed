"""What a shell offers while a command line is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.cli.values import OTHER_COSTS
from penstock.schedule.catalog import schedules

__all__ = ["cost_names", "sources"]

_FILES = (".csv", ".json")


def sources(incomplete: str) -> Iterator[tuple[str, str]]:
    """Schedules, and files that may hold a program, each with what it is.

    Example:
        >>> [name for name, _ in sources("zb-h")]
        ['zb-h1', 'zb-h2']
    """
    for each in schedules():
        if each.name.startswith(incomplete.lower()):
            yield each.name, each.summary
    head, slash, begun = incomplete.rpartition("/")
    for path in sorted(Path(head + slash).glob("*")):
        if path.name.startswith(begun) and (path.suffix in _FILES or path.is_dir()):
            told = f"{head}{slash}{path.name}"
            yield (f"{told}/", "folder") if path.is_dir() else (told, "file")


def cost_names(incomplete: str) -> Iterator[str]:
    """The costs that are given by name.

    Example:
        >>> list(cost_names("off"))
        ['offload=', 'offload_bandwidth=']
    """
    yield from (f"{name}=" for name in OTHER_COSTS if name.startswith(incomplete))
