"""What has torch's names and is held against nothing of torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import penstock

DIM = 6
CPU = torch.device("cpu")


def test_a_stage_has_the_attributes_that_users_read() -> None:
    module = nn.Linear(2, 2)
    mesh_of = lambda *_: None  # noqa: E731
    build_dw = lambda: lambda: None  # noqa: E731
    stage = penstock.PipelineStage(
        module, 1, 3, torch.device("cpu"), dw_builder=build_dw, get_mesh=mesh_of
    )
    assert (stage.stage_index, stage.num_stages) == (1, 3)
    assert (stage.is_first, stage.is_last, stage.has_backward) == (False, False, True)
    assert (stage.group, stage.group_rank, stage.group_size) == (None, 0, 1)
    assert stage.device == torch.device("cpu")
    assert (stage.dw_builder, stage.get_mesh, stage.chunks) == (build_dw, mesh_of, None)
    assert stage.submod is module
    stage.submod = wrapped = nn.Sequential(module)
    assert stage.submod is wrapped


@pytest.mark.parametrize("name", ["forward-only", "ScheduleForwardOnly", "_ScheduleForwardOnly"])
def test_forward_only_is_found_by_its_names(name: str) -> None:
    assert penstock.get_schedule_class(name) is penstock.ScheduleForwardOnly


def test_a_program_is_loaded_by_its_format(tmp_path: Path) -> None:
    stages = [penstock.PipelineStage(nn.Linear(DIM, DIM), i, 2, CPU) for i in range(2)]
    empty = penstock._PipelineScheduleRuntime(stages, 2, nn.MSELoss())
    with pytest.raises(penstock.ScheduleError, match=r"has no program.*_load_csv\(path\)"):
        empty.step(torch.ones(4, DIM), target=torch.ones(4, DIM))
    path = tmp_path / "mine.csv"
    path.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n")
    with pytest.raises(penstock.ScheduleError, match=r"2 microbatches, but .* n_microbatches=3"):
        penstock._PipelineScheduleRuntime(stages, 3, nn.MSELoss())._load_csv(path)
    with pytest.raises(penstock.ScheduleError, match="format='compute': expected 'compute_only'"):
        empty._load_csv(path, "compute")
    penstock.save_csv(penstock.Pipeline(stages, n_microbatches=2, ranks=2).program, path)
    with pytest.raises(penstock.ScheduleError, match="sends and receives; pass format='compute_co"):
        empty._load_csv(path)
    # What can't be loaded leaves what was loaded before as it is.
    path.write_text("0F0,1F0,1B0,0B0,0F1,1F1,1B1,0B1\n")
    empty._load_csv(path)
    before = empty.engine
    path.write_text("0F0,1F0,2F0,2B0,1B0,0B0,0F1,1F1,2F1,2B1,1B1,0B1\n")
    with pytest.raises(penstock.ScheduleError, match="stages"):
        empty._load_csv(path)
    assert empty.engine is before
    empty.step(torch.ones(4, DIM), target=torch.ones(4, DIM))


def test_a_traced_stage_knows_where_its_outputs_go() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    spec = {"1": penstock.SplitPoint.BEGINNING}
    pipe = penstock.pipeline(model, (torch.ones(2, DIM),), split_spec=spec)
    stage = pipe.build_stage(0, torch.device("cpu"))
    nodes = list(pipe.info().graph.nodes)
    stages = [node for node in nodes if node.op == "call_module"]
    assert [stage.get_stage_index_of_submod(node.name) for node in stages] == [0, 1]
    assert [stage.find_dst_rank(node) for node in stages] == [0, 0]  # one process holds all
    assert stage.find_dst_rank(nodes[-1]) is None


def test_options_of_later_versions_of_torch_are_taken() -> None:
    options = {"max_active_stages": 2, "unshard_lookahead": "auto", "defer_reduce_grad_wait": True}
    options |= {"max_outstanding_sends": 2, "defer_pp_recv": True}
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble"):
        stages = [penstock.PipelineStage(nn.Linear(DIM, DIM), i, 2, CPU) for i in range(2)]
        schedule = penstock.get_schedule_class(name)(stages, 2, nn.MSELoss(), **options)  # type: ignore[arg-type]
        schedule.step(torch.ones(4, DIM), target=torch.ones(4, DIM), finalize_gradients=True)


def test_chunk_specs_may_change_from_step_to_step() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x * table.sum()

    stage = penstock.PipelineStage(Scaled(), 0, 1, CPU)
    rows = penstock.TensorChunkSpec(0)
    schedule = penstock.ScheduleGPipe(stage, 2, kwargs_chunk_spec={"table": rows})
    x, table = torch.ones(4, DIM), torch.arange(4.0)
    halves = schedule.eval(x, table=table)
    assert [half.mean() for half in halves.chunk(2)] == [1, 5]
    before = schedule._kwargs_chunk_spec
    assert before == {"table": rows}
    schedule._kwargs_chunk_spec = {"table": None}
    assert schedule.eval(x, table=table).mean() == 6
    schedule._kwargs_chunk_spec = before
    assert torch.equal(schedule.eval(x, table=table), halves)
    assert schedule._args_chunk_spec is None is schedule._output_merge_spec
