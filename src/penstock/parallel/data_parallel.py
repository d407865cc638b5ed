"""Data parallelism around a stage: the gradients of DDP, FSDP2 and replicate.

Within a step gradients accumulate locally. They are reduced once, from the stage's REDUCE_GRAD on,
after its last weight gradient, so that the result does not depend on the schedule's order. A step
may leave them to a later one. Reductions and gathers run beside other stages' computations:

    UNSHARD ── gather ──┤ F of the stage        W of the stage, REDUCE_GRAD ── reduce ──┤ step's end

    DDP                ``start_averaging``: torch's all-reduce, bucket by bucket
    FSDP2, replicate   FSDP's own reduce-scatter, all-gather and resharding
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock import _torch_compat
from penstock.errors import StageError

__all__ = ["Replicas", "in_buckets", "replicas_of", "start_averaging"]

T = TypeVar("T")


class Replicas:
    """The replication or sharding of a module, or of the modules of several ``parts``."""

    sharded: bool = False  # if True, ``unshard`` must gather parameters
    groups: Sequence[dist.ProcessGroup] = ()  # of reductions and gathers, once a step has begun
    shares_params = False  # with other modules, which may add to gradients under reduction

    def __init__(self, parts: Sequence[Replicas] = ()) -> None:
        self._parts = parts
        self._waits: list[Callable[[], object]] = []  # for gathers and reductions under way
        self.sharded = any(part.sharded for part in parts)
        self.shares_params = any(part.shares_params for part in parts)

    @property
    def is_synced(self) -> bool:
        """False where the user has suspended reductions, as within DDP's ``no_sync()``."""
        return all(part.is_synced for part in self._parts)

    def begin(self, *, reduces: bool = True) -> None:
        """Begin a step: suspend reductions until ``start_reduction``, or to a later step's."""
        for part in self._parts:
            part.begin(reduces=reduces)
        self.groups = [group for part in self._parts for group in part.groups]

    def share_buffers(self) -> None:
        """Broadcast the first replica's buffers, after ``begin``, if a forward would."""
        for part in self._parts:
            part.share_buffers()

    def end_weight_grad(self) -> None:
        """Follow a deferred weight gradient, as the wrapper follows each of its backwards."""
        for part in self._parts:
            part.end_weight_grad()

    def start_reduction(self) -> None:
        """Start to average the gradients over the replicas, unless a later step does."""
        for part in self._parts:
            part.start_reduction()
            if part.shares_params:
                part.wait()

    @property
    def is_busy(self) -> bool:
        """True if a gather or a reduction is to be waited for."""
        return bool(self._waits) or any(part.is_busy for part in self._parts)

    def wait(self) -> None:
        """Wait for gathers and reductions: before a computation on the module, and at the end."""
        for part in self._parts:
            part.wait()
        while self._waits:
            self._waits.pop(0)()

    def end(self) -> None:
        """End the step, complete or failed, and restore the module."""
        self._waits.clear()
        for part in self._parts:
            part.end()

    def unshard(self) -> None:
        """Start to all-gather sharded parameters."""
        for part in self._parts:
            part.unshard()

    def reshard(self) -> None:
        """Free the gathered parameters."""
        for part in self._parts:
            part.reshard()


def replicas_of(module: nn.Module, shared: Collection[int] = ()) -> Replicas | None:
    """Find the replication or sharding of ``module`` or its submodules; None without any.

    Args:
        module: the module of a stage.
        shared: the ids of parameters that several modules hold.

    Raises:
        StageError: a wrapper is unsupported: FSDP1, or DDP with mixed precision.
    """
    found = list(_find(module, shared))
    return Replicas(found) if found else None


def _find(module: nn.Module, shared: Collection[int]) -> Iterator[Replicas]:
    """Find the outermost wrappers in ``module``, itself included."""
    fsdp1 = _torch_compat.loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if isinstance(module, fsdp1):
        raise StageError(
            "a stage is wrapped in FullyShardedDataParallel (FSDP1), which reduces gradients after "
            "each backward; use torch.distributed.fsdp.fully_shard instead"
        )
    if _torch_compat.is_composable_ddp(module):
        raise StageError(
            "a stage is under the replicate that is made of DDP; use DistributedDataParallel, or "
            "the replicate that is made of FSDP2"
        )
    is_ddp = isinstance(module, DistributedDataParallel)
    if is_ddp and (module.static_graph or module.mixed_precision is not None):
        raise StageError(
            "a stage is wrapped in DDP with static_graph=, or with mixed_precision=, which act on "
            "each backward; leave them out (for the latter use torch.autocast, or fully_shard's "
            "MixedPrecisionPolicy)"
        )
    is_fsdp = _torch_compat.is_fsdp(module)
    if is_ddp or is_fsdp:
        found: Replicas = _Ddp(module) if is_ddp else _Fsdp(module)
        found.shares_params = any(id(param) in shared for param in module.parameters())
        yield found
        return
    for child in module.children():
        yield from _find(child, shared)


class _Ddp(Replicas):
    def __init__(self, ddp: Any) -> None:
        super().__init__()
        self._ddp = ddp
        self._synced = self._reduces = True
        self._shares_buffers = self._trains = False

    @property
    def is_synced(self) -> bool:
        return bool(self._ddp.require_backward_grad_sync)

    def begin(self, *, reduces: bool = True) -> None:
        ddp = self._ddp
        self.groups = (ddp.process_group,)
        if _torch_compat.comm_hooks_of(ddp):
            raise StageError(
                "a stage in DDP has a communication hook (register_comm_hook), which a pipeline "
                "can't call; leave it out, or shard the stage by fully_shard"
            )
        self._synced = self.is_synced
        self._reduces = reduces and self._synced
        # Equivalent to DDP's no_sync() around the whole step.
        ddp.require_backward_grad_sync = False
        # ``share_buffers`` broadcasts the buffers in place of DDP's forward.
        self._shares_buffers = ddp.will_sync_module_buffers()
        self._trains = torch.is_grad_enabled()
        ddp.require_forward_param_sync = False

    def share_buffers(self) -> None:
        if self._shares_buffers:
            _torch_compat.broadcast_ddp_buffers(self._ddp)

    def start_reduction(self) -> None:
        self.wait()  # of a module on two stages
        if self._reduces:
            params, ddp = _torch_compat.ddp_parameters(self._ddp), self._ddp
            self._waits += start_averaging(params, ddp.process_group, ddp.bucket_bytes_cap)

    def end(self) -> None:
        """Leave DDP in the state that its own forwards and backwards would."""
        super().end()
        self._ddp.require_backward_grad_sync = self._synced
        # Buffers are broadcast again only after a reduction.
        self._ddp.require_forward_param_sync = self._reduces and self._trains


class _Fsdp(Replicas):
    def __init__(self, root: Any) -> None:
        super().__init__()
        self.sharded = self._reduces = True
        self._root = root

    def begin(self, *, reduces: bool = True) -> None:
        self._reduces = reduces
        if not self.groups:
            # Of all mesh dimensions of the sharded parameters.
            params = (p for p in self._root.parameters() if hasattr(p, "device_mesh"))
            meshes = dict.fromkeys(param.device_mesh for param in params)
            self.groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        self._set_sync(False)

    def unshard(self) -> None:
        self.wait()  # of a module on two stages
        for module in filter(_torch_compat.is_fsdp, self._root.modules()):
            handle = module.unshard(async_op=True)
            assert handle is not None
            self._waits.append(handle.wait)

    def reshard(self) -> None:
        for module in filter(_torch_compat.is_fsdp, self._root.modules()):
            module.reshard()

    def end_weight_grad(self) -> None:
        # Adds the gradients, in the parameters' dtype, to sums in the dtype of the reduction.
        _torch_compat.fsdp_finish_backward(self._root)

    def start_reduction(self) -> None:
        if self._reduces:
            self._root.set_requires_gradient_sync(True)
            self.end_weight_grad()
            self._root.set_requires_gradient_sync(False)
            self._waits.append(self._end_reduction)

    def _end_reduction(self) -> None:
        self._root.set_is_last_backward(True)  # at whose end FSDP waits
        _torch_compat.fsdp_finish_backward(self._root, is_reduced=True)
        self._root.set_is_last_backward(False)

    def end(self) -> None:
        super().end()
        _torch_compat.fsdp_drop_gathers(self._root)
        self._set_sync(True)
        # An evaluation has no backward to reshard the parameters, but gradients and the optimizer
        # belong to the shards.
        self.reshard()

    def _set_sync(self, synced: bool) -> None:
        self._root.set_is_last_backward(synced)
        self._root.set_reshard_after_backward(synced)
        self._root.set_requires_gradient_sync(synced)


def start_averaging(
    params: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int
) -> list[Callable[[], object]]:
    """Start to average gradients over replicas, in place, by coalesced all-reduces.

    A gradient that is missing on all ranks stays None; one that is missing on some counts as zero
    there.

    Args:
        params: the parameters, in the same order on every rank.
        group: the process group of the replicas.
        bucket_bytes: the number of bytes of gradients per all-reduce.

    Returns:
        The waits after which the gradients are averages, in order.

    Raises:
        StageError: a gradient is sparse.
    """
    if not params:
        return []
    here = [param.grad is not None for param in params]
    counts = torch.tensor(here, dtype=torch.int32, device=params[0].device)
    counted = group.allreduce([counts])
    # Not read if all are here, so that the host does not wait.
    if not all(here):
        counted.wait()
    waits: list[Callable[[], object]] = [counted.wait]
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params if all(here) else compress(params, counts.tolist()):
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if param.grad.is_sparse:
            raise StageError(
                "a parameter of a replicated stage has a sparse gradient, which is not reduced; "
                "make it dense, such as by sparse=False of an embedding"
            )
        # Divided before the sum, as in DDP, since a float16 sum may overflow.
        grad = param.grad.div_(group.size())
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for grads in kinds.values():
        for bucket in in_buckets(grads, lambda grad: grad.nbytes, bucket_bytes):
            wires = [grad.contiguous() for grad in bucket]
            waits.append(partial(_finish, group.allreduce_coalesced(wires), bucket, wires))
    return waits


def _finish(work: dist.Work, grads: Sequence[Tensor], wires: Sequence[Tensor]) -> None:
    work.wait()
    for grad, wire in zip(grads, wires, strict=True):
        if wire is not grad:
            grad.copy_(wire)


def in_buckets(items: Iterable[T], size: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Group consecutive items into lists of total size at most ``limit``, or of one item.

    Examples:
        >>> list(in_buckets([3, 4, 9, 1], int, 8))
        [[3, 4], [9], [1]]
    """
    bucket: list[T] = []
    for item in items:
        if bucket and sum(map(size, bucket)) + size(item) > limit:
            yield bucket
            bucket = []
        bucket.append(item)
    if bucket:
        yield bucket
