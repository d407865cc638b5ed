"""Leaf modules: the modules of a model that run whole, on one stage each.

    LlamaForCausalLM        a container: every stage runs its forward (the top-level forward)
      model                 a container
        embed_tokens        a leaf module: runs whole, on one stage
        layers              a container: a list
          0 ... 31          leaf modules
        norm, rotary_emb    leaf modules
      lm_head               a leaf module

Modules above a cut are containers, all other modules are leaf modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock._torch_compat import children, fused_by, has_no_forward, is_sequential, registries
from penstock.errors import PartitionError
from penstock.partition.blocks import find_blocks
from penstock.partition.plan import abbreviate, prefixes
from penstock.partition.ties import named_tensors

__all__ = ["LeafModules", "NotByModule", "find_leaf_modules"]


class NotByModule(PartitionError):
    """The names are valid, but the model's forward can't run on several stages cut by module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModules:
    """The leaf modules and containers of a model.

    A module that occurs several times in a list is a separate leaf module in each place, since its
    calls can be distinguished and run on several stages.
    """

    leaves: dict[str, nn.Module]  # in definition order
    containers: dict[str, nn.Module]  # the modules above them; the model itself is ""
    direct: tuple[str, ...]  # the parameters and buffers that containers hold themselves
    # All names of each module, parameter and buffer that has several, under each of them.
    shared: Mapping[str, tuple[str, ...]]

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.containers[""]

    def has_state(self, name: str) -> bool:
        """True if a leaf module has parameters, or buffers in its state dict."""
        leaf = self.leaves[name]
        return any(True for _ in leaf.parameters()) or bool(leaf.state_dict(keep_vars=True))

    def leaf_at(self, path: str) -> str | None:
        """The listed name of the leaf module at a path of the model's tree; None elsewhere."""
        names = (path, *self.shared.get(path, ()))
        return next((name for name in names if name in self.leaves), None)

    def under(self, name: str) -> list[str]:
        """The leaf modules and direct parameters named ``name`` or below it."""
        leaf = self.leaf_at(name)
        if leaf is not None or name in self.direct:
            return [leaf or name]
        return [each for each in (*self.leaves, *self.direct) if each.startswith(f"{name}.")]


def find_leaf_modules(model: nn.Module, places: Iterable[str]) -> LeafModules:
    """Divide a model into leaf modules and the containers above them.

    ``places`` are the names of modules or parameters that different stages may hold.

    Raises:
        PartitionError: a name is not in the model, or a container can't be cut.
    """
    places = list(places)
    named: dict[str, Any] = dict(model.named_modules(remove_duplicate=False))
    named |= named_tensors(model)
    unknown = [place for place in places if place not in named or place == ""]
    if unknown:
        blocks = find_blocks(model)
        hint = f", such as {blocks[0]} to {blocks[-1]}" if blocks else ""
        raise PartitionError(
            f"{abbreviate(unknown)}: no such module in this {type(model).__name__}; name modules "
            f"as model.named_modules() does{hint}"
        )
    above = {"", *(prefix for place in places for prefix in prefixes(place))}
    leaves: dict[str, nn.Module] = {}
    containers: dict[str, nn.Module] = {}
    met: set[int] = set()

    def visit(module: nn.Module, name: str, in_list: bool = False) -> None:
        if id(module) in met:
            if in_list and name not in above and any(m is module for m in leaves.values()):
                leaves[name] = module
            return
        met.add(id(module))
        if name not in above and not has_no_forward(module):
            leaves[name] = module
            return
        containers[name] = module
        is_list = has_no_forward(module) or is_sequential(module)
        for child_name, child in children(module):
            visit(child, f"{name}.{child_name}" if name else child_name, is_list)

    visit(model, "")
    for name, module in containers.items():
        _refuse_container(name or "the model", module)
    direct = [
        f"{name}.{own}".removeprefix(".")
        for name, module in containers.items()
        for registry in registries(module)
        for own, tensor in registry.items()
        if tensor is not None
    ]
    names: dict[int, tuple[str, ...]] = {}
    for name, each in named.items():
        names[id(each)] = (*names.get(id(each), ()), name)
    return LeafModules(
        leaves=leaves,
        containers=containers,
        direct=tuple(direct),
        shared={name: many for many in names.values() if len(many) > 1 for name in many},
    )


def _refuse_container(name: str, module: nn.Module) -> None:
    """Refuse a compiled container, and one with modules that are not registered in the tree."""
    fused = fused_by(module)
    if fused is not None:
        raise NotByModule(
            f"{name} is one piece by {fused}, and can't be cut inside; cut before or after it, or "
            "take that off and compile its parts instead (layer.compile() for each layer)"
        )
    for attribute, value in vars(module).items():
        items: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
        if isinstance(value, dict) and attribute not in ("_modules", "_parameters", "_buffers"):
            items += value.values()
        if any(isinstance(item, nn.Module) for item in items):
            raise PartitionError(
                f"{name}.{attribute} holds modules outside of the model's tree, which can't be put "
                "on stages; use nn.ModuleList or nn.ModuleDict"
            )
