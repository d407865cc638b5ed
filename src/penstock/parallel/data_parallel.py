"""Data parallelism around a stage: the only file that knows DDP, FSDP2 and replicate.

Within a step gradients pile up locally, microbatch by microbatch; they are reduced once, at the
stage's REDUCE_GRAD, when its last weight gradient is in. So it matters neither in which order a
schedule computes input and weight gradients, nor from which of the two a hook fires.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import _torch_compat as replica_private
from penstock.errors import StageError
from penstock.parallel.gradient_reduction import average_grads

if TYPE_CHECKING:
    from torch.distributed._composable.replicate import DDP as ComposableDdp
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Replicas", "replicas_of"]

T = TypeVar("T")


class Replicas(ABC):
    """A stage's module, or a part of it, as one of several replicas or shards.

    Attributes:
        sharded: whether parameters are sharded: gathered by ``unshard``.
        groups: the processes that reductions and gathers run over; known once a step has begun.
    """

    sharded: bool = False
    groups: Sequence[dist.ProcessGroup] = ()

    @abstractmethod
    def begin(self) -> None:
        """Start a step: no reduction until ``reduce_grads``."""

    def share_buffers(self) -> None:
        """Give every replica the first one's buffers, where the wrapper would do so now: once per
        step, after ``begin`` and before the first forward."""
        return

    @abstractmethod
    def reduce_grads(self) -> None:
        """Average the gradients over the replicas, once per step."""

    @abstractmethod
    def end(self) -> None:
        """End the step, whole or broken: the module is as it was before."""

    def unshard(self) -> None:
        """Gather the parameters, where they are sharded."""
        return

    def reshard(self) -> None:
        """Let go of gathered parameters."""
        return


def replicas_of(module: nn.Module) -> Replicas | None:
    """How ``module``, or what it is made of, is replicated or sharded; None if nothing is.

    Raises:
        StageError: a wrapper that can't be pipelined: DDP with mixed precision of its own, or
            FSDP1.
    """
    found = _find(module)
    return found[0] if len(found) == 1 else _Several(found) if found else None


def _find(module: nn.Module) -> list[Replicas]:
    """The outermost wrappers within ``module``, itself included."""
    if isinstance(module, DistributedDataParallel):
        if replica_private.ddp_casts(module):
            raise StageError(
                "a stage is wrapped in DDP with mixed_precision=, which casts gradients as each "
                "backward reduces them; use torch.autocast, or fully_shard's MixedPrecisionPolicy"
            )
        return [_Ddp(module)]
    if replica_private.is_composable_ddp(module):
        return [_Replicate(module)]
    if replica_private.is_fsdp(module):
        return [_Fsdp(module)]
    if replica_private.is_fsdp1(module):
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
    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self.groups = (module.process_group,)
        # Within the user's own no_sync() a step reduces nothing.
        self._synced = module.require_backward_grad_sync
        self._sink_off = False
        self._shares_buffers = self._trains = False

    def begin(self) -> None:
        # What DDP's no_sync() does, for as long as the step takes.
        self._synced = self._module.require_backward_grad_sync
        self._module.require_backward_grad_sync = False
        self._sink_off = replica_private.switch_ddp_sink(self._module, off=True)
        # DDP's forward would share buffers wherever it runs first; here it is done before that.
        will_share: Callable[[], bool] = self._module.will_sync_module_buffers
        self._shares_buffers = will_share()
        self._trains = torch.is_grad_enabled()
        self._module.require_forward_param_sync = False

    def share_buffers(self) -> None:
        if self._shares_buffers:
            replica_private.broadcast_ddp_buffers(self._module)

    def reduce_grads(self) -> None:
        if self._synced:
            self.average(_embedded_sparsely(self._module))

    def average(self, sparse: Set[Tensor]) -> None:
        """Average the gradients, whether or not the user holds reductions back."""
        average_grads(
            replica_private.ddp_parameters(self._module),
            self._module.process_group,
            sparse,
            reduce=replica_private.ddp_comm_hook(self._module),
            bucket_bytes=self._module.bucket_bytes_cap,
        )

    def end(self) -> None:
        self.end_as(synced=self._synced)

    def end_as(self, *, synced: bool) -> None:
        """End the step as DDP's own forwards and backwards would, with a reduction or without."""
        self._module.require_backward_grad_sync = self._synced
        # Buffers are shared once more when the gradients have been: not between the steps that
        # accumulate under no_sync(), nor between evaluations.
        self._module.require_forward_param_sync = synced and self._trains
        replica_private.switch_ddp_sink(self._module, off=self._sink_off)


class _Replicate(Replicas):
    """The functional form of DDP: the module stays what it is, its hooks hold a DDP module."""

    def __init__(self, module: ComposableDdp) -> None:
        self._module = module
        self._synced = True
        self._ddp: _Ddp | None = None

    def begin(self) -> None:
        # It is made at the first forward, or here.
        if self._ddp is None:
            self._ddp = _Ddp(replica_private.ddp_within(self._module))
            self.groups = self._ddp.groups
        self._synced = replica_private.composable_syncs(self._module)
        self._module.set_requires_gradient_sync(False)
        self._ddp.begin()

    def reduce_grads(self) -> None:
        assert self._ddp is not None
        if self._synced:
            # Its DDP knows the parameters alone.
            assert isinstance(self._module, nn.Module)
            self._ddp.average(_embedded_sparsely(self._module))

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
        self._root.set_is_last_backward(False)
        self._root.set_reshard_after_backward(False)
        self._root.set_requires_gradient_sync(False)

    def unshard(self) -> None:
        _each(self._root, lambda module: module.unshard())

    def reshard(self) -> None:
        _each(self._root, lambda module: module.reshard())

    def reduce_grads(self) -> None:
        self._sync_again()
        replica_private.fsdp_finish_backward(self._root)

    def end(self) -> None:
        self._sync_again()
        # Without a backward, nothing else would: an evaluation leaves what its forwards gathered,
        # and gradients and the optimizer are those of the shards.
        self.reshard()

    def _sync_again(self) -> None:
        self._root.set_is_last_backward(True)
        self._root.set_reshard_after_backward(True)
        self._root.set_requires_gradient_sync(True)


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
        if replica_private.is_fsdp(module):
            act(module)


def _embedded_sparsely(module: nn.Module) -> frozenset[Tensor]:
    """The parameters whose gradients are sparse, alike on all replicas."""
    embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return frozenset(m.weight for m in embeddings if m.sparse)
