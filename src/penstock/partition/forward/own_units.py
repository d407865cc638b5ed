"""What a stage registers, shown in its shell: its modules may be replaced or wrapped at any time.

    what stage 1 registers             its shell, whose forward runs
      layers                             layers
        1: a user's new module    ──►      1: that module, watched

Only units are asked again for every microbatch: the code of the modules above them is the shell's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock._torch_compat import registries
from penstock.errors import PartitionError
from penstock.partition.forward.shell import watched
from penstock.partition.forward.stage_player import StagePlayer
from penstock.partition.forward.units import Units
from penstock.stage.wrappers import unwrapped

__all__ = ["OwnUnits", "registry_of"]


class OwnUnits:
    """One stage's units, and the opened modules that they stand in.

    Args:
        stage: what registers them.
        shell: the stage's copy of the model's tree.
        parts: the model's units.
        own: the names of the units that the stage holds.
        player: whom the units report to.
    """

    def __init__(
        self,
        stage: nn.Module,
        shell: nn.Module,
        parts: Units,
        own: frozenset[str],
        player: StagePlayer,
    ) -> None:
        self._stage = stage
        self._player = player
        # Of each opened module its name, its copy in the shell, and what the stage registers.
        self._opened: list[tuple[str, nn.Module, nn.Module]] = []
        # Of each unit its name, that of the opened module above it, its last name, and itself.
        self._units: list[tuple[str, str, str, nn.Module]] = []
        held = {name: module for name, module in stage.named_modules() if name in parts.opened}
        for place in parts.opened:
            self._opened.append((place, shell.get_submodule(place), held.get(place, stage)))
        for place, module in held.items():
            for last, child in module._modules.items():
                unit = parts.unit_at(f"{place}.{last}" if place else last)
                if unit in own and child is not None:
                    self._units.append((unit, place, last, child))

    def take_in(self) -> None:
        """Let the shell have what is registered now, and train what trains.

        Raises:
            PartitionError: a unit is gone, or a module above units is another one.
        """
        shown: dict[str, nn.Module] = {}
        registered: dict[str, nn.Module] = {}
        for place, copy, held in self._opened:
            now = held if held is self._stage else self._stage.get_submodule(place)
            if now is not held and type(now) is not type(held):
                raise PartitionError(
                    f"{place} of this stage's module was replaced, but it is cut: the code of the "
                    f"model's own {type(held).__name__} runs; put other modules in the places of "
                    "its parts, or cut the model after the change"
                )
            copy.training = now.training
            shown[place], registered[place] = copy, now
        for i, (unit, place, last, before) in enumerate(self._units):
            module = registered[place]._modules.get(last)
            if module is before:
                continue
            if module is None:
                raise PartitionError(
                    f"{unit} is gone from this stage's module, and the model calls it; put a "
                    "module in its place, such as torch.nn.Identity()"
                )
            self._player.forget(before)
            shown[place]._modules[last] = watched(module, unit, self._player)
            self._units[i] = (unit, place, last, module)


def registry_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module keeps a parameter or buffer, and its last name there; wrappers change none.

    Raises:
        PartitionError: it is gone.
    """
    *path, last = name.split(".")
    holder: nn.Module | None = unwrapped(module)
    for part in path:
        below = None if holder is None else holder._modules.get(part)
        holder = None if below is None else unwrapped(below)
    for registry in () if holder is None else registries(holder):
        if last in registry:
            return registry, last
    raise PartitionError(
        f"{name} is gone from its module, and the model's code between its parts, or another part, "
        "uses it; put modules in its place that hold it under that name"
    )
