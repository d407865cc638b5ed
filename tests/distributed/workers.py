"""What each rank's process runs, to train a pipeline beside the plain model.

Every rank holds the whole plain model too, and compares its own stages with it, so all that goes
back is what was wrong: a text per case, empty where nothing was.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import pickle
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline, PipelineStage, ScheduleGPipe, get_schedule_class
from penstock.runtime.comm.c10d import C10dTransport
from tests.agreement import ROUNDING, Twins
from tests.compare import plain_step
from tests.crossings import SUMMED, crossing_model
from tests.models import CASES, DIM, features, mlp, token_loss, tokens

__all__ = [
    "Plan",
    "cross",
    "given_tensors",
    "losses_and_traces",
    "replicated",
    "restless",
    "shapes_and_freezing",
    "side_by_side",
    "subgroup",
    "train",
    "unfrozen",
]

# A rank whose comparison fails leaves the others waiting in the next step.
TIMEOUT_S = 20.0


class Plan(NamedTuple):
    """One pipeline to train."""

    model: str
    schedule: str
    virtual: int
    microbatches: int
    all_inputs: bool


def told(run: Callable[..., None], *args: Any, **kwargs: Any) -> str:
    """What went wrong in ``run``; empty if nothing did."""
    try:
        run(*args, **kwargs)
    except Exception:
        return traceback.format_exc()
    return ""


def train(rank: int, num_ranks: int, plans: list[tuple[Any, ...]]) -> list[str]:
    """Train each plan's pipeline over all ranks."""
    every = [Plan(*plan) for plan in plans]
    # A group per schedule: the broken connections of one that fails are not those of the next.
    groups = {
        name: dist.new_group(list(range(num_ranks))) for name in sorted({p.schedule for p in every})
    }
    return [
        told(_evaluate if plan.schedule == "forward-only" else _train, plan, groups[plan.schedule])
        for plan in every
    ]


def _evaluate(plan: Plan, group: dist.ProcessGroup) -> None:
    case = CASES[plan.model]
    model = case.make(max(3, group.size() * plan.virtual))
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        loss_fn=case.loss_fn,
        schedule=plan.schedule,
        virtual=plan.virtual,
        n_microbatches=plan.microbatches,
        group=group,
        timeout_s=TIMEOUT_S,
        **({} if group.size() > 1 else {"ranks": 1}),
    )
    has_first, has_last = (
        any(getattr(stage, which) for stage in pipe.stages) for which in ("is_first", "is_last")
    )
    for rows in (2 * plan.microbatches, plan.microbatches + 1, 1):
        inputs, target = case.batch(rows, 0)
        expected = plain_step(
            plain, case.loss_fn, inputs, target=target, n_microbatches=plan.microbatches
        )
        out = pipe.eval(
            *((inputs,) if plan.all_inputs or has_first else ()),
            target=target if plan.all_inputs or has_last else None,
        )
        assert (out is not None) == has_last
        assert out is None or torch.equal(out, torch.cat(expected.outputs))
        assert len(pipe.losses) == min(rows, plan.microbatches)
        assert all(map(torch.equal, pipe.losses, expected.losses))
    assert all(p.grad is None for p in pipe.parameters())


def _train(plan: Plan, group: dist.ProcessGroup) -> None:
    case = CASES[plan.model]
    both = Twins(
        case.make(max(3, group.size() * plan.virtual)),
        case.loss_fn,
        all_inputs=plan.all_inputs,
        schedule=plan.schedule,
        virtual=plan.virtual,
        n_microbatches=plan.microbatches,
        group=group,
        timeout_s=TIMEOUT_S,
        **({} if group.size() > 1 else {"ranks": 1}),
    )
    assert both.pipe.is_distributed == (group.size() > 1)
    assert both.pipe.num_ranks == group.size()
    _all_parameters_are_somewhere(both, group)
    calls = [0] * len(both.pipe.stages)
    for i, stage in enumerate(both.pipe.stages):
        stage.submod.register_forward_hook(lambda *_, i=i: operator.setitem(calls, i, calls[i] + 1))

    def expect_calls() -> None:
        """Each module has been called once per microbatch."""
        assert calls == [plan.microbatches] * len(calls)
        calls[:] = [0] * len(calls)

    for step, rows in enumerate((2 * plan.microbatches, plan.microbatches + 1)):
        inputs, target = case.batch(rows, step)
        for _ in range(2 - step):  # gradients of two steps add up
            both.step(inputs, target=target)
            expect_calls()
        both.descend()
        if plan.model != "convnet":  # whose evaluation counts batches, split differently
            both.eval(case.batch(rows + 3, 10 + step)[0])
            expect_calls()
    inputs, target = case.batch(max(1, plan.microbatches - 1), 2)
    both.step(inputs, target=target)


def _all_parameters_are_somewhere(both: Twins, group: dist.ProcessGroup) -> None:
    names: list[list[str]] = [[] for _ in range(group.size())]
    dist.all_gather_object(names, [name for name, _ in both.pipe.named_parameters()], group=group)
    held = [name for part in names for name in part]
    assert sorted(held) == sorted(name for name, _ in both.plain.named_parameters())


def cross(rank: int, num_ranks: int, names: list[str], schedule: str, dynamic: bool) -> list[str]:
    """Send what ``tests.crossings`` gives between the ranks, where nothing can be pickled."""
    return [told(_cross, name, schedule, dynamic) for name in names]


def _cross(name: str, schedule: str, dynamic: bool) -> None:
    both = Twins(
        crossing_model(name),
        F.mse_loss,
        tolerance=ROUNDING if name in SUMMED else None,
        schedule=schedule,
        n_microbatches=3,
        dynamic_shapes=dynamic,
        timeout_s=TIMEOUT_S,
    )
    with unpickled():
        for step, rows in enumerate((6, 5)):
            inputs, target = features(rows, step)
            both.step(inputs, target=target)
            both.eval(inputs)


@contextlib.contextmanager
def unpickled() -> Iterator[None]:
    """Within, whatever pickles raises: what is read from another rank is never run as code."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("something is pickled")

    with contextlib.ExitStack() as stack:
        for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
            stack.enter_context(mock.patch.object(pickle, name, refuse))
        for name in ("_pickler", "_unpickler"):
            stack.enter_context(mock.patch.object(distributed_c10d, name, refuse))
        yield


def shapes_and_freezing(rank: int, num_ranks: int, schedules: list[str]) -> list[str]:
    """Shapes that change from step to step, and parameters that are frozen in between."""
    return [told(_shapes_and_freezing, schedule) for schedule in schedules]


def _shapes_and_freezing(schedule: str) -> None:
    both = Twins(
        CASES["gpt"].make(4),
        token_loss,
        schedule=schedule,
        n_microbatches=3,
        all_inputs=False,
        timeout_s=TIMEOUT_S,
    )
    for step, (rows, length) in enumerate([(6, 5), (4, 5), (6, 9), (3, 1), (6, 5)]):
        inputs, target = tokens(rows, step, length)
        both.step(inputs, target=target)
        both.eval(tokens(rows + step, 50 + step, length + 1)[0])
        if step == 2:
            _train_layers(both, (0, 1), False)


def unfrozen(rank: int, num_ranks: int, schedule: str, layers: int) -> str:
    """What went wrong where layers are unfrozen from the last one down, and frozen again."""
    return told(_unfrozen, schedule, layers)


def _unfrozen(schedule: str, layers: int) -> None:
    both = Twins(mlp(layers), F.mse_loss, schedule=schedule, n_microbatches=3, timeout_s=TIMEOUT_S)
    _train_layers(both, tuple(range(layers - 1)), False)
    for step in range(2 * layers + 1):
        layer = layers - 1 - step // 2
        if step % 2 == 0 and layer >= 0:
            _train_layers(both, (layer,), True)
        if step == layers:
            _train_layers(both, (layers - 1,), False)
        inputs, target = features(6, step)
        both.step(inputs, target=target)


def _train_layers(both: Twins, layers: tuple[int, ...], trained: bool) -> None:
    for model in (both.plain, both.pipe):
        for name, param in model.named_parameters():
            if int(name.split(".")[0]) in layers:
                param.requires_grad_(trained)


class Annealed(nn.Linear):
    """Passes on a number that is set from outside."""

    temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.temperature


class Repeats(nn.Linear):
    """Its output is as long as it is told."""

    def forward(self, x: Tensor, temperature: float, times: int = 1) -> Tensor:
        return super().forward(x / temperature).repeat(1, times)


class Shortens(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :DIM] * x.size(1))


def restless(rank: int, num_ranks: int, schedules: list[str]) -> list[str]:
    """What crosses changes from step to step, and the first stage's inputs do not."""
    return [told(_restless, rank, schedule) for schedule in schedules]


def _restless(rank: int, schedule: str) -> None:
    torch.manual_seed(0)
    plain = [Annealed(DIM, DIM), Repeats(DIM, DIM), Shortens(DIM, DIM)]
    stage = PipelineStage(copy.deepcopy(plain[rank]), rank, 3, torch.device("cpu"))
    cls: Any = get_schedule_class(schedule)
    mine = cls(stage, 3, F.mse_loss, timeout_s=TIMEOUT_S)
    for step, times in enumerate((1, 2, 3, 1)):
        for module in (plain[0], stage.submod):
            module.temperature = 1.0 / times

        def whole(x: Tensor, times: int = times) -> Tensor:
            out: Tensor = plain[2](plain[1](*plain[0](x), times))
            return out

        inputs, target = features(6, step)
        mine.step(
            *((inputs,) if rank == 0 else ()),
            target=target,
            **({"times": times} if rank == 1 else {}),
        )
        plain_step(whole, F.mse_loss, inputs, target=target, n_microbatches=3)
        expected = [p.grad for p in plain[rank].parameters()]
        assert all(map(torch.equal, [p.grad for p in stage.submod.parameters()], expected))


class Masks(nn.Linear):
    times = 1

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (super().forward(x) * mask).repeat_interleave(self.times, 0)


def given_tensors(rank: int, num_ranks: int) -> dict[str, Any]:
    """The middle rank is given a tensor; how many notes it sends by step, and what goes wrong.

    The last two are of another shape than those before, and make what crosses so. An attribute that
    is set then does it too, and nobody sees that ahead.
    """
    notes: list[int] = []
    send_metadata = C10dTransport.send_metadata

    def counted(self: C10dTransport, *args: Any) -> None:
        notes[-1] += 1
        send_metadata(self, *args)

    C10dTransport.send_metadata = counted  # type: ignore[method-assign]
    module = Masks(DIM, DIM) if rank == 1 else nn.Linear(DIM, DIM)
    stage = PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, F.mse_loss, timeout_s=TIMEOUT_S)
    x, target = torch.ones(4, DIM), torch.ones(4, DIM)

    def step(mask: Tensor) -> None:
        notes.append(0)
        schedule.step(
            *((x,) if rank == 0 else ()), target=target, **({"mask": mask} if rank == 1 else {})
        )

    for shape in [(4, 1)] * 3 + [(4, 1, 1)] * 2:
        step(torch.ones(shape))
    if rank == 1:
        Masks.times = 2
    return {"notes": notes[:5], "error": told(step, torch.ones(4, 1, 1))}


def losses_and_traces(rank: int, num_ranks: int, schedule: str) -> dict[str, Any]:
    """The losses, metrics and trace as this rank sees them."""
    model = CASES["mlp"].make(2 * num_ranks)
    pipe = Pipeline(
        model,
        loss_fn=lambda out, target: (F.mse_loss(out, target), len(out)),
        schedule=schedule,
        n_microbatches=3,
        timeout_s=TIMEOUT_S,
    )
    inputs, target = features(7, 0)
    loss = pipe.step(inputs, target=target)
    trace = pipe.trace()
    return {
        "loss": loss,
        "losses": list(pipe.losses),
        "metrics": list(pipe.metrics),
        "spans": [(s.rank, str(s.action), s.start, s.end) for s in trace.spans],
        "program": [[str(a) for step in r for a in step.parts] for r in pipe.program.ranks],
        "bubble_ratio": trace.bubble_ratio,
        "eval": pipe.eval(inputs) is not None,
        "eval losses": len(pipe.losses),
        "eval losses with a target": (pipe.eval(inputs, target=target), list(pipe.losses))[1],
        "last": pipe.stages[-1].is_last or pipe.stages[0].is_last,
        "dtypes": _loss_dtypes(model, schedule),
    }


def _loss_dtypes(model: nn.Sequential, schedule: str) -> list[torch.dtype]:
    """Those of a loss under autocast, without it, under it again; and of a count, in eval()."""

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return out.mean() if torch.is_grad_enabled() else (out > target).sum()

    pipe = Pipeline(
        model, loss_fn=loss_fn, schedule=schedule, n_microbatches=2, timeout_s=TIMEOUT_S
    )
    inputs, target = features(4, 0)
    found = []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(pipe.step(inputs, target=target).dtype)
    pipe.eval(inputs, target=target)
    return [*found, pipe.losses[0].dtype]


def subgroup(rank: int, num_ranks: int, members: list[int], schedule: str) -> str:
    """A pipeline over some of the ranks; the others do something else."""
    group = dist.new_group(members)
    if rank not in members:
        return ""
    return told(_subgroup, group, schedule)


def _subgroup(group: dist.ProcessGroup, schedule: str) -> None:
    _train(Plan("mlp", schedule, 2 if schedule == "zbv" else 1, 3, False), group)


def side_by_side(rank: int, num_ranks: int, schedules: list[str]) -> str:
    """Two pipelines at once, over two ranks each."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    mine = 0 if rank in (0, 2) else 1
    return told(_subgroup, groups[mine], schedules[mine])


def replicated(rank: int, num_ranks: int, schedules: list[tuple[str, int]]) -> list[str]:
    """Data parallel 2 × pipeline 2: ranks 0, 1 and 2, 3 are pipelines, 0, 2 and 1, 3 replicas."""
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = pipelines[rank // 2], replicas[rank % 2]
    return [told(_replicated, rank, *mine, schedule, virtual) for schedule, virtual in schedules]


def _replicated(
    rank: int,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup,
    schedule: str,
    virtual: int,
) -> None:
    torch.manual_seed(0)
    model = mlp(4)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        loss_fn=F.mse_loss,
        schedule=schedule,
        n_microbatches=3,
        virtual=virtual,
        group=group,
        timeout_s=TIMEOUT_S,
    )
    modules = nn.ModuleList(stage.submod for stage in pipe.stages)
    for stage in pipe.stages:
        stage.submod = DistributedDataParallel(stage.submod, process_group=replicas)
    halves = [features(6, seed) for seed in range(4)]
    for step in range(2):
        # Mean over the replicas, as DDP has it: each plain gradient counts half.
        batches = halves[2 * step : 2 * step + 2]
        for inputs, target in batches:
            plain_step(
                plain,
                lambda out, target: F.mse_loss(out, target) / 2,
                inputs,
                target=target,
                n_microbatches=3,
            )
        inputs, target = batches[rank // 2]
        pipe.step(inputs, target=target)
        mine = {n: p for module in modules for n, p in module.named_parameters()}
        assert mine
        for name, param in plain.named_parameters():
            if name in mine:
                torch.testing.assert_close(mine[name].grad, param.grad)
                copies = [torch.empty_like(param) for _ in range(2)]
                dist.all_gather(copies, mine[name].grad, group=replicas)
                assert torch.equal(copies[0], copies[1])
        for each in (plain, modules):
            each.zero_grad()
