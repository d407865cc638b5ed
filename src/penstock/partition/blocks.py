"""Find the blocks of a model by its structure: embeddings, a trunk of repeated layers, a head.

    leaf modules    embed  rotary   layers.0   layers.1   norm  head
    blocks          ─────────────   ────────   ────────   ──────────

A *leaf module* is never cut. It is a layer of a trunk, or a module outside the trunks and their
containers. Leaf modules are gathered into blocks once their execution order is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from penstock._torch_compat import children, has_no_forward, is_sequential
from penstock.errors import PartitionError

__all__ = ["LeafModule", "find_blocks", "gather", "leaf_modules"]

# As a share of the largest trunk's parameters; a smaller list of modules is not a trunk.
SMALLEST_TRUNK = 0.05
# As a share of a layer's parameters; a larger module between two layers is its own block.
SMALLEST_BLOCK = 0.25


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeafModule:
    """A module that is never cut: its name, and that of its trunk (None outside trunks)."""

    name: str
    module: nn.Module
    trunk: str | None

    @property
    def parameters(self) -> int:
        """The number of elements in its parameters."""
        return sum(param.numel() for param in self.module.parameters())


def leaf_modules(model: nn.Module) -> tuple[LeafModule, ...]:
    """Find the leaf modules of a model, in definition order.

    A trunk is a ``ModuleList``, ``ModuleDict`` or ``nn.Sequential`` most of whose members are of
    one class; an encoder-decoder has two. In a model without one, every direct child is a leaf
    module. A layer with several places in a trunk is listed once per place.

    Raises:
        PartitionError: the model has no two leaf modules to cut between.
    """
    if is_sequential(model):
        leaves = _layers(model)
    else:
        leaves = tuple(_walk(model, "", find_trunks(model), set()))
    if len(leaves) < 2:
        raise PartitionError(
            f"the {type(model).__name__} has no modules to cut between: no list of layers, and "
            f"{len(leaves)} direct children; pass an nn.Sequential or a list of modules"
        )
    return leaves


def find_blocks(model: nn.Module) -> list[str]:
    """The names of the layers of a model's trunks, in definition order, one for each place."""
    try:
        return [leaf.name for leaf in leaf_modules(model) if leaf.trunk is not None]
    except PartitionError:  # nothing to cut between, so no blocks either
        return []


def gather(leaves: Sequence[LeafModule], order: Sequence[str]) -> list[list[LeafModule]]:
    """Gather leaf modules into blocks, given the names of those that run, by first call.

    Leaf modules before the trunk form one block, leaf modules after it another; without a trunk
    each is a block. A leaf module between two layers is a block of its own if it is large.
    Otherwise it joins the layer before it if both belong to one module (an encoder and its last
    norm), else the layer after it. Leaf modules that don't run join the block of those defined
    before them.
    """
    by_name = {leaf.name: leaf for leaf in leaves}
    running = [by_name[name] for name in order]
    if any(leaf.trunk is not None for leaf in running):
        blocks = _around_trunks(running)
    else:
        blocks = [[leaf] for leaf in running]
    # A module without parameters, such as a rotary table, may be defined far from its use.
    block_of = {leaf.name: block for block in blocks for leaf in block if leaf.parameters}
    block = blocks[0]
    for leaf in leaves:
        block = block_of.get(leaf.name, block)
        if leaf.name not in order:
            block.append(leaf)
    return blocks


def _around_trunks(running: list[LeafModule]) -> list[list[LeafModule]]:
    places = [i for i, leaf in enumerate(running) if leaf.trunk is not None]
    first, last = places[0], places[-1]
    large = max(SMALLEST_BLOCK * median_high(running[i].parameters for i in places), 1)
    blocks = [running[:first]] if first else []
    between: list[LeafModule] = []
    for leaf in running[first : last + 1]:
        if leaf.trunk is not None or leaf.parameters >= large:
            blocks.append([*between, leaf])
            between = []
        elif leaf.name.rpartition(".")[0] in {
            each.trunk.rpartition(".")[0] for each in blocks[-1] if each.trunk is not None
        }:
            blocks[-1].append(leaf)
        else:
            between.append(leaf)
    if running[last + 1 :]:
        blocks.append(running[last + 1 :])
    return blocks


# --- structure ---------------------------------------------------------------------------------


def _walk(module: nn.Module, prefix: str, trunks: set[str], met: set[int]) -> Iterator[LeafModule]:
    """The leaf modules below ``module``; a module in other places than one trunk is listed once."""
    for name, child in children(module):
        full = prefix + name
        if full in trunks:
            layers = [(key, layer) for key, layer in children(child) if id(layer) not in met]
            for key, layer in layers:
                met.add(id(layer))
                yield LeafModule(name=f"{full}.{key}", module=layer, trunk=full)
        elif has_no_forward(child) or any(trunk.startswith(f"{full}.") for trunk in trunks):
            yield from _walk(child, f"{full}.", trunks, met)
        elif id(child) not in met:
            met.add(id(child))
            yield LeafModule(name=full, module=child, trunk=None)


def find_trunks(model: nn.Module) -> set[str]:
    """The names of the outermost lists of repeated layers, except small ones."""
    found = dict(_repeated_lists(model, ""))
    # Lists of plain layers don't count if there are lists of blocks.
    found = {n: m for n, m in found.items() if any(children(x) for _, x in children(m))} or found
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in found.items()}
    most = max(sizes.values(), default=0)
    return {name for name, size in sizes.items() if size >= SMALLEST_TRUNK * most}


def _repeated_lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in children(module):
        if _is_repeated(child):
            yield prefix + name, child
        else:
            yield from _repeated_lists(child, f"{prefix}{name}.")


def _is_repeated(module: nn.Module) -> bool:
    """True for a list of layers, at least half of them of one class."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or is_sequential(module)
    members = children(module) if is_list else []
    classes = Counter(type_before_parametrizations(member) for _, member in members)
    most = max(classes.values(), default=0)
    return most >= 2 and 2 * most >= len(members)


def _layers(model: nn.Module) -> tuple[LeafModule, ...]:
    """The layers of an ``nn.Sequential``.

    Its trunk, called ``""``, spans the layers of the commonest class; if none repeats, all layers.
    """
    layers = children(model)
    classes = [type_before_parametrizations(layer) for _, layer in layers]
    common = next((cls for cls, count in Counter(classes).most_common(1) if count > 1), None)
    places = [i for i, cls in enumerate(classes) if common in (None, cls)]
    return tuple(
        LeafModule(name=name, module=layer, trunk="" if places[0] <= i <= places[-1] else None)
        for i, (name, layer) in enumerate(layers)
    )
