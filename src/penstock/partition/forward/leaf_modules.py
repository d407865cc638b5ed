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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from penstock._torch_compat import children, fused_by, has_no_forward, is_sequential
from penstock.errors import PartitionError
from penstock.partition.blocks import find_blocks
from penstock.partition.plan import abbreviate, prefixes
from penstock.partition.ties import named_tensors, names_by_tensor

__all__ = [
    "LeafModules",
    "NotByModule",
    "SharedNames",
    "StageAssignment",
    "find_leaf_modules",
    "stage_of",
]

StageAssignment: TypeAlias = Mapping[str, int | None]
"""The stage of each leaf module, and of each parameter or buffer held directly by a container; None
for a stateless leaf module, which runs where its inputs are available first."""


class NotByModule(PartitionError):
    """The names are valid, but the model's forward can't run on several stages cut by module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNames:
    """The names of state shared by several leaf modules; holds no module."""

    inner: dict[str, str]  # one canonical name for each name of a shared buffer or inner module
    ties: dict[str, tuple[str, ...]]  # all names of tensors with several, by the first

    def shared_name(self, name: str) -> str | None:
        """The canonical name of a leaf module's buffer or attribute; None if not shared."""
        owner, _, last = name.rpartition(".")
        return f"{self.inner[owner]}.{last}" if owner in self.inner else self.inner.get(name)

    def stages_with(self, name: str, assignment: StageAssignment) -> set[int]:
        """The stages that hold a parameter under any of its names."""
        stages = {stage_of(each, assignment) for each in self.ties.get(name, (name,))}
        return {stage for stage in stages if stage is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafModules:
    """The leaf modules and containers of a model.

    A module that occurs several times in a list is a separate leaf module in each place, since its
    calls can be distinguished and run on several stages.
    """

    leaves: dict[str, nn.Module]  # in definition order, or that of the model's own pipeline plan
    containers: dict[str, nn.Module]  # the modules above them; the model itself is ""
    direct: tuple[str, ...]  # the parameters and buffers that containers hold themselves
    aliases: dict[str, str]  # from further names of leaf modules to their listed names
    shared: SharedNames

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.containers[""]

    def has_state(self, name: str) -> bool:
        """True if a leaf module has parameters, or buffers in its state dict."""
        leaf = self.leaves[name]
        return any(True for _ in leaf.parameters()) or bool(leaf.state_dict(keep_vars=True))

    def leaf_at(self, path: str) -> str | None:
        """The name of the leaf module at a path of the model's tree; None for other paths."""
        name = self.aliases.get(path, path)
        return name if name in self.leaves else None

    def under(self, name: str) -> list[str]:
        """The leaf modules and direct parameters named ``name`` or below it."""
        name = self.aliases.get(name, name)
        if name in self.leaves or name in self.direct:
            return [name]
        every = [*self.leaves, *self.direct]
        return every if name == "" else [each for each in every if each.startswith(f"{name}.")]


def stage_of(name: str, assignment: StageAssignment) -> int | None:
    """The stage of a leaf module or of any name inside one; None without a stage.

    Example:
        >>> stage_of("layers.1.weight", {"layers.0": 0, "layers.1": 2})
        2
    """
    return next((assignment[n] for n in (name, *prefixes(name)) if n in assignment), None)


def find_leaf_modules(model: nn.Module, places: Iterable[str]) -> LeafModules:
    """Divide a model into leaf modules and the containers above them.

    Args:
        model: the model.
        places: names of modules or parameters that different stages may hold.

    Raises:
        PartitionError: a name is not in the model, or a container can't be cut.
    """
    places = list(places)
    _refuse_unknown(model, places)
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
    first = {id(module): name for name, module in reversed(leaves.items())}
    ties = (names for names in names_by_tensor(model).values() if len(names) > 1)
    return LeafModules(
        leaves=leaves,
        containers=containers,
        direct=tuple(_direct(containers)),
        aliases={
            name: first[id(module)]
            for name, module in model.named_modules(remove_duplicate=False)
            if id(module) in first and name not in leaves
        },
        shared=SharedNames(inner=_shared(leaves), ties={names[0]: names for names in ties}),
    )


def _direct(containers: Mapping[str, nn.Module]) -> Iterator[str]:
    for name, module in containers.items():
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        yield from (f"{name}.{each}".removeprefix(".") for each, _ in own)


def _shared(leaves: Mapping[str, nn.Module]) -> dict[str, str]:
    holders: dict[int, list[str]] = {}
    for leaf, module in leaves.items():
        inner = module.named_modules(remove_duplicate=False)
        for name, each in (*inner, *module.named_buffers(remove_duplicate=False)):
            holders.setdefault(id(each), []).append(f"{leaf}.{name}".removesuffix("."))
    return {name: names[0] for names in holders.values() if len(names) > 1 for name in names}


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
