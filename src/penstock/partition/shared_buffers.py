"""Buffers of a layer that several stages call: says so where a step writes into them.

    stage 0   layer ──┐
    stage 2   layer ──┴─ one module, with ``count`` and ``scale``

In one process a microbatch meets such a layer in every place before the next one comes. In a
pipeline many meet it in one place first; over processes, each place has buffers of its own. Layers
that keep running statistics are refused (``tied.py``); of others only a step can tell.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["SharedBuffers"]

_log = logging.getLogger(__name__)


class SharedBuffers:
    """The buffers of layers that stand in several stages, watched from step to step.

    Args:
        modules: the modules of the model's stages, rising; of all of them, or of those that are
            known here.

    Example:
        >>> norm, other = nn.BatchNorm1d(2), nn.Linear(2, 2)
        >>> SharedBuffers({0: norm, 1: nn.Sequential(other, norm)}).names
        ('1.running_mean', '1.running_var', '1.num_batches_tracked')
        >>> SharedBuffers({0: norm, 1: other}).names
        ()
    """

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        met: dict[int, int] = {}
        self._shared: list[tuple[weakref.ref[nn.Module], str, str, int, int]] = []
        for stage, module in modules.items():
            for path, layer in module.named_modules():
                first = met.setdefault(id(layer), stage)
                if first != stage:
                    for name in layer._buffers:
                        full = f"{path}.{name}" if path else name
                        self._shared.append((weakref.ref(layer), name, full, first, stage))

    @property
    def names(self) -> tuple[str, ...]:
        """Their names in the last stage that has each."""
        return tuple(full for _, _, full, _, _ in self._shared)

    def _now(self) -> list[tuple[Tensor | None, int]]:
        held = ((ref(), name) for ref, name, *_ in self._shared)
        buffers = (None if layer is None else layer._buffers.get(name) for layer, name in held)
        return [(b, 0 if b is None or b.is_inference() else b._version) for b in buffers]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A step: say once that one has written into one of them."""
        before = self._now()
        yield
        for shared, (buffer, version), (now, version_now) in zip(
            self._shared, before, self._now(), strict=True
        ):
            if now is not buffer or version_now != version:
                _, _, name, first, stage = shared
                _log.warning(
                    "the buffer %s of stage %d is that of stage %d too, and is written in each "
                    "call: not in the order of one process, and over processes each stage has one "
                    "of its own; give each stage its own layer, or cut so that one stage has both",
                    name,
                    stage,
                    first,
                )
                self._shared = []
                return
