"""Run leaf modules while a model is traced without its values.

    on shapes      a copy on the meta device; under autocast one of fake tensors, which it casts
    on values      the module itself, with copies of its buffers; of one on the meta device a copy
                   with small numbers, for as long as it runs

If any module can't run on shapes, the trace restarts on values. This module does not know its
caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import as_fake, autocast_state, buffers_of, fake_mode
from penstock.errors import PartitionError
from penstock.partition.forward.placeholder import PlaceholderTensor, on_meta
from penstock.partition.forward.stage_tree import copy_with_tensors

__all__ = ["LeafRunner", "RunOnValues", "with_values"]


class RunOnValues(Exception):  # not an error: the trace restarts
    """A leaf module can't run on shapes."""


class LeafRunner:
    """Run the leaf modules of one model.

    Args:
        leaves: the leaf modules by name, on any device.
        device: the device of the stages.

    Attributes:
        on_values: True if the modules themselves run.
    """

    def __init__(self, leaves: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._copies = {name: copy_with_tensors(leaf, _bare) for name, leaf in leaves.items()}
        # Leaf modules that gradients pass through, to their parameters or to their inputs.
        self._trained = {
            name
            for name, leaf in leaves.items()
            if any(p.requires_grad for p in leaf.parameters()) or not list(leaf.parameters())
        }
        # Kept until a trace shows that no values are needed, since a rank may drop the other
        # stages.
        self._leaves: Mapping[str, nn.Module] | None = leaves
        self.on_values = False
        # Copies of fake tensors for use under autocast; made on demand.
        self._mode: Any = None
        self._fakes: dict[str, nn.Module] = {}

    @property
    def device(self) -> torch.device:
        """The device of values: the stages' device, or the modules' current one."""
        if not self.on_values:
            return self._device
        held = (p for leaf in (self._leaves or {}).values() for p in leaf.parameters())
        return next((p.device for p in held if not p.is_meta), self._device)

    @property
    def casts(self) -> bool:
        """True under autocast, which requires the device type."""
        return not self.on_values and bool(autocast_state(self._device))

    def train(self, training: bool) -> None:
        """Set the mode of the copies."""
        for module in self._copies.values():
            module.train(training)

    def take_values(self, error: Exception) -> None:
        """Run on values from now on.

        Raises:
            PartitionError: the modules have no values.
        """
        if self._leaves is None:
            raise PartitionError(
                f"{error}; the model has to be run once on values for that, but has none here: "
                "pass an example"
            ) from error
        self.on_values = True

    def let_go(self) -> None:
        """Release the leaf modules; their shapes are kept."""
        self._leaves = None

    def trains(self, leaf: str) -> bool:
        """True if gradients may pass through a leaf module in training."""
        return self._copies[leaf].training and leaf in self._trained

    @contextmanager
    def module_of(self, leaf: str) -> Iterator[nn.Module]:
        """The module that runs in place of a leaf module for one call; its buffers are restored."""
        module = self._module(leaf)
        held = [(each, dict(buffers_of(each))) for each in module.modules()]
        copies: dict[int, Tensor] = {}
        try:
            if self.on_values:
                for each, buffers in held:
                    for name, buffer in buffers.items():
                        if buffer is not None:
                            buffers_of(each)[name] = copies.setdefault(id(buffer), buffer.clone())
            yield module
        finally:
            for each, buffers in held:
                buffers_of(each).clear()
                buffers_of(each).update(buffers)

    def _module(self, leaf: str) -> nn.Module:
        copy = self._copies[leaf]
        if self.on_values:
            assert self._leaves is not None
            own = self._leaves[leaf]
            if not any(each.is_meta for each in (*own.parameters(), *own.buffers())):
                return own
            # Only the shape of the result matters, so any values like those at initialization will
            # do. Released after the call: a single module fits in memory if the model does not.
            return copy_with_tensors(own, self._with_values).train(copy.training)
        if not self.casts:
            return copy
        if leaf not in self._fakes:
            self._fakes[leaf] = copy_with_tensors(copy, self._fake)
        return self._fakes[leaf].train(copy.training)

    def _with_values(self, tensor: Tensor) -> Tensor:
        return with_values(tensor, self.device) if tensor.is_meta else tensor

    def _fake(self, tensor: Tensor) -> Tensor:
        self._mode = self._mode or fake_mode()
        return as_fake(self._mode, tensor, self._device)

    def lower(self, leaf: Any) -> Any:
        """Convert a leaf of a module's arguments for the module that runs."""
        body = leaf.body if type(leaf) is PlaceholderTensor else leaf
        if not isinstance(body, Tensor):
            return body
        if self.on_values:  # parameters of other leaf modules have no meta copy
            return self._with_values(body)
        if self.casts:
            return self._fake(on_meta(body))
        return body if type(leaf) is PlaceholderTensor else on_meta(body)

    def run(self, leaf: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call the module that ``module_of`` gave.

        Raises:
            RunOnValues: the module can't run on shapes.
        """
        if self.on_values:
            return module(*args, **kwargs)
        try:
            with nullcontext() if module is self._copies[leaf] else self._mode:
                return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise RunOnValues(
                f"{leaf} can't run on shapes alone ({type(error).__name__}: {said})"
            ) from error


def _bare(tensor: Tensor) -> Tensor:
    made = on_meta(tensor)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def with_values(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with values: the tensor's own, or small numbers, the same on each rank.

    Integers without values become zeros.
    """
    if not tensor.is_meta:
        return tensor.detach().to(device, copy=True)
    made = torch.zeros_like(tensor, device=device)
    if made.is_floating_point():
        made.copy_(torch.linspace(-0.02, 0.02, made.numel(), device=device).view(made.shape))
    return made
