"""What autograd keeps for one microbatch's backward, put on the host for a while.

    F, in shelf.collecting()    every tensor that is saved is noted
    shelf.offload()             copied to the host, and let go of on the device
    shelf.reload()              copied back
    backward                    finds it as it was

On CUDA copies run on streams of their own, beside the compute and each other: nothing waits for an
offload, and the backward waits for the reload of what it uses. On the CPU they are copies all the
same.
Parameters, buffers and inputs, which others hold anyway, stay where they are. This module knows
neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from penstock._torch_compat import has_memory, saved_through
from penstock.errors import StageError
from penstock.stage.device_streams import DeviceStreams, Event, Stream

__all__ = ["Copier", "Shelf"]

_REFUSED = (
    "the forward differentiates by torch.func (grad, vjp, hessian, ...), under which torch lets "
    "nobody see what is saved for the backward, so it can't be offloaded; choose a schedule that "
    "offloads nothing, or one that recomputes"
)


class Copier:
    """Copies to and from the host, on a stream of its own each.

        compute    F0 ─┐ F1 ─┬─ F2 ...  B1 ──┬─ B0       F2 may be given what F0 has kept: it waits
        out            └ 0 ──┘ └ 1           │           until that is copied
        back                             └ 0 ┘

    The host runs ahead of the device, and the allocator goes by what the device has done when it
    is asked. So memory is not kept by ``keep``, which would let the host take new memory again and
    again: it is let go of when the compute has been told to wait for the copy, which is at the
    next offload. A stage that computes faster than it copies waits, and holds no more than that.

    Args:
        streams: those of the device.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._out, self._back = streams.new(), streams.new()
        # What is being copied to the host, when it is, and on which stream it was made.
        self._leaving: tuple[Sequence[Tensor], Event, Stream] | None = None

    def to_host(self, here: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Begin to copy bytes to the host; the event says when they are there."""
        self._let_go()
        streams, current = self._streams, self._streams.current()
        hosts = [streams.pinned(each.numel()) for each in here]
        streams.follow(self._out, current)
        event = self._copy(here, hosts, self._out)
        self._leaving = (here, event, current)
        return hosts, event

    def _let_go(self) -> None:
        if self._leaving is not None:
            _, copied, made_on = self._leaving
            self._streams.wait(made_on, copied)
            self._leaving = None

    def to_device(
        self, hosts: Sequence[Tensor], there: Event, device: torch.device
    ) -> tuple[list[Tensor], Event]:
        """Begin to copy bytes back that ``to_host`` has copied; the event says when."""
        if self._leaving is not None and self._leaving[1] is there:
            self._let_go()  # the last one: no offload comes after it
        streams = self._streams
        here = [torch.empty(each.numel(), dtype=torch.uint8, device=device) for each in hosts]
        streams.wait(self._back, there)
        streams.follow(self._back, streams.current())  # whose memory it is
        return here, self._copy(hosts, here, self._back)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor], stream: Stream) -> Event:
        streams, current = self._streams, self._streams.current()
        streams.switch(stream)
        try:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        finally:
            streams.switch(current)
        event = streams.event()
        streams.mark(event, stream)
        return event

    def await_here(self, come: Event) -> None:
        """Let the current stream use what has been copied back."""
        self._streams.wait(self._streams.current(), come)


class _Copy:
    """The memory of saved tensors that share it: on the device, on the host, or both."""

    __slots__ = ("bytes", "host", "stamp", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.bytes = storage.nbytes()
        self.host: Tensor | None = None
        # When the last copy, to the host or back, is done.
        self.stamp: Event = None


class _Saved:
    """One tensor that autograd saved: its place in that memory."""

    __slots__ = ("__weakref__", "copy", "dtype", "offset", "shape", "stride")

    def __init__(self, tensor: Tensor, copy: _Copy) -> None:
        self.copy = copy
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()


class Shelf:
    """The saved tensors of one microbatch in one stage.

    Args:
        device: where the stage computes.
        stays: tensors whose memory is held anyway.
        copier: copies beside the compute; None where the device has no streams.

    Example:
        >>> x = torch.ones(3, requires_grad=True)
        >>> shelf = Shelf(torch.device("cpu"), [x])
        >>> with shelf.collecting():
        ...     y = (x * 2).exp().sum()
        >>> shelf.offload()
        12
        >>> shelf.reload()
        >>> y.backward()
        >>> torch.equal(x.grad, 2 * (x * 2).exp())
        True
    """

    def __init__(
        self,
        device: torch.device,
        stays: Iterable[Tensor],
        copier: Copier | None = None,
    ) -> None:
        self._device = device
        self._copier = copier
        self._stays = {_address(t) for t in stays if type(t) in _PLAIN}
        self._copies: dict[int, _Copy] = {}
        self._saved: list[ref[_Saved]] = []

    def collecting(self) -> AbstractContextManager[None]:
        """A context for the forward, in which saved tensors are noted."""
        return saved_through(self._pack, self._unpack, StageError(_REFUSED))

    def _pack(self, tensor: Tensor) -> Any:
        if not _is_as_in_memory(tensor):
            return tensor
        address = _address(tensor)
        if tensor.device != self._device or address == 0 or address in self._stays:
            return tensor
        if address not in self._copies:
            self._copies[address] = _Copy(tensor.untyped_storage())
        saved = _Saved(tensor, self._copies[address])
        self._saved.append(ref(saved))
        return saved

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            tensor: Tensor = saved
            return tensor
        copy = saved.copy
        if copy.storage is None:
            raise StageError("an activation is needed that is on the host: reload it first")
        empty = torch.empty(0, dtype=saved.dtype, device=self._device)
        found = empty.set_(copy.storage, saved.offset, saved.shape, saved.stride)
        if self._copier is not None and copy.stamp is not None:
            self._copier.await_here(copy.stamp)
        return found

    def offload(self) -> int:
        """Copy what was saved to the host, and let go of it here.

        Returns:
            How many bytes went.
        """
        # What autograd has let go of already, since the forward, is needed no more.
        live = {id(saved.copy): saved.copy for each in self._saved if (saved := each()) is not None}
        self._copies, self._saved = {}, [each for each in self._saved if each() is not None]
        copies = [copy for copy in live.values() if copy.storage is not None]
        here = [_flat(copy.storage, self._device) for copy in copies if copy.storage is not None]
        stamp: Event = None
        if self._copier is None:
            hosts = [each.clone() for each in here]
        else:
            hosts, stamp = self._copier.to_host(here)
        for copy, host in zip(copies, hosts, strict=True):
            copy.storage, copy.host, copy.stamp = None, host, stamp
        return sum(copy.bytes for copy in copies)

    def reload(self) -> None:
        """Copy it back, for the backward."""
        live = {id(saved.copy): saved.copy for each in self._saved if (saved := each())}
        copies = list(live.values())
        hosts = [copy.host for copy in copies if copy.host is not None]
        stamp: Event = None
        if self._copier is None or not copies:
            here = [host.clone() for host in hosts]
        else:
            here, stamp = self._copier.to_device(hosts, copies[0].stamp, self._device)
        for copy, back in zip(copies, here, strict=True):
            copy.storage, copy.host, copy.stamp = back.untyped_storage(), None, stamp


_PLAIN = (Tensor, torch.nn.Parameter)


def _is_as_in_memory(tensor: Tensor) -> bool:
    """Whether memory, dtype, shape and strides say all of a tensor."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
        and has_memory(tensor)
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
