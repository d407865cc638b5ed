"""Stages that are replicated or sharded, in pipelines of four processes.

Two pipeline ranks × two replicas, each pair of ranks a group of a DeviceMesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import PipelineStage, build, get_schedule_class
from penstock.stage.dtensor import full_tensor

DIM = 4
ROWS = 8  # per replica
NUM_MICROBATCHES = 4
CPU = torch.device("cpu")


def make_layers(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        for _ in range(num_stages)
    ]


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return (
        torch.randn(ROWS, DIM, generator=generator),
        torch.randn(ROWS, DIM, generator=generator),
    )


def wrap_ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def wrap_fsdp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for child in module.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def wrap_fsdp_whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return module


def wrap_replicate(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapped: nn.Module = replicate(module, mesh=mesh)
    return wrapped


def wrap_part(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Two parts, replicated each on its own."""
    assert isinstance(module, nn.Sequential)
    return nn.Sequential(wrap_ddp(module[:2], mesh), module[2], wrap_replicate(module[3], mesh))


WRAPS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "ddp": wrap_ddp,
    "fsdp": wrap_fsdp,
    "fsdp whole": wrap_fsdp_whole,
    "replicate": wrap_replicate,
    "parts": wrap_part,
}


def whole(tensor: Tensor) -> Tensor:
    # A replicated tensor, in full, is itself: copied, so that later steps do not change it.
    return full_tensor(tensor).detach().clone()


def make_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh over which the pipeline runs, and the one over which each stage is replicated."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return mesh["pp"], mesh["dp"]


def make_schedule(
    name: str, wrap: str, pipeline: DeviceMesh, replicas: DeviceMesh, **options: Any
) -> Any:
    """The schedule over this rank's stages, their modules wrapped, and those modules."""
    placement = build(name, ranks=2, microbatches=NUM_MICROBATCHES).placement
    layers = make_layers(placement.num_stages)
    mine = placement.stages_of(pipeline.get_local_rank())
    modules = [WRAPS[wrap](layers[i], replicas) for i in mine]
    stages = [
        PipelineStage(m, i, placement.num_stages, CPU, group=pipeline.get_group())
        for i, m in zip(mine, modules, strict=True)
    ]
    cls: Any = get_schedule_class(name)
    return cls(
        stages[0] if len(stages) == 1 else stages,
        NUM_MICROBATCHES,
        nn.functional.mse_loss,
        timeout_s=20,
        **options,
    ), modules


def run_step(
    schedule: Any, step: int, pipeline: DeviceMesh, replicas: DeviceMesh, **options: Any
) -> None:
    x, target = batch(step, replicas.get_local_rank())
    x_here = (x,) if pipeline.get_local_rank() == 0 else ()
    schedule.step(*x_here, target=target, **options)


def num_reductions(profiler: torch.profiler.profile) -> int:
    """The all-reduces of a profiled step, as which gloo runs reduce-scatters, too.

    Counted in what was recorded: ``profiler.events()`` takes several times as long as the step.
    """
    recorded: Any = profiler.profiler
    return sum(event.name() == "gloo:all_reduce" for event in recorded.kineto_results.events())


def run_eval(schedule: Any, pipeline: DeviceMesh, replicas: DeviceMesh) -> None:
    x, _ = batch(0, replicas.get_local_rank())
    schedule.eval(*((x,) if pipeline.get_local_rank() == 0 else ()))
