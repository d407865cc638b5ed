"""Data parallelism around a stage: the only file that knows DDP, FSDP2 and replicate.

Within a step gradients accumulate locally, microbatch by microbatch. They are reduced once, at the
stage's REDUCE_GRAD, when its last weight gradient is there. Neither the order in which a schedule
computes input and weight gradients nor the moment at which a hook fires makes a difference.

    DDP, replicate   ``average_grads``: torch's all-reduce, bucket by bucket
    FSDP2            FSDP's own reduce-scatter, all-gather and resharding
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import _torch_compat
from penstock.errors import StageError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["ReplicaStep", "Replicas", "average_grads", "in_buckets", "replicas_of"]

T = TypeVar("T")
# As large as DDP's by default.
BUCKET_BYTES = 25 << 20


class Replicas(ABC):
    """A stage's module, or a part of it, as one of several replicas or shards.

    Attributes:
        sharded: whether parameters are sharded: gathered by ``unshard``.
        groups: the processes of reductions and gathers; known once a step has begun.
    """

    sharded: bool = False
    groups: Sequence[dist.ProcessGroup] = ()

    @abstractmethod
    def begin(self) -> None:
        """Start a step: no reduction until ``reduce_grads``."""

    def share_buffers(self) -> None:
        """Broadcast the first replica's buffers, if the wrapper would do so now: once per step,
        after ``begin`` and before the first forward."""
        return

    @abstractmethod
    def reduce_grads(self) -> None:
        """Average the gradients over the replicas, once per step."""

    @abstractmethod
    def end(self) -> None:
        """End the step, whole or broken: the module is as it was before."""

    def unshard(self) -> None:
        """Gather the parameters, if they are sharded."""
        return

    def reshard(self) -> None:
        """Free gathered parameters."""
        return


def replicas_of(module: nn.Module) -> Replicas | None:
    """The replication or sharding of ``module`` or of its parts; None if there is none.

    Raises:
        StageError: a wrapper that can't be pipelined: DDP with mixed precision, with a
            communication hook or around sparse embeddings, or FSDP1.
    """
    found = _find(module)
    return found[0] if len(found) == 1 else _Several(found) if found else None


def _find(module: nn.Module) -> list[Replicas]:
    """The outermost wrappers within ``module``, itself included."""
    if isinstance(module, DistributedDataParallel):
        if _torch_compat.ddp_casts(module):
            raise StageError(
                "a stage is wrapped in DDP with mixed_precision=, which casts gradients as each "
                "backward reduces them; use torch.autocast, or fully_shard's MixedPrecisionPolicy"
            )
        return [_Ddp(module, module.module)]
    if _torch_compat.is_composable_ddp(module):
        return [_Replicate(module)]
    if _torch_compat.is_fsdp(module):
        return [_Fsdp(module)]
    if _torch_compat.is_fsdp1(module):
        raise StageError(
            "a stage is wrapped in FullyShardedDataParallel (FSDP1), which reduces gradients after "
            "each backward; use torch.distributed.fsdp.fully_shard instead"
        )
    return [each for child in module.children() for each in _find(child)]


class _Several(Replicas):
    def __init__(self, parts: Sequence[Replicas]) -> None:
        self._parts = parts
        self.sharded = any(part.sharded for part in parts)

    def begin(self) -> None:
        for part in self._parts:
            part.begin()
        self.groups = _distinct(group for part in self._parts for group in part.groups)

    def share_buffers(self) -> None:
        for part in self._parts:
            part.share_buffers()

    def reduce_grads(self) -> None:
        for part in self._parts:
            part.reduce_grads()

    def end(self) -> None:
        for part in self._parts:
            part.end()

    def unshard(self) -> None:
        for part in self._parts:
            part.unshard()

    def reshard(self) -> None:
        for part in self._parts:
            part.reshard()


class _Ddp(Replicas):
    """A module in DDP.

    Args:
        ddp: the wrapper.
        module: the module with the layers.
    """

    def __init__(self, ddp: DistributedDataParallel, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
                raise StageError(
                    f"the embedding {name!r} of a stage in DDP has sparse gradients, which are not "
                    "reduced; make it with sparse=False"
                )
        self._ddp = ddp
        self.groups = (ddp.process_group,)
        # Within the user's own no_sync() a step reduces nothing.
        self._synced = ddp.require_backward_grad_sync
        self._sink_off = False
        self._shares_buffers = self._trains = False

    def begin(self) -> None:
        if _torch_compat.has_comm_hook(self._ddp):
            raise StageError(
                "a stage in DDP has a communication hook (register_comm_hook), which a pipeline "
                "can't call; leave it out, or shard the stage by fully_shard"
            )
        # As DDP's no_sync() does, for the whole step.
        self._synced = self._ddp.require_backward_grad_sync
        self._ddp.require_backward_grad_sync = False
        self._sink_off = _torch_compat.switch_ddp_sink(self._ddp, off=True)
        # DDP's forward would broadcast buffers wherever it runs first; ``share_buffers`` does.
        will_share: Callable[[], bool] = self._ddp.will_sync_module_buffers
        self._shares_buffers = will_share()
        self._trains = torch.is_grad_enabled()
        self._ddp.require_forward_param_sync = False

    def share_buffers(self) -> None:
        if self._shares_buffers:
            _torch_compat.broadcast_ddp_buffers(self._ddp)

    def reduce_grads(self) -> None:
        if self._synced:
            self.average()

    def average(self) -> None:
        """Average the gradients, whether or not the user holds reductions back."""
        params = _torch_compat.ddp_parameters(self._ddp)
        average_grads(params, self._ddp.process_group, self._ddp.bucket_bytes_cap)

    def end(self) -> None:
        self.end_as(synced=self._synced)

    def end_as(self, *, synced: bool) -> None:
        """End the step as DDP's own forwards and backwards would, with a reduction or without."""
        self._ddp.require_backward_grad_sync = self._synced
        # Buffers are broadcast again after gradients were reduced: not between steps that
        # accumulate under no_sync(), nor between evaluations.
        self._ddp.require_forward_param_sync = synced and self._trains
        _torch_compat.switch_ddp_sink(self._ddp, off=self._sink_off)


class _Replicate(Replicas):
    """A module given to ``replicate``: it keeps its class, and its hooks hold a DDP module."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._synced = True
        self._ddp: _Ddp | None = None

    def begin(self) -> None:
        if self._ddp is None:
            # Torch makes it at the first forward.
            self._ddp = _Ddp(_torch_compat.ddp_within(self._module), self._module)
            self.groups = self._ddp.groups
        self._synced = _torch_compat.composable_syncs(self._module)
        self._module.set_requires_gradient_sync(False)
        self._ddp.begin()

    def reduce_grads(self) -> None:
        assert self._ddp is not None
        if self._synced:
            self._ddp.average()

    def end(self) -> None:
        self._module.set_requires_gradient_sync(self._synced)
        if self._ddp is not None:
            self._ddp.end_as(synced=self._synced)


class _Fsdp(Replicas):
    sharded = True

    def __init__(self, root: FSDPModule) -> None:
        self._root = root

    def begin(self) -> None:
        if not self.groups:
            self.groups = _groups_of(self._root)
        self._set_sync(False)

    def unshard(self) -> None:
        _each(self._root, lambda module: module.unshard())

    def reshard(self) -> None:
        _each(self._root, lambda module: module.reshard())

    def reduce_grads(self) -> None:
        self._set_sync(True)
        _torch_compat.fsdp_finish_backward(self._root)

    def end(self) -> None:
        self._set_sync(True)
        # An evaluation has no backward that would reshard; gradients and the optimizer are those
        # of the shards.
        self.reshard()

    def _set_sync(self, synced: bool) -> None:
        self._root.set_is_last_backward(synced)
        self._root.set_reshard_after_backward(synced)
        self._root.set_requires_gradient_sync(synced)


def _groups_of(root: FSDPModule) -> list[dist.ProcessGroup]:
    """The groups of all dimensions of the meshes that the parameters are sharded over."""
    assert isinstance(root, nn.Module)
    meshes = _distinct(p.device_mesh for p in root.parameters() if hasattr(p, "device_mesh"))
    return _distinct(group for mesh in meshes for group in mesh.get_all_groups())


def _distinct(things: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(things))


def _each(root: FSDPModule, act: Callable[[FSDPModule], object]) -> None:
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if _torch_compat.is_fsdp(module):
            act(module)


# --- the reduction ---------------------------------------------------------------------------


def average_grads(
    params: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Average the gradients of ``params`` over ``group``, by coalesced all-reduces in place.

    A parameter without a gradient on any rank keeps none; one without a gradient on some ranks
    counts as zero there.

    Args:
        params: the parameters, in the same order on every rank.
        group: the replicas.
        bucket_bytes: how many bytes of gradients are reduced together.

    Raises:
        StageError: a gradient is sparse.
    """
    if not params:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in _with_grads(params, group):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse:
            raise StageError(
                "a parameter of a replicated stage has a sparse gradient, which is not reduced; "
                "make it dense, such as by sparse=False of an embedding"
            )
        # Divided before the sum, as in DDP: a sum of halves may overflow.
        grad = param.grad.div_(group.size())
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    reduced = []
    for grads in kinds.values():
        for bucket in in_buckets(grads, lambda grad: grad.nbytes, bucket_bytes):
            wires = [grad.contiguous() for grad in bucket]
            reduced.append((group.allreduce_coalesced(wires), bucket, wires))
    for work, bucket, wires in reduced:
        work.wait()
        for grad, wire in zip(bucket, wires, strict=True):
            if wire is not grad:
                grad.copy_(wire)


def _with_grads(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Sequence[nn.Parameter]:
    """The parameters that have a gradient on some rank."""
    here = [param.grad is not None for param in params]
    if all(here):
        # Made on the device, and not read: the host need not wait for the device.
        counts = torch.ones(len(params), dtype=torch.int32, device=params[0].device)
        dist.all_reduce(counts, group=group)
        return params
    counts = torch.tensor(here, dtype=torch.int32, device=params[0].device)
    dist.all_reduce(counts, group=group)
    return [param for param, count in zip(params, counts.tolist(), strict=True) if count]


def in_buckets(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Consecutive items in lists of at most ``limit`` in all, or of one item.

    Example:
        >>> list(in_buckets([3, 4, 9, 1], int, 8))
        [[3, 4], [9], [1]]
    """
    bucket: list[T] = []
    held = 0
    for item in items:
        if bucket and held + size(item) > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size(item)
    if bucket:
        yield bucket


# --- stages driven by hand ---------------------------------------------------------------------


class ReplicaStep:
    """A step of a replicated stage that is driven by hand, up to its one reduction.

    A schedule knows which backward of a step is the last one. Whoever drives a stage by hand says
    so with a backward, or asks for the reduction itself, or does both.

    Attributes:
        due: whether the backward that completes the step is to reduce.
    """

    def __init__(self) -> None:
        self.due = False
        self._begun = False
        self._replicas: Replicas | None = None

    @property
    def is_sharded(self) -> bool:
        """True if parameters are sharded; the graph's are then other ones than the module's."""
        return self._replicas is not None and self._replicas.sharded

    def begin(self, module: nn.Module) -> None:
        """Hold reductions back from now on, unless the step has begun."""
        if self._begun:
            return
        self._begun = True
        self._replicas = replicas_of(module)
        if self._replicas is not None:
            self._replicas.begin()
            self._replicas.share_buffers()

    def end(self, *, reduce: bool) -> None:
        """End the step, if one has begun: its gradients are averaged, or left as they are."""
        replicas, self._replicas = self._replicas, None
        self._begun = self.due = False
        if replicas is not None:
            try:
                if reduce:
                    replicas.reduce_grads()
            finally:
                replicas.end()
