"""Schedules of a user's own, written for torch: classes that fill an order, and files."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.pipelining._schedule_visualizer as peer_ops
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as peer
from torch.nn import functional as F

import penstock
from penstock import PipelineStage, ScheduleError, check, load_csv
from tests.processes import run_ranks

DIM, MICROBATCHES, CPU = 6, 4, torch.device("cpu")
comparing = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compares with the API of torch 2.13 to 2.15"
)


def layers_of(num: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, DIM, generator=generator), torch.randn(8, DIM, generator=generator)


def plain_grads(num: int) -> list[Tensor | None]:
    layers, (x, target) = layers_of(num), batch()
    F.mse_loss(nn.Sequential(*layers)(x), target).backward()
    return [p.grad for layer in layers for p in layer.parameters()]


def rows_of(names: Any, rank: int, num_ranks: int) -> list[Any]:
    """All forwards, then all backwards, each of them split; of two stages per rank."""
    action, kind = names._Action, names._ComputationType
    stages = (rank, rank + num_ranks)
    rows: list[Any] = [None] * rank
    for stage in stages:
        rows += [action(stage, names.FORWARD, mb) for mb in range(MICROBATCHES)]
    for stage in reversed(stages):
        for mb in range(MICROBATCHES):
            rows.append(action(stage, kind.BACKWARD_INPUT, mb))
            rows.append(action(stage, names.BACKWARD_WEIGHT, microbatch_index=mb))
    return rows


def train(rank: int, num_ranks: int, module_name: str, how: str) -> list[Tensor | None]:
    """A user's script with a schedule of its own; only what it imports from differs."""
    names = importlib.import_module(module_name)
    library = importlib.import_module(module_name.removesuffix(".schedules"))

    class Own(names._PipelineScheduleRuntime):  # type: ignore[misc, name-defined]
        def __init__(self, stages: list[Any], n_microbatches: int, loss_fn: Any) -> None:
            super().__init__(stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.pipeline_order = {}
            for each in range(self.pp_group_size):
                self.pipeline_order[each] = rows_of(names, each, self.pp_group_size)
            assert (self._num_stages, self._n_microbatches) == (2 * num_ranks, MICROBATCHES)
            if how == "prepared":
                self._prepare_schedule_with_comms(self.pipeline_order)

    layers = layers_of(2 * num_ranks)
    mine = (rank, rank + num_ranks)
    stages = [library.PipelineStage(layers[i], i, 2 * num_ranks, CPU) for i in mine]
    schedule = Own(stages, MICROBATCHES, F.mse_loss)
    if how == "with comms":
        lowered = Own(stages, MICROBATCHES, F.mse_loss)
        lowered._prepare_schedule_with_comms(lowered.pipeline_order)
        schedule.pipeline_order_with_comms = dict(lowered.pipeline_order_with_comms)
    x, target = batch()
    schedule.step(*((x,) if rank == 0 else ()), target=target)
    order = schedule.pipeline_order or schedule.pipeline_order_with_comms
    compute = [str(a) for a in order[rank] if a is not None and a.is_compute_op]
    assert compute[:2] == [f"{rank}F0", f"{rank}F1"]
    assert f"{rank + num_ranks}RECV_F0" in map(str, schedule.pipeline_order_with_comms[rank])
    return [p.grad for i in mine for p in layers[i].parameters()]


@comparing
@pytest.mark.parametrize(
    ("module_name", "how"),
    [
        ("torch.distributed.pipelining.schedules", "prepared"),
        ("penstock", "prepared"),
        ("penstock", "set"),
        ("penstock", "with comms"),
    ],
)
def test_a_class_of_ones_own_trains(module_name: str, how: str) -> None:
    expected = plain_grads(4)
    for rank, outcome in enumerate(run_ranks(train, 2, module_name, how)):
        wanted = [expected[2 * i + j] for i in (rank, rank + 2) for j in range(2)]
        torch.testing.assert_close(outcome.result(), wanted, rtol=1e-5, atol=1e-6)


# --- kinds of classes, in one process ----------------------------------------------------------


class OwnMulti(penstock.PipelineScheduleMulti):
    """Fills the order that its base has."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        row: list[Any] = []
        for mb in range(self._n_microbatches):
            row += [penstock._Action(0, penstock.FORWARD, mb), None]
            row.append(penstock._Action.from_str(f"1F{mb}"))
            row += [penstock.Action(stage=i, op=penstock.Op("B"), microbatch=mb) for i in (1, 0)]
        self.pipeline_order[self.rank] = row


class OwnSingle(penstock.PipelineScheduleSingle):
    """Makes its order when it is asked for it."""

    def _get_pipeline_order(self) -> dict[int, list[Any]]:
        kinds = (penstock.FORWARD, penstock.FULL_BACKWARD)
        microbatches = range(self._n_microbatches)
        return {0: [penstock._Action(0, kind, mb) for mb in microbatches for kind in kinds]}


class OwnInterleaved(penstock.ScheduleInterleaved1F1B):
    """Replaces the order of a schedule by name."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        forwards, backwards = (
            [act for act in self.pipeline_order[0] if act.computation_type == kind] for kind in "FB"
        )
        forwards.sort(key=lambda act: act.microbatch_index)
        self.pipeline_order = {0: forwards}
        self.pipeline_order[0] += backwards


@pytest.mark.parametrize("cls", [OwnMulti, OwnSingle, OwnInterleaved])
def test_orders_are_taken_from_classes_of_each_kind(cls: Any) -> None:
    num = 1 if cls is OwnSingle else 2
    layers, (x, target) = layers_of(num), batch()
    stages = [PipelineStage(layer, i, num, CPU) for i, layer in enumerate(layers)]
    schedule = cls(stages[0] if num == 1 else stages, 4, F.mse_loss)
    for _ in range(2):
        schedule.step(x, target=target)
    grads = [p.grad for layer in layers for p in layer.parameters()]
    expected = [None if grad is None else 2 * grad for grad in plain_grads(num)]
    torch.testing.assert_close(grads, expected)
    ran = [str(span.action) for span in schedule.trace().spans if span.action.op.value in "FB"]
    assert ran == [str(act) for act in schedule.pipeline_order[0]]
    if cls is OwnMulti:
        assert ran[:5] == ["0F0", "1F0", "1B0", "0B0", "0F1"]
    if cls is OwnInterleaved:
        assert ran[:4] == ["0F0", "1F0", "0F1", "1F1"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0F0 1F0 0B0 1B0", "0B0 needs 1B0 before it"),
        ("0F0 1F0 1B0", "0B0"),
        ("0F0 1F0 1B0 0B0 0B0", "0B0 again, first done at step 3"),
        ("0F0 1F1 1B0 0B0", "microbatch"),
        ("0F0 1X0 1B0 0B0", r"row 1, column 2: '1X0' is not an action"),
    ],
)
def test_orders_are_checked(row: str, message: str) -> None:
    stages = [PipelineStage(layer, i, 2, CPU) for i, layer in enumerate(layers_of(2))]
    schedule = penstock._PipelineScheduleRuntime(stages, 1, F.mse_loss)
    with pytest.raises(ScheduleError, match=message):
        schedule._prepare_schedule_with_comms({0: row.split()})  # type: ignore[dict-item]
    # And nothing else runs in its place.
    with pytest.raises(ScheduleError, match=message):
        schedule.step(*batch())


def test_without_an_order_there_is_no_program() -> None:
    stages = [PipelineStage(layer, i, 2, CPU) for i, layer in enumerate(layers_of(2))]
    for schedule in (
        penstock.PipelineScheduleMulti(stages, 1, F.mse_loss),
        penstock.ScheduleInterleaved1F1B(stages, 1, F.mse_loss),
    ):
        schedule.pipeline_order = {}
        with pytest.raises(ScheduleError, match=r"has no program: .* set pipeline_order, or"):
            schedule.step(*batch())


# --- what would have no effect -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["_step_microbatches", "_compute_loss", "_split_inputs", "_loss_fn", "_has_backward"]
)
def test_a_runtime_of_ones_own_is_refused(name: str) -> None:
    own = type("Own", (penstock.PipelineScheduleSingle,), {name: lambda self, *args: None})
    stage = PipelineStage(nn.Identity(), 0, 1, CPU)
    with pytest.raises(ScheduleError, match=f"Own has a {name} of its own, which is not used"):
        own(stage, 2)
    schedule = penstock.ScheduleGPipe(stage, 2)
    setattr(schedule, name, None)
    with pytest.raises(ScheduleError, match=f"ScheduleGPipe has a {name} of its own"):
        schedule.step(torch.zeros(2, 2))


@pytest.mark.parametrize("name", ["backward_maybe_with_nosync", "forward_one_chunk", "scale_grads"])
def test_overridden_methods_of_stages_are_refused(name: str) -> None:
    own = type("Own", (PipelineStage,), {name: lambda self, *args: None})
    patched = PipelineStage(nn.Identity(), 0, 1, CPU)
    setattr(patched, name, lambda *args: None)
    for stage in (own(nn.Identity(), 0, 1, CPU), patched):
        with pytest.raises(ScheduleError, match=f"stage 0 has a {name} of its own, which schedul"):
            penstock.ScheduleGPipe(stage, 2)
    stage = PipelineStage(nn.Identity(), 0, 1, CPU)
    schedule = penstock.ScheduleGPipe(stage, 2)
    setattr(stage, name, lambda *args: None)
    with pytest.raises(ScheduleError, match=f"stage 0 has a {name} of its own, which schedul"):
        schedule.eval(torch.ones(4, DIM))
    delattr(stage, name)
    assert torch.equal(schedule.eval(torch.ones(4, DIM)), torch.ones(4, DIM))
    renamed = type("Renamed", (PipelineStage,), {"log_prefix": "mine"})
    penstock.ScheduleGPipe(renamed(nn.Identity(), 0, 1, CPU), 2)


# --- names and files ---------------------------------------------------------------------------


def test_actions_read_as_torchs() -> None:
    for text in ("0F1", "2I0", "11W3", "0UNSHARD", "3SEND_B2", "1REDUCE_GRAD"):
        ours, theirs = penstock._Action.from_str(text), peer._Action.from_str(text)
        assert (str(ours), repr(ours)) == (str(theirs), repr(theirs))
        assert ours == theirs and hash(ours) == hash(theirs)
        assert ours.is_compute_op == theirs.is_compute_op
    text = "(0F3;1B2)OVERLAP_F_B"
    ours, theirs = penstock._Action.from_str(text), peer._Action.from_str(text)
    assert ours == theirs and str(ours) == text
    assert penstock._Action.from_str(" ") is None is penstock._Action.from_str("0WAIT_SEND_F1")
    for kind in peer._ComputationType:
        assert getattr(penstock, kind.name) == kind
        assert penstock._ComputationType.from_str(kind.value).name == kind.name


MULTI = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "LoopedBFS")


@comparing
@pytest.mark.parametrize("name", ["GPipe", "1F1B", *MULTI])
def test_schedule_ops_are_torchs(name: str) -> None:
    ours = penstock.get_schedule_ops(name, 2, 4)
    theirs = peer_ops.get_schedule_ops(name, 2, 4)
    for mine, other in zip(ours, theirs, strict=True):
        compute = [act for act in other if act is not None and act.is_compute_op]
        # Torch orders backwards otherwise, and shows no 1F0 of 1F1B, though it runs.
        if name not in ("1F1B", "DualPipeV", "LoopedBFS"):
            assert list(map(str, mine)) == list(map(str, compute))
    spaced = penstock.get_schedule_ops(f"Schedule{name}", 2, 4, add_spacing=True)
    for mine, other in zip(spaced, ours, strict=True):
        assert [act for act in mine if act is not None] == other
    assert None in spaced[1]
    sent = [str(act) for act in penstock.get_schedule_ops(name, 2, 4, with_comms=True)[0]]
    assert {"0UNSHARD", "0SEND_F0", "0REDUCE_GRAD"} <= {*sent}


@comparing
@pytest.mark.parametrize("name", MULTI)
def test_files_of_torch_are_read(name: str, tmp_path: Path) -> None:
    """Its own files leave stages unsharded at the end; torch 2.15 writes waits, too."""
    stages: Any = [
        SimpleNamespace(stage_index=i, num_stages=4, group_rank=0, group_size=2, submod=None)
        for i in range(2)
    ]
    schedule = getattr(peer, f"Schedule{name}")(stages, 4, loss_fn=lambda *_: None)
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    rows = []
    for rank in range(2):
        row = []
        for act in schedule.pipeline_order_with_comms[rank]:
            row.append(str(act))
            writes_waits = hasattr(peer, "WAIT_SEND_F")
            if ("SEND" in str(act) or "REDUCE_GRAD" in str(act)) and not writes_waits:
                stage, kind, mb = act[:3]
                row.append(f"{stage}WAIT_{kind.value}{'' if mb is None else mb}")
        while row[-1].endswith("RESHARD"):
            row.pop()
        rows.append(row)
    path = tmp_path / "theirs.csv"
    path.write_text("".join(",".join(row) + "\n" for row in rows))
    program = check(load_csv(path))
    kept = [[cell for cell in row if "WAIT" not in cell] for row in rows]
    assert [[str(step) for step in steps] for steps in program.ranks] == kept
