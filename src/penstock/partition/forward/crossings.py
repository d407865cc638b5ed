"""All that the stages of a model cut by module know of its run on inputs of one shape.

    call     wte    h.0    h.1    h.2    lm_head
    stage    0      0      1      1      1
    carried  ids, labels, output 0 of h.0            over the boundary between 0 and 1

A value is carried hop by hop from the stage that has it to the last one that needs it. Pure data,
which the first rank tells the others; ``find_crossings`` works it out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from penstock.partition.forward.absent import Source, SourceKind
from penstock.stage.boundary import BoundarySpec

__all__ = ["Crossings", "PlacedCall"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedCall:
    """One call of a part, in the order in which they run.

    Args:
        unit: the part's name.
        stage: where it runs.
        output: what it returns, and what is collected from within it.
        written: the leaves of the output that later code writes into.
        writes: the leaves of its arguments that it writes into.
    """

    unit: str
    stage: int
    output: BoundarySpec
    written: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossings:
    """All that the stages have to know to run their parts of a model on inputs of one shape.

    Args:
        inputs: the model's arguments, ``((args, kwargs),)``.
        calls: the calls in order.
        carried: for each boundary the values that cross it, in order.
        written: the leaves of the inputs that the model writes into.
        draws: whether the code between the parts draws random numbers.
        host_draws: which of the host's generators it draws from, by name; a seed for each of them
            crosses every boundary, behind the values.
    """

    inputs: BoundarySpec
    calls: tuple[PlacedCall, ...]
    carried: tuple[tuple[Source, ...], ...]
    written: tuple[int, ...] = ()
    draws: bool = False
    host_draws: tuple[str, ...] = ()

    def last_call(self, stage: int) -> int:
        """The last call that runs on ``stage``; -1 where none does."""
        return max((i for i, call in enumerate(self.calls) if call.stage == stage), default=-1)

    def encode(self) -> bytes:
        """As JSON, to be read by ``decode`` on another rank."""
        calls = [
            [c.unit, c.stage, c.output.encode().decode(), c.written, c.writes] for c in self.calls
        ]
        carried = [[[s.kind.value, s.call, s.leaf, s.name] for s in part] for part in self.carried]
        inputs = self.inputs.encode().decode()
        draws = self.draws, self.host_draws
        return json.dumps([inputs, calls, carried, self.written, *draws]).encode()

    @staticmethod
    def decode(data: bytes) -> Crossings:
        """What ``encode`` wrote."""
        inputs, calls, carried, written, draws, host_draws = json.loads(data)
        return Crossings(
            inputs=BoundarySpec.decode(inputs.encode()),
            calls=tuple(
                PlacedCall(
                    unit=unit,
                    stage=stage,
                    output=BoundarySpec.decode(output.encode()),
                    written=tuple(leaves),
                    writes=tuple(writes),
                )
                for unit, stage, output, leaves, writes in calls
            ),
            carried=tuple(
                tuple(Source(SourceKind(kind), call, leaf, name) for kind, call, leaf, name in part)
                for part in carried
            ),
            written=tuple(written),
            draws=draws,
            host_draws=tuple(host_draws),
        )
