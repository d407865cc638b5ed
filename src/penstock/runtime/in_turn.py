"""Steps over one process group come one after the other: a step within a step is refused.

    step of A ──► its loss function ──► eval of B        only the rank of the loss is here:
                                                         the others would never come

A loss function, a hook or a module may call what it likes, also another pipeline all of whose
ranks are in this process.
"""

from __future__ import annotations

import torch.distributed as dist

from penstock.errors import ScheduleError

__all__ = ["InTurn"]

# The steps that this process is in, by what plays them.
_running: list[InTurn] = []


class InTurn:
    """A step or evaluation runs in this.

    Args:
        engine: what plays it.
        group: the ranks; None where all of them are in this process.

    Raises:
        ScheduleError: ``engine`` is at play, or another one over the same ranks.
    """

    def __init__(self, engine: object, group: dist.ProcessGroup | None) -> None:
        self._engine = engine
        self._group = group if group is not None and group.size() > 1 else None

    def __enter__(self) -> None:
        for other in _running:
            if other._engine is self._engine:
                _refuse("the same pipeline", "its slots are in use")
            if self._group is not None and other._group is self._group:
                _refuse("another one over the same ranks", "the others do not come")
        _running.append(self)

    def __exit__(self, *_: object) -> None:
        _running.remove(self)


def _refuse(whose: str, why: str) -> None:
    raise ScheduleError(
        f"step() or eval() was called within a step of {whose} (in a loss function, a hook or a "
        f"module), where {why}: call it before, and pass what it gives as target= or loss_kwargs="
    )
