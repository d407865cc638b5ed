"""The state of one microbatch in one stage, between its actions.

    RECV_F       F                     SEND_F     RECV_B            B, or I           W
    received ───►leaves, roots, work,  to_send    received_grads ──►grads_to_send     (work done)
                 to_send

Each field is set by one action and cleared by the action that consumes it, so that memory is held
only for microbatches in flight. A schedule makes its own states and reuses them from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock.stage.boundary import BoundarySpec
from penstock.stage.offload import ActivationOffload
from penstock.stage.recompute import RecomputeContext
from penstock.stage.sequence_state import SequenceState

__all__ = ["MicrobatchState", "Phase", "WeightWork"]


class Phase(Enum):
    """The progress of a microbatch in a manually driven stage."""

    EMPTY = "not run"
    FORWARD = "forward done"
    INPUT_GRAD = "input gradient done"
    DONE = "backward done"


class WeightWork(Protocol):
    """Weight gradients deferred to W."""

    @property
    def is_reached(self) -> bool:
        """True if a backward other than I has passed since the forward."""
        ...

    def accumulate(self) -> None:
        """Add the weight gradients to the parameters' ``.grad``."""
        ...


class MicrobatchState:
    """One microbatch's tensors and graph edges in one stage.

    Args:
        microbatch: its index.
        in_sequence: whether it is a chunk of a sequence, whose backward returns the gradient of
            the state that the chunk before has passed on.

    Attributes:
        phase: its progress, where the stage is driven by hand.
        received: the activations: a pending receive, then tensors.
        leaves: the stage's inputs whose gradients are sent back.
        roots: gradient edges of the outputs that take gradients; None for an output that required
            grad when its shape was first seen but no longer does.
        to_send: output tensors; None once sent.
        received_grads: the gradients of ``to_send``: a pending receive, then tensors.
        grads_to_send: gradients of ``leaves``.
        output: the last stage's output, where the stage is driven by hand.
        work: the weight gradients deferred to W.
        recompute: the state to restore when the forward is run again.
        offload: the saved activations, where they can be moved to the host.
        sequence: the state passed to the next chunk of a sequence.
        metadata: the encoded ``out_spec``, to be sent ahead of ``to_send``.
        grads_present: for each gradient of ``to_send``, whether it is sent at all.
        in_spec: the boundary spec of the inputs.
        out_spec: the boundary spec of the outputs.
    """

    __slots__ = (
        "grads_present",
        "grads_to_send",
        "in_sequence",
        "in_spec",
        "leaves",
        "metadata",
        "microbatch",
        "offload",
        "out_spec",
        "output",
        "phase",
        "received",
        "received_grads",
        "recompute",
        "roots",
        "sequence",
        "to_send",
        "work",
    )

    def __init__(self, microbatch: int, *, in_sequence: bool = False) -> None:
        self.microbatch = microbatch
        self.in_sequence = in_sequence
        self.clear()

    def clear(self) -> None:
        """Reset all fields to their values before the first action."""
        self.phase = Phase.EMPTY
        self.received: Any = None
        self.received_grads: Any = None
        self.leaves: Sequence[Tensor] = ()
        self.roots: Sequence[GradientEdge | None] = ()
        self.to_send: Sequence[Tensor] | None = None
        self.grads_to_send: Sequence[Tensor | None] | None = None
        self.output: Any = None
        self.work: WeightWork | None = None
        self.recompute: RecomputeContext | None = None
        self.offload: ActivationOffload | None = None
        self.sequence: SequenceState | None = None
        self.metadata: bytes | None = None
        self.grads_present: tuple[bool, ...] = ()
        self.in_spec: BoundarySpec | None = None
        self.out_spec: BoundarySpec | None = None
