"""What a stage keeps of a microbatch from forward to backward: all of it, nothing, or on the host.

                F                       then            before the backward
    as usual    graph and activations
    recomputed  inputs, as they came                    the forward again
    offloaded   graph and activations   to the host     back

The player runs forwards; the keeper says what is around them. It knows no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain

import torch
from torch import Tensor

from penstock.runtime.batch import Batch
from penstock.schedule.action import Op
from penstock.stage import device_streams
from penstock.stage.replay import Replayer
from penstock.stage.shelf import Copier, Shelf
from penstock.stage.slots import Slot
from penstock.stage.stage import Stage

__all__ = ["Keeper"]


class Keeper:
    """Runs a stage's forwards so that their activations can be recomputed or offloaded.

    Args:
        stage: the stage.
        done: the microbatches that are recomputed (RECOMPUTE) and offloaded (OFFLOAD).
    """

    def __init__(self, stage: Stage, done: Mapping[Op, Set[int]]) -> None:
        self._stage = stage
        self._recomputed = done.get(Op.RECOMPUTE, frozenset())
        self._offloaded = done.get(Op.OFFLOAD, frozenset())
        self._replayer = Replayer(stage.device)
        streams = device_streams.streams_of(stage.device) if self._offloaded else None
        self._copier = Copier(streams) if streams is not None else None

    def forward_for(
        self,
        microbatch: int,
        forward: Callable[[Slot], None],
        given: Callable[[], Sequence[Tensor]],
    ) -> Callable[[Slot], None]:
        """``forward``, with what the program wants of this microbatch around it.

        Args:
            microbatch: the microbatch.
            forward: its forward.
            given: the tensors that the batch holds of it.
        """
        if microbatch in self._recomputed:
            return lambda slot: self._drop(slot, forward, given())
        if microbatch in self._offloaded:
            return lambda slot: self._collect(slot, forward, given())
        return forward

    # --- recomputed --------------------------------------------------------------------------

    def _drop(self, slot: Slot, forward: Callable[[Slot], None], given: Sequence[Tensor]) -> None:
        stage, received = self._stage, slot.arrival
        if received is not None:
            # The forward gets leaves of its own, and memory of its own if it writes into it.
            alike = torch.clone if stage.may_write_inputs else torch.Tensor.detach
            slot.arrival = [alike(tensor) for tensor in received]
        replay = self._replayer.record(stage.submod, given)
        forward(slot)
        replay.close()
        slot.arrival, slot.replay = received, replay
        slot.roots, slot.leaves, slot.work = (), (), None

    def recompute(self, slot: Slot, batch: Batch, forward: Callable[[Slot], None]) -> None:
        """Run the forward again, in the circumstances of its first run."""
        replay, slot.replay = slot.replay, None
        assert replay is not None
        with replay, batch.as_before(slot.microbatch, replay.given):
            forward(slot)

    # --- offloaded ---------------------------------------------------------------------------

    def _collect(
        self, slot: Slot, forward: Callable[[Slot], None], given: Sequence[Tensor]
    ) -> None:
        module = self._stage.submod
        held = (module.parameters(), module.buffers(), slot.arrival or ())
        stays = [*chain.from_iterable(held), *given]
        slot.shelf = Shelf(self._stage.device, stays, self._copier)
        with slot.shelf.collecting():
            forward(slot)

    def offload(self, slot: Slot) -> None:
        """Begin to copy what the backward needs to the host."""
        assert slot.shelf is not None
        slot.shelf.offload()

    def reload(self, slot: Slot) -> None:
        """Begin to copy it back."""
        shelf, slot.shelf = slot.shelf, None
        assert shelf is not None
        shelf.reload()
