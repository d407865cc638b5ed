"""Parameters shared by several stages: synchronized values and summed gradients.

    rank 0   embed.weight.grad  a ─┐             ┌─► a + b
    rank 3   head.weight.grad   b ─┴─ exchanged ─┴─► a + b      bit for bit the same on both

Tied parameters (``penstock.partition.ties``) are shared. If the placement has several copies of the
model, all parameters are shared. Before the first step the value on the first stage is broadcast.
During a step each copy of a parameter accumulates its own part of the gradient. Earlier gradients
are set aside, so that only this step's parts are summed, in rank order. A step that does not
reduce leaves the parts to the next one that does. Autograd alone sums the parts of a parameter that
is one object in one process.
"""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress, groupby
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch_compat import grad_hooks_of
from penstock.errors import PartitionError, StageError
from penstock.parallel.data_parallel import in_buckets
from penstock.partition.plan import abbreviate
from penstock.partition.ties import Tie
from penstock.runtime.comm.base import Transport
from penstock.schedule.placement import Placement
from penstock.stage.boundary import TensorMeta, shape_text
from penstock.stage.dtensor import local_part
from penstock.stage.stage import Stage
from penstock.stage.wrappers import named_plainly, plain_name, unwrapped

__all__ = ["SharedParams", "shared_params_of"]


# Limit on the buffers that receive other ranks' parts, in bytes; a single larger tensor is allowed.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """A shared parameter or buffer, with all its copies."""

    key: tuple[int, str]  # the number of its group, and its name there; the same on every rank
    label: str  # the name of the first local copy, for messages
    ranks: tuple[int, ...]  # with a copy, in ascending order
    src_rank: int  # the rank of the first stage, which broadcasts its value
    tensors: tuple[Tensor, ...]  # this process's distinct ones, in stage order

    @property
    def local(self) -> Tensor:
        """The first tensor here, or its shard: of the shape and dtype that is exchanged."""
        return _local(self.tensors[0])

    @property
    def is_summed(self) -> bool:
        """True if autograd does not sum its gradients."""
        return len(self.tensors) > 1 or len(self.ranks) > 1


class SharedParams:
    """The parameters that this process's stages share, among each other and with other ranks.

    Args:
        ties: the parameters that stages share, in addition to the placement's copies of the model;
            the same on every rank.
        placement: the assignment of stages to ranks.
        stages: this process's stages, by index.
        transports: one per rank of this process.

    Attributes:
        num_processes: the number of processes of the pipeline.

    Raises:
        PartitionError: a tie names a stage, module or parameter that does not exist or is in
            another tie.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        placement: Placement,
        stages: Mapping[int, Stage],
        transports: Sequence[Transport],
    ) -> None:
        self._placement = placement
        self._stages = stages
        self._transport = transports[0]
        self.num_processes = 1 if len(transports) == placement.num_ranks else placement.num_ranks
        # By stage, the shared names: of each tie, then of each stage's copies.
        self._groups = [_names_by_stage(tie, placement) for tie in ties]
        self._num_ties, size = len(ties), placement.num_model_stages
        if placement.num_directions > 1:
            copies = (range(i, placement.num_stages, size) for i in range(size))
            self._groups += [dict.fromkeys(stages, "") for stages in copies]
        self._params: list[nn.Parameter] = []
        # By id of a parameter: True if sums over ranks count it on this rank.
        self._counted: dict[int, bool] = {}
        self._shared: list[_Shared] = []
        self._holds_parts = False  # after a step that did not reduce
        for group in self._groups:
            ranks = self._ranks_of(group)
            if (rank := self._transport.rank) in ranks:
                self._transport.register_peers({*ranks} - {rank})
        self._find_params()
        _live.append(weakref.ref(self, _live.remove))

    @property
    def facts(self) -> str:
        """The shared names, which must be the same on all ranks."""
        return json.dumps([sorted(group.items()) for group in self._groups])

    def counts_here(self, param: Tensor) -> bool | None:
        """True if sums over ranks count ``param`` on this rank: once per shared parameter, in its
        first copy. None for a foreign parameter."""
        return self._counted.get(id(param))

    def _ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The ranks of these stages; within one process, rank 0 alone."""
        if self.num_processes == 1:
            return (0,)
        return tuple(sorted({self._placement.rank_of(stage) for stage in stages}))

    def _find_params(self) -> None:
        """Find the parameters, and find them again if a stage replaced them, as sharding does."""
        params = [param for stage in self._stages.values() for param in stage.submod.parameters()]
        if [*map(id, params)] == [*map(id, self._params)]:
            return
        self._params, self._shared = params, list(self._find())
        self._counted = dict.fromkeys(map(id, params), True)
        for shared in self._shared:
            if shared.is_summed:
                self._counted |= dict.fromkeys(map(id, shared.tensors), False)
                self._counted[id(shared.tensors[0])] = shared.src_rank == self._transport.rank

    def _find(self, *, buffers: bool = False) -> Iterator[_Shared]:
        """Find the shared parameters, or buffers, of this process's stages, sorted by key."""
        group_of: dict[int, int] = {}
        for number, group in enumerate(self._groups):
            # By name: the tensors by id, and the first of their stages.
            found: dict[str, tuple[dict[int, Tensor], int]] = {}
            for stage in sorted(group.keys() & self._stages.keys()):
                named = _named(self._stages[stage].submod, stage, group[stage], buffers)
                for name, tensor in named.items():
                    # A tie includes all copies of the model, so that these need no further sharing.
                    if group_of.setdefault(id(tensor), number) == number:
                        found.setdefault(name, ({}, stage))[0][id(tensor)] = tensor
                    elif number < self._num_ties:
                        raise PartitionError(
                            f"{group[stage]!r} of stage {stage} is named by two of the ties; "
                            "name all places of a parameter in one"
                        )
            for name, (tensors, stage) in sorted(found.items()):
                yield _Shared(
                    key=(number, name),
                    label=f"{'.'.join(filter(None, (group[stage], name)))} of stage {stage}",
                    ranks=self._ranks_of(group),
                    src_rank=self._ranks_of([min(group)])[0],
                    tensors=tuple(tensors.values()),
                )

    def broadcast_values(self) -> None:
        """Check that all copies match, then broadcast the first stage's; a collective, called once.

        Raises:
            PartitionError: copies differ in shape, dtype or shards; raised on every rank.
        """
        if not self._groups:
            return
        self._find_params()
        found = [*self._find(), *self._find(buffers=True)]
        self._compare(found)
        with torch.no_grad():
            for bucket in _buckets(found):
                is_src = bucket[0].src_rank == self._transport.rank
                values = [shared.local if is_src else None for shared in bucket]
                for shared, value in zip(bucket, self._sum(bucket, values), strict=True):
                    assert value is not None, "the source rank has it"
                    for tensor in shared.tensors:
                        _local(tensor).copy_(value)

    def _compare(self, found: Sequence[_Shared]) -> None:
        mine = [(*s.key, _describe(tensor), s.label) for s in found for tensor in s.tensors]
        copies: defaultdict[tuple[int, str], list[tuple[int, str, str]]] = defaultdict(list)
        for rank, data in enumerate(self._transport.all_gather_bytes(json.dumps(mine).encode())):
            for number, name, kind, label in json.loads(data):
                copies[number, name].append((rank, kind, label))
        for (number, name), places in copies.items():
            _, first_kind, first = places[0]
            for _, kind, label in places:
                if kind != first_kind:
                    what = f"{first} ({first_kind}) and {label} ({kind})"
                    raise PartitionError(f"{what} can't be shared: shapes, dtypes or shards differ")
            ranks = {*self._ranks_of(self._groups[number])}
            if lacking := ranks - {rank for rank, *_ in places}:
                raise PartitionError(
                    f"{first} is shared with rank {min(lacking)}, whose stage has no {name!r} in "
                    f"{self._groups[number]}; the modules must have the same parameters and buffers"
                )

    @contextmanager
    def summing_grads(self, *, reduces: bool) -> Iterator[None]:
        """A context for a training step; at exit each copy has the whole gradient, or, if the step
        failed, none of the step's.

        Args:
            reduces: if False, each copy keeps its part, and the first one also has earlier whole
                gradients, for the next step that reduces.

        Raises:
            StageError: a shared parameter has a post-accumulate-grad hook.
        """
        self._find_params()
        for shared in self._shared:
            # Autograd sums over the stages of one rank in stage order.
            is_partial = shared.is_summed or shared.key[0] < self._num_ties
            if is_partial and any(after for _, after in map(grad_hooks_of, shared.tensors)):
                raise StageError(
                    f"{shared.label} is shared with other stages and has a post-accumulate-grad "
                    "hook, which would see the gradient of one stage alone; step the optimizer "
                    "after step() instead"
                )
        summed = [shared for shared in self._shared if shared.is_summed]
        earlier = [(param, param.grad) for shared in summed for param in shared.tensors]
        had_parts, self._holds_parts = self._holds_parts, not reduces
        for param, before in earlier:
            # Parts are reduced, and summed, with those of this step.
            param.grad = before.clone() if had_parts and before is not None else None
        is_complete = False
        try:
            yield
            with torch.no_grad():
                for bucket in _buckets(summed) if reduces else ():
                    totals = self._sum(bucket, [_local_sum(shared) for shared in bucket])
                    for shared, total in zip(bucket, totals, strict=True):
                        for param in shared.tensors:
                            _set_grad(param, total)
            is_complete = True
        finally:
            with torch.no_grad():
                for param, before in earlier:
                    if not is_complete:
                        param.grad = before
                    elif not had_parts and (reduces or self.counts_here(param)):
                        param.grad = _added(before, param.grad)

    def _sum(
        self, bucket: Sequence[_Shared], mine: Sequence[Tensor | None]
    ) -> Iterator[Tensor | None]:
        """Exchange the parts of a bucket between its ranks, and sum them in rank order."""
        transport, likes = self._transport, [shared.local for shared in bucket]
        metas = [TensorMeta(shape=t.shape, dtype=t.dtype, requires_grad=False) for t in likes]
        peers = [rank for rank in bucket[0].ranks if rank != transport.rank]
        for peer in peers:
            transport.send_metadata(peer, bytes(part is not None for part in mine))
        present = {peer: transport.recv_metadata(peer) for peer in peers}
        receives = {
            peer: transport.receive(peer, [*compress(metas, there)], likes[0].device)
            for peer, there in present.items()
        }
        for peer in peers:
            transport.send(peer, [part.contiguous() for part in mine if part is not None])
        parts = {transport.rank: mine}
        for peer, wait in receives.items():
            tensors = iter(wait())
            parts[peer] = [next(tensors) if is_there else None for is_there in present[peer]]
        if peers:
            transport.drain()
        for contributions in zip(*(parts[rank] for rank in bucket[0].ranks), strict=True):
            yield _total([part for part in contributions if part is not None])


# Weak references to this process's pipelines, latest last, for norms over ranks.
_live: list[weakref.ref[SharedParams]] = []


def shared_params_of(param: Tensor) -> SharedParams | None:
    """The latest live pipeline with the parameter ``param``."""
    alive = (ref() for ref in reversed(_live))
    return next((p for p in alive if p is not None and p.counts_here(param) is not None), None)


def _names_by_stage(tie: Tie, placement: Placement) -> dict[int, str]:
    """The names of a tie in all copies of the model, by stage."""
    if not isinstance(tie, Mapping) or len(tie) < 2:
        raise PartitionError(
            f"a tie is {tie!r}; expected a dict, from each stage that holds the parameter to its "
            "name there, with two stages or more"
        )
    names: dict[int, str] = {}
    for stage, name in tie.items():
        if stage not in range(placement.num_stages):
            last = placement.num_stages - 1
            raise PartitionError(f"the tie {tie} names stage {stage}; there are stages 0 to {last}")
        first = placement.model_stage(stage)
        for copy in range(first, placement.num_stages, placement.num_model_stages):
            if names.setdefault(copy, name) != name:
                raise PartitionError(f"the tie {tie} has two names for one of the model's stages")
    return names


def _named(module: nn.Module, stage: int, name: str, buffers: bool) -> dict[str, Tensor]:
    """The tensors of the parameter or module ``name``, by relative name."""
    params = {plain_name(module, n): p for n, p in module.named_parameters(remove_duplicate=False)}
    if name in params:
        return {} if buffers else {"": params[name]}
    try:
        within = unwrapped(module).get_submodule(name)
    except AttributeError:
        raise PartitionError(
            f"stage {stage} has neither a parameter nor a module {name!r}; its parameters are: "
            f"{abbreviate([*params])}"
        ) from None
    return dict(named_plainly(within, buffers=buffers))


def _buckets(found: Iterable[_Shared]) -> Iterator[list[_Shared]]:
    """Group tensors with the same ranks, source and device into buckets of bounded size, in the
    same order on every rank, so that no two ranks wait for each other."""

    def kind(shared: _Shared) -> tuple[Any, ...]:
        return (shared.ranks, shared.src_rank, shared.local.device.type)

    for _, alike in groupby(sorted(found, key=lambda s: (*kind(s), *s.key)), key=kind):
        yield from in_buckets(alike, lambda shared: shared.local.nbytes, BUCKET_BYTES)


def _local(tensor: Tensor) -> Tensor:
    """The tensor itself, or this rank's shard of it (DTensor)."""
    return local_part(tensor).detach()


def _describe(tensor: Tensor) -> str:
    kind = shape_text(tensor)
    # Local shards are summed directly, so they must be the same part of the tensor.
    shards = [str(p) for p in getattr(tensor, "placements", ()) if not p.is_replicate()]
    return f"{kind}, {tuple(_local(tensor).shape)} by {', '.join(shards)}" if shards else kind


def _total(parts: Sequence[Tensor]) -> Tensor | None:
    return sum(parts[1:], start=parts[0]) if parts else None


def _local_sum(shared: _Shared) -> Tensor | None:
    """The sum of the gradients of this process's copies, in stage order."""
    grads = [_local(param.grad) for param in shared.tensors if param.grad is not None]
    return _total([grad.to_dense() if grad.is_sparse else grad for grad in grads])


def _set_grad(param: Tensor, total: Tensor | None) -> None:
    if total is not None and param.requires_grad:
        if param.grad is None or param.grad.is_sparse:
            param.grad = torch.zeros_like(param, requires_grad=False)
        _local(param.grad).copy_(total)


def _added(earlier: Tensor | None, fresh: Tensor | None) -> Tensor | None:
    if earlier is None or fresh is None:
        return fresh if earlier is None else earlier
    return earlier + fresh if earlier.is_sparse else earlier.add_(fresh)
