"""Step times of three ways to run one schedule, interleaved in one run, on gloo processes.

    bare       the schedule's actions as straight-line Python (``bare.py``)
    penstock   what a user of Penstock runs
    torch      torch.distributed.pipelining, with the same stages and schedule

Every round runs each way for a block of steps, in an order that turns from round to round; ratios
are taken within a round, so that what slows the machine for a while slows both sides of a ratio.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import penstock
from benchmarks.bare import bare_step
from benchmarks.figures import Figure
from benchmarks.split_backward import Block
from penstock.schedule.passes import lower
from tests.processes import run_ranks

__all__ = [
    "RANKS", "TINY", "Case", "measure_compute_bound", "measure_sharded", "measure_tiny",
    "time_ways", "ways_of",
]  # fmt: skip

RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One schedule to measure.

    Args:
        schedule: torch's class name, which is Penstock's too.
        virtual: stages per rank.
        over_bare: bound of Penstock's step time over the bare loop's; None where not measured.
        over_torch: likewise over torch's; None where there is no bound.
    """

    schedule: str
    virtual: int
    over_bare: float | None
    over_torch: float | None


TINY = (
    Case(schedule="ScheduleGPipe", virtual=1, over_bare=1.10, over_torch=0.92),
    Case(schedule="Schedule1F1B", virtual=1, over_bare=1.10, over_torch=0.92),
    Case(schedule="ScheduleLoopedBFS", virtual=2, over_bare=1.15, over_torch=0.65),
    Case(schedule="ScheduleInterleaved1F1B", virtual=2, over_bare=1.15, over_torch=0.65),
    Case(schedule="ScheduleInterleavedZeroBubble", virtual=2, over_bare=1.15, over_torch=0.65),
    Case(schedule="ScheduleZBVZeroBubble", virtual=2, over_bare=1.15, over_torch=0.65),
    Case(schedule="ScheduleDualPipeV", virtual=2, over_bare=1.15, over_torch=None),
)
COMPUTE_BOUND = (
    Case(schedule="Schedule1F1B", virtual=1, over_bare=None, over_torch=1.00),
    Case(schedule="ScheduleInterleavedZeroBubble", virtual=2, over_bare=None, over_torch=0.90),
    Case(schedule="ScheduleZBVZeroBubble", virtual=2, over_bare=None, over_torch=0.90),
)
SHARDED = (
    Case(schedule="Schedule1F1B", virtual=1, over_bare=None, over_torch=1.00),
    Case(schedule="ScheduleInterleaved1F1B", virtual=2, over_bare=None, over_torch=1.00),
)


def measure_tiny(rounds: int, block: int) -> list[Figure]:
    """Stages of one linear layer of width 16: what is measured is the way, not the work.

    Args:
        rounds: how often every way is measured.
        block: steps per measurement.
    """
    return _figures("step time, tiny stages", TINY, "tiny", rounds, block)


def measure_compute_bound(rounds: int) -> list[Figure]:
    """Eight transformer blocks of width 256 in all, 4 sequences of 128 per microbatch, M = 8."""
    return _figures("step time, transformer blocks", COMPUTE_BOUND, "blocks", rounds, 1)


def measure_sharded(rounds: int) -> list[Figure]:
    """The transformer blocks, each sharded over two replicas of the pipeline by FSDP2."""
    return _figures("step time, blocks sharded by FSDP2", SHARDED, "sharded", rounds, 1)


def _figures(group: str, cases: Sequence[Case], work: str, rounds: int, block: int) -> list[Figure]:
    figures = []
    for case in cases:
        args = (case.schedule, case.virtual, work, case.over_bare is not None, rounds, block)
        replicas = 2 if work == "sharded" else 1
        times = run_ranks(time_ways, replicas * RANKS, *args, timeout_s=1800)[0].result()
        pairs: list[tuple[str, str, float | None]] = [("penstock", "torch", case.over_torch)]
        if case.over_bare is not None:
            pairs = [
                ("penstock", "bare", case.over_bare),
                *pairs,
                ("torch", "bare", None),
            ]
        for way, other, bound in pairs:
            ratios = [a / b for a, b in zip(times[way], times[other], strict=True)]
            name = case.schedule.removeprefix("Schedule")
            figures.append(
                Figure.median_of(
                    ratios,
                    group=group,
                    name=name if way == "penstock" else f"{name}, torch's own",
                    over=other,
                    bound=bound,
                )
            )
    return figures


# --- in each process -----------------------------------------------------------------------------

Way = Callable[[], Any]


def time_ways(
    rank: int,
    num_ranks: int,
    schedule: str,
    virtual: int,
    work: str,
    bare: bool,
    rounds: int,
    block: int,
) -> dict[str, list[float]]:
    """Seconds per step of each way, by round."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    ways = ways_of(rank, schedule, virtual, work, bare, 64 if work == "tiny" else 8)
    for run in ways.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds):
        order.append(order.pop(0))
        for name in order:
            run = ways[name]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(block):
                run()
            dist.barrier()
            times[name].append((time.perf_counter() - start) / block)
    return times


def ways_of(
    rank: int, schedule: str, virtual: int, work: str, bare: bool, num_microbatches: int
) -> dict[str, Way]:
    """A step of each way, by name; all have run once, and give the same gradients.

    Raises:
        AssertionError: they do not.
    """
    num_stages = RANKS * virtual
    program = penstock.build(schedule, ranks=RANKS, microbatches=num_microbatches, virtual=virtual)
    mesh = init_device_mesh(
        "cpu", (RANKS, dist.get_world_size() // RANKS), mesh_dim_names=("pp", "dp")
    )
    modules = {
        s: _module(work, num_stages) for s in program.placement.stages_of(mesh.get_local_rank("pp"))
    }
    if work == "sharded":
        for module in modules.values():
            for part in (*module, module):
                fully_shard(part, mesh=mesh["dp"])
    shape = (4, 16) if work == "tiny" else (4, 128, 256)
    inputs = torch.randn(num_microbatches * shape[0], *shape[1:])
    target = torch.randn_like(inputs)
    loss_fn = nn.functional.mse_loss
    is_first, is_last = 0 in modules, num_stages - 1 in modules
    ways: dict[str, Way] = {}
    if bare:
        step = bare_step(lower(program), rank, modules, loss_fn, shape)
        ways["bare"] = lambda: step(inputs, target)
    for name in ("penstock", "torch"):
        runner = _schedule(name, schedule, modules, mesh, num_stages, num_microbatches, loss_fn)
        ways[name] = _stepper(runner, inputs if is_first else None, target if is_last else None)
    _expect_equal_gradients(ways, modules)
    return ways


def _module(work: str, num_stages: int) -> nn.Module:
    if work == "tiny":
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    return nn.Sequential(*(Block(256, 4) for _ in range(8 // num_stages)))


def _schedule(
    library: str,
    schedule: str,
    modules: dict[int, nn.Module],
    mesh: DeviceMesh,
    num_stages: int,
    n: int,
    loss_fn: Callable[..., Tensor],
) -> Any:
    source: Any = penstock
    if library == "torch":
        import torch.distributed.pipelining as source
    device = torch.device("cpu")
    group = mesh["pp"].get_group()
    stages = [
        source.PipelineStage(m, s, num_stages, device, group=group) for s, m in modules.items()
    ]
    single = schedule in ("ScheduleGPipe", "Schedule1F1B")
    return getattr(source, schedule)(stages[0] if single else stages, n, loss_fn=loss_fn)


def _stepper(schedule: Any, inputs: Tensor | None, target: Tensor | None) -> Way:
    args = () if inputs is None else (inputs,)
    if target is None:
        return lambda: schedule.step(*args, return_outputs=False)
    return lambda: schedule.step(*args, target=target, losses=[], return_outputs=False)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, if it is sharded; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _expect_equal_gradients(ways: dict[str, Way], modules: dict[int, nn.Module]) -> None:
    """What is compared must do the same work."""
    found: dict[str, list[Tensor]] = {}
    params = [p for m in modules.values() for p in m.parameters()]
    for name, run in ways.items():
        for param in params:
            param.grad = None
        run()
        found[name] = [_local(p.grad).clone() for p in params if p.grad is not None]
        assert len(found[name]) == len(params), f"{name} leaves gradients out"
    first, *others = found.values()
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
