"""Clip gradients by their total norm, over the stages of all ranks.

    rank 0   ‖grads of its stages‖ ─┐
    rank 1   ‖grads of its stages‖ ─┴─► total norm ─► the same factor on every rank

It knows parameters and a process group; no stages, no schedules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import StageError
from penstock.runtime.together import gather_numbers, together
from penstock.runtime.torch_private import takes_cpu_tensors
from penstock.stage.announcing import own_group
from penstock.stage.counted import counts_here, pipeline_size
from penstock.stage.device_streams import indexed
from penstock.stage.spread import in_full, is_spread, largest

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

    As ``torch.nn.utils.clip_grad_norm_`` would on the whole model in one process. Every rank of
    the pipeline calls it with its own parameters, after ``step`` and before the optimizer. A
    parameter that stages on several ranks share counts once.

    Args:
        parameters: this rank's parameters; those without a gradient do not count.
        max_norm: the largest total norm allowed.
        norm_type: the p of the p-norm, above 0; ``math.inf`` for the largest absolute value.
        error_if_nonfinite: whether a total norm that is infinite or not a number is an error.
        foreach: whether tensors are taken together for speed; torch decides if None.
        group: the pipeline's process group; the default group if None. Without an initialised
            process group the parameters are all there are.

    Returns:
        The total norm before clipping, a scalar; the same on every rank.

    Raises:
        ValueError: ``norm_type`` is not above 0; or no group was given, and the parameters are
            those of a pipeline over some of the processes.
        StageError: the total norm is not finite, and that was to be an error; on every rank.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> clip_grad_norm_([weight], 1.0), weight.grad
        (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, expected a number above 0, or math.inf")
    mine = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    kinds = _by_mesh(mine)
    total = _norm_here(kinds, norm_type, foreach)
    if dist.is_available() and dist.is_initialized():
        if group is None:
            _refuse_other_ranks(mine, dist.get_world_size())
        total = _over_ranks(total, norm_type, group, _device(mine, group))
    if error_if_nonfinite and not torch.isfinite(total):
        raise StageError(
            f"the total norm of the gradients, over all ranks, is {total.item()}; look for an "
            "overflow in the forward, or pass error_if_nonfinite=False"
        )
    for alike in kinds:
        torch.nn.utils.clip_grads_with_norm_(alike, max_norm, total, foreach=foreach)
    return total


def _refuse_other_ranks(parameters: Iterable[Tensor], num_ranks: int) -> None:
    """Where there are replicas of a pipeline, the default group would count its gradients twice."""
    sizes = {pipeline_size(param) for param in parameters} - {None, num_ranks}
    if sizes:
        raise ValueError(
            f"the default group has {num_ranks} ranks, and the pipeline of these parameters "
            f"{sizes.pop()}, over which their norm adds up: pass the pipeline's group as group="
        )


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those that have a gradient, by the mesh over which it is spread; torch takes no two together.

    In a stage that is tensor parallel some are spread over one mesh, some over none.
    """
    kinds: dict[object, list[Tensor]] = {}
    for param in parameters:
        if param.grad is not None:
            kinds.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    return [*kinds.values()]


def _norm_here(kinds: Sequence[Sequence[Tensor]], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of all gradients of this process's stages."""
    norms = []
    for alike in kinds:
        grads = [p.grad for p in alike if p.grad is not None and counts_here(p)]
        if not grads:
            continue
        if math.isinf(norm_type) and is_spread(grads[0]):
            norms.append(largest(grads))
            continue
        norm = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        norms.append(in_full(norm))  # of sharded gradients the norm is sharded too
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)


def _device(parameters: list[Tensor], group: dist.ProcessGroup | None) -> torch.device:
    if parameters:
        return parameters[0].device
    group = group or dist.group.WORLD
    assert group is not None, "there is a default group"
    # A rank without parameters takes part, over whatever the others' norms travel.
    return indexed(torch.device("cpu" if takes_cpu_tensors(group) else "cuda"))


def _over_ranks(
    norm: Tensor, norm_type: float, group: dist.ProcessGroup | None, device: torch.device
) -> Tensor:
    """The norm of the ranks' norms, the same on every rank."""
    # Doubles: powers of a float32 norm may not fit float32. Gathered: a maximum that is taken on
    # the way loses what is not a number.
    mine = norm.to(device, torch.float64)
    made = own_group(group)
    assert made is not None, "there is a default group"
    if mine.device.type == "cpu" and takes_cpu_tensors(made):
        bits = int(mine.view(torch.int64))
        everyones = gather_numbers(made, "clip_grad_norm_()", bits)
        norms = [*torch.tensor(everyones, dtype=torch.int64, device="cpu").view(torch.float64)]
    else:
        norms = [torch.empty_like(mine) for _ in range(made.size())]
        with together(made, "clip_grad_norm_()"):
            dist.all_gather(norms, mine, made)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    # Ranks may have gradients of other dtypes, or none: no rank rounds it to its own.
    return total.to(torch.promote_types(norm.dtype, torch.float32))
