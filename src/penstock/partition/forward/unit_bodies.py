"""What runs in the place of a model's units while it is run dry, and what they are given.

    on shapes      a copy on the meta device; under autocast one of fake tensors, which it casts
    on values      the unit itself, with copies of its buffers; of one on the meta device a copy
                   with small numbers, for as long as it runs

A unit that can't run on shapes says so once; then everything is run on values. This module does
not know what calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import as_fake, autocast_state, fake_mode, registries
from penstock.errors import PartitionError
from penstock.partition.forward.absent import Absent, on_meta
from penstock.partition.forward.shell import put_tensors, skeleton

__all__ = ["NeedsValues", "UnitBodies", "with_values"]


class NeedsValues(Exception):  # no error of anybody's: the dry run starts again
    """A part can't run without values."""


class UnitBodies:
    """Runs the units of one model.

    Args:
        units: the units by name, on any device.
        device: where the stages will live.

    Attributes:
        on_values: whether the units themselves run.
    """

    def __init__(self, units: Mapping[str, nn.Module], device: torch.device) -> None:
        self._device = device
        self._bare = {name: skeleton(unit) for name, unit in units.items()}
        # Those through which gradients go: to parameters of theirs, or to what they are given.
        self._trained = {
            name
            for name, unit in units.items()
            if any(p.requires_grad for p in unit.parameters()) or not list(unit.parameters())
        }
        # Held until it is known that no dry run needs values: a rank may drop the rest.
        self._units: Mapping[str, nn.Module] | None = units
        self.on_values = False
        # Under autocast, units run on copies of these kinds, which it casts; made when needed.
        self._mode: Any = None
        self._fakes: dict[str, nn.Module] = {}

    @property
    def place(self) -> torch.device:
        """Where values are: the stages' device, or where the units are now."""
        if not self.on_values:
            return self._device
        return next((p.device for p in self._parameters() if not p.is_meta), self._device)

    @property
    def casts(self) -> bool:
        """Whether autocast has to be told the device by name."""
        return not self.on_values and bool(autocast_state(self._device))

    def train(self, training: bool) -> None:
        """Set the mode of the copies."""
        for module in self._bare.values():
            module.train(training)

    def take_values(self, error: Exception) -> None:
        """Run on values from now on.

        Raises:
            PartitionError: there are none.
        """
        if self._units is None:
            raise PartitionError(
                f"{error}; the model has to be run once on values for that, but has none here: "
                "pass an example"
            ) from error
        self.on_values = True

    def _parameters(self) -> Iterator[Tensor]:
        for unit in (self._units or {}).values():
            yield from unit.parameters()

    def let_go(self) -> None:
        """Hold the units themselves no longer: shapes do."""
        self._units = None

    def trains(self, unit: str) -> bool:
        """Whether gradients may have to go through a unit while the model trains."""
        return self._bare[unit].training and unit in self._trained

    @contextmanager
    def of(self, unit: str) -> Iterator[nn.Module]:
        """What is run in a unit's place, for one call; its buffers are afterwards as before."""
        module = self._module(unit)
        held = [(each, dict(each._buffers)) for each in module.modules()]
        copies: dict[int, Tensor] = {}
        try:
            if self.on_values:
                for each, buffers in held:
                    for name, buffer in buffers.items():
                        if buffer is not None:
                            each._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
            yield module
        finally:
            for each, buffers in held:
                each._buffers.clear()
                each._buffers.update(buffers)

    def _module(self, unit: str) -> nn.Module:
        if self.on_values:
            assert self._units is not None
            found = self._units[unit]
            if not any(each.is_meta for each in (*found.parameters(), *found.buffers())):
                return found
            return imagined(self._bare[unit], found, self.place)
        if not self.casts:
            return self._bare[unit]
        if unit not in self._fakes:
            made = self._fakes[unit] = skeleton(self._bare[unit])
            put_tensors(made, self._fake)
        return self._fakes[unit].train(self._bare[unit].training)

    def _fake(self, tensor: Tensor) -> Tensor:
        self._mode = self._mode or fake_mode()
        return as_fake(self._mode, tensor, self._device)

    def lower(self, leaf: Any) -> Any:
        """A leaf of a unit's arguments as what runs in its place takes it."""
        body = leaf.body if type(leaf) is Absent else leaf
        if not isinstance(body, Tensor):
            return body
        if self.on_values:  # other units' parameters have none
            return with_values(body, self.place) if body.is_meta else body
        if self.casts:
            return self._fake(on_meta(body))
        return body if type(leaf) is Absent else on_meta(body)

    def run(self, unit: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call what ``of`` gave.

        Raises:
            NeedsValues: it can't run on shapes.
        """
        if self.on_values:
            return module(*args, **kwargs)
        try:
            with nullcontext() if module is self._bare[unit] else self._mode:
                return module(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise NeedsValues(
                f"{unit} can't run on shapes alone ({type(error).__name__}: {said})"
            ) from error


def imagined(bare: nn.Module, unit: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a unit whose tensors on the meta device have values, but nobody's.

    What a unit returns is looked at for its shape alone, so any numbers do that are like those of
    a model before training. It is let go after the call: one unit fits where a model does not.

    Args:
        bare: the unit's copy on the meta device, in the mode in which it is to run.
        unit: the unit.
        device: where to.
    """
    made = skeleton(bare)
    real: dict[int, Tensor] = {}  # by what the unit has there
    stand: dict[int, Tensor] = {}  # by what stands for it in the copy
    places = made.named_modules(remove_duplicate=False), unit.named_modules(remove_duplicate=False)
    for (_, copy), (_, module) in zip(*places, strict=True):
        for registry, held in zip(registries(copy), registries(module), strict=True):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in real:
                        real[id(tensor)] = with_values(tensor, device) if tensor.is_meta else tensor
                    stand[id(registry[name])] = real[id(tensor)]
    put_tensors(made, lambda tensor: stand[id(tensor)])
    return made.train(bare.training)


def with_values(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy with values: the tensor's own, or those that ``imagined`` takes.

    Those are small numbers, the same on each rank; zeros where the tensor holds whole ones.
    """
    if not tensor.is_meta:
        return tensor.detach().to(device, copy=True)
    made = torch.zeros_like(tensor, device=device)
    if made.is_floating_point():
        made.copy_(torch.linspace(-0.02, 0.02, made.numel(), device=device).view(made.shape))
    return made
