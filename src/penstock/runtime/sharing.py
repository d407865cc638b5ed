"""Parameters that several stages share: one value, and in each place the whole gradient.

    rank 0   embed.weight.grad  a ─┐            ┌─► a + b
    rank 3   head.weight.grad   b ─┴─ summed ───┴─► a + b      bit for bit the same on both

Shared are tied parameters (``penstock.partition.tied``), and all of a model whose placement has
several copies. Each place gathers its own part of the gradient during a step; earlier gradients
are put aside meanwhile, so that only what this step has added is summed, in the order of ranks.
Where one process holds all places as one object, autograd has summed already and nothing is done.

Before the first step the places are made equal: they take the value of the first stage's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError, StageError
from penstock.partition.tied import Tie
from penstock.runtime.flat import flat_meta, flatten_tensors, unflatten_tensors
from penstock.runtime.shared_names import groups_of, named_tensors
from penstock.runtime.torch_private import has_grad_hooks
from penstock.runtime.transport import Transport
from penstock.schedule.placement import Placement
from penstock.stage.counted import set_counts_here
from penstock.stage.stage import Stage

__all__ = ["Sharing"]

_log = logging.getLogger(__name__)

# Messages are kept to so many bytes where they hold more than one tensor: what is summed is there
# twice until then.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
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


class Sharing:
    """What this process's stages share with each other and with other ranks.

    Args:
        ties: what is shared beside the copies that the placement has; the same on every rank.
        placement: which rank holds which stage.
        stages: this process's stages, by index.
        transports: one per rank that this process plays.

    Raises:
        PartitionError: a tie names a stage, module or parameter that does not exist, or one that
            another tie names as well.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        placement: Placement,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
    ) -> None:
        self._groups = groups_of(ties, placement)
        self._num_ties = len(ties)
        self._placement = placement
        self._stages = stages
        self._transport = transports[0] if len(transports) < placement.num_ranks else None
        self._submods: list[nn.Module] = []
        self._params: tuple[_Shared, ...] = ()
        self._resolve()
        self._tell()

    def _tell(self) -> None:
        """Say once, in the process of the first stage, which way is taken."""
        rank_of, copies = self._placement.rank_of, self._placement.copies
        apart = self._transport is not None
        for group in self._groups[: self._num_ties]:
            ranks = sorted({rank_of(stage) for stage in group})
            if min(group) in self._stages:
                places = [
                    f"{name} of stage {stage}"
                    for stage, name in sorted(group.items())
                    if self._placement.copy_of(stage) == 0
                ]
                summed = f"gradients summed across ranks {_listed(ranks)}"
                how = summed if apart and len(ranks) > 1 else "placed together"
                _log.info("%s are one parameter: %s", _listed(places), how)
        if copies > 1 and 0 in self._stages:
            groups = self._groups[self._num_ties :]
            pairs = sorted({tuple(sorted(map(rank_of, group))) for group in groups})
            summed = f"gradients summed across ranks {', '.join(map(_listed, pairs))}"
            how = summed if apart else "in one process"
            _log.info("%d copies of the model: %s", copies, how)

    @property
    def facts(self) -> str:
        """What every rank must agree on."""
        return json.dumps([sorted(group.items()) for group in self._groups])

    # --- what is shared ----------------------------------------------------------------------

    def _resolve(self) -> None:
        """Find the parameters: again whenever a stage's module is another one."""
        submods = [stage.submod for stage in self._stages.values()]
        if len(submods) == len(self._submods) and all(map(_is, submods, self._submods)):
            return
        self._submods = submods
        for submod in submods:
            for param in submod.parameters():
                set_counts_here(param, True)
        self._params = tuple(s for s in self._shared(buffers=False) if self._crosses(s))
        rank = self._transport.rank if self._transport is not None else None
        for shared in self._params:
            for place, tensor in enumerate(shared.here):
                set_counts_here(tensor, place == 0 and rank in (None, shared.home))

    def _crosses(self, shared: _Shared) -> bool:
        return len(shared.here) > 1 or len(shared.ranks) > 1

    def _shared(self, *, buffers: bool) -> Iterator[_Shared]:
        claimed: dict[int, int] = {}
        for number, group in enumerate(self._groups):
            found: dict[str, dict[int, Tensor]] = {}
            labels: dict[str, str] = {}
            for stage in sorted(group.keys() & self._stages.keys()):
                named = named_tensors(self._stages[stage].submod, stage, group[stage], buffers)
                for name, tensor in named.items():
                    claimant = claimed.setdefault(id(tensor), number)
                    if claimant == number:
                        found.setdefault(name, {})[id(tensor)] = tensor
                        full = ".".join(filter(None, (group[stage], name)))
                        labels.setdefault(name, f"{full} of stage {stage}")
                    elif number < self._num_ties:
                        raise PartitionError(
                            f"{group[stage]!r} of stage {stage} is named by two of the ties; "
                            "name all places of a parameter in one"
                        )
            ranks = {self._placement.rank_of(stage) for stage in group}
            for name, tensors in sorted(found.items()):
                yield _Shared(
                    title=(number, name),
                    label=labels[name],
                    ranks=tuple(sorted(ranks)) if self._transport is not None else (0,),
                    home=self._placement.rank_of(min(group)),
                    here=tuple(tensors.values()),
                )

    # --- before the first step ---------------------------------------------------------------

    def agree(self) -> None:
        """Once: hold the names, shapes and dtypes of all places against each other, and give all
        of them the value of the first.

        Raises:
            PartitionError: they differ; the same on every rank.
        """
        if not self._groups:
            return
        self._resolve()
        every = [*self._shared(buffers=False), *self._shared(buffers=True)]
        self._compare(every)
        with torch.no_grad():
            for shared in every:
                for other in shared.here[1:]:
                    local(other).copy_(local(shared.here[0]))
            if self._transport is not None:
                for bucket in _buckets(every):
                    self._spread(bucket, self._transport)
                self._transport.drain()

    def _compare(self, every: Sequence[_Shared]) -> None:
        mine = [
            [*shared.title, f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}", shared.label]
            for shared in every
            for t in shared.here
        ]
        notes = [json.dumps(mine).encode()]
        if self._transport is not None:
            notes = self._transport.gather_notes(notes[0])
        told: dict[tuple[int, str], dict[int, tuple[str, str]]] = {}
        for rank, note in enumerate(notes):
            for number, name, kind, label in json.loads(note):
                was = told.setdefault((number, name), {}).setdefault(rank, (kind, label))
                if was[0] != kind:
                    raise _unlike(was, (kind, label))
        for (number, name), places in told.items():
            ranks = {self._placement.rank_of(s) for s in self._groups[number]}
            first = next(iter(places.values()))
            for other in places.values():
                if other[0] != first[0]:
                    raise _unlike(first, other)
            if self._transport is not None and (lacking := sorted(ranks - places.keys())):
                raise PartitionError(
                    f"{first[1]} is shared with rank {lacking[0]}, whose stage has no {name!r} in "
                    f"{dict(self._groups[number])}; the modules must have the same parameters and "
                    "buffers"
                )

    def _spread(self, bucket: Sequence[_Shared], transport: Transport) -> None:
        """Overwrite the values on all ranks by those of the home."""
        likes = [shared.like for shared in bucket]
        home = bucket[0].home
        if transport.rank == home:
            flat = flatten_tensors(likes, likes)
            for peer in bucket[0].ranks:
                if peer != home:
                    transport.send(peer, [flat])
            return
        receipt = transport.receive(home, [flat_meta(likes)], likes[0].device)
        for shared, value in zip(bucket, unflatten_tensors(receipt.wait()[0], likes), strict=True):
            for tensor in shared.here:
                assert value is not None, "the home holds what it sends"
                local(tensor).copy_(value)

    # --- a step ------------------------------------------------------------------------------

    @contextmanager
    def summed(self) -> Iterator[None]:
        """A training step runs in this: at its end shared gradients are whole in every place.

        Raises:
            StageError: a shared parameter has a hook on its accumulated gradient, which would
                see a part of it.
        """
        self._resolve()
        if not self._params:
            yield
            return
        params = [param for shared in self._params for param in shared.here]
        if any(has_grad_hooks(param) for param in params):
            raise StageError(
                "a parameter that several ranks share has a post-accumulate-grad hook, which would "
                "see the gradient of one rank alone; step the optimizer after step() instead"
            )
        earlier = {id(param): param.grad for param in params}
        for param in params:
            param.grad = None
        is_whole = False
        try:
            yield
            with torch.no_grad():
                for bucket in _buckets(self._params):
                    self._sum(bucket)
            is_whole = True
        finally:
            # Of a broken step nothing stays.
            with torch.no_grad():
                for param in params:
                    fresh = param.grad if is_whole else None
                    param.grad = _added(earlier[id(param)], fresh)

    def _sum(self, bucket: Sequence[_Shared]) -> None:
        likes = [shared.like for shared in bucket]
        parts = [[_part_here(shared) for shared in bucket]]
        if self._transport is not None and len(bucket[0].ranks) > 1:
            parts = self._exchanged(bucket[0].ranks, parts[0], likes, self._transport)
        for shared, contributions in zip(bucket, zip(*parts, strict=True), strict=True):
            present = [part for part in contributions if part is not None]
            if present:
                total = present[0]
                for part in present[1:]:
                    total = total + part
                for param in shared.here:
                    _put(param, total)

    def _exchanged(
        self,
        ranks: Sequence[int],
        mine: list[Tensor | None],
        likes: list[Tensor],
        transport: Transport,
    ) -> list[list[Tensor | None]]:
        """The parts of all ``ranks``, in their order."""
        peers = [rank for rank in ranks if rank != transport.rank]
        device = likes[0].device
        receipts = {peer: transport.receive(peer, [flat_meta(likes)], device) for peer in peers}
        flat = flatten_tensors(mine, likes)
        for peer in peers:
            transport.send(peer, [flat])
        parts = {peer: unflatten_tensors(receipts[peer].wait()[0], likes) for peer in peers}
        parts[transport.rank] = mine
        return [parts[rank] for rank in ranks]


def local(tensor: Tensor) -> Tensor:
    """The tensor itself; of a sharded one (DTensor), what this rank holds."""
    to_local = getattr(tensor, "to_local", None)
    found: Tensor = tensor if to_local is None else to_local()
    return found.detach()


def _listed(items: Sequence[object]) -> str:
    return " and ".join(map(str, items))


def _is(one: object, other: object) -> bool:
    return one is other


def _part_here(shared: _Shared) -> Tensor | None:
    """What the places of this process have added, summed in the order of stages."""
    total: Tensor | None = None
    for param in shared.here:
        if param.grad is not None:
            part = local(param.grad)
            part = part.to_dense() if part.is_sparse else part
            total = part if total is None else total + part
    return total


def _put(param: Tensor, total: Tensor) -> None:
    if not param.requires_grad:
        return
    if param.grad is None or param.grad.is_sparse:
        param.grad = torch.zeros_like(param, requires_grad=False)
    local(param.grad).copy_(total)


def _added(earlier: Tensor | None, fresh: Tensor | None) -> Tensor | None:
    if earlier is None or fresh is None:
        return fresh if earlier is None else earlier
    return earlier + fresh if earlier.is_sparse else earlier.add_(fresh)


def _unlike(one: tuple[str, str], other: tuple[str, str]) -> PartitionError:
    return PartitionError(
        f"{one[1]} ({one[0]}) and {other[1]} ({other[0]}) can't be shared: shapes and dtypes differ"
    )


def _buckets(every: Sequence[_Shared]) -> Iterator[list[_Shared]]:
    """Those with the same ranks, home and device together, in messages of a bounded size.

    In an order that is the same on every rank, so that no two wait for each other: each waits for
    the first of all buckets that is not done yet, and that one all of its ranks come to.
    """

    def kind(shared: _Shared) -> tuple[Any, ...]:
        return (shared.ranks, shared.home, str(shared.like.device.type))

    for _, alike in groupby(sorted(every, key=lambda s: (*kind(s), *s.title)), key=kind):
        bucket: list[_Shared] = []
        size = 0
        for shared in alike:
            if bucket and size + shared.like.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(shared)
            size += shared.like.nbytes
        yield bucket
