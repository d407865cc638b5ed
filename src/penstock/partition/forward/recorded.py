"""What a dry run saw: the calls of a model's parts in order, and what each of them was given.

    call    wte    h.0    h.1    h.2    lm_head
    needs   ids    wte    h.0    h.1    h.2, labels

Pure data: nothing here knows where the model is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.partition.forward.absent import Source
from penstock.stage.boundary import BoundarySpec

__all__ = ["DryRun", "Recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One call of a part of the model, as the dry run saw it.

    Args:
        unit: the part's name.
        needs: the values that it was given, or that what it was given was computed from.
        output: what it returned, and what was collected from within it.
        written: the leaves of the output that somebody wrote into afterwards.
        writes: the leaves of its arguments that it wrote into.
        changed: its buffers and attributes that it wrote into, or set anew.
        drawn: how many random draws had a number by then; see ``Source``.
        detached: whether what it returns has lost its gradients, where it takes any: it ran
            within an autograd function, as a reentrant checkpoint is one.
    """

    unit: str
    needs: frozenset[Source]
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()
    drawn: int = 0
    detached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a dry run of the whole model saw.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls in order.
        needs: the values that the model's output was computed from.
        everywhere: the inputs that every stage has: those that are not floating point. Masks and
            positions are made of them, and control flow may depend on them.
        written: the leaves of the inputs that the model writes into.
        loss: whether the output has a scalar named ``loss``.
        changed: the parameters and buffers that the code between the parts writes into.
        draws: whether it draws random numbers.
        host_draws: which of the host's generators it draws from, by name.
    """

    inputs: BoundarySpec
    calls: tuple[Recorded, ...]
    needs: frozenset[Source]
    everywhere: frozenset[Source]
    written: tuple[int, ...]
    loss: bool
    changed: frozenset[str] = frozenset()
    draws: bool = False
    host_draws: tuple[str, ...] = ()

    def first_calls(self) -> dict[str, int]:
        """For each part that was called, its first call."""
        found: dict[str, int] = {}
        for i, call in enumerate(self.calls):
            found.setdefault(call.unit, i)
        return found
