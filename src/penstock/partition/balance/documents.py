"""Files of plain values: TOML and JSON text, and what a table in them may hold.

    text ──read_toml, read_json──► tables ──table, names, number, word──► checked values

Whatever is wrong is a ``PartitionError`` that says where. What the tables are good for is not
known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PartitionError

__all__ = [
    "check_format",
    "load",
    "names",
    "number",
    "read_json",
    "read_toml",
    "table",
    "word",
    "write_json",
    "write_toml",
]

T = TypeVar("T")


def read_toml(text: str) -> object:
    """The table in TOML text."""
    import tomllib  # here and below: few read or write plans, and all import this

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PartitionError(f"not TOML: {error}") from error


def write_toml(data: Mapping[str, Any]) -> str:
    """A table as TOML text."""
    import tomli_w

    return tomli_w.dumps(data, multiline_strings=False)


def read_json(text: str) -> object:
    """The value in JSON text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PartitionError(f"not JSON: {error}") from error


def write_json(data: Mapping[str, Any]) -> str:
    """A table as JSON text."""
    return json.dumps(data, indent=2) + "\n"


def load(path: Path, read: Callable[[str], T]) -> T:
    """What ``read`` makes of a file's text.

    Raises:
        FileNotFoundError: there is no such file.
        PartitionError: it can't be read; the message begins with its name.
    """
    try:
        return read(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise
    except (PartitionError, OSError, UnicodeDecodeError) as error:
        raise PartitionError(f"{path}: {error}") from error


# --- what a table holds ------------------------------------------------------------------------


def table(data: object, where: str, known: set[str]) -> Mapping[str, Any]:
    """``data`` as a table that has no other keys than these."""
    if not isinstance(data, Mapping):
        raise PartitionError(f"{where} is {data!r}, expected a table")
    odd = sorted(set(data) - known)
    if odd:
        raise PartitionError(f"{where} has the unknown keys {odd}, known are {sorted(known)}")
    return data


def names(value: object, what: str) -> tuple[str, ...]:
    """``value`` as a tuple of strings."""
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise PartitionError(f"the {what} are {value!r}, expected a list of names")


def word(value: object, what: str) -> str:
    """``value`` as a string."""
    if isinstance(value, str):
        return value
    raise PartitionError(f"{what} is {value!r}, expected a string")


def number(value: object, what: str) -> Any:
    """``value`` as a finite number from 0 on."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and 0 <= value < float("inf"):  # type: ignore[operator]
        return value
    raise PartitionError(f"{what} is {value!r}, expected a number ≥ 0")


def check_format(value: object, expected: int, what: str, hint: str) -> None:
    """Refuse a file of another version's form."""
    if value != expected or isinstance(value, bool):
        raise PartitionError(
            f"{what} has format {value!r}, this version reads {expected}; {hint} anew"
        )
