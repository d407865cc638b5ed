"""A large model's costs from a few of its layers: layers alike cost alike.

    measured     E  0  1  2  L          three layers, of a model made with three
    the whole    E  0  1  1  1  2  L    the first and the last, and those between again and again

The first and the last stay, since what opens or ends a trunk goes with them. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.errors import PartitionError
from penstock.partition.balance.costs import BlockCosts, Profile

__all__ = ["LEAST_SAMPLE", "repeat_layers"]

LEAST_SAMPLE = 3


def repeat_layers(measured: Profile, trunks: Mapping[str, Sequence[str]]) -> Profile:
    """The profile of a model whose trunks are longer than those that were measured.

    Args:
        measured: the profile of the short model.
        trunks: of each trunk, the names of its layers in the long model.

    Returns:
        The long model's profile. Layers between the first and the last have the costs of those
        that were measured between them, in turn.

    Raises:
        PartitionError: a trunk was measured with fewer than three layers.

    Example:
        >>> blocks = [BlockCosts(modules=(f"h.{i}",), forward_s=i) for i in range(3)]
        >>> long = repeat_layers(Profile(blocks=blocks), {"h": [f"h.{i}" for i in range(5)]})
        >>> [(block.name, block.forward_s) for block in long.blocks]
        [('h.0', 0), ('h.1', 1), ('h.2', 1), ('h.3', 1), ('h.4', 2)]
    """
    blocks: list[BlockCosts] = []
    rest = list(measured.blocks)
    order = {name: i for i, block in enumerate(rest) for name in block.modules}
    for layers in sorted(trunks.values(), key=lambda names: order.get(names[0], 0)):
        places = [i for i, b in enumerate(rest) if not set(layers).isdisjoint(b.modules)]
        if len(places) >= len(layers):
            continue  # a trunk that is not longer
        if len(places) < LEAST_SAMPLE:
            raise PartitionError(
                f"{len(places)} layers of {layers[0]} to {layers[-1]} were measured, expected at "
                f"least {LEAST_SAMPLE}: the first, the last and one between them"
            )
        first, last = places[0], places[-1]
        blocks += [*rest[: first + 1], *between(rest[first + 1 : last], layers)]
        end = rest[last]
        old = next(name for name in end.modules if name in layers)
        blocks.append(replace(end, modules=renamed(end.modules, {old: layers[-1]})))
        del rest[: last + 1]
    return replace(measured, blocks=tuple(blocks + rest))


def between(inner: Sequence[BlockCosts], layers: Sequence[str]) -> Iterator[BlockCosts]:
    """The layers between the first and the last, with the costs of those measured in turn."""
    for place, name in enumerate(layers[1:-1]):
        block = inner[place % len(inner)]
        old = next(each for each in block.modules if each in layers)
        yield replace(block, modules=renamed(block.modules, {old: name}))


def renamed(names: Sequence[str], change: Mapping[str, str]) -> tuple[str, ...]:
    """The names, some of them changed."""
    return tuple(change.get(name, name) for name in names)
