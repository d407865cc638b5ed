"""The blocks of a model, found by its structure: embeddings, a trunk of repeated layers, a head.

    Llama                                     units                       blocks
    ├── model                                 model.embed_tokens  ┐
    │   ├── embed_tokens                      model.rotary_emb    ┴────── E
    │   ├── layers                            model.layers.0  ─────────── t
    │   │   ├── 0                             model.layers.1  ─────────── t
    │   │   └── 1                             model.norm   ┐
    │   ├── norm                              lm_head      ┴───────────── L
    │   └── rotary_emb
    └── lm_head

*Units* are the largest modules that no cut goes through: the members of the trunk, and whatever
stands beside the way to it. In which order they run is seen when the model runs, and units that
are no layers of the trunk are gathered into blocks by it. This module runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from penstock._torch_compat import children, has_no_forward, is_sequential
from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockKind
from penstock.partition.balance.own_plan import OwnPlan

__all__ = ["Block", "Unit", "gather", "units_of"]

# Of the largest trunk's parameters; below, a list of modules is no trunk but a detail.
SMALLEST_TRUNK = 0.05
# Of a layer's parameters; from here on, what stands between two layers is a block of its own.
SMALLEST_BLOCK = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Unit:
    """A module that is never cut.

    Args:
        name: its qualified name in the model.
        module: the module.
        trunk: the name of the list that it is a layer of; None beside the trunk.
    """

    name: str
    module: nn.Module
    trunk: str | None

    @property
    def parameters(self) -> int:
        """How many numbers its parameters hold."""
        return count(self.module)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Units that stay together.

    Args:
        kind: what they are to the model.
        units: the units in the order in which they run.
    """

    kind: BlockKind
    units: tuple[Unit, ...]


def units_of(model: nn.Module, *, repeats: bool = False) -> tuple[Unit, ...]:
    """The units of a model, in the order in which they are registered.

    A trunk is what the model's own plan names as one, where it brings one along; else a
    ``ModuleList``, ``ModuleDict`` or ``nn.Sequential`` most of whose members are of one class. A
    model may have several, as encoder-decoders do. One without any is cut between its direct
    children.

    Args:
        model: any module; an ``nn.Sequential`` is a trunk from end to end.
        repeats: whether a layer that stands in a trunk several times is listed in each place.

    Raises:
        PartitionError: it has no modules to cut between.

    Example:
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(8, 4)
        ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        ...         self.head = nn.Linear(4, 8)
        >>> [unit.name for unit in units_of(Model())]
        ['embed', 'layers.0', 'layers.1', 'head']
    """
    if is_sequential(model):
        units = [Unit(name=n, module=m, trunk=trunk_of(model, n)) for n, m in children(model)]
    else:
        trunks = set(OwnPlan.of(model).trunks) or find_trunks(model)
        units = list(walk(model, "", trunks, set(), repeats))
    if len(units) < 2:
        raise PartitionError(
            f"the {type(model).__name__} has no modules to cut between: no list of layers, and "
            f"{len(units)} direct children; pass an nn.Sequential or a list of modules"
        )
    return tuple(units)


def gather(units: Sequence[Unit], order: Sequence[str]) -> tuple[Block, ...]:
    """The blocks, given the order in which units run.

    Units before the trunk make one block, those behind it another. What runs between two layers
    of it goes with the layer before, where both belong to one module (an encoder and its last
    norm), else with the one after; or it is a block of its own if it is large.

    Args:
        units: all units, as registered.
        order: the names of those that run, in the order of their first call. Those that never do
            go with the ones that are registered before them.
    """
    by_name = {unit.name: unit for unit in units}
    running = [by_name[name] for name in order]
    places = [i for i, unit in enumerate(running) if unit.trunk is not None]
    if not places:
        return tuple(Block(kind=BlockKind.LAYER, units=(unit,)) for unit in running)
    first, last = places[0], places[-1]
    sizes = sorted(running[i].parameters for i in places)
    large = max(SMALLEST_BLOCK * sizes[len(sizes) // 2], 1)
    groups: list[tuple[BlockKind, list[Unit]]] = []
    if first:
        groups.append((BlockKind.EMBEDDING, running[:first]))
    between: list[Unit] = []
    for unit in running[first : last + 1]:
        if unit.trunk is None and unit.parameters < large:
            between.append(unit)
            continue
        ahead = settle(groups, between)
        groups.append((BlockKind.LAYER, [*ahead, unit]))
        between = []
    if running[last + 1 :]:
        groups.append((BlockKind.HEAD, running[last + 1 :]))
    place_uncalled(groups, units, set(order))
    return tuple(Block(kind=kind, units=tuple(group)) for kind, group in groups)


def settle(groups: list[tuple[BlockKind, list[Unit]]], between: Sequence[Unit]) -> list[Unit]:
    """Give what runs between two layers to the one before; return what goes with the other."""
    if not between:
        return []
    before = groups[-1][1]
    homes = [parent(unit.trunk) for unit in before if unit.trunk is not None]
    stays = [unit for unit in between if parent(unit.name) in homes]
    before += stays
    return [unit for unit in between if unit not in stays]


def place_uncalled(
    groups: list[tuple[BlockKind, list[Unit]]], units: Sequence[Unit], called: set[str]
) -> None:
    """Put units that never run with those with parameters that are registered before them."""
    # What has none (a rotary table) may be registered far from where it runs.
    place = {unit.name: group for _, group in groups for unit in group if unit.parameters}
    group = groups[0][1]
    for unit in units:
        group = place.get(unit.name, group)
        if unit.name not in called:
            group.append(unit)


# --- structure ---------------------------------------------------------------------------------


def walk(
    module: nn.Module, prefix: str, trunks: set[str], met: set[int], repeats: bool
) -> Iterator[Unit]:
    """The units below ``module``, but for those met before: a shared one is listed once."""
    for name, child in children(module):
        full = prefix + name
        if full in trunks:
            before = set(met)
            for key, layer in children(child):
                if id(layer) not in (before if repeats else met):
                    met.add(id(layer))
                    yield Unit(name=f"{full}.{key}", module=layer, trunk=full)
        elif has_no_forward(child) or any(trunk.startswith(f"{full}.") for trunk in trunks):
            yield from walk(child, f"{full}.", trunks, met, repeats)
        elif id(child) not in met:
            met.add(id(child))
            yield Unit(name=full, module=child, trunk=None)


def find_trunks(model: nn.Module) -> set[str]:
    """The names of the outermost lists of repeated layers that matter."""
    found = dict(candidates(model, ""))
    deep = {name: m for name, m in found.items() if any(children(x) for _, x in children(m))}
    found = deep or found  # lists of plain layers are details where there are lists of blocks
    sizes = {name: count(module) for name, module in found.items()}
    most = max(sizes.values(), default=0)
    return {name for name, size in sizes.items() if size >= SMALLEST_TRUNK * most}


def candidates(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """All outermost lists of repeated layers below ``module``."""
    for name, child in children(module):
        if is_repeated(child):
            yield prefix + name, child
        else:
            yield from candidates(child, f"{prefix}{name}.")


def is_repeated(module: nn.Module) -> bool:
    """Whether a module is a list of layers, at least half of which are of one class."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or is_sequential(module)
    members = children(module) if is_list else []
    if len(members) < 2:
        return False
    [(_, most)] = Counter(own_class(member) for _, member in members).most_common(1)
    return most >= 2 and 2 * most >= len(members)


def own_class(module: nn.Module) -> type[nn.Module]:
    """What a module was made as: where its weights are computed, each has a class of its own."""
    return type_before_parametrizations(module)


def trunk_of(model: nn.Module, name: str) -> str | None:
    """The trunk, "" itself, of a layer of an ``nn.Sequential``; None before and behind its run.

    The run of repeated layers reaches from the first to the last one of the commonest class.
    """
    layers = children(model)
    classes = [own_class(layer) for _, layer in layers]
    [(common, most)] = Counter(classes).most_common(1)
    if most < 2:
        return ""
    places = [i for i, cls in enumerate(classes) if cls is common]
    names = [each for each, _ in layers]
    return "" if places[0] <= names.index(name) <= places[-1] else None


def parent(name: str | None) -> str:
    """The module that holds the one of this name."""
    return name.rpartition(".")[0] if name else ""


def count(module: nn.Module) -> int:
    """How many numbers the parameters of a module hold."""
    return sum(param.numel() for param in module.parameters())
