"""Scripts run over gloo: each rank's process plays the plain model beside its own stages."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.generated.case import Case
from tests.generated.drawing import draw_case
from tests.generated.piped import Place
from tests.generated.play import Unplayable, play
from tests.processes import run_ranks

__all__ = ["REPLICAS", "Grid", "told_of", "told_over"]

REPLICAS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Where a script is run.

    Args:
        ranks: of the pipeline, each a process; None where one process plays any number.
        wrapper: ``ddp``, ``fsdp`` or ``replicate`` where stages are replicated; else empty.
    """

    ranks: int | None = None
    wrapper: str = ""


def told_of(case: Case, place: Place | None = None) -> str:
    """What was wrong with a script; empty if nothing was."""
    if "compiled" in case.recipe.units:
        torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in HARMLESS:
            warnings.filterwarnings("ignore", message=harmless)
        try:
            return play(case, place, REPLICAS if case.replicas else 1)
        except Unplayable as error:
            return f"unplayable: {error}: {error.__cause__!r}"


# Of what the plain model does too, and of outputs that the next stage has as tensors of its own.
HARMLESS = (
    "None of the inputs have requires_grad",
    "Full backward hook is firing",
    "Mismatch dtype between input and weight",
    "The .grad attribute of a Tensor that is not a leaf",
    "Sparse invariant checks are implicitly disabled",
    "FSDP2-wrapped module .* returned a view",
    "Found a non-scalar tensor with numel=1 and ndim!=0",
    "Detected call of `lr_scheduler.step\\(\\)` before",
)


def told_over(
    grid: Grid, seeds: range, without: frozenset[str] = frozenset(), *, timeout_s: float = 60
) -> list[str]:
    """What was wrong with each seed's script, over processes.

    Args:
        grid: how many processes, and how stages are replicated.
        seeds: of the scripts, which one set of processes plays in turn.
        without: the features that are switched off.
        timeout_s: how long all of it may take.
    """
    assert grid.ranks is not None
    num = grid.ranks * (REPLICAS if grid.wrapper else 1)
    given = (list(seeds), sorted(without), grid.ranks, grid.wrapper)
    outcomes = run_ranks(_play_all, num, *given, timeout_s=timeout_s)
    by_rank = [outcome.result() for outcome in outcomes]
    return [
        "\n".join(f"rank {rank}: {told[i]}" for rank, told in enumerate(by_rank) if told[i])
        for i in range(len(seeds))
    ]


def _play_all(
    rank: int, num_ranks: int, seeds: list[int], without: list[str], ranks: int, wrapper: str
) -> list[str]:
    logging.getLogger("penstock").setLevel(logging.ERROR)
    told = []
    for seed in seeds:
        # New connections: those of a script that fails are not those of the next.
        place = _replicated(ranks) if wrapper else Place(group=_group(num_ranks))
        case = draw_case(seed, frozenset(without), ranks=ranks, replicas=wrapper)
        told.append(told_of(case, place))
        dist.barrier()
    return told


def _group(num_ranks: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(num_ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _replicated(ranks: int) -> Place:
    mesh = init_device_mesh("cpu", (REPLICAS, ranks), mesh_dim_names=("replica", "stage"))
    return Place(
        group=mesh["stage"].get_group(),
        replicas=mesh["replica"],
        replica=mesh["replica"].get_local_rank(),
    )
