"""Restore what a forward depends on, so that it can be run again with the same result.

Restores random generators and buffers, so that dropout draws the same mask, and BatchNorm counts a
microbatch once. The first forward copies all buffers; later forwards copy only those written by the
first one. A forward that writes into its inputs is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch_compat import buffers_of, grad_hooks_of, version_of
from penstock.errors import StageError
from penstock.stage.rng import preserve_rng_state, random_states, set_random_states

__all__ = ["Findings", "RecomputeContext"]

_Place: TypeAlias = tuple[nn.Module, str]


@dataclass(slots=True)
class Findings:
    """Findings of a module's first forward; dropped when another module takes its place."""

    module: nn.Module
    writes: bool | None = None  # whether it may write into received leaves
    undeferred: Sequence[nn.Parameter] = ()  # the parameters whose gradients I computes anyway
    is_outdated: bool = True  # whether to find these again, as in each step
    compiled: Any = None  # of ``compiled_parts``
    written_buffers: set[_Place] | None = None  # the buffers that it writes into

    def keep_undeferred(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep them for the step. If parameters have hooks, each microbatch finds its own."""
        self.undeferred = parameters
        self.is_outdated = any(any(grad_hooks_of(p)) for p in self.module.parameters())


class RecomputeContext:
    """The state before one forward; ``restored`` once, around its repetition."""

    def __init__(
        self, findings: Findings, device: torch.device, inputs: Sequence[Tensor], loss_fn: Any
    ) -> None:
        self._findings, self._device = findings, device
        others = [loss_fn] if isinstance(loss_fn, nn.Module) else []
        self._random = random_states(device)
        self._recorded = {
            (owner, name): (buffer, 0 if buffer is None else version_of(buffer))
            for module in (findings.module, *others)
            for owner in module.modules()
            for name, buffer in buffers_of(owner).items()
        }
        written = findings.written_buffers
        self._before = {
            place: None if buffer is None else buffer.clone()
            for place, (buffer, _) in self._recorded.items()
            if written is None or place in written
        }
        # A tensor of inference mode counts no versions, and can't be written into here.
        self._versions = [(t, version_of(t)) for t in inputs if not t.is_inference()]

    def close(self) -> None:
        """End the recorded forward; copies of tensors that it did not write into are dropped."""
        findings, recorded, versions = self._findings, self._recorded, self._versions
        self._recorded, self._versions = {}, []
        is_first = findings.written_buffers is None
        if any(version_of(tensor) != version for tensor, version in versions):
            raise StageError(
                "this forward writes into its inputs in place (as nn.ReLU(inplace=True) does), so "
                "that it can't be run again; compute new tensors, or don't recompute this stage"
            )
        changed: set[_Place] = set()
        reassigned: dict[_Place, Tensor | None] = {}
        for place, (buffer, version) in recorded.items():
            owner, name = place
            if buffers_of(owner).get(name) is not buffer:
                reassigned[place] = buffer  # which still has its value from before
            before = self._before.get(place)
            # Some kernels, BatchNorm's among them, write without counting: compared once.
            if buffer is not None and (
                version_of(buffer) != version
                or (is_first and before is not None and not torch.equal(buffer, before))
            ):
                changed.add(place)
        if findings.written_buffers is None:
            findings.written_buffers = changed
        for _, name in changed - self._before.keys():
            raise StageError(
                f"this forward wrote into the buffer {name!r}, and the first one did not; don't "
                "recompute this stage"
            )
        known = findings.written_buffers
        self._before = reassigned | {p: b for p, b in self._before.items() if p in known}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state for the repetition, and afterwards the present one."""
        owners = {owner for owner, _ in self._before}
        present = [(buffers_of(owner), dict(buffers_of(owner))) for owner in owners]
        try:
            for (owner, name), buffer in self._before.items():
                buffers_of(owner)[name] = buffer
            with preserve_rng_state(self._device):
                set_random_states(self._random)
                yield
        finally:
            for buffers, before in present:
                buffers.clear()
                buffers.update(before)
            self._before = {}
