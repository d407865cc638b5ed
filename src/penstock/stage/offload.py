"""Offload the tensors that autograd saved for one microbatch's backward to the host, and back.

    F, in offload.collecting()    saved tensors are recorded
    offload.offload()             copied to the host, released on the device
    offload.reload()              copied back
    backward                      uses them as if they had stayed

On CUDA, copies run on two streams of their own: no stream waits for an offload, and the backward
waits for the reload of the tensors that it uses. Parameters, buffers and inputs stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock._torch_compat import is_zero_tensor, version_of
from penstock.errors import StageError
from penstock.stage.device_streams import DeviceStreams, Event, Stream

__all__ = ["ActivationOffload", "CopyStreams"]

_PLAIN = (Tensor, torch.nn.Parameter)


class CopyStreams:
    """Two streams, for copies to the host and for copies back.

        compute    F0 ─┐ F1 ─┬─ F2 ...  B1 ──┬─ B0       F2 may reuse the memory of F0: it waits
        out            └ 0 ──┘ └ 1           │           for the copy
        back                             └ 0 ┘

    ``record_stream`` would let the host, which runs ahead, allocate new memory for each offload.
    Instead tensors are released at the next offload, after which the compute stream waits for the
    copy: a stage that computes faster than it copies waits for memory.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self._out, self._back = streams.new(), streams.new()
        # Tensors being copied to the host, the event of the copy, and the stream that made them.
        self._offloading: tuple[Sequence[Tensor], Event, Stream] | None = None

    def to_host(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Event]:
        """Start to copy bytes to the host; the event marks the end of the copy."""
        self._release()
        streams, current = self.streams, self.streams.current()
        hosts = [streams.pinned(each.numel()) for each in tensors]
        streams.follow(self._out, current)
        event = self._copy(tensors, hosts, self._out)
        self._offloading = (tensors, event, current)
        return hosts, event

    def _release(self) -> None:
        if self._offloading is not None:
            _, copied, made_on = self._offloading
            self.streams.wait(made_on, copied)
            self._offloading = None

    def to_device(
        self, hosts: Sequence[Tensor], offloaded: Event, device: torch.device
    ) -> tuple[list[Tensor], Event]:
        """Start to copy bytes back; the event marks the end of the copy."""
        if self._offloading is not None and self._offloading[1] is offloaded:
            self._release()  # no later offload would release them
        streams = self.streams
        tensors = [torch.empty(each.numel(), dtype=torch.uint8, device=device) for each in hosts]
        streams.wait(self._back, offloaded)
        streams.follow(self._back, streams.current())  # the stream that owns the memory
        return tensors, self._copy(hosts, tensors, self._back)

    def _copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor], stream: Stream) -> Event:
        streams, current = self.streams, self.streams.current()
        streams.switch(stream)
        try:
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        finally:
            streams.switch(current)
        event = streams.event()
        streams.mark(event, stream)
        return event


class _Storage:
    """The storage of saved tensors that share it: its bytes on the device, or on the host."""

    __slots__ = ("__weakref__", "copied", "device", "host")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device: Any = storage  # None while the bytes are on the host
        self.host: Any = None  # None while they are on the device
        self.copied: Event = None  # the end of the last copy, to the host or back


class ActivationOffload:
    """The saved tensors of one microbatch in one stage.

    ``resident`` tensors stay; ``copy_streams`` is None where the device has no streams.
    """

    def __init__(
        self,
        device: torch.device,
        resident: Iterable[Tensor],
        copy_streams: CopyStreams | None = None,
    ) -> None:
        self._device = device
        self._copy_streams = copy_streams
        self._resident = {_address_of(t) for t in resident} | {0}
        # By address, referenced by autograd alone: a storage that it releases is not copied.
        self._storages: WeakValueDictionary[int, _Storage] = WeakValueDictionary()

    def collecting(self) -> saved_tensors_hooks:
        """A context for the forward, in which saved tensors are recorded."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        """The storage, dtype and view of a saved tensor; itself and its version if it stays."""
        address = _address_of(tensor)
        stays = address in self._resident or tensor.device != self._device
        if stays or tensor.is_conj() or tensor.is_neg():
            return tensor, version_of(tensor)
        storage = self._storages.get(address)
        if storage is None:
            storage = self._storages[address] = _Storage(tensor.untyped_storage())
        return storage, tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved[0], Tensor):
            if version_of(saved[0]) != saved[1]:
                shape = tuple(saved[0].shape)
                raise StageError(f"a saved tensor of shape {shape} was modified in place; clone it")
            return saved[0]
        storage, dtype, view = saved
        if storage.device is None:
            raise StageError("the backward uses an offloaded activation; reload it first")
        restored = torch.empty(0, dtype=dtype, device=self._device).set_(storage.device, *view)
        if self._copy_streams is not None and storage.copied is not None:
            streams = self._copy_streams.streams
            streams.wait(streams.current(), storage.copied)
        return restored

    def offload(self) -> int:
        """Copy the saved tensors to the host and release them here; returns their bytes."""
        storages = list(self._storages.values())
        tensors = [
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage.device)
            for storage in storages
        ]
        copied: Event = None
        if self._copy_streams is None:
            hosts = [tensor.clone() for tensor in tensors]
        else:
            hosts, copied = self._copy_streams.to_host(tensors)
        for storage, host in zip(storages, hosts, strict=True):
            storage.device, storage.host, storage.copied = None, host, copied
        return sum(host.numel() for host in hosts)

    def reload(self) -> None:
        """Copy the saved tensors back for the backward."""
        storages = list(self._storages.values())
        hosts = [each.host for each in storages]
        copied: Event = None
        if self._copy_streams is None or not storages:
            tensors = [host.clone() for host in hosts]
        else:
            offloaded = storages[0].copied
            tensors, copied = self._copy_streams.to_device(hosts, offloaded, self._device)
        for storage, tensor in zip(storages, tensors, strict=True):
            storage.device, storage.host, storage.copied = tensor.untyped_storage(), None, copied


def _address_of(tensor: Tensor) -> int:
    """The address of a plain tensor's memory; 0 for other tensors, and for empty memory."""
    is_plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if is_plain and not is_zero_tensor(tensor) else 0
