"""Replicated stages within a step and after it: reduced once, restored, or refused."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from penstock import (
    PenstockError,
    Pipeline,
    PipelineStage,
    ScheduleProgram,
    StageError,
    build,
    get_schedule_class,
)
from penstock.cause import store_of
from penstock.parallel.data_parallel import start_averaging
from penstock.runtime import failure
from tests.compare import plain_step
from tests.crossings import Give, Take
from tests.distributed.launches import results_of
from tests.distributed.replicas import (
    CPU,
    DIM,
    NUM_MICROBATCHES,
    WRAPS,
    batch,
    make_layers,
    make_meshes,
    make_schedule,
    num_reductions,
    run_eval,
    run_step,
    whole,
)
from tests.processes import run_ranks


def count_reductions(rank: int, num_ranks: int) -> dict[str, list[int]]:
    """How many reductions of gradients each of two steps takes, per stage of the rank."""
    pipeline, replicas = make_meshes()
    counts: dict[str, list[int]] = {}
    every = itertools.product(("gpipe", "zbv"), ("ddp", "fsdp whole", "fsdp"))
    for name, wrap in (*every, ("zbv", "replicate")):
        schedule, modules = make_schedule(name, wrap, pipeline, replicas)
        for step in range(2):
            with torch.profiler.profile() as profiler:
                run_step(schedule, step, pipeline, replicas)
            found = num_reductions(profiler) - 1  # one is that of the losses
            counts.setdefault(f"{name} {wrap}", []).append(found // len(modules))
            assert found % len(modules) == 0
    return counts


def test_gradients_are_reduced_once_per_step_and_stage() -> None:
    # Under DDP one of the numbers that say which gradients there are, and one of the gradients;
    # of nested shards one for each of two linear layers, and one for what is around them.
    per_stage = {"ddp": 2, "replicate": 1, "fsdp whole": 1, "fsdp": 3}
    for outcome in run_ranks(count_reductions, 4):
        counts = outcome.result()
        assert len(counts) == 7
        for case, found in counts.items():
            assert found == [per_stage[case.partition(" ")[2]]] * 2, case


class Burst(nn.Module):
    """An identity that raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            raise RuntimeError("burst")
        return x


def use_after_steps(rank: int, num_ranks: int, breaks: bool) -> dict[str, list[Tensor]]:
    """Train a step, whole or broken; then the wrapped module by itself, as its owner would."""
    pipeline, replicas = make_meshes()
    if pipeline.get_local_rank() == 1:
        # These raise by themselves. Would one look before it does, and find that its replica has
        # failed, then it would give up their group.
        failure.READ_INTERVAL_S = 60.0
    grads = {}
    for wrap in ("ddp", "replicate", "fsdp"):
        torch.manual_seed(0)
        burst = Burst()
        inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), burst)
        module = WRAPS[wrap](inner, replicas)
        # The group of a broken step is of no use any more.
        group = dist.new_group(
            dist.get_process_group_ranks(pipeline.get_group()), use_local_synchronization=True
        )
        stage = PipelineStage(module, pipeline.get_local_rank(), 2, CPU, group=group)
        schedule = get_schedule_class("1f1b")(stage, 2, nn.functional.mse_loss)  # type: ignore[arg-type]
        burst.armed = breaks and pipeline.get_local_rank() == 1
        try:
            run_step(schedule, 0, pipeline, replicas)
            assert not breaks
        except PenstockError as error:
            assert breaks and "burst" in str(error)
        burst.armed = False
        module.zero_grad()
        module(batch(1, replicas.get_local_rank())[0]).sum().backward()
        grads[wrap] = [whole(p.grad) for p in module.parameters() if p.grad is not None]
    return grads


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
def test_after_a_step_the_module_reduces_by_itself_again(breaks: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    for replica in range(2):
        (plain(batch(1, replica)[0]).sum() / 2).backward()
    expected = [p.grad for p in plain.parameters()]
    for outcome in run_ranks(use_after_steps, 4, breaks):
        for grads in outcome.result().values():
            torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-6)


def average_large(rank: int, num_ranks: int) -> Tensor:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad = torch.full_like(param, 48_000.0)
    for wait in start_averaging([param], dist.group.WORLD, bucket_bytes=1 << 20):
        wait()
    return param.grad


def test_large_gradients_in_half_precision_do_not_overflow() -> None:
    for outcome in run_ranks(average_large, 2):
        assert outcome.result().tolist() == [48_000.0, 48_000.0]


def average_in_buckets(rank: int, num_ranks: int) -> tuple[bool, bool]:
    """Gradients of two dtypes, small and large, one of them transposed: means, in place."""
    params = [nn.Parameter(torch.zeros(n, 2)) for n in (8, 2, 2)]
    params.append(nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    for param in params:
        param.grad = torch.arange(param.numel()).reshape(param.shape).to(param.dtype) + rank
    if rank == 0:  # in another order in memory than on the other rank
        params[0].grad = params[0].grad.t().contiguous().t()  # type: ignore[union-attr]
    grads = [param.grad for param in params]
    for wait in start_averaging(params, dist.group.WORLD, bucket_bytes=32):
        wait()
    expected = [torch.arange(p.numel()).reshape(p.shape).to(p.dtype) + 0.5 for p in params]
    are_means = all(map(torch.equal, grads, expected))  # type: ignore[arg-type]
    return are_means, all(p.grad is grad for p, grad in zip(params, grads, strict=True))


def test_gradients_are_averaged_in_place_whatever_their_layout() -> None:
    for outcome in run_ranks(average_in_buckets, 2):
        assert outcome.result() == (True, True)


# --- beside computations -------------------------------------------------------------------------


def overlap(rank: int, num_ranks: int, wrap: str) -> bool:
    """Two stages of two replicas. The second replica joins the last stage's reduction, or gather,
    once the first one has run a computation of the first stage that follows it."""
    mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("dp", "pp"))
    first, last = (WRAPS[wrap](layer, mesh["dp"]) for layer in make_layers(2))
    stages = [
        PipelineStage(module, i, 2, CPU, group=mesh["pp"].get_group())
        for i, module in enumerate((first, last))
    ]
    schedule: Any = get_schedule_class("looped-bfs")(stages, 2, F.mse_loss, timeout_s=20)  # type: ignore[arg-type]
    store, key = store_of(dist.group.WORLD), "computed beside"

    def tell(*_: object) -> None:
        store.set(key, "")

    def wait(*_: object) -> None:
        assert failure.poll(lambda: store.check([key]) or None, for_s=10)

    x, target = batch(0, rank)
    schedule.step(x, target=target)  # torch makes groups and buckets
    if wrap == "ddp":
        if rank == 0:
            first.register_full_backward_hook(tell)
        else:
            last.register_full_backward_hook(wait)
    elif rank == 0:
        first.register_forward_hook(tell)
    else:
        unshard: Any = last.unshard
        last.unshard = lambda **options: (wait(), unshard(**options))[1]  # type: ignore[assignment]
    schedule.step(x, target=target)
    return store.check([key])


@pytest.mark.parametrize("wrap", ["ddp", "fsdp whole"])
def test_collectives_run_beside_computations(wrap: str) -> None:
    for outcome in run_ranks(overlap, 2, wrap):
        assert outcome.result()


# --- what users do with DDP beside --------------------------------------------------------------


def accumulate(rank: int, num_ranks: int, wrap: str, without_sync: bool) -> list[Tensor]:
    """Two steps without zeroing, the first one under DDP's no_sync() or not."""
    pipeline, replicas = make_meshes()
    schedule, modules = make_schedule("1f1b", wrap, pipeline, replicas)
    (module,) = modules
    with module.no_sync() if without_sync else contextlib.nullcontext():
        run_step(schedule, 0, pipeline, replicas)
    run_step(schedule, 1, pipeline, replicas)
    return [whole(p.grad) for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("without_sync", [False, True])
def test_gradients_accumulate_over_steps(without_sync: bool) -> None:
    layers = make_layers(2)
    for step in range(2):
        for replica in range(2):
            x, target = batch(step, replica)
            out = layers[1](layers[0](x))
            (nn.functional.mse_loss(out, target) / 2).backward()
    outcomes = [o.result() for o in run_ranks(accumulate, 4, "ddp", without_sync)]
    for pp_rank, layer in enumerate(layers):
        expected = [p.grad for p in layer.parameters()]
        for replica in range(2):
            told = outcomes[2 * pp_rank + replica]
            torch.testing.assert_close(told, expected, rtol=2e-5, atol=1e-6)


def finalize_last(rank: int, num_ranks: int) -> dict[str, tuple[list[Tensor], list[int]]]:
    """Three steps, the last of which reduces: its stages' gradients, and reductions per step."""
    pipeline, replicas = make_meshes()
    found = {}
    for name, wrap in itertools.product(("1f1b", "zbv"), ("ddp", "replicate", "fsdp", "parts")):
        schedule, modules = make_schedule(name, wrap, pipeline, replicas)
        counts = []
        for step in range(3):
            with torch.profiler.profile() as profiler:
                run_step(schedule, step, pipeline, replicas, finalize_gradients=step == 2)
            counts.append(num_reductions(profiler) - 1)  # one sums the losses
            run_eval(schedule, pipeline, replicas)
        params = [p for module in modules for p in module.parameters()]
        found[f"{name} {wrap}"] = [whole(p.grad) for p in params], counts
    return found


def test_steps_without_finalize_gradients_leave_the_reduction_to_the_last() -> None:
    expected = {}
    for name in ("1f1b", "zbv"):
        placement = build(name, ranks=2, microbatches=NUM_MICROBATCHES).placement
        model = nn.Sequential(*make_layers(placement.num_stages))
        for step, replica in itertools.product(range(3), range(2)):
            x, target = batch(step, replica)
            (F.mse_loss(model(x), target) / 2).backward()
        for rank in range(2):
            mine = [model[i] for i in placement.stages_of(rank)]
            expected[name, rank] = [p.grad for module in mine for p in module.parameters()]
    for rank, outcome in enumerate(run_ranks(finalize_last, 4)):
        for case, (grads, counts) in outcome.result().items():
            wanted = expected[case.partition(" ")[0], rank // 2]
            torch.testing.assert_close(grads, wanted, rtol=2e-5, atol=1e-6, msg=case)
            assert counts[:2] == [0, 0] and counts[2] > 0, case


def disagree(rank: int, num_ranks: int) -> str:
    schedule, _ = make_schedule("1f1b", "ddp", *(meshes := make_meshes()))
    with pytest.raises(PenstockError) as caught:
        run_step(schedule, 0, *meshes, finalize_gradients=rank < 2)
    return str(caught.value)


def test_ranks_that_disagree_on_finalizing_are_told() -> None:
    for outcome in run_ranks(disagree, 4):
        assert "step(finalize_gradients=False), after 0 others" in outcome.result()


def odd_parameters(rank: int, num_ranks: int) -> dict[str, float | None]:
    """Gradients of parameters that one replica alone uses, nobody uses, or DDP ignores."""
    pipeline, replicas = make_meshes()

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("used", "sometimes", "never", "ignored", "frozen"):
                self.register_parameter(name, nn.Parameter(torch.ones(())))
            self.get_parameter("frozen").requires_grad = False

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x * self.used * self.frozen + self.ignored
            return out * self.sometimes if replicas.get_local_rank() == 0 else out

    odd = Odd()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(odd, ["ignored"])
    module = DistributedDataParallel(odd, process_group=replicas.get_group())
    stage = PipelineStage(module, pipeline.get_local_rank(), 2, CPU, group=pipeline.get_group())
    schedule = get_schedule_class("1f1b")(stage, 2, lambda out, target: out.sum())  # type: ignore[arg-type]
    x = torch.full((2, 1), 1.0 + replicas.get_local_rank())
    schedule.step(*((x,) if pipeline.get_local_rank() == 0 else ()), target=x)
    return {
        name: None if param.grad is None else param.grad.item()
        for name, param in odd.named_parameters()
    }


def test_parameters_without_gradients_and_ignored_ones() -> None:
    first = [o.result() for o in run_ranks(odd_parameters, 4)[:2]]
    # The two replicas' gradients of the first stage's parameters, by hand: the mean over two
    # microbatches of x = 1 (replica 0) and x = 2 (replica 1).
    for told in first:
        assert told["used"] == (1 + 2) / 2
        assert told["sometimes"] == 2 / 2  # x + 1 on replica 0, nothing on replica 1
        assert told["never"] is None and told["frozen"] is None
        assert told["ignored"] == 1  # each its own


def refused(rank: int, num_ranks: int) -> list[str]:
    """What reduces when it wants to, or casts as it does."""
    pipeline, replicas = make_meshes()
    ddp = DistributedDataParallel(nn.Linear(DIM, DIM), process_group=replicas.get_group())
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)
    sharded = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(sharded)
    told = []
    static = DistributedDataParallel(
        nn.Linear(DIM, DIM), process_group=replicas.get_group(), static_graph=True
    )
    of_ddp = replicate(nn.Linear(DIM, DIM), device_mesh=replicas)
    for module in (ddp, static, nn.Sequential(sharded), of_ddp):
        with pytest.raises(StageError) as caught:
            PipelineStage(module, pipeline.get_local_rank(), 2, CPU, group=pipeline.get_group())
            get_schedule_class("1f1b")(  # type: ignore[call-arg]
                PipelineStage(
                    module, pipeline.get_local_rank(), 2, CPU, group=pipeline.get_group()
                ),
                4,
                nn.functional.mse_loss,
            )
        told.append(str(caught.value))
    for sparse in (True, False):
        module = nn.Sequential(nn.Embedding(7, DIM, sparse=sparse), nn.Linear(DIM, DIM))
        told.append(refused_in_a_step(rank, WRAPS["ddp"](module, replicas), not sparse))
    module = nn.Sequential(Lookup(), nn.Linear(DIM, DIM))
    told.append(refused_in_a_step(rank, WRAPS["ddp"](module, replicas), False))
    return told


class Lookup(nn.Module):
    """Has a sparse gradient, and is no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(7, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.table, sparse=True)


def refused_in_a_step(rank: int, module: Any, has_hook: bool) -> str:
    """The error of a step over one stage."""
    if has_hook:
        module.register_comm_hook(None, allreduce_hook)
    group = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(StageError) as caught:
        stage = PipelineStage(module, 0, 1, CPU, group=group)
        schedule = get_schedule_class("1f1b")(stage, 2, nn.functional.mse_loss)  # type: ignore[arg-type]
        schedule.step(torch.arange(4), target=torch.zeros(4, DIM))
    return str(caught.value)


def test_unsupported_wrappers_are_refused() -> None:
    for outcome in run_ranks(refused, 4):
        precise, static, fsdp1, of_ddp, sparse, hook, no_embedding = outcome.result()
        assert "or with mixed_precision=" in precise
        assert "wrapped in DDP with static_graph=" in static
        assert "use torch.distributed.fsdp.fully_shard instead" in fsdp1
        assert "under the replicate that is made of DDP" in of_ddp
        assert "a parameter of a replicated stage has a sparse gradient" in sparse
        assert "has a communication hook (register_comm_hook)" in hook
        assert "action 0REDUCE_GRAD: a parameter of a replicated stage has a sparse" in no_embedding


def shard_one_stage(rank: int, num_ranks: int) -> list[bool]:
    """Of two stages one is sharded: its ranks gather and reshard, the others have nothing to."""
    pipeline, replicas = make_meshes()
    mine = pipeline.get_local_rank()
    module = make_layers(2)[mine]
    stage = PipelineStage(
        WRAPS["fsdp"](module, replicas) if mine == 0 else module,
        mine,
        2,
        CPU,
        group=pipeline.get_group(),
    )
    schedule: Any = get_schedule_class("1f1b")(stage, 4, nn.functional.mse_loss, timeout_s=20)  # type: ignore[arg-type]
    run_step(schedule, 0, pipeline, replicas)
    return [p.grad is not None for p in module.parameters()]


def test_ranks_agree_where_only_some_are_sharded() -> None:
    for outcome in run_ranks(shard_one_stage, 4):
        assert all(outcome.result())


def leave_unsharded(rank: int, num_ranks: int) -> list[bool]:
    """A program from a file whose stages are unsharded at its end, as torch's are."""
    pipeline, replicas = make_meshes()
    schedule, modules = make_schedule("zbv", "fsdp", pipeline, replicas)
    params = [p for module in modules for p in module.parameters()]
    run_step(schedule, 0, pipeline, replicas)
    expected = [whole(p.grad) for p in params]
    one, _ = make_schedule("zbv", "fsdp", pipeline, replicas, max_active_stages=1)
    acts = map(str, one.pipeline_order_with_comms[rank // 2])
    kinds = [act[1:] for act in acts if act.endswith("SHARD")]
    assert len(kinds) > 4 and kinds == ["UNSHARD", "RESHARD"] * (len(kinds) // 2)
    rows = [[str(act) for act in row] for row in schedule.pipeline_order_with_comms.values()]
    for row in rows:
        last = max(i for i, text in enumerate(row) if text.endswith("UNSHARD"))
        row[last:] = [text for text in row[last:] if not text.endswith("RESHARD")]
    schedule.pipeline_order_with_comms = dict(enumerate(rows))
    for module in modules:
        module.zero_grad()
    run_step(schedule, 0, pipeline, replicas)
    assert str(schedule.pipeline_order_with_comms[rank // 2]) == f"[{', '.join(rows[rank // 2])}]"
    same = [torch.equal(whole(p.grad), grad) for p, grad in zip(params, expected, strict=True)]
    return [*same, all(hasattr(p, "placements") for m in modules for p in m.parameters())]


def test_stages_that_a_program_leaves_unsharded_are_resharded_at_its_end() -> None:
    for outcome in run_ranks(leave_unsharded, 4):
        assert all(outcome.result())


def shard_around_a_class(rank: int, num_ranks: int) -> list[str]:
    """The parameters that a step leaves without the plain loop's gradient."""
    mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("replica", "stage"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 6), Give("registered"), Take("registered"))
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        list(model), loss_fn=F.mse_loss, schedule="interleaved-1f1b", n_microbatches=2,
        virtual=3, group=mesh["stage"].get_group(),
    )  # fmt: skip
    for stage in pipe.stages:
        fully_shard(stage.submod, mesh=mesh["replica"])
    inputs, target = torch.ones(4, DIM), torch.zeros(4, 6)
    for _ in range(2):
        pipe.step(inputs, target=target)
        plain_step(plain, F.mse_loss, inputs, target=target, n_microbatches=2)
    expected = [(name, param.grad) for name, param in plain.named_parameters()]
    found = [None if param.grad is None else whole(param.grad) for param in pipe.parameters()]
    return [
        name
        for (name, wanted), grad in zip(expected, found, strict=True)
        if grad is None or wanted is None or not torch.allclose(grad, wanted)
    ]


def test_parameters_ignored_by_fsdp_are_reduced_all_the_same() -> None:
    """It hears of a backward by the tensors of its module's output, as far as it sees them."""
    for outcome in run_ranks(shard_around_a_class, 2):
        assert outcome.result() == []


def share_buffers(rank: int, num_ranks: int, under_no_grad: bool) -> list[str]:
    """Steps in a pipeline beside those of DDP itself, which accumulates; returns what differs."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Tanh()))
    mine, theirs = modules
    native = DistributedDataParallel(theirs, process_group=mesh.get_group())
    group = dist.new_group([rank], use_local_synchronization=True)
    stage = PipelineStage(WRAPS["ddp"](mine, mesh), 0, 1, CPU, group=group)
    program = build("looped-bfs", ranks=1, virtual=1, microbatches=NUM_MICROBATCHES)
    mse = nn.functional.mse_loss
    schedule = ScheduleProgram([stage], program, mse, backward_requires_autograd=not under_no_grad)
    wrong = []

    def compare(moment: str) -> None:
        for name, buffer in theirs.named_buffers():
            if not torch.equal(buffer, mine.get_buffer(name)):
                wrong.append(f"{moment}: {name}")

    for step in range(3):
        x, target = batch(step, rank)
        with torch.set_grad_enabled(not under_no_grad):
            schedule.step(x, target=target)
        parts = list(zip(x.chunk(NUM_MICROBATCHES), target.chunk(NUM_MICROBATCHES), strict=True))
        for i, (x_mb, target_mb) in enumerate(parts):
            is_last = i + 1 == len(parts)
            with contextlib.nullcontext() if is_last else native.no_sync():
                (nn.functional.mse_loss(native(x_mb), target_mb) / len(parts)).backward()
        compare(f"step {step}")
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        if step == 1:
            mine.eval(), theirs.eval()
            with torch.no_grad():
                expected = torch.cat([native(x_mb) for x_mb, _ in parts])
            assert torch.equal(schedule.eval(x), expected)
            compare("evaluation")
            mine.train(), theirs.train()
    return wrong


@pytest.mark.parametrize("under_no_grad", [False, True])
def test_buffers_are_the_first_replica_s(under_no_grad: bool) -> None:
    cases = ((False,), (True,))
    assert results_of(share_buffers, 2, cases, (under_no_grad,)) == [[], []]
