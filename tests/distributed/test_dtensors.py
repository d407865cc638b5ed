"""Stages whose tensors are spread over a mesh of their own: DTensors cross as what they are."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.microbatch as peer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from penstock import PipelineStage, ScheduleProgram, build
from penstock.errors import BoundaryError, PenstockError
from penstock.runtime import microbatch
from penstock.stage.dtensor import dtensor_meta, encode_placement, find_mesh
from penstock.stage.weight_grad import DeferredGrads, find_undeferred
from tests.compare import plain_step
from tests.distributed.launches import results_of
from tests.processes import run_ranks

CPU = torch.device("cpu")
PLACEMENTS = {"rows": Shard(0), "features": Shard(1), "whole": Replicate(), "sums": Partial()}
MICROBATCHES = 4


def layers(num: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double() for _ in range(num)]


def train(
    rank: int, num_ranks: int, name: str, between: str, says_mesh: bool, spreads_loss: bool = False
) -> list[str]:
    """Two ranks per stage share its weights and what it passes on; returns what came."""
    meshes = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("pipeline", "tensor"))
    mesh, group = meshes["tensor"], meshes["pipeline"].get_group()
    program = build(name, ranks=2, microbatches=MICROBATCHES)
    plain = layers(program.num_stages)
    reference = nn.Sequential(*copy.deepcopy(plain))
    placed, last = PLACEMENTS[between], program.num_stages - 1
    came: list[str] = []
    stages = []
    for i in program.placement.stages_of(group.rank()):
        colwise = ColwiseParallel(input_layouts=placed) if i else ColwiseParallel()
        rowwise = RowwiseParallel()
        if i < last or spreads_loss:
            rowwise = RowwiseParallel(output_layouts=placed, use_local_output=False)
        module = parallelize_module(plain[i], mesh, {"0": colwise, "2": rowwise})
        module.register_forward_pre_hook(lambda _, args: came.append(type(args[0]).__name__))
        get_mesh = (lambda names, layout: meshes[names]) if says_mesh else None
        stages.append(PipelineStage(module, i, last + 1, CPU, group=group, get_mesh=get_mesh))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if not spreads_loss:
            return F.mse_loss(output, target)
        target = distribute_tensor(target, mesh, [placed])
        # Of a mean over parts torch's own gradients are as many times too large.
        return F.mse_loss(output, target, reduction="sum") / target.numel()

    schedule = ScheduleProgram(stages, program, loss_fn)
    for step in range(2):
        torch.manual_seed(step)
        inputs, target = torch.randn(2, 8, 6, dtype=torch.float64)
        expected = plain_step(
            reference, F.mse_loss, inputs, target=target, n_microbatches=MICROBATCHES
        )
        losses: list[Tensor] = []
        schedule.step(inputs, target=target, losses=losses)
        torch.testing.assert_close(torch.stack(losses).mean(), expected.loss)
        assert not any(isinstance(loss, DTensor) for loss in losses)
    for stage in stages:
        wanted = dict(reference[stage.stage_index].named_parameters())
        for path, param in stage.submod.named_parameters():
            assert isinstance(param.grad, DTensor)
            torch.testing.assert_close(param.grad.full_tensor(), wanted[path].grad)
    return came


CASES = (
    *((name, each, says_mesh) for name, says_mesh in (("1f1b", True), ("zbv", False))
      for each in PLACEMENTS),
    *(("zbv", each, False, True) for each in ("rows", "whole")),
)  # fmt: skip


@pytest.mark.parametrize("between", PLACEMENTS)
@pytest.mark.parametrize(("name", "says_mesh"), [("1f1b", True), ("zbv", False)])
def test_stages_of_two_ranks_each_train_as_one_device_does(
    name: str, between: str, says_mesh: bool
) -> None:
    for rank, came in enumerate(results_of(train, 4, CASES, (name, between, says_mesh))):
        # In a V the ranks of the first stage hold the last one, too.
        first = {"Tensor"} if name == "1f1b" else {"Tensor", "DTensor"}
        assert set(came) == (first if rank < 2 else {"DTensor"})


@pytest.mark.parametrize("between", ["rows", "whole"])
def test_a_loss_may_be_a_dtensor_and_is_returned_in_full(between: str) -> None:
    assert len(results_of(train, 4, CASES, ("zbv", between, False, True))) == 4


class Sharded(nn.Module):
    """Sequence parallel norm, then a column-wise and a row-wise layer, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def split(rank: int, num_ranks: int) -> dict[str, Any]:
    """F, I and W of two microbatches; what each part computed and communicated."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tensor",))
    torch.manual_seed(0)
    module = Sharded().double()
    reference = copy.deepcopy(module)
    plan: dict[str, Any] = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=True),
        "down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
    }
    parallelize_module(module, mesh, plan)
    batches = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    found: dict[str, Any] = {}
    for _ in range(2):  # the first time, torch also runs operations to learn their placements
        for batch in batches:
            output = reference(batch)
            output.backward(output.detach().cos())
        flying = []
        for batch in batches:
            shared = distribute_tensor(batch, mesh, [Replicate()]).requires_grad_()
            work = DeferredGrads()
            with work:
                flying.append((work, module(shared)))
        found["undeferred"] = find_undeferred([y for _, y in flying])
        before = [p.grad for p in module.parameters()]
        with CommDebugMode() as sent, profile(activities=[ProfilerActivity.CPU]) as computed:
            for work, output in flying:
                with work:
                    output.backward(output.detach().cos())
        found["I"] = sent.get_total_counts() > 0, num_products(computed)
        assert all(p.grad is g for p, g in zip(module.parameters(), before, strict=True))
        with CommDebugMode() as sent, profile(activities=[ProfilerActivity.CPU]) as computed:
            for work, _ in flying:
                work.accumulate()
        found["W"] = sent.get_total_counts() > 0, num_products(computed)
    wanted = dict(reference.named_parameters())
    for name, param in module.named_parameters():
        assert isinstance(param.grad, DTensor)
        torch.testing.assert_close(param.grad.full_tensor(), wanted[name].grad)
    return found


def num_products(computed: profile) -> int:
    return sum(e.count for e in computed.key_averages() if e.key in ("aten::mm", "aten::addmm"))


def test_weight_gradients_of_dtensors_are_deferred() -> None:
    """I has the collectives, and half of the products; W has the other half."""
    for outcome in run_ranks(split, 2):
        found = outcome.result()
        assert found["undeferred"] == []
        assert found["I"] == (True, found["W"][1])
        assert found["W"][0] is False
        assert found["W"][1] > 0


class Passes(nn.Linear):
    """Passes on what lies over a mesh of which the next stage knows nothing."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(4, 4)
        self.mesh = mesh

    def forward(self, x: Tensor) -> Tensor:
        return DTensor.from_local(super().forward(x), self.mesh, [Replicate()])


def ask(rank: int, num_ranks: int) -> str:
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "tensor"))
    module = nn.Linear(4, 4) if rank else Passes(meshes["tensor"])
    stage = PipelineStage(module, rank, 2, CPU)
    schedule = ScheduleProgram([stage], build("1f1b", ranks=2, microbatches=2), F.mse_loss)
    try:
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
    except PenstockError as error:
        return str(error)
    return "nothing was raised"


def test_a_mesh_that_no_argument_names_needs_get_mesh() -> None:
    for outcome in run_ranks(ask, 2):
        assert "a DTensor (replicate over (tensor=1), (1, 4) in all)" in outcome.result()
        assert "get_mesh=" in outcome.result()


def find(rank: int, num_ranks: int) -> list[bool]:
    """Whether the mesh of a parameter is taken for that of what came: by names, never by sizes."""
    found = []
    for names in (("tensor",), None):
        meshes = [init_device_mesh("cpu", (1,), mesh_dim_names=names) for _ in range(2)]
        mine, theirs = (DTensor.from_local(torch.ones(2), m, [Replicate()]) for m in meshes)
        spread = dtensor_meta(theirs)
        assert spread is not None
        try:
            found.append(find_mesh(spread, [mine]) is meshes[0])
        except BoundaryError:
            found.append(False)
    return found


def test_a_mesh_is_found_by_the_names_of_its_dimensions() -> None:
    (outcome,) = run_ranks(find, 1)
    assert outcome.result() == [True, False]


def test_an_unnamed_placement_of_a_dtensor_is_refused() -> None:
    with pytest.raises(
        BoundaryError, match=r"the placement _S\(0, 2\) can.t cross .* redistribute"
    ):
        encode_placement(_StridedShard(0, split_factor=2))


# --- batches that are DTensors -----------------------------------------------------------------


def split_and_merge(rank: int, num_ranks: int) -> list[bool]:
    """Whether microbatches, and their merge, are those of torch."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("data",))
    batch = torch.arange(48.0).reshape(8, 6)
    same = []
    for dim, placed in itertools.product((0, 1), (Shard(0), Shard(1), Replicate())):
        given, chunks = distribute_tensor(batch, mesh, [placed]), 3 if dim else 4
        args_of = []
        for library in (microbatch, peer):
            args, _ = library.split_args_kwargs_into_chunks(
                (given,), {}, chunks, (library.TensorChunkSpec(dim),)
            )
            merged = library.merge_chunks([mb for (mb,) in args], library.TensorChunkSpec(dim))
            assert torch.equal(merged.full_tensor(), batch)
            args_of.append([*(mb for (mb,) in args), merged])
        for mine, theirs in zip(*args_of, strict=True):
            same.append((mine.placements, mine.shape) == (theirs.placements, theirs.shape))
            same.append(mine.placements == given.placements)
            same.append(torch.equal(mine.to_local(), theirs.to_local()))
    return same


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="compares with the API of torch 2.13 to 2.15"
)
def test_dtensors_are_split_as_torch_splits_them() -> None:
    for outcome in run_ranks(split_and_merge, 2):
        found = outcome.result()
        assert len(found) > 50 and all(found)


def sharded_batch(rank: int, num_ranks: int, case: str) -> str:
    """Two ranks per stage, each with its own rows of the batch: what the plain model gives."""
    meshes = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("pipeline", "data"))
    mesh, group = meshes["data"], meshes["pipeline"].get_group()
    plain = layers(2)
    reference = nn.Sequential(*copy.deepcopy(plain))
    rows_here: list[int] = []
    module = distribute_module(plain[group.rank()], mesh)
    module.register_forward_pre_hook(lambda _, args: rows_here.append(len(args[0].to_local())))
    example = distribute_tensor(torch.zeros(2, 6, dtype=torch.float64), mesh, [Shard(0)])
    declared = {"input_args": example} if case == "declared" else {}
    stage = PipelineStage(module, group.rank(), 2, CPU, group=group, **declared)
    made = build("1f1b", ranks=2, microbatches=MICROBATCHES)
    schedule = ScheduleProgram(
        [stage], made, lambda out, target: F.mse_loss(out, target, reduction="sum") / out.numel()
    )
    torch.manual_seed(0)
    inputs, target = torch.randn(2, 8, 6, dtype=torch.float64)
    if case == "uneven":
        inputs, target = inputs[:6], target[:6]
    placed = [Replicate() if case == "declared" else Shard(0)]
    x = distribute_tensor(inputs, mesh, placed)
    wanted = target if case == "plain target" else distribute_tensor(target, mesh, placed)
    try:
        output = schedule.step(*((x,) if group.rank() == 0 else ()), target=wanted)
    except (PenstockError, ValueError) as error:
        return str(error)
    assert rows_here == [1] * MICROBATCHES  # of two in a microbatch
    # Microbatches of other rows than those of a plain batch, whose mean is the same.
    F.mse_loss(reference(inputs), target).backward()
    for param, expected in zip(
        module.parameters(), reference[group.rank()].parameters(), strict=True
    ):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)
    if group.rank() == 1:
        assert output.placements == (Shard(0),)
        torch.testing.assert_close(output.full_tensor(), reference(inputs))
    return "trained"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("", "trained"),
        ("uneven", "a DTensor of 6 rows in 2 shards can't be split evenly into 4 microbatches"),
        ("plain target", "tensors of 8 rows in 1 and 2 shards would have different rows"),
        ("declared", "float64[2,6], replicate over (data=2), (2, 6) in all, expected float64"),
    ],
)
def test_a_batch_may_be_sharded_along_its_rows(case: str, told: str) -> None:
    for outcome in run_ranks(sharded_batch, 4, case):
        assert told in outcome.result()


def merge_in_order(rank: int, num_ranks: int) -> list[float]:
    """Outputs sharded by the model, of a batch that is not."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("data",))

    class Shards(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(0)])

    group = dist.new_group([rank], use_local_synchronization=True)
    stage = PipelineStage(Shards(), 0, 1, CPU, group=group)
    output = ScheduleProgram([stage], build("gpipe", ranks=1, microbatches=2)).eval(
        torch.arange(8.0)
    )
    assert output.placements == (Shard(0),)
    return output.full_tensor().tolist()


def test_outputs_come_in_the_order_of_the_batch() -> None:
    for outcome in run_ranks(merge_in_order, 2):
        assert outcome.result() == [*range(8)]
