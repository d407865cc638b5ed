"""Clip gradients by their total norm, over the stages of all ranks.

rank 0   ‖grads of its stages‖ ─┐
rank 1   ‖grads of its stages‖ ─┴─► total norm ─► the same factor on every rank
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.cause import own_group
from penstock.errors import StageError
from penstock.parallel.shared_params import shared_params_of
from penstock.runtime.comm.c10d import control_group
from penstock.runtime.comm.process_group import collective_call, gather_objects
from penstock.stage.device_streams import indexed
from penstock.stage.dtensor import full_tensor, is_dtensor

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``.

    Does what ``torch.nn.utils.clip_grad_norm_`` would on the whole model in one process. Every
    rank of the pipeline calls it, after ``step``. A shared parameter counts once.

    Args:
        parameters: this rank's parameters; those without a gradient do not count.
        max_norm: the largest total norm allowed.
        norm_type: the p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: raise if the total norm is infinite or not a number.
        foreach: process tensors together, for speed; torch decides if None.
        group: the pipeline's process group; the default group, if there is one, if None.

    Returns:
        The total norm before clipping, a scalar; the same on every rank, in the dtype to which
        all gradients, wherever they are, promote.

    Raises:
        ValueError: ``norm_type`` is not above 0, or ``group`` is None for a pipeline over some of
            the processes.
        StageError: the total norm is not finite with ``error_if_nonfinite``; on every rank.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, expected a number above 0, or math.inf")
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    norms = [_norm(grads, norm_type, foreach) for grads in _by_mesh(filter(_counts_here, params))]
    total = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
    if (ranks := own_group(group)) is not None:
        owners = filter(None, map(shared_params_of, params if group is None else ()))
        if sizes := {owner.num_processes for owner in owners} - {ranks.size()}:
            # It includes replicas, whose gradients would count twice.
            raise ValueError(
                f"the default group has {ranks.size()} ranks, and the pipeline of these parameters "
                f"{sizes.pop()}, over which their norm adds up: pass the pipeline's group as group="
            )
        # A rank without parameters takes part in the collective on any device.
        device = params[0].device if params else torch.device("cpu")
        total = _over_ranks(total, total.dtype if norms else None, norm_type, ranks, device)
    if error_if_nonfinite and not torch.isfinite(total):
        raise StageError(
            f"the total norm of the gradients, over all ranks, is {total.item()}; look for an "
            "overflow in the forward, or pass error_if_nonfinite=False"
        )
    for alike in _by_mesh(params):
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total, foreach=foreach)
    return total


def _counts_here(param: Tensor) -> bool:
    """True unless another rank, or another parameter here, counts this shared gradient."""
    owner = shared_params_of(param)
    return owner is None or bool(owner.counts_here(param))


def _by_mesh(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters with gradients by device mesh, since torch mixes no two of them: in a
    tensor-parallel stage some gradients are on none."""
    found: dict[object, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            found.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    return list(found.values())


def _norm(params: Sequence[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of the gradients, which are on one mesh."""
    grads = [param.grad for param in params if param.grad is not None]
    if math.isinf(norm_type) and is_dtensor(grads[0]):  # torch's fails for shards without elements
        return torch.stack([full_tensor(grad).abs().max() for grad in grads]).max()
    # The norm of sharded gradients is sharded too.
    return full_tensor(torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach))


def _over_ranks(
    norm: Tensor,
    dtype: torch.dtype | None,
    norm_type: float,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """The norm of the ranks' norms, the same on every rank; ``dtype`` is that of this rank's
    gradients, and ``device`` that of its parameters."""
    # In float64, since powers of a float32 norm may not fit float32. Gathered, since a reduction
    # by maximum loses what is not a number. The host does not wait for norms on the device.
    on_device, control = device.type != "cpu", control_group(group)
    with collective_call(control, "clip_grad_norm_()"):
        mine = (0.0 if on_device else norm.item(), on_device, dtype)
        norms, are_on_device, dtypes = zip(*gather_objects(control, mine), strict=True)
    table = torch.tensor(norms, dtype=torch.float64, device="cpu")
    if any(are_on_device):
        placed = norm.to(indexed(device if on_device else torch.device("cuda")), torch.float64)
        parts = [torch.empty_like(placed) for _ in range(group.size())]
        with collective_call(group, "clip_grad_norm_()"):
            dist.all_gather(parts, placed, group)
        table = torch.stack(parts)
    total: Tensor = torch.linalg.vector_norm(table, norm_type)
    known = [each for each in dtypes if each is not None]
    return total.to(reduce(torch.promote_types, known) if known else norm.dtype)
