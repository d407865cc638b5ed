"""The mean of gradients over replicas, whole ones and sparse ones; it knows no wrapper.

whole     buckets of one dtype and device      all-reduced, or what a communication hook says
sparse    the rows that have a gradient        gathered, and summed where they meet

Small gradients are copied together to a bucket; one that fills a bucket by itself is averaged where
it lies. Two buckets are on their way at a time, so that little memory is needed beside gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["BUCKET_BYTES", "Bucket", "Reduce", "average_grads", "filled"]

T = TypeVar("T")
# As large as DDP's are by default.
BUCKET_BYTES = 25 << 20


class Bucket:
    """Gradients of one dtype and device, in one tensor: what a communication hook is given.

    It has the methods of ``torch.distributed.GradBucket``, which DDP alone can make.

    Args:
        number: how many buckets go before.
        params: whose gradients; one that is missing counts as zeros.
        is_last: whether no bucket comes after.
    """

    def __init__(self, number: int, params: Sequence[nn.Parameter], *, is_last: bool) -> None:
        self._number = number
        self._params = list(params)
        self._is_last = is_last
        flat = [_flat_grad(param) for param in params]
        self._buffer = flat[0] if len(flat) == 1 else torch.cat(flat)

    def index(self) -> int:
        """How many buckets go before."""
        return self._number

    def is_last(self) -> bool:
        """Whether no bucket comes after."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients, one behind the other: one dimension."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor in the place of ``buffer``."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as views of ``buffer``, each in its parameter's shape."""
        return list(self.parts(self._buffer))

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients they are."""
        return self._params

    def parts(self, buffer: Tensor) -> Iterator[Tensor]:
        """What of a tensor like ``buffer`` is each parameter's."""
        sizes = [param.numel() for param in self._params]
        parts = torch.split(buffer, sizes)
        return (p.view_as(q) for p, q in zip(parts, self._params, strict=True))


Reduce: TypeAlias = Callable[[Any], "torch.futures.Future[Any]"]


def average_grads(
    params: Sequence[nn.Parameter],
    group: dist.ProcessGroup,
    sparse: Set[Tensor] = frozenset(),
    *,
    reduce: Reduce | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Average the gradients of ``params`` over ``group``.

    A parameter without a gradient on any rank keeps none; one without a gradient on some counts
    as zero there.

    Args:
        params: the parameters, in the same order on every rank.
        group: the replicas.
        sparse: those of them whose gradients are sparse, and stay so: of these the rows that have
            a gradient are gathered.
        reduce: begins to make the mean of a bucket, as DDP's communication hooks do, and returns a
            future of it; an all-reduce if None.
        bucket_bytes: how many bytes of gradients are reduced together.
    """
    whole = [param for param in params if param not in sparse]
    for param in params:
        if param in sparse:
            _average_rows(param, group)
    if not whole:
        return
    has_grad = _have_grads(whole, group)
    begin = reduce or (lambda bucket: _all_reduce(bucket, group))
    on_their_way: deque[tuple[Bucket, torch.futures.Future[Any]]] = deque()
    buckets = list(_bucketed(whole, bucket_bytes))
    for number, alike in enumerate(buckets):
        bucket = Bucket(number, alike, is_last=number == len(buckets) - 1)
        on_their_way.append((bucket, begin(bucket)))
        if len(on_their_way) == 2:
            _take(*on_their_way.popleft(), has_grad)
    for bucket, future in on_their_way:
        _take(bucket, future, has_grad)


def _have_grads(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> Set[Tensor]:
    """The parameters that have a gradient on some rank."""
    here = {param for param in params if param.grad is not None}
    device = params[0].device
    if len(here) == len(params):
        # Made on the device, and not read: the host need not wait for what it has given it.
        dist.all_reduce(torch.ones(len(params), dtype=torch.int32, device=device), group=group)
        return here
    counts = torch.tensor([p in here for p in params], dtype=torch.int32, device=device)
    dist.all_reduce(counts, group=group)
    return {param for param, count in zip(params, counts.tolist(), strict=True) if count}


def _bucketed(params: Iterable[nn.Parameter], bucket_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Parameters whose gradients go together."""
    kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    for alike in kinds.values():
        yield from filled(alike, lambda param: param.nbytes, bucket_bytes)


def filled(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items that follow each other, in lists of no more than so much in all; or of one item.

    Example:
        >>> list(filled([3, 4, 9, 1], int, 8))
        [[3, 4], [9], [1]]
    """
    together: list[T] = []
    held = 0
    for item in items:
        if held and held + size(item) > most:
            yield together
            together, held = [], 0
        together.append(item)
        held += size(item)
    if together:
        yield together


def _all_reduce(bucket: Bucket, group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    # Divided before it is added up, as DDP does: a sum of halves may be too large.
    buffer = bucket.buffer().div_(group.size())
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future


def _take(bucket: Bucket, future: torch.futures.Future[Any], has_grad: Set[Tensor]) -> None:
    """Wait for a bucket's mean, and make it the parameters' gradients."""
    found = future.wait()
    mean = found if isinstance(found, Tensor) else found[0]
    for param, part in zip(bucket.parameters(), bucket.parts(mean), strict=True):
        grad = param.grad
        if param not in has_grad:
            continue
        if grad is None or grad.is_sparse:
            param.grad = part.clone()
        elif grad.data_ptr() != part.data_ptr():
            grad.copy_(part)


def _flat_grad(param: nn.Parameter) -> Tensor:
    """A parameter's gradient in one dimension; the gradient's own memory, where it lies so."""
    if param.grad is None:
        return torch.zeros_like(param, memory_format=torch.contiguous_format).flatten()
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
