"""Which parameters lie here, but are trained on another rank, by another pipeline over the model.

    first pipeline     rank 0: layers 0, 1      rank 1: layers 2, 3
    second pipeline    rank 0: layers 0, 3      rank 1: layers 1, 2

Under the second, layer 3 of rank 0 is as it began, however long the first has trained that of rank
1. The marks are numbers, set on the parameters themselves, so that they keep nothing alive and can
be saved with them. A parameter that was written here since then counts as handed on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable

from torch import nn

__all__ = ["TrainedElsewhere"]

_log = logging.getLogger(__name__)
# The pipelines that hold a parameter here; those that hold it on another rank; its version when one
# of these was made, or last trained it there.
_HERE, _AWAY, _TRAINED = "_penstock_here", "_penstock_away", "_penstock_trained_away"
# By its number, how many steps each pipeline has made.
_num_steps: dict[int, int] = {}


class TrainedElsewhere:
    """Which of one pipeline's parameters lie here, but are trained on another rank.

    Args:
        own: the parameters that this process holds.
        away: those that only others hold.
    """

    def __init__(self, own: Iterable[nn.Parameter], away: Iterable[nn.Parameter]) -> None:
        self._number = len(_num_steps)
        _num_steps[self._number] = 0
        self._own = [weakref.ref(param) for param in own]
        held = {id(ref()) for ref in self._own}
        self._away = [weakref.ref(param) for param in away if id(param) not in held]
        for ref in self._away:
            _add(ref(), _AWAY, self._number)
            _note(ref())
        for ref in self._own:
            _add(ref(), _HERE, self._number)
        self._doubtful: list[weakref.ref[nn.Parameter]] = []
        self._watched: list[weakref.ref[nn.Parameter]] = []
        self._num_known = 0
        self._has_told = False

    def _look(self) -> None:
        """Which parameters another pipeline has elsewhere, or here: few pipelines share any."""
        if self._num_known == len(_num_steps):
            return
        self._num_known = len(_num_steps)
        self._doubtful = [ref for ref in self._own if hasattr(ref(), _AWAY)]
        self._watched = [ref for ref in self._away if hasattr(ref(), _HERE)]

    def stepped(self) -> None:
        """This pipeline has made a step."""
        self._look()
        _num_steps[self._number] += 1
        for ref in self._watched:
            _note(ref())

    def remark(self) -> None:
        """Say once that what is about to be used is trained elsewhere."""
        self._look()
        if self._has_told or not self._doubtful:
            return
        params = [param for ref in self._doubtful if (param := ref()) is not None]
        count = sum(map(_is_behind, params))
        if count:
            self._has_told = True
            _log.warning(
                "%d of this rank's parameters are trained on another rank, by another pipeline "
                "over the same model, and here they are as before; give both pipelines the same "
                "split, schedule and ranks, or call second.load_state_dict(first.state_dict("
                "full=True)) on every rank",
                count,
            )


def _note(param: nn.Parameter | None) -> None:
    if param is not None and param.requires_grad and not param.is_inference():
        setattr(param, _TRAINED, param._version)


def _is_behind(param: nn.Parameter) -> bool:
    is_trained = any(_num_steps.get(number) for number in getattr(param, _AWAY, ()))
    return is_trained and getattr(param, _TRAINED, None) == param._version


def _add(param: nn.Parameter | None, mark: str, number: int) -> None:
    if param is not None:
        setattr(param, mark, (*getattr(param, mark, ()), number))
