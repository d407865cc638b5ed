"""What a forward depends on, so that it can be run again with the same outcome.

Random numbers and buffers: dropout draws the same mask, and a BatchNorm layer counts a microbatch
once. Of what it is given, what it writes into: that is there again as it was. This module knows
neither arguments nor outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import StageError
from penstock.stage.rng import (
    host_random_states,
    random_state,
    set_host_random_states,
    set_random_state,
)

__all__ = ["Replay", "Replayer"]

_Place: TypeAlias = tuple[nn.Module, str]
_Buffers: TypeAlias = dict[str, Tensor | None]


class Replayer:
    """Makes the replays of one module: it learns which of the buffers a forward writes into.

    Example:
        >>> module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
        >>> replay = Replayer(torch.device("cpu")).record(module)
        >>> first = module(torch.eye(2))
        >>> replay.close()
        >>> with replay:
        ...     second = module(torch.eye(2))
        >>> torch.equal(first, second), module[0].num_batches_tracked.item()
        (True, 1)
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: nn.Module | None = None
        # None as long as no forward has told.
        self.written: set[_Place] | None = None
        self.writes_given: bool | None = None

    def record(self, module: nn.Module, given: Sequence[Tensor] = ()) -> Replay:
        """Note what is there before a forward of ``module``.

        Args:
            module: the module.
            given: the tensors that it is called with and may write into, which others hold too.
        """
        if module is not self._module:
            self._module, self.written, self.writes_given = module, None, None
        return Replay(self, module, self._device, given)


class Replay:
    """What was there before one forward; entered around its repetition, once.

    Args:
        maker: what it learns and has learned.
        module: the module that runs.
        device: whose random numbers it draws, beside those of the CPU.
        given: the tensors that it is called with.

    Attributes:
        given: those of them that the forward wrote into, each with a copy of what was in it.
    """

    def __init__(
        self, maker: Replayer, module: nn.Module, device: torch.device, given: Sequence[Tensor]
    ) -> None:
        self._maker = maker
        # The CPU's generator, and that of the device where it is another one.
        self._devices = dict.fromkeys((torch.device("cpu"), device))
        self._random, self._host = self._random_states(), host_random_states()
        self._noted = {
            (owner, name): (buffer, 0 if buffer is None else buffer._version)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
        }
        wanted = self._noted if maker.written is None else maker.written & self._noted.keys()
        self._before = {place: _copy(self._noted[place][0]) for place in wanted}
        self._now: list[tuple[_Buffers, _Buffers]] = []
        # A tensor of inference mode counts no versions; nobody may write into it here.
        self._versions = [(t, t._version) for t in given if not t.is_inference()]
        copied = () if maker.writes_given is False else self._versions
        self.given = [(tensor, tensor.detach().clone()) for tensor, _ in copied]

    def close(self) -> None:
        """The forward is over: forget what it has left alone.

        Raises:
            StageError: it wrote into a buffer that forwards before it did not write into, or
                likewise into what it was given.
        """
        self._close_given()
        noted, self._noted = self._noted, {}
        written = {
            place
            for place, (buffer, version) in noted.items()
            if buffer is not None and buffer._version != version
        }
        if self._maker.written is None:
            # Some kernels, BatchNorm's among them, write without counting: compared once.
            written |= {
                place
                for place, (buffer, _) in noted.items()
                if buffer is not None
                and (before := self._before[place]) is not None
                and not torch.equal(buffer, before)
            }
            self._maker.written = written
        late = [name for _, name in written - self._before.keys()]
        if late:
            raise StageError(
                f"this forward wrote into the buffer {late[0]!r}, and the first one did not: it "
                "can't be recomputed; leave the stage out of the recomputed ones"
            )
        # A buffer that another has taken the place of is as it was.
        replaced = {
            (owner, name): buffer
            for (owner, name), (buffer, _) in noted.items()
            if owner._buffers.get(name) is not buffer
        }
        kept = self._maker.written & self._before.keys()
        self._before = replaced | {place: self._before[place] for place in kept}

    def _close_given(self) -> None:
        written = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        self._versions = []
        if self._maker.writes_given is None:
            self._maker.writes_given = bool(written)
        if written and not self._maker.writes_given:
            raise StageError(
                "this forward wrote into what it was given, and the first one did not: it can't "
                "be recomputed; leave the stage out of the recomputed ones"
            )
        self.given = [(tensor, old) for tensor, old in self.given if id(tensor) in written]

    def __enter__(self) -> None:
        owners = {owner for owner, _ in self._before}
        self._now = [(owner._buffers, dict(owner._buffers)) for owner in owners]
        for (owner, name), buffer in self._before.items():
            owner._buffers[name] = buffer
        then, self._random = self._random, self._random_states()
        self._set_random_states(then)
        host, self._host = self._host, host_random_states()
        set_host_random_states(host)

    def __exit__(self, *_: object) -> None:
        self._set_random_states(self._random)
        set_host_random_states(self._host)
        for buffers, now in self._now:
            buffers.clear()
            buffers.update(now)
        self._before, self._now = {}, []

    def _random_states(self) -> list[Tensor]:
        return [random_state(device) for device in self._devices]

    def _set_random_states(self, states: list[Tensor]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            set_random_state(device, state)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
