"""Hooks, replicas, checkpointing, compiled regions: each runs as often as it would, and when."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock import Pipeline
from penstock.errors import StageError
from penstock.stage.stage import holding_back
from penstock.stage.weight_grad import CannotDeferError, DeferredGrads, find_undeferred
from tests.compare import plain_step
from tests.stage.deferral_cases import (
    Block,
    Calls,
    Scale,
    assert_same,
    gradients,
    plain,
    some_grads,
    split,
    x,
)

Loss = Callable[[Tensor, Tensor], Tensor]


def forward_and_input_grad(module: nn.Module, *inputs: Tensor) -> DeferredGrads:
    """F and I of one microbatch."""
    work = DeferredGrads()
    with work:
        out = module(*inputs)
    with work:
        torch.autograd.backward((out,), (torch.ones_like(out),))
    return work


def test_hooks_of_parameters_run_once_with_w() -> None:
    module = Calls(lambda m, t: m.l(m.l(t)) @ m.l.weight.T, l=nn.Linear(3, 3))
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append(f"{name} tensor"))
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: seen.append(f"{name} accumulated")
        )
    work = forward_and_input_grad(module, x(2, 3))
    assert seen == []
    work.accumulate()
    assert sorted(seen) == [
        "l.bias accumulated",
        "l.bias tensor",
        "l.weight accumulated",
        "l.weight tensor",
    ]


@pytest.mark.parametrize("twice", [False, True])
def test_a_hook_sees_the_gradient_of_all_uses(twice: bool) -> None:
    linear = nn.Linear(3, 3)
    module, t = nn.Sequential(linear, linear) if twice else linear, x(4, 3)
    seen: list[Tensor] = []
    linear.weight.register_hook(seen.append)
    out = module(t)
    torch.autograd.backward((out,), (torch.ones_like(out),))
    forward_and_input_grad(module, t).accumulate()
    whole, deferred = seen
    assert torch.equal(deferred, whole)


def test_an_optimizer_in_the_backward_steps_with_w() -> None:
    torch.manual_seed(0)
    module = Block(8, 2)
    twin = copy.deepcopy(module)
    inputs = (x(2, 3, 8),)

    def stepped(module: nn.Module) -> None:
        for parameter in module.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)

    stepped(module)
    stepped(twin)
    for _ in range(3):
        out = twin(*inputs)
        torch.autograd.backward((out,), (torch.ones_like(out),))
        forward_and_input_grad(module, *inputs).accumulate()
    for got, wanted in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_reduces_once_in_w(one_process: None) -> None:
    torch.manual_seed(0)
    module, inputs = Block(8, 2), (x(2, 3, 8),)
    out = module(*inputs)
    torch.autograd.backward((out,), (torch.ones_like(out),))
    expected = {name: p.grad for name, p in module.named_parameters()}
    wrapped = DistributedDataParallel(module)
    buckets: list[int] = []

    def reduce(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as text
        buckets.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    wrapped.register_comm_hook(None, reduce)
    for _ in range(3):
        module.zero_grad()
        work = forward_and_input_grad(wrapped, *inputs)
        assert buckets == []
        work.accumulate()
        assert len(set(buckets)) == len(buckets) > 0
        buckets.clear()
        got = {name: p.grad for name, p in module.named_parameters()}
        assert_same(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_region_is_recomputed_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    runs: list[int] = []

    def run(m: Calls, t: Tensor) -> Tensor:
        def inner(hidden: Tensor) -> Tensor:
            runs.append(1)
            hidden = m.block(m.norm(hidden) * m.scale)
            return F.linear(hidden, m.w * m.scale).relu_() @ m.w.T

        return checkpoint(inner, m.up(t), use_reentrant=reentrant)

    module = Calls(
        run,
        block=Block(8, 2),
        up=nn.Linear(4, 8),
        scale=nn.Parameter(torch.randn(8)),
        norm=nn.BatchNorm1d(3),
        w=nn.Parameter(torch.randn(8, 8)),
    )
    inputs = (x(2, 3, 4),)
    expected = plain(module, inputs)
    runs.clear()
    assert_same(split(module, inputs), expected, exact=False)
    assert len(runs) == 2  # in F and in I
    work = forward_and_input_grad(module, *inputs)
    # All that takes an activation in the region waits for W.
    assert module.block.up.weight.grad is None
    work.accumulate()
    assert module.block.up.weight.grad is not None


def test_a_checkpoint_holds_nothing_of_its_region() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    work = DeferredGrads()
    with work:
        checkpoint(module, x(2, 4), use_reentrant=False)
    assert all(record is None for record in work.records)


def test_saved_tensors_on_cpu() -> None:
    module, inputs = Block(8, 2), (x(2, 3, 8),)
    expected = plain(module, inputs)
    with torch.autograd.graph.save_on_cpu():
        found = split(module, inputs)
    assert_same(found, expected)


def test_the_parameters_of_a_custom_function_are_found() -> None:
    module = Calls(
        lambda m, t: Scale.apply(m.l(t), m.w) * m.w,
        l=nn.Linear(3, 3),
        w=nn.Parameter(torch.ones(3)),
    )
    inputs = (x(2, 3),)
    seen: list[str] = []
    module.w.register_post_accumulate_grad_hook(lambda _: seen.append("w"))
    work = DeferredGrads()
    with work:
        out = module(*inputs)
    undeferred = find_undeferred([out])
    assert [id(p) for p in undeferred] == [id(module.w)]

    work = DeferredGrads(undeferred)
    with work:
        out = module(*inputs)
    with work:
        torch.autograd.backward((out,), (torch.ones_like(out),))
    assert seen == ["w"]
    work.accumulate()
    assert seen == ["w"]
    out = module(*inputs)
    found = gradients(module, ())
    module.zero_grad()
    torch.autograd.backward((out,), (torch.ones_like(out),))
    assert_same(found, gradients(module, ()))


class Squared(nn.Module):
    """Uses its weight in a custom function, which can't be seen, and in a deferred operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, t: Tensor) -> Tensor:
        out: Tensor = Scale.apply(t, self.weight) * self.weight
        return out


@pytest.mark.parametrize("schedule", ["zbv", "interleaved-zb"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_hooks_see_the_full_gradient_of_an_undeferred_parameter_once(
    schedule: str, microbatches: int
) -> None:
    """From the first microbatch on, in whose forward the parameter is found."""
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(3, 3), Squared()) for _ in range(4)]
    plain = copy.deepcopy(stages)
    fired: list[int] = []

    def hook(model: list[nn.Sequential]) -> list[nn.Parameter]:
        weights: list[nn.Parameter] = [stage[1].weight for stage in model]  # type: ignore[misc]
        for weight in weights:
            weight.register_hook(lambda grad: grad * grad)  # not the same of a sum and of its parts
        return weights

    for index, weight in enumerate(hook(stages)):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: fired.append(index))
    hook(plain)
    pipe = Pipeline(
        stages, loss_fn=F.mse_loss, schedule=schedule, ranks=2, n_microbatches=microbatches
    )
    inputs, target = torch.randn(6, 3), torch.randn(6, 3)
    for step in range(2):
        pipe.step(inputs, target=target)
        plain_step(
            nn.Sequential(*plain), F.mse_loss, inputs, target=target, n_microbatches=microbatches
        )
        assert sorted(fired) == sorted([*range(4)] * microbatches * (step + 1))
        for ours, theirs in zip(stages, plain, strict=True):
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)


def steps_alike(
    model: nn.Sequential, plain: nn.Module, loss_fn: Loss, plain_loss_fn: Loss, schedule: str,
    *, steps: int,
) -> Iterator[int]:  # fmt: skip
    """Train over two ranks and by the plain loop; yield each step once the gradients are equal."""
    pipe = Pipeline(model, loss_fn=loss_fn, schedule=schedule, ranks=2, n_microbatches=4)
    inputs, target = torch.randn(8, 3), torch.randn(8, 3)
    for step in range(steps):
        pipe.step(inputs, target=target)
        plain_step(plain, plain_loss_fn, inputs, target=target, n_microbatches=4)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        yield step


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_hooks_see_the_full_gradient_of_a_parameter_that_is_unfrozen(schedule: str) -> None:
    """In the first steps its use in a custom function is in no graph."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), Squared()) for _ in range(4)))
    plain = copy.deepcopy(model)
    for each in (model, plain):
        for layer in each:
            layer[1].weight.register_hook(lambda grad: grad.clamp(-0.02, 0.02))  # type: ignore[index]
            layer[1].weight.requires_grad_(False)  # type: ignore[index]
    for step in steps_alike(model, plain, F.mse_loss, F.mse_loss, schedule, steps=3):
        if step == 0:
            for each in (*model, *plain):
                each[1].weight.requires_grad_(True)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_hooks_see_the_gradient_of_the_layer_and_of_the_loss_at_once(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    plain = copy.deepcopy(model)
    fired: list[str] = []

    def loss_of(each: nn.Sequential) -> Loss:
        weight = each[-1].get_parameter("weight")
        weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
        return lambda out, target: F.mse_loss(out, target) + weight.pow(2).sum() / 2

    loss_fn, plain_loss_fn = loss_of(model), loss_of(plain)
    weight = model[-1].get_parameter("weight")
    weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight"))
    for step in steps_alike(model, plain, loss_fn, plain_loss_fn, schedule, steps=2):
        assert len(fired) == 4 * (step + 1)


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_hooks_see_one_gradient_where_some_microbatches_losses_use_the_parameter(
    schedule: str, kind: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    plain = copy.deepcopy(model)

    def loss_of(each: nn.Sequential) -> tuple[Loss, list[Tensor]]:
        weight, calls, seen = each[-1].get_parameter("weight"), itertools.count(), []

        def hook(tensor: Tensor) -> None:  # of the gradient, or of the parameter
            seen.append(tensor.clone())

        def loss_fn(out: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(out, target) + (weight.pow(2).sum() if next(calls) % 2 else 0)

        getattr(weight, kind)(hook)
        return loss_fn, seen

    (loss_fn, seen), (plain_loss_fn, expected) = loss_of(model), loss_of(plain)
    assert [*steps_alike(model, plain, loss_fn, plain_loss_fn, schedule, steps=1)] == [0]
    assert len(seen) == 4
    if kind == "register_hook":  # in the order of W, or of I for those that it computes
        for gradients in (seen, expected):
            gradients.sort(key=lambda grad: grad.norm().item())
        torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_a_loss_that_runs_a_backward_of_its_own(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    plain = copy.deepcopy(model)

    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        (out.abs().mean() / 4).backward(retain_graph=True)
        return F.mse_loss(out, target)

    steps = steps_alike(model, plain, loss_fn, loss_fn, schedule, steps=1)
    if schedule == "1f1b":
        assert [*steps] == [0]
        return
    with pytest.raises(CannotDeferError, match=r"the module or its loss calls backward\(\)"):
        next(steps)


def test_an_undeferred_gradient_is_added_once_to_one_that_is_there() -> None:
    torch.manual_seed(0)
    module, inputs = (
        Calls(lambda m, t: Scale.apply(t, m.w) + m.w, w=nn.Parameter(torch.ones(3))),
        x(2, 3),
    )
    expected = plain(module, (inputs,), steps=2)
    leaf = inputs.detach().clone().requires_grad_()
    for _ in range(2):
        work = DeferredGrads()
        with work:
            out = module(leaf)
        work.note_undeferred(find_undeferred([out]))
        with work, holding_back(work.mixed) as held:
            torch.autograd.backward([out], some_grads([out]))
        work.add_computed(held)
        work.accumulate()
    assert_same(gradients(module, (leaf,)), expected)


class Normalized(nn.Module):
    """Keeps its weight at norm one, by assigning other data to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 2)

    def forward(self, t: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return F.linear(t, self.weight)


def test_data_assigned_to_a_weight_in_the_forward_are_the_weight_from_then_on() -> None:
    module, inputs = Normalized(), (x(2, 3),)
    assert_same(split(module, inputs), plain(module, inputs), exact=False)
    with DeferredGrads():
        module(*inputs)
    torch.testing.assert_close(module.weight.norm(), torch.tensor(1.0))


def test_ordinary_modules_have_no_undeferred_parameters() -> None:
    module = nn.Sequential(Block(8, 2), nn.BatchNorm1d(3), nn.LSTM(8, 4))
    with DeferredGrads():
        out, _ = module(x(2, 3, 8))
    assert find_undeferred([out, None, 3]) == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_submodule(backend: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    first, middle, last = Block(8, 2), nn.Linear(8, 8), Block(8, 2)
    inputs = (x(2, 3, 8),)
    expected = plain(nn.Sequential(first, middle, last), inputs, steps=2)
    module = nn.Sequential(first, torch.compile(middle, backend=backend), last)
    works = []
    leaf = inputs[0].detach().clone().requires_grad_()
    for _ in range(2):
        work = DeferredGrads()
        with work:
            out = module(leaf)
        works.append((work, out))
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(out.shape, generator=generator)
    for work, out in works:
        with work:
            torch.autograd.backward((out,), (grad,))
    assert last.up.weight.grad is None
    for work, _ in works:
        work.accumulate()
    found = gradients(nn.Sequential(first, middle, last), (leaf,))
    assert_same(found, expected, exact=False)


def test_a_function_that_is_compiled_on_its_own() -> None:
    torch.compiler.reset()

    @torch.compile(backend="eager", fullgraph=True)
    def scaled(t: Tensor, weight: Tensor) -> Tensor:
        return t * t.square().mean(-1, keepdim=True).rsqrt() * weight

    module = Calls(lambda m, t: m.l(scaled(t, m.l.bias)), l=nn.Linear(3, 3))
    inputs = (x(2, 3),)
    assert_same(split(module, inputs), plain(module, inputs), exact=False)


@pytest.mark.parametrize("target", ["linear", "conv", "matmul"])
def test_autocast(target: str) -> None:
    members: dict[str, tuple[Callable[..., object], Tensor, dict[str, nn.Module]]] = {
        "linear": (
            lambda m, t: m.n(m.l(t)),
            x(2, 3, 8),
            {"l": nn.Linear(8, 8), "n": nn.LayerNorm(8)},
        ),
        "conv": (lambda m, t: m.c(t), x(2, 3, 8), {"c": nn.Conv1d(3, 4, 3)}),
        "matmul": (
            lambda m, t: m.b(t @ m.l.weight),
            x(2, 3, 8),
            {"l": nn.Linear(8, 8), "b": Block(8, 2)},
        ),
    }
    function, t, modules = members[target]

    def run(m: Calls, t: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return function(m, t)

    module = Calls(run, **modules)
    expected = plain(module, (t,), steps=2)
    assert_same(split(module, (t,), steps=2), expected)


def test_an_input_changed_after_the_forward_is_refused() -> None:
    module, t = nn.Linear(3, 2), x(4, 3)
    work = forward_and_input_grad(module, t)
    with torch.no_grad():
        t.add_(1)
    with pytest.raises(
        StageError, match=r"shape \(4, 3\).*was modified in place after the forward"
    ):
        work.accumulate()


def test_second_derivatives_inside_a_transform_are_refused() -> None:
    """The results lie outside of the transform, where weights were deferred."""
    linear, t = nn.Linear(3, 1), x(2, 3)
    with pytest.raises(CannotDeferError, match=r"autograd\.grad inside"), DeferredGrads():
        out = linear(t).square()
        torch.vmap(lambda v: torch.autograd.grad(out, t, v, create_graph=True)[0])(
            torch.ones(1, *out.shape)
        )


@pytest.mark.parametrize("order", ["in the forward", "of the output"])
def test_second_derivatives_are_refused(order: str) -> None:
    linear = nn.Linear(3, 1)

    def slope(out: Tensor, t: Tensor) -> Tensor:
        return torch.autograd.grad(out.sum(), t, create_graph=True)[0].square()

    t, work = x(2, 3), DeferredGrads()
    if order == "in the forward":
        with pytest.raises(CannotDeferError, match=r"autograd\.grad inside"), work:
            slope(linear(t).square(), t)
        return
    with work:
        out = linear(t).square()
    loss = slope(out, t)
    with pytest.raises(CannotDeferError, match="create_graph"), work:
        torch.autograd.backward((loss,), (torch.ones_like(loss),))


@pytest.mark.parametrize("of_weight", [False, True])
def test_gradients_inside_the_forward_are_refused(of_weight: bool) -> None:
    linear, t = nn.Linear(3, 1), x(2, 3)
    said = r"autograd\.grad inside the stage.*pass defers_weights=False to this PipelineStage"
    with pytest.raises(CannotDeferError, match=said), DeferredGrads():
        torch.autograd.grad(linear(t).sum(), linear.weight if of_weight else t)
    with (
        pytest.raises(CannotDeferError, match=r"backward\(\) inside the forward"),
        DeferredGrads(),
    ):
        linear(x(2, 3)).sum().backward()


def test_a_gradient_taken_of_the_output_is_not_counted() -> None:
    linear, t = nn.Linear(3, 1), x(2, 3)
    work = DeferredGrads()
    with work:
        out = linear(t)
    torch.autograd.grad(out.sum(), t, retain_graph=True)
    with work:
        torch.autograd.backward((out,), (torch.ones_like(out),))
    work.accumulate()
    assert torch.equal(linear.weight.grad, t.sum(0, keepdim=True))


def test_w_frees_the_records_and_i_the_graph() -> None:
    class Held(torch.autograd.Function):
        alive = 0

        @staticmethod
        def forward(ctx, t):  # type: ignore[no-untyped-def]
            ctx.token = Token()
            return t.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
            return grad

    class Token:
        def __init__(self) -> None:
            Held.alive += 1

        def __del__(self) -> None:
            Held.alive -= 1

    linear = nn.Linear(3, 3)
    work = forward_and_input_grad(Calls(lambda m, t: m.l(Held.apply(m.l(t))), l=linear), x(2, 3))
    assert Held.alive == 0
    assert len(work.records) == 2
    work.accumulate()
    assert work.records == []
    assert not work.proxies and not work.expressions


def test_a_parameter_frozen_between_f_and_w_gets_nothing() -> None:
    linear = nn.Linear(3, 3)
    work = forward_and_input_grad(linear, x(2, 3))
    linear.weight.requires_grad_(False)
    work.accumulate()
    assert linear.weight.grad is None
    assert linear.bias.grad is not None


def test_w_does_not_alias_first_gradients() -> None:
    bias, t = nn.Parameter(torch.zeros(4, 3)), x(4, 3)
    for parameter in (bias,):
        work = forward_and_input_grad(Calls(lambda m, t: t + m.b, b=parameter), t)
        work.accumulate()
    assert t.grad is not None and bias.grad is not None
    bias.grad.add_(1)
    assert torch.equal(t.grad, torch.ones(4, 3))


def test_two_microbatches_in_any_order() -> None:
    module = nn.Linear(3, 2)
    first, second = forward_and_input_grad(module, x(1, 3)), forward_and_input_grad(module, x(5, 3))
    second.accumulate()
    after_second = module.weight.grad.clone()
    first.accumulate()
    assert not torch.equal(module.weight.grad, after_second)
    first.accumulate()  # nothing is left over twice
    again = module.weight.grad.clone()
    second.accumulate()
    assert torch.equal(module.weight.grad, again)
