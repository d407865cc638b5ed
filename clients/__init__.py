"""Libraries that train through torch.distributed.pipelining, with its import swapped for Penstock.

A client is a module of this package that offers

    TITLE      its name and version
    CASES      its runs: ``Case``s, the reference of a composition before the others
    prepare    a function of (rank, number of ranks, folder), called once in one process
    train      a function of (rank, number of ranks, case, folder) that gives the rank's record:
               {"losses": {name: number}, "gradients": {name: tensor}}; the names of the first
               step's gradients begin with "1/"

``python -m clients.run`` runs all cases on both sides and compares them. Where the environment says
that the side is Penstock's, importing this package swaps the import.
"""

import os
import sys
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Case", "SIDE"]

SIDE = "PENSTOCK_CLIENTS_SIDE"  # "prepare", "torch" or "penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of a client.

    Args:
        composition: the model, and what stands around its stages.
        schedule: the pipeline's schedule; None for the composition's reference, which trains over
            the same data and replicas without a pipeline.
        num_ranks: how many processes.
        settings: what the client reads.
    """

    composition: str
    schedule: str | None
    num_ranks: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.composition}, {self.schedule or 'no pipeline'}"


if os.environ.get(SIDE) == "penstock":
    import penstock

    for name in ("", ".schedules", ".stage", ".microbatch"):
        sys.modules["torch.distributed.pipelining" + name] = penstock
