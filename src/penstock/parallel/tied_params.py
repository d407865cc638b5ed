"""Parameters that several stages share: one value, and in each place the whole gradient.

    rank 0   embed.weight.grad  a ─┐            ┌─► a + b
    rank 3   head.weight.grad   b ─┴─ summed ───┴─► a + b      bit for bit the same on both

Shared are tied parameters (``penstock.partition.ties``), and all of a model whose placement has
several copies. Each place gathers its own part of the gradient during a step; earlier gradients
are put aside meanwhile, so that only what this step has added is summed, in the order of ranks.
Where one process holds all places as one object, autograd has summed already and nothing is done.

Before the first step the places are made equal: they take the value of the first stage's.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock._torch_compat import has_grad_hooks, has_tensor_hooks
from penstock.errors import StageError
from penstock.parallel.counted import set_counts_here, set_pipeline_size
from penstock.parallel.equal_start import equalize
from penstock.parallel.tied_names import groups_of
from penstock.parallel.tied_places import Shared, buckets, find_shared, local
from penstock.partition.ties import Tie
from penstock.runtime.comm.base import Transport
from penstock.runtime.comm.flat import flat_meta, flatten_tensors, unflatten_tensors
from penstock.schedule.placement import Placement
from penstock.stage.stage import Stage

__all__ = ["SharedParams"]

_log = logging.getLogger(__name__)


class SharedParams:
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
        self._placement = placement
        self._stages = stages
        self._transport = transports[0] if len(transports) < placement.num_ranks else None
        self._seen: list[nn.Parameter] = []
        self._params: tuple[Shared, ...] = ()
        self._tied: list[Shared] = []
        self._told_of_hooks = False
        self._register_peers()
        self._resolve()
        self._tell()

    def _register_peers(self) -> None:
        if self._transport is not None:
            for number in range(len(self._groups.every)):
                ranks = set(self._groups.ranks(number, self._placement))
                if self._transport.rank in ranks:
                    self._transport.register_peers(ranks - {self._transport.rank})

    def _tell(self) -> None:
        """Say once, in the process of the first stage, which way is taken."""
        placement, groups = self._placement, self._groups
        apart = self._transport is not None
        for number, group in enumerate(groups.ties):
            if min(group) in self._stages:
                places = [
                    f"{name} of stage {stage}"
                    for stage, name in sorted(group.items())
                    if placement.copy_of(stage) == 0
                ]
                ranks = groups.ranks(number, placement)
                summed = f"gradients summed across ranks {_listed(ranks)}"
                how = summed if apart and len(ranks) > 1 else "placed together"
                _log.info("%s are one parameter: %s", _listed(places), how)
        if placement.copies > 1 and 0 in self._stages:
            pairs = sorted({groups.ranks(n, placement) for n in groups.copies})
            summed = f"gradients summed across ranks {', '.join(map(_listed, pairs))}"
            how = summed if apart else "in one process"
            _log.info("%d copies of the model: %s", placement.copies, how)
        if placement.copies > 1 and apart and any(map(_keeps_statistics, self._stages.values())):
            _log.warning(
                "the %d copies of a batch norm each keep the statistics of the microbatches that "
                "pass them, which are not those of all",
                placement.copies,
            )

    @property
    def facts(self) -> str:
        """What every rank must agree on."""
        return json.dumps([sorted(group.items()) for group in self._groups.every])

    # --- what is shared ----------------------------------------------------------------------

    def _resolve(self) -> None:
        """Find the parameters: again whenever a stage has others, as when it is sharded."""
        params = [param for stage in self._stages.values() for param in stage.submod.parameters()]
        if len(params) == len(self._seen) and all(map(operator.is_, params, self._seen)):
            return
        self._seen = params
        for param in params:
            set_counts_here(param, True)
            set_pipeline_size(param, self._placement.num_ranks if self._transport else 1)
        found = list(self._find())
        self._tied = [s for s in found if s.title[0] < self._groups.num_ties]
        self._params = tuple(s for s in found if len(s.here) > 1 or len(s.ranks) > 1)
        rank = self._transport.rank if self._transport is not None else None
        for shared in self._params:
            for place, tensor in enumerate(shared.here):
                set_counts_here(tensor, place == 0 and rank in (None, shared.home))

    def agree(self) -> None:
        """Once, before the first step: see that all places are alike, and make them equal.

        Raises:
            PartitionError: they differ in shape or dtype; the same on every rank.
        """
        if self._groups.every:
            self._resolve()
            every = [*self._find(), *self._find(buffers=True)]
            equalize(every, self._groups, self._placement, self._transport)

    def _find(self, *, buffers: bool = False) -> Iterator[Shared]:
        apart = self._transport is not None
        return find_shared(
            self._groups, self._placement, self._stages, apart=apart, buffers=buffers
        )

    # --- a step ------------------------------------------------------------------------------

    @contextmanager
    def reduced(self) -> Iterator[None]:
        """A training step runs in this: at its end shared gradients are whole in every place.

        Raises:
            StageError: a shared parameter has a hook on its accumulated gradient, which would
                see a part of it.
        """
        self._resolve()
        # One object that stages on one rank share is summed by autograd, but stage by stage.
        for shared in (*self._params, *self._tied):
            if any(map(has_grad_hooks, shared.here)):
                raise StageError(
                    f"{shared.label} is shared with other stages and has a post-accumulate-grad "
                    "hook, which would see the gradient of one stage alone; step the optimizer "
                    "after step() instead"
                )
        self._tell_of_hooks()
        if not self._params:
            yield
            return
        params = [param for shared in self._params for param in shared.here]
        earlier = {id(param): param.grad for param in params}
        for param in params:
            param.grad = None
        is_whole = False
        try:
            yield
            with torch.no_grad():
                for bucket in buckets(self._params):
                    self._sum(bucket)
            is_whole = True
        finally:
            # Of a broken step nothing stays.
            with torch.no_grad():
                for param in params:
                    fresh = param.grad if is_whole else None
                    param.grad = _added(earlier[id(param)], fresh)

    def _tell_of_hooks(self) -> None:
        if self._told_of_hooks:
            return
        hooked = [s for s in self._tied if any(map(has_tensor_hooks, s.here))]
        if hooked:
            self._told_of_hooks = True
            _log.warning(
                "%s is shared with other stages and has a hook (register_hook), which is called "
                "with the gradient of each stage by itself: right for a mask or a factor, but not "
                "where it clips, or counts its calls",
                hooked[0].label,
            )

    def _sum(self, bucket: Sequence[Shared]) -> None:
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
        transport.drain()  # so that no more than one message to a peer is held
        parts[transport.rank] = mine
        return [parts[rank] for rank in ranks]


def _listed(items: Sequence[object]) -> str:
    return " and ".join(map(str, items))


def _keeps_statistics(stage: Stage) -> bool:
    return any(getattr(module, "track_running_stats", False) for module in stage.submod.modules())


def _part_here(shared: Shared) -> Tensor | None:
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
