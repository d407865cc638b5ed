"""Restore what a forward depends on, so that it can be run again with the same result.

Restores random generators and buffers, so that dropout draws the same mask, and BatchNorm counts a
microbatch once. Tensors that the forward writes into are restored from copies. The first forward
copies all buffers and inputs; later forwards copy only those written by the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import buffers_of, version_of
from penstock.errors import StageError
from penstock.stage.rng import (
    host_random_states,
    random_state,
    set_host_random_states,
    set_random_state,
)

__all__ = ["RecomputeContext", "Recomputer"]

_Place: TypeAlias = tuple[nn.Module, str]
_LATE = "this forward wrote into {}, and the first one did not; don't recompute this stage"


class Recomputer:
    """Makes the recompute contexts of one stage.

    Args:
        device: the device whose generator is restored, beside the CPU's.

    Attributes:
        written_buffers: the buffers that the forward writes into; None before the first forward.
        writes_inputs: whether it writes into its inputs; likewise.

    Example:
        >>> module = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
        >>> context = Recomputer(torch.device("cpu")).record(module)
        >>> first = module(torch.eye(2))
        >>> context.close()
        >>> with context:
        ...     second = module(torch.eye(2))
        >>> torch.equal(first, second), module[0].num_batches_tracked.item()
        (True, 1)
    """

    def __init__(self, device: torch.device) -> None:
        # The CPU's generator, and that of the device where it is another one.
        self.devices = tuple(dict.fromkeys((torch.device("cpu"), device)))
        self._module: nn.Module | None = None
        self.written_buffers: set[_Place] | None = None
        self.writes_inputs: bool | None = None

    def record(self, module: nn.Module, inputs: Sequence[Tensor] = ()) -> RecomputeContext:
        """Record the state before a forward.

        Args:
            module: the module that is about to run.
            inputs: the tensors that it is given.
        """
        if module is not self._module:
            self._module, self.written_buffers, self.writes_inputs = module, None, None
        return RecomputeContext(self, module, inputs)


class RecomputeContext:
    """The state before one forward; entered once, around its repetition.

    Args:
        recomputer: the facts learned from the stage's earlier forwards.
        module: the module that runs.
        inputs: the tensors that it is given.

    Attributes:
        written_inputs: by id, for each input that the forward wrote into, a copy of its value
            before, and the input itself to keep the id valid.
    """

    def __init__(self, recomputer: Recomputer, module: nn.Module, inputs: Sequence[Tensor]) -> None:
        self._recomputer = recomputer
        self._random, self._host = self._random_states(), host_random_states()
        self._recorded = {
            (owner, name): (buffer, 0 if buffer is None else version_of(buffer))
            for owner in module.modules()
            for name, buffer in buffers_of(owner).items()
        }
        known = recomputer.written_buffers
        copied: Iterable[_Place] = self._recorded if known is None else known
        self._before = {
            place: _copy(self._recorded[place][0]) for place in copied if place in self._recorded
        }
        self._now: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
        # A tensor of inference mode counts no versions, and can't be written into here.
        self._versions = [(t, version_of(t)) for t in inputs if not t.is_inference()]
        kept = () if recomputer.writes_inputs is False else self._versions
        self.written_inputs: Mapping[int, tuple[Tensor, Tensor]] = {
            id(tensor): (tensor.detach().clone(), tensor) for tensor, _ in kept
        }

    def close(self) -> None:
        """End the recorded forward; copies of what it left alone are dropped.

        Raises:
            StageError: it wrote into a buffer or input that the first forward did not write into.
        """
        recomputer = self._recomputer
        written = {
            id(tensor) for tensor, version in self._versions if version_of(tensor) != version
        }
        self._versions = []
        if recomputer.writes_inputs is None:
            recomputer.writes_inputs = bool(written)
        elif written and not recomputer.writes_inputs:
            raise StageError(_LATE.format("its inputs"))
        self.written_inputs = {i: self.written_inputs[i] for i in written}
        self._close_buffers(recomputer)

    def _close_buffers(self, recomputer: Recomputer) -> None:
        recorded, self._recorded = self._recorded, {}
        written = {
            place
            for place, (buffer, version) in recorded.items()
            if buffer is not None and version_of(buffer) != version
        }
        if recomputer.written_buffers is None:
            # Some kernels, BatchNorm's among them, write without counting: compared once.
            written |= {
                place
                for place, before in self._before.items()
                if before is not None
                and (buffer := recorded[place][0]) is not None
                and not torch.equal(buffer, before)
            }
            recomputer.written_buffers = written
        if late := [name for _, name in written - self._before.keys()]:
            raise StageError(_LATE.format(f"the buffer {late[0]!r}"))
        kept = {
            place: before
            for place, before in self._before.items()
            if place in recomputer.written_buffers
        }
        # A buffer that was reassigned still has its value from before.
        reassigned = {
            (owner, name): buffer
            for (owner, name), (buffer, _) in recorded.items()
            if buffers_of(owner).get(name) is not buffer
        }
        self._before = reassigned | kept

    def restore(self, tensor: Tensor) -> Tensor:
        """An input's value before the recorded forward."""
        found = self.written_inputs.get(id(tensor))
        return tensor if found is None else found[0]

    def __enter__(self) -> None:
        owners = {owner for owner, _ in self._before}
        self._now = [(buffers_of(owner), dict(buffers_of(owner))) for owner in owners]
        for (owner, name), buffer in self._before.items():
            buffers_of(owner)[name] = buffer
        self._swap_random_states()

    def __exit__(self, *_: object) -> None:
        self._swap_random_states()
        for buffers, now in self._now:
            buffers.clear()
            buffers.update(now)
        self._before, self._now = {}, []

    def _swap_random_states(self) -> None:
        now, host = self._random_states(), host_random_states()
        for device, state in zip(self._recomputer.devices, self._random, strict=True):
            set_random_state(device, state)
        set_host_random_states(self._host)
        self._random, self._host = now, host

    def _random_states(self) -> list[Tensor]:
        return [random_state(device) for device in self._recomputer.devices]


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.clone()
