"""Data parallelism around a stage: the only file that knows DDP, FSDP2 and replicate.

Within a step gradients pile up locally, microbatch by microbatch; they are reduced once, at the
stage's REDUCE_GRAD, when its last weight gradient is in. So it matters neither in which order a
schedule computes input and weight gradients, nor from which of the two a hook fires.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import StageError
from penstock.stage import replica_private

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["Replicas", "replicas_of"]


class Replicas(ABC):
    """A stage's module as one of several replicas or shards."""

    sharded: ClassVar[bool]

    @abstractmethod
    def begin(self) -> None:
        """Start a step: no reduction until ``reduce_grads``."""

    @abstractmethod
    def unshard(self) -> None:
        """Gather the parameters, where they are sharded."""

    @abstractmethod
    def reshard(self) -> None:
        """Let go of gathered parameters."""

    @abstractmethod
    def reduce_grads(self) -> None:
        """Average the gradients over the replicas, once per step."""

    @abstractmethod
    def end(self) -> None:
        """End the step: as the module was before it."""


def replicas_of(module: nn.Module) -> Replicas | None:
    """How ``module`` is replicated or sharded; None if it is neither.

    Raises:
        StageError: DDP with a communication hook, which a pipelined step would not call.
    """
    if isinstance(module, DistributedDataParallel):
        if replica_private.ddp_has_comm_hook(module):
            raise StageError(
                "the stage's DDP module has a communication hook, which is not called in a "
                "pipelined step; register none (the gradients are averaged by one all-reduce)"
            )
        return _Ddp(module)
    roots = replica_private.fsdp_roots(module)
    return _Fsdp(roots) if roots else None


class _Ddp(Replicas):
    sharded = False

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._synced = True

    def begin(self) -> None:
        # What DDP's no_sync() does, for as long as the step takes.
        self._synced = self._module.require_backward_grad_sync
        self._module.require_backward_grad_sync = False

    def unshard(self) -> None:
        pass

    def reshard(self) -> None:
        pass

    def reduce_grads(self) -> None:
        params = [p for p in self._module.module.parameters() if p.requires_grad]
        average_grads(params, self._module.process_group)

    def end(self) -> None:
        self._module.require_backward_grad_sync = self._synced


class _Fsdp(Replicas):
    sharded = True

    def __init__(self, roots: list[FSDPModule]) -> None:
        self._roots = roots

    def begin(self) -> None:
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(False)
            root.set_requires_gradient_sync(False)

    def unshard(self) -> None:
        for root in self._roots:
            _each(root, lambda module: module.unshard())

    def reshard(self) -> None:
        for root in self._roots:
            _each(root, lambda module: module.reshard())

    def reduce_grads(self) -> None:
        for root in self._roots:
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            root.set_requires_gradient_sync(True)
            replica_private.fsdp_finish_backward(root)

    def end(self) -> None:
        pass


def _each(root: FSDPModule, act: Callable[[FSDPModule], object]) -> None:
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(root, nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            act(module)


def average_grads(params: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of ``params`` over ``group``, in one all-reduce per dtype and device.

    A parameter without a gradient on any rank keeps none; one without a gradient on some counts
    as zero there.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    for alike in kinds.values():
        # The last entries of the buffer count the ranks that have a gradient, per parameter.
        parts = [_flat_grad(p) for p in alike]
        have = torch.tensor(
            [p.grad is not None for p in alike], dtype=alike[0].dtype, device=alike[0].device
        )
        buffer = torch.cat([*parts, have])
        dist.all_reduce(buffer, group=group)
        counts = buffer[-len(alike) :].tolist()
        buffer /= group.size()
        offset = 0
        for param, count in zip(alike, counts, strict=True):
            mean = buffer[offset : offset + param.numel()].view_as(param)
            offset += param.numel()
            if not count:
                continue
            if param.grad is None:
                param.grad = mean.clone()
            else:
                param.grad.copy_(mean)


def _flat_grad(param: nn.Parameter) -> Tensor:
    return torch.zeros_like(param).flatten() if param.grad is None else param.grad.flatten()
