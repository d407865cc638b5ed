"""Which parts of a model run whole, and which are opened so that the model can be cut in them.

    LlamaForCausalLM        opened: every stage runs its forward, with its own parts in it
      model                 opened
        embed_tokens        a unit: runs whole, in one stage
        layers              opened: a list
          0 ... 31          units
        norm, rotary_emb    units
      lm_head               a unit

The modules above a place where the model is cut are opened, all others are units. This module
knows names and modules; it neither runs nor copies any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock._torch_compat import children, fused_by, has_no_forward, is_sequential
from penstock.errors import PartitionError
from penstock.partition.blocks import find_blocks
from penstock.partition.forward.shared_parts import SharedParts, find_shared
from penstock.partition.huggingface import HFPipelinePlan
from penstock.partition.plan import abbreviate, prefixes
from penstock.partition.ties import named_tensors

__all__ = ["NotByModule", "Units", "find_units"]


class NotByModule(PartitionError):
    """The names are right, but the model does what can't run on several stages so cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The parts of a model.

    Args:
        units: those that run whole, by name, in the order of their definition, or in that which
            the model's own plan tells.
        opened: the modules above them, by name; the model itself is ``""``.
        direct: the parameters and buffers that opened modules hold by themselves.
        aliases: further names of units that stand in several places, and under which one they
            are listed. One that stands in a list several times is a unit in each place there:
            its calls can be told apart, and go to several stages.
        shared: what units have in common.
    """

    units: dict[str, nn.Module]
    opened: dict[str, nn.Module]
    direct: tuple[str, ...]
    aliases: dict[str, str]
    shared: SharedParts

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.opened[""]

    def stored(self, name: str) -> bool:
        """Whether a unit has parameters, or buffers that belong to the model's state."""
        unit = self.units[name]
        return any(True for _ in unit.parameters()) or any(
            True for _ in unit.state_dict(keep_vars=True)
        )

    def unit_at(self, place: str) -> str | None:
        """The name of the unit in a place of the model's tree; None where none stands."""
        name = self.aliases.get(place, place)
        return name if name in self.units else None

    def under(self, name: str) -> list[str]:
        """The units that are ``name`` or lie below it, and likewise parameters by themselves."""
        name = self.aliases.get(name, name)
        if name in self.units or name in self.direct:
            return [name]
        below = [each for each in (*self.units, *self.direct) if each.startswith(f"{name}.")]
        return [*self.units, *self.direct] if name == "" else below


def find_units(model: nn.Module, places: Iterable[str]) -> Units:
    """Open a model above the given places.

    Args:
        model: the model.
        places: names of modules or parameters that are to be told apart.

    Raises:
        PartitionError: a place is not in the model, or an opened module can't be cut.
    """
    places = list(places)
    _refuse_unknown(model, places)
    above = {"", *(prefix for place in places for prefix in prefixes(place))}
    units: dict[str, nn.Module] = {}
    opened: dict[str, nn.Module] = {}
    met: set[int] = set()

    def visit(module: nn.Module, name: str, in_list: bool = False) -> None:
        if id(module) in met:
            if in_list and name not in above and any(m is module for m in units.values()):
                units[name] = module
            return
        met.add(id(module))
        if name not in above and not has_no_forward(module):
            units[name] = module
            return
        opened[name] = module
        is_list = has_no_forward(module) or is_sequential(module)
        for child_name, child in children(module):
            visit(child, f"{name}.{child_name}" if name else child_name, is_list)

    visit(model, "")
    for name, module in opened.items():
        _refuse_fused(name, module)
        _refuse_hidden_parts(name, module)
    first: dict[int, str] = {}
    for name, module in units.items():
        first.setdefault(id(module), name)
    aliases = {
        name: first[id(module)]
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in first and name not in units
    }
    return Units(
        units={name: units[name] for name in HFPipelinePlan.of(model).arrange(list(units))},
        opened=opened,
        direct=tuple(_direct(opened)),
        aliases=aliases,
        shared=find_shared(model, units),
    )


def _direct(opened: dict[str, nn.Module]) -> Iterator[str]:
    for name, module in opened.items():
        dot = f"{name}." if name else ""
        yield from (f"{dot}{each}" for each, _ in module.named_parameters(recurse=False))
        yield from (f"{dot}{each}" for each, _ in module.named_buffers(recurse=False))


def _refuse_unknown(model: nn.Module, places: Sequence[str]) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= named_tensors(model).keys()
    unknown = [place for place in places if place not in known or place == ""]
    if not unknown:
        return
    blocks = find_blocks(model)
    hint = f", such as {blocks[0]} to {blocks[-1]}" if blocks else ""
    raise PartitionError(
        f"{abbreviate(unknown)}: no such module in this {type(model).__name__}; name modules as "
        f"model.named_modules() does{hint}"
    )


def _refuse_fused(name: str, module: nn.Module) -> None:
    fused = fused_by(module)
    if fused is not None:
        raise NotByModule(
            f"{name or 'the model'} is one piece by {fused}, and can't be cut inside; cut before "
            "or after it, or take that off and compile its parts instead (layer.compile() for "
            "each layer)"
        )


def _refuse_hidden_parts(name: str, module: nn.Module) -> None:
    """Modules in a plain list are reached past the model's tree, and can't be told apart."""
    for attribute, value in vars(module).items():
        if attribute in ("_modules", "_parameters", "_buffers"):
            continue
        items: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        items += list(value.values()) if isinstance(value, dict) else []
        if any(isinstance(item, nn.Module) for item in items):
            raise PartitionError(
                f"{name or 'the model'}.{attribute} holds modules outside of the model's tree, "
                "which can't be put on stages; use nn.ModuleList or nn.ModuleDict"
            )
