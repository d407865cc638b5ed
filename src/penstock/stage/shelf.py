"""What autograd keeps for one microbatch's backward, put on the host for a while.

    F, in shelf.collecting()    every tensor that is saved is noted
    shelf.offload()             copied to the host, and let go of on the device
    shelf.reload()              copied back
    backward                    finds it as it was

On CUDA copies run on a stream of their own, beside the compute: nothing waits for an offload, and
the backward waits for the reload of what it uses. On the CPU they are copies all the same.
Parameters, buffers and inputs, which others hold anyway, stay where they are. This module knows
neither stages nor schedules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import StageError

__all__ = ["Shelf"]


class _Copy:
    """The memory of saved tensors that share it: on the device, on the host, or both."""

    __slots__ = ("bytes", "host", "stamp", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.bytes = storage.nbytes()
        self.host: Tensor | None = None
        self.stamp: torch.cuda.Event | None = None


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
        stream: the CUDA stream to copy on; None on the CPU.

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
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._device = device
        self._stream = stream
        self._stays = {_address(t) for t in stays if type(t) in _PLAIN}
        self._copies: dict[int, _Copy] = {}
        self._saved: list[ref[_Saved]] = []

    def collecting(self) -> saved_tensors_hooks:
        """A context for the forward, in which saved tensors are noted."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
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
        if copy.stamp is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copy.stamp)
            found.record_stream(current)
        return found

    def offload(self) -> int:
        """Copy what was saved to the host, and let go of it here.

        Returns:
            How many bytes went.
        """
        # What autograd has let go of already, since the forward, is needed no more.
        live = {id(saved.copy): saved.copy for each in self._saved if (saved := each()) is not None}
        self._copies, self._saved = {}, [each for each in self._saved if each() is not None]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for copy in live.values():
            assert copy.storage is not None
            here = _flat(copy.storage, self._device)
            copy.host = torch.empty(copy.bytes, dtype=torch.uint8, pin_memory=self._is_cuda)
            with torch.cuda.stream(self._stream):  # none: does nothing
                copy.host.copy_(here, non_blocking=True)
            if self._stream is not None:
                here.record_stream(self._stream)
            copy.storage = None
        return sum(copy.bytes for copy in live.values())

    def reload(self) -> None:
        """Copy it back, for the backward."""
        copies = {id(saved.copy): saved.copy for each in self._saved if (saved := each())}
        for copy in copies.values():
            assert copy.host is not None
            with torch.cuda.stream(self._stream):
                back = torch.empty(copy.bytes, dtype=torch.uint8, device=self._device)
                back.copy_(copy.host, non_blocking=True)
                if self._stream is not None:
                    copy.stamp = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    copy.stamp.record(self._stream)
            copy.storage = back.untyped_storage()
            copy.host = None

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"


_PLAIN = (Tensor, torch.nn.Parameter)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
