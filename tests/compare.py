"""Comparisons of two snapshots (``penstock.testing.compare``), exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tolerance", "assert_same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The allowed difference of two values whose terms are summed in different orders.

    Args:
        relative: relative to the largest finite magnitude of the expected tensor, not to each
            element: a sum that cancels to almost nothing has the rounding of its terms.
        absolute: in the values' own unit.
    """

    relative: float
    absolute: float = 0.0


def assert_same(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: Tolerance | None = None,
    partial: bool = False,
) -> None:
    """Compare two snapshots: names, None, shapes, dtypes and values.

    Args:
        actual: the snapshot to check.
        expected: the reference.
        tolerance: the allowed difference; None demands equal numbers (a NaN equals a NaN).
        partial: whether ``actual`` may be a part of ``expected``, as one rank's stages are.

    Raises:
        AssertionError: they differ; all differences are listed.
    """
    differences = []
    for name in dict.fromkeys([*actual, *(() if partial else expected)]):
        if name not in expected or name not in actual:
            found: str | None = "is missing" if name in expected else "is not expected at all"
        else:
            found = _difference(actual[name], expected[name], tolerance)
        if found is not None:
            differences.append(f"{name}: {found}")
    if differences:
        raise AssertionError(f"{len(differences)} differences:\n  " + "\n  ".join(differences))


def _difference(
    actual: Tensor | None, expected: Tensor | None, tolerance: Tolerance | None
) -> str | None:
    if actual is None or expected is None:
        kinds = [
            "None" if t is None else f"a tensor of shape {tuple(t.shape)}"
            for t in (actual, expected)
        ]
        return None if actual is expected else f"is {kinds[0]}, expected {kinds[1]}"
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return (
            f"has shape {tuple(actual.shape)} and dtype {actual.dtype}, "
            f"expected {tuple(expected.shape)} and {expected.dtype}"
        )
    wide = torch.complex128 if actual.is_complex() else torch.float64
    left, right = actual.to(wide), expected.to(wide)
    allowed = 0.0
    if tolerance is not None:
        finite = right[right.isfinite()].abs()
        largest = finite.max().item() if finite.numel() else 0.0
        allowed = tolerance.absolute + tolerance.relative * largest
    try:
        # Two equal infinities, or two NaN, do not differ.
        torch.testing.assert_close(
            left, right, rtol=0, atol=allowed, equal_nan=True, check_device=False
        )
    except AssertionError as error:
        return f"differs: {' '.join(str(error).split())}"
    return None
