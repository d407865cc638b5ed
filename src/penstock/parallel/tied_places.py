"""The places of what is shared, found in this process's stages, and put up in messages.

Everything here is in an order that is the same on every rank; nothing is sent or changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from penstock.errors import PartitionError
from penstock.parallel.gradient_reduction import filled
from penstock.parallel.tied_names import Groups, named_tensors
from penstock.schedule.placement import Placement
from penstock.stage.dtensor import local_part
from penstock.stage.stage import Stage

__all__ = ["Shared", "buckets", "find_shared", "local"]

# Messages are kept to so many bytes where they hold more than one tensor: what is summed is there
# twice until then.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A parameter (or buffer) in all of its places.

    Args:
        title: what it is called, alike on every rank: its group, and its name within that.
        label: its first place, for people.
        ranks: the ranks that hold it, rising.
        home: the rank of its first stage, whose value the others take at first.
        here: what this process holds, none twice, in the order of stages.
    """

    title: tuple[int, str]
    label: str
    ranks: tuple[int, ...]
    home: int
    here: tuple[Tensor, ...]

    @property
    def like(self) -> Tensor:
        """A tensor of its shape and dtype: of this rank's shard, where it is sharded."""
        return local(self.here[0])


def local(tensor: Tensor) -> Tensor:
    """The tensor itself; of a sharded one (DTensor), what this rank holds."""
    return local_part(tensor).detach()


def find_shared(
    groups: Groups,
    placement: Placement,
    stages: Mapping[int, Stage],
    *,
    apart: bool,
    buffers: bool = False,
) -> Iterator[Shared]:
    """What this process's stages hold of what is shared.

    Args:
        groups: what is shared, by stage and name.
        placement: which rank holds which stage.
        stages: this process's stages, by index.
        apart: whether other ranks live in other processes.
        buffers: whether to find buffers, or parameters.

    Raises:
        PartitionError: a tie names a module or parameter that does not exist, or one that another
            tie names as well.
    """
    claimed: dict[int, int] = {}
    for number, group in enumerate(groups.every):
        found: dict[str, dict[int, Tensor]] = {}
        labels: dict[str, str] = {}
        for stage in sorted(group.keys() & stages.keys()):
            named = named_tensors(stages[stage].submod, stage, group[stage], buffers)
            for name, tensor in named.items():
                # What is tied has its places in all copies already.
                if claimed.setdefault(id(tensor), number) == number:
                    found.setdefault(name, {})[id(tensor)] = tensor
                    full = ".".join(filter(None, (group[stage], name)))
                    labels.setdefault(name, f"{full} of stage {stage}")
                elif number < groups.num_ties:
                    raise PartitionError(
                        f"{group[stage]!r} of stage {stage} is named by two of the ties; "
                        "name all places of a parameter in one"
                    )
        for name, tensors in sorted(found.items()):
            yield Shared(
                title=(number, name),
                label=labels[name],
                ranks=groups.ranks(number, placement) if apart else (0,),
                home=placement.rank_of(min(group)),
                here=tuple(tensors.values()),
            )


def buckets(every: Sequence[Shared]) -> Iterator[list[Shared]]:
    """Those with the same ranks, home and device together, in messages of a bounded size.

    In an order that is the same on every rank, so that no two wait for each other: each waits for
    the first of all buckets that is not done yet, and that one all of its ranks come to.
    """

    def kind(shared: Shared) -> tuple[Any, ...]:
        return (shared.ranks, shared.home, str(shared.like.device.type))

    for _, alike in groupby(sorted(every, key=lambda s: (*kind(s), *s.title)), key=kind):
        yield from filled(alike, lambda shared: shared.like.nbytes, BUCKET_BYTES)
