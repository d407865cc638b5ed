"""The mean of gradients over replicas, whole ones and sparse ones; it knows no wrapper.

whole     one buffer per dtype and device    all-reduced
sparse    the rows that have a gradient      gathered, and summed where they meet
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["average_grads"]


def average_grads(
    params: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    sparse: Set[Tensor] = frozenset(),
) -> None:
    """Average the gradients of ``params`` over ``group``, in one all-reduce per dtype and device.

    A parameter without a gradient on any rank keeps none; one without a gradient on some counts
    as zero there.

    Args:
        params: the parameters, in the same order on every rank.
        group: the replicas.
        sparse: those of them whose gradients are sparse, and stay so: of these the rows that have
            a gradient are gathered.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        if param in sparse:
            _average_rows(param, group)
        else:
            kinds.setdefault((param.dtype, param.device), []).append(param)
    for alike in kinds.values():
        _average_whole(alike, group)


def _average_whole(alike: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    # The last entries of the buffer count the ranks that have a gradient, per parameter.
    parts = [_flat_grad(p) for p in alike]
    have = torch.tensor(
        [p.grad is not None for p in alike], dtype=alike[0].dtype, device=alike[0].device
    )
    buffer = torch.cat([*parts, have])
    # Divided before it is added up, as DDP does: a sum of halves may be too large.
    buffer[: -len(alike)] /= group.size()
    dist.all_reduce(buffer, group=group)
    counts = buffer[-len(alike) :].tolist()
    offset = 0
    for param, count in zip(alike, counts, strict=True):
        mean = buffer[offset : offset + param.numel()].view_as(param)
        offset += param.numel()
        if not count:
            continue
        if param.grad is None or param.grad.is_sparse:
            param.grad = mean.clone()
        else:
            param.grad.copy_(mean)


def _flat_grad(param: nn.Parameter) -> Tensor:
    if param.grad is None:
        return torch.zeros_like(param).flatten()
    # Sparse, although no embedding layer said so ahead: the others expect it whole.
    return (param.grad.to_dense() if param.grad.is_sparse else param.grad).flatten()


def _average_rows(param: nn.Parameter, group: dist.ProcessGroup) -> None:
    grad = param.grad
    if grad is None:
        mine = param.detach().new_zeros(param.shape).to_sparse(1)
    else:
        mine = grad.coalesce() if grad.is_sparse else grad.to_sparse(1)
    here = torch.tensor([mine.values().size(0), grad is not None], device=param.device)
    counts = torch.stack(_gathered(here, group)).tolist()
    if not any(has_grad for _, has_grad in counts):
        return
    longest = max(num_rows for num_rows, _ in counts)
    rows, values = (
        [
            part[:num_rows]
            for part, (num_rows, _) in zip(
                _gathered(_padded(t, longest), group), counts, strict=True
            )
        ]
        for t in (mine.indices()[0], mine.values() / group.size())
    )
    mean = torch.sparse_coo_tensor(torch.cat(rows)[None], torch.cat(values), param.shape).coalesce()
    param.grad = mean if grad is None or grad.is_sparse else mean.to_dense()


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(num_rows - rows.size(0), *rows.shape[1:])])


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts
