"""What several parts of a model have in common: one module, one buffer, one parameter.

    layers.0.norm ─┐
    layers.1.norm ─┴─ one module             what it keeps in a call, the other part sees
    embed.weight  ─┐
    head.weight   ─┴─ one parameter          known as embed.weight, held wherever one of them is

This module knows no stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from penstock.partition.ties import names_by_tensor

__all__ = ["SharedParts", "find_shared", "home_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParts:
    """What parts have in common, by name.

    Args:
        state: buffers that lie in several parts, and modules that do: under which one name each
            is known.
        ties: parameters and buffers that have several names: by the first, all of them.
    """

    state: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def known(self, name: str) -> str | None:
        """The one name of what a part changes, if others see the change.

        Args:
            name: a buffer or an attribute, with its part's name in front.
        """
        owner, _, last = name.rpartition(".")
        return self.state.get(name) or (
            f"{self.state[owner]}.{last}" if owner in self.state else None
        )

    def stages(self, name: str, homes: Mapping[str, int | None]) -> set[int]:
        """The stages that hold a parameter, under whatever name."""
        found = {home_of(each, homes) for each in self.ties.get(name, (name,))}
        return {home for home in found if home is not None}


def find_shared(model: nn.Module, units: Mapping[str, nn.Module]) -> SharedParts:
    """What the parts of a model have in common.

    Args:
        model: the model.
        units: its units, by name.
    """
    held: dict[int, list[str]] = {}
    for unit, module in units.items():
        for name, inner in module.named_modules(remove_duplicate=False):
            held.setdefault(id(inner), []).append(f"{unit}.{name}" if name else unit)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            held.setdefault(id(buffer), []).append(f"{unit}.{name}")
    state = {name: each[0] for each in held.values() if len(each) > 1 for name in each}
    ties = {names[0]: names for names in names_by_tensor(model).values() if len(names) > 1}
    return SharedParts(state=state, ties=ties)


def home_of(name: str, homes: Mapping[str, int | None]) -> int | None:
    """The stage of a part, or of what lies in one; None where it has none.

    Example:
        >>> home_of("layers.1.weight", {"layers.0": 0, "layers.1": 2})
        2
    """
    while name not in homes and "." in name:
        name = name.rpartition(".")[0]
    return homes.get(name)
