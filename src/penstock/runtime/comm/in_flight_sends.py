"""Sends that are on their way: their tensors are kept until they have gone, and counted.

Whoever sends decides how many may pile up, and waits for them.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from torch import Tensor

__all__ = ["InFlightSends"]


class InFlightSends:
    """Sends to one peer that are on their way, oldest first, and how many messages went before."""

    __slots__ = ("num_bytes", "num_sent", "sends")

    def __init__(self) -> None:
        # The number of its message, counted from the step's start; the work; the tensor.
        self.sends: deque[tuple[int, Any, Tensor]] = deque()
        self.num_bytes = 0
        self.num_sent = 0

    def add(self, work: Any, tensor: Tensor) -> None:
        self.sends.append((self.num_sent, work, tensor))
        self.num_bytes += tensor.nbytes

    def drop_first(self) -> None:
        self.num_bytes -= self.sends.popleft()[2].nbytes

    def drop_all(self) -> None:
        self.sends.clear()
        self.num_bytes = 0
        self.num_sent = 0
