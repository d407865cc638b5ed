"""Bytes and seconds, as people write and read them."""

from __future__ import annotations

import re

from penstock.errors import PartitionError

__all__ = ["bytes_text", "parse_bytes", "seconds_text"]

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> float:
    """A number of bytes.

    Args:
        text: a number, with a unit (kB, MB, GB, TB, or KiB, MiB, GiB, TiB) or without.

    Raises:
        PartitionError: it is no number of bytes.

    Example:
        >>> parse_bytes("16GB"), parse_bytes("1.5 GiB"), parse_bytes("300")
        (16000000000.0, 1610612736.0, 300.0)
    """
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgt]i?|)b?\s*", text.lower())
    try:
        number, unit = (float(found[1]), found[2]) if found else (0.0, "")
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise PartitionError(f"{text!r} is no number of bytes; write it as 16GB or 300MiB")
    return number * (UNITS | BINARY)[unit]


def bytes_text(number: float) -> str:
    """A number of bytes, in three digits.

    Example:
        >>> bytes_text(0), bytes_text(1234), bytes_text(27e9), bytes_text(999_999)
        ('0 B', '1.23 kB', '27.0 GB', '1.00 MB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            break
        number /= 1000
    digits = 0 if unit == "B" else 2 if number < 9.995 else 1 if number < 99.95 else 0
    return f"{number:.{digits}f} {unit}"


def seconds_text(seconds: float) -> str:
    """A time, in three digits.

    Example:
        >>> seconds_text(0.0123), seconds_text(2.5), seconds_text(4e-6)
        ('12.3 ms', '2.5 s', '4 µs')
    """
    for scale, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
