"""The state of one microbatch in one stage: the one place where it lives.

    RECV_F        F                     SEND_F      RECV_B           B, or I         W
    arrival ─────►leaves, roots, work,  outgoing    grad_arrival ───►outgoing_grads  (work done)
                  outgoing

Each field is set by one action and cleared by the one that uses it up, so that memory is held for
the microbatches in flight and no longer. A slot is reused from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.stage.boundary import BoundarySpec
from penstock.stage.replay import Replay
from penstock.stage.shelf import Shelf

__all__ = ["Phase", "Slot", "WeightWork"]


class Phase(Enum):
    """How far a microbatch has come in a stage."""

    EMPTY = "not run"
    FORWARD = "forward done"
    INPUT_GRAD = "input gradient done"
    DONE = "backward done"


class WeightWork(Protocol):
    """Weight gradients put off to W."""

    @property
    def is_reached(self) -> bool:
        """Whether a gradient has come by since the forward, without I."""
        ...

    def accumulate(self) -> None:
        """Add them to the parameters' ``.grad``."""
        ...


class Slot:
    """What one microbatch holds in one stage between its actions.

    Attributes:
        microbatch: its index.
        phase: how far it has come.
        arrival: the activations that are expected or here (the runtime's, or tensors by hand).
        leaves: the stage's inputs whose gradients go back.
        roots: the gradient edges of what the stage sent on, for the tensors that take gradients;
            None for one that took one when its shape was first met, and no longer does.
        outgoing: the tensors to send on; None once they are on their way.
        grad_arrival: the gradients of ``outgoing`` that are expected or here.
        outgoing_grads: the gradients to send back.
        output: what the last stage returned, where it is asked for.
        work: the weight gradients left to W.
        replay: what a forward that is run again depends on beside its inputs.
        shelf: what the backward needs, where that can be put on the host.
        note: what the receiver must be told before ``outgoing`` comes.
        grads_present: for each of the roots, whether its gradient is sent at all.
        spec: what ``outgoing`` is; ``in_spec`` the same of the inputs.
    """

    __slots__ = (
        "arrival",
        "grad_arrival",
        "grads_present",
        "in_spec",
        "leaves",
        "microbatch",
        "note",
        "outgoing",
        "outgoing_grads",
        "output",
        "phase",
        "replay",
        "roots",
        "shelf",
        "spec",
        "work",
    )

    def __init__(self, microbatch: int) -> None:
        self.microbatch = microbatch
        self.clear()

    def clear(self) -> None:
        """Forget everything: as before the first action."""
        self.phase = Phase.EMPTY
        self.arrival: Any = None
        self.grad_arrival: Any = None
        self.leaves: Sequence[Tensor] = ()
        self.roots: Sequence[GradientEdge | None] = ()
        self.outgoing: Sequence[Tensor] | None = None
        self.outgoing_grads: Sequence[Tensor | None] | None = None
        self.output: Any = None
        self.work: WeightWork | None = None
        self.replay: Replay | None = None
        self.shelf: Shelf | None = None
        self.note: bytes | None = None
        self.grads_present: tuple[bool, ...] = ()
        self.spec: BoundarySpec | None = None
        self.in_spec: BoundarySpec | None = None
