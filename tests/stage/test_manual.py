"""Stages driven by hand in one process, beside the plain model; and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import BoundaryError, Pipeline, PipelineStage, StageError

DIM = 5
NUM_MICROBATCHES = 3
CPU = torch.device("cpu")


def make_modules(num_stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(num_stages)]


def make_stages(modules: Sequence[nn.Module], **options: Any) -> list[PipelineStage]:
    return [PipelineStage(m, i, len(modules), CPU, **options) for i, m in enumerate(modules)]


def microbatches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, DIM, generator=generator), torch.randn(2, DIM, generator=generator))
        for _ in range(NUM_MICROBATCHES)
    ]


def grads_of(modules: Sequence[nn.Module]) -> list[Tensor]:
    found = []
    for module in modules:
        for param in module.parameters():
            assert param.grad is not None
            found.append(param.grad)
    return found


def plain_grads(modules: Sequence[nn.Module]) -> list[Tensor]:
    """The gradients of the plain model; those of the modules are cleared."""
    for x, target in microbatches():
        for module in modules:
            x = module(x)
        nn.functional.mse_loss(x, target).backward()
    grads = [g.clone() for g in grads_of(modules)]
    for module in modules:
        module.zero_grad()
    return grads


def run_forward(stages: Sequence[PipelineStage], mb: int, x: Tensor) -> Any:
    out = stages[0].forward_one_chunk(mb, (x,))
    for stage in stages[1:]:
        stage.set_local_fwd_input(out, mb)
        out = stage.forward_one_chunk(mb, ())
    return out


def run_backward(stages: Sequence[PipelineStage], mb: int, loss: Tensor, *, full: bool) -> None:
    stages[-1].backward_one_chunk(mb, loss=loss, full_backward=full)
    for after, stage in zip(stages[:0:-1], stages[-2::-1], strict=True):
        stage.set_local_bwd_input(after.get_local_bwd_output(mb), mb)
        stage.backward_one_chunk(mb, full_backward=full)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("full", [True, False], ids=["full", "split"])
def test_gradients_are_those_of_the_plain_model(num_stages: int, full: bool) -> None:
    modules = make_modules(num_stages)
    expected = plain_grads(modules)
    stages = make_stages(modules)
    losses = []
    for mb, (x, target) in enumerate(microbatches()):
        losses.append(nn.functional.mse_loss(run_forward(stages, mb, x), target))
    for mb, loss in enumerate(losses):
        run_backward(stages, mb, loss, full=full)
    if not full:
        assert all(p.grad is None for m in modules for p in m.parameters())
        for stage in stages:
            for mb in range(NUM_MICROBATCHES):
                stage.backward_weight_one_chunk(mb)
    torch.testing.assert_close(grads_of(modules), expected, rtol=0, atol=0)


class Doubled(torch.autograd.Function):
    """An operation whose weight gradient can't be deferred by itself; it counts its backwards."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        Doubled.num_backwards += 1
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x * 2).sum(0)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Doubled.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def test_a_stage_that_sends_no_gradients_back_runs_its_backward_in_w() -> None:
    modules = [nn.Sequential(Double(), nn.Tanh()) for _ in range(2)]
    expected = plain_grads(modules)
    first, last = stages = make_stages(modules)
    Doubled.num_backwards = 0
    for mb, (x, target) in enumerate(microbatches()):
        run_backward(
            stages, mb, nn.functional.mse_loss(run_forward(stages, mb, x), target), full=False
        )
    # The last stage's have run, for the first one waits for them; and nothing of the first's.
    assert Doubled.num_backwards == NUM_MICROBATCHES
    assert modules[0][0].weight.grad is None
    for stage in (first, last):
        for mb in range(NUM_MICROBATCHES):
            stage.backward_weight_one_chunk(mb)
    assert Doubled.num_backwards == 2 * NUM_MICROBATCHES
    torch.testing.assert_close(grads_of(modules), expected, rtol=0, atol=0)


def test_full_and_split_backwards_may_be_mixed() -> None:
    modules = make_modules(2)
    expected = plain_grads(modules)
    stages = make_stages(modules)
    for mb, (x, target) in enumerate(microbatches()):
        loss = nn.functional.mse_loss(run_forward(stages, mb, x), target)
        run_backward(stages, mb, loss, full=mb == 1)
        if mb != 1:
            for stage in stages:
                stage.backward_weight_one_chunk(mb)
    torch.testing.assert_close(grads_of(modules), expected, rtol=0, atol=0)


def test_chunks_can_be_used_again_step_after_step_with_other_shapes() -> None:
    modules = make_modules(2)
    stages = make_stages(modules)
    for rows in (4, 3, 6):
        x, target = torch.randn(rows, DIM), torch.randn(rows, DIM)
        nn.functional.mse_loss(modules[1](modules[0](x)), target).backward()
        expected = [g.clone() for g in grads_of(modules)]
        for module in modules:
            module.zero_grad()
        loss = nn.functional.mse_loss(run_forward(stages, 0, x), target)
        run_backward(stages, 0, loss, full=True)
        torch.testing.assert_close(grads_of(modules), expected, rtol=0, atol=0)
        for module in modules:
            module.zero_grad()


def test_scale_grads_divides_every_gradient() -> None:
    modules = make_modules(1)
    (stage,) = make_stages(modules)
    x, target = microbatches()[0]
    stage.backward_one_chunk(0, nn.functional.mse_loss(stage.forward_one_chunk(0, (x,)), target))
    before = [g.clone() for g in grads_of(modules)]
    stage.scale_grads(1)
    torch.testing.assert_close(grads_of(modules), before, rtol=0, atol=0)
    modules[0].register_parameter("unused", nn.Parameter(torch.ones(1)))
    stage.scale_grads(4)
    modules[0].unused = None  # type: ignore[assignment]
    torch.testing.assert_close(grads_of(modules), [g / 4 for g in before], rtol=0, atol=0)
    stage.perform_reduce_grad(2)  # not replicated: it scales, and that is all
    torch.testing.assert_close(grads_of(modules), [g / 8 for g in before], rtol=0, atol=0)


def test_several_outputs_one_without_a_gradient() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out = self.linear(x)
            return out, x > 0, out * 2

    class Join(nn.Module):
        def forward(self, out: Tensor, mask: Tensor, unused: Tensor) -> Tensor:
            return (out * mask).sum()

    torch.manual_seed(0)
    pair, join = Pair(), Join()
    x = torch.randn(3, DIM)
    join(*pair(x)).backward()
    expected = [p.grad.clone() for p in pair.parameters() if p.grad is not None]
    pair.zero_grad()
    first, last = make_stages([pair, join])
    last.set_local_fwd_input(first.forward_one_chunk(0, (x,)), 0)
    last.backward_one_chunk(0, last.forward_one_chunk(0, ()))
    given = last.get_local_bwd_output(0)
    assert [tuple(g.shape) for g in given] == [(3, DIM), (3, DIM)]
    assert not given[1].any()  # no gradient reached it
    first.set_local_bwd_input(given, 0)
    first.backward_one_chunk(0)
    torch.testing.assert_close(grads_of([pair]), expected, rtol=0, atol=0)


# --- the user's own weight gradients --------------------------------------------------------


class OwnWeights(nn.Module):
    """A linear layer that keeps back its weight gradient until it is told to compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        out = nn.functional.linear(x, self.weight.detach())
        if not x.requires_grad:
            out.requires_grad_()
        out.register_hook(lambda grad: self.waiting.append((x.detach(), grad)))
        return out

    def build(self) -> Callable[..., None]:
        """What torch calls a dw_builder: taken after each backward, run at its W."""
        x, grad = self.waiting.pop()

        def run() -> None:
            delta = grad.T @ x
            self.weight.grad = delta if self.weight.grad is None else self.weight.grad + delta

        return run


@pytest.mark.parametrize("full", [True, False], ids=["full", "split"])
def test_a_module_may_compute_its_own_weight_gradients(full: bool) -> None:
    torch.manual_seed(0)
    own, head = OwnWeights(), nn.Linear(DIM, DIM)
    plain = nn.Linear(DIM, DIM, bias=False)
    plain.weight = nn.Parameter(own.weight.detach().clone())
    expected = plain_grads([plain, head])
    stages = [
        PipelineStage(own, 0, 2, CPU, dw_builder=own.build),
        PipelineStage(head, 1, 2, CPU),
    ]
    for mb, (x, target) in enumerate(microbatches()):
        loss = nn.functional.mse_loss(run_forward(stages, mb, x), target)
        run_backward(stages, mb, loss, full=full)
    if not full:
        assert own.weight.grad is None
        for mb in range(NUM_MICROBATCHES):
            for stage in stages:
                stage.backward_weight_one_chunk(mb)
    # Its formula is not autograd's, so it may round otherwise.
    torch.testing.assert_close(grads_of([own]), expected[:1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads_of([head]), expected[1:], rtol=0, atol=0)


@pytest.mark.parametrize("late", [False, True], ids=["when made", "set later"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-zb", "zb-h1"])
def test_schedules_run_a_modules_own_weight_gradients(schedule: str, late: bool) -> None:
    torch.manual_seed(0)
    num = 4 if schedule in ("zbv", "interleaved-zb") else 2
    modules: list[nn.Module] = [OwnWeights() if i % 2 else nn.Linear(DIM, DIM) for i in range(num)]
    plain: list[nn.Module] = []
    for module in modules:
        twin = nn.Linear(DIM, DIM, bias=not isinstance(module, OwnWeights))
        twin.load_state_dict(module.state_dict())
        plain.append(twin)
    expected = [g / NUM_MICROBATCHES for g in plain_grads(plain)]
    builders = [m.build if isinstance(m, OwnWeights) else None for m in modules]
    stages = [
        PipelineStage(m, i, num, CPU, dw_builder=None if late else builders[i])
        for i, m in enumerate(modules)
    ]
    for stage, builder in zip(stages, builders, strict=True):
        stage.dw_builder = builder
    xs, targets = zip(*microbatches(), strict=True)
    mse = nn.functional.mse_loss
    pipe = Pipeline(stages, loss_fn=mse, schedule=schedule, n_microbatches=3, ranks=2)
    pipe.step(torch.cat(xs), target=torch.cat(targets))
    torch.testing.assert_close(grads_of(modules), expected, rtol=1e-6, atol=1e-7)


def test_a_builder_that_gives_no_runner_is_named() -> None:
    linear = nn.Linear(DIM, DIM)
    builder: Any = lambda: None  # noqa: E731
    stage = PipelineStage(linear, 0, 1, CPU, dw_builder=builder)
    for full in (True, False):
        loss = stage.forward_one_chunk(0, (torch.ones(1, DIM),)).sum()
        with pytest.raises(StageError, match="dw_builder returned None, expected a callable"):
            stage.backward_one_chunk(0, loss, full_backward=full)


class OwnSlope(nn.Module):
    """Differentiates with respect to its own parameter in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        energy = self.inner(x).square().sum()
        (slope,) = torch.autograd.grad(energy, self.inner.weight, create_graph=True)
        return x @ slope


@pytest.mark.parametrize("said", ["to the constructor", "of the stage"])
def test_a_stage_that_needs_its_graph_defers_nothing(said: str) -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(DIM, DIM), OwnSlope()]
    expected = plain_grads(modules)
    stages = make_stages(modules, defers_weights=said != "to the constructor")
    if said == "of the stage":
        with pytest.raises(StageError, match="pass defers_weights=False to this PipelineStage"):
            run_forward(stages, 0, microbatches()[0][0])
        stages = make_stages(modules)
        stages[1].defers_weights = False
    for mb, (x, target) in enumerate(microbatches()):
        loss = nn.functional.mse_loss(run_forward(stages, mb, x), target)
        run_backward(stages, mb, loss, full=False)
        for stage in stages:
            stage.backward_weight_one_chunk(mb)
    torch.testing.assert_close(grads_of(modules), expected, rtol=1e-6, atol=1e-7)


# --- backwards through a graph of one's own ---------------------------------------------------


@pytest.mark.parametrize("by", ["forward_maybe_with_nosync", "forward_one_chunk"])
@pytest.mark.parametrize("full", [True, False], ids=["full", "split"])
def test_a_backward_through_a_graph(full: bool, by: str) -> None:
    modules = make_modules(1)
    expected = plain_grads(modules)
    (stage,) = make_stages(modules)
    for mb, (x, target) in enumerate(microbatches()):
        x.requires_grad_()
        hand = by == "forward_maybe_with_nosync"
        out = stage.forward_maybe_with_nosync(x) if hand else stage.forward_one_chunk(mb, (x,))
        (wanted,) = torch.autograd.grad(nn.functional.mse_loss(modules[0](x), target), x)
        graph = {
            "stage_output": nn.functional.mse_loss(out, target),
            "output_grads": None,
            "input_values": [x],
        }
        grads, groups = stage.backward_maybe_with_nosync("full" if full else "input", graph)
        torch.testing.assert_close(grads, (wanted,), rtol=0, atol=0)
        assert (groups is None) == full
        if not full:
            assert mb or all(p.grad is None for p in modules[0].parameters())
            left = {"param_groups": groups}
            _, none = stage.backward_maybe_with_nosync("weight", left, last_backward=True)
            assert none is None
    torch.testing.assert_close(grads_of(modules), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["full", "input"])
def test_a_graph_backward_past_deferred_weight_gradients_is_refused(kind: str) -> None:
    _, last = stages = make_stages(make_modules(2))
    (x, target), *_ = microbatches()
    loss = nn.functional.mse_loss(run_forward(stages, 0, x), target)
    graph = {"stage_output": loss, "output_grads": None, "input_values": []}
    with pytest.raises(StageError, match=r"deferred its weight grad.*run backward_one_chunk\("):
        last.backward_maybe_with_nosync(kind, graph)
    last.backward_one_chunk(0, loss)


def test_a_stage_without_backward_computes_no_gradients(stage: PipelineStage) -> None:
    stage.has_backward = False
    loss = stage.forward_one_chunk(0, (torch.ones(1, DIM),)).sum()
    for full in (True, False):
        stage.backward_one_chunk(0, loss, full_backward=full)
    stage.backward_weight_one_chunk(0)
    assert all(p.grad is None for p in stage.submod.parameters())


def test_outputs_of_the_last_stage_are_kept_on_request() -> None:
    stages = make_stages(make_modules(2))
    made = [run_forward(stages, mb, x) for mb, (x, _) in enumerate(microbatches())]
    assert stages[0].output_chunks == []
    assert all(a is b for a, b in zip(stages[1].output_chunks, made, strict=True))
    run_backward(stages, 1, made[1].sum(), full=True)
    assert [out.requires_grad for out in stages[1].output_chunks] == [True, False, True]
    stages[1].clear_runtime_states()
    assert stages[1].output_chunks == []
    stages[1].set_local_fwd_input(torch.ones(2, DIM, requires_grad=True), 0)
    stages[1].forward_one_chunk(0, (), save_forward_output=False)
    assert stages[1].output_chunks == []


# --- mistakes ---------------------------------------------------------------------------------


@pytest.fixture
def stage() -> PipelineStage:
    return make_stages(make_modules(1))[0]


@pytest.fixture
def middle() -> PipelineStage:
    return PipelineStage(nn.Linear(DIM, DIM), 1, 3, CPU)


# A module's own weight gradients are asked for in the same order.
BUILDERS = pytest.mark.parametrize(
    "dw_builder", [None, lambda: lambda: None], ids=["autograd", "dw_builder"]
)


@BUILDERS
def test_weights_before_the_input_gradient(dw_builder: Any) -> None:
    (stage,) = make_stages(make_modules(1), dw_builder=dw_builder)
    with pytest.raises(StageError, match=r"stage 0, microbatch 0: a weight gradient .*'not run'"):
        stage.backward_weight_one_chunk(0)
    stage.forward_one_chunk(0, (torch.ones(1, DIM),))
    with pytest.raises(StageError, match=r"after 'input gradient done', .* at 'forward done'"):
        stage.backward_weight_one_chunk(0)


@BUILDERS
def test_weights_twice_or_after_a_full_backward(dw_builder: Any) -> None:
    (stage,) = make_stages(make_modules(1), dw_builder=dw_builder)
    for mb, full in ((0, False), (1, True)):
        loss = stage.forward_one_chunk(mb, (torch.ones(1, DIM),)).sum()
        stage.backward_one_chunk(mb, loss, full_backward=full)
    stage.backward_weight_one_chunk(0)
    for mb in (0, 1):
        with pytest.raises(StageError, match=f"microbatch {mb}: .* at 'backward done'"):
            stage.backward_weight_one_chunk(mb)


def test_backward_before_forward_or_twice(stage: PipelineStage) -> None:
    with pytest.raises(StageError, match=r"a backward is requested, .* 'not run'"):
        stage.backward_one_chunk(0, torch.ones(()))
    loss = stage.forward_one_chunk(0, (torch.ones(1, DIM),)).sum()
    stage.backward_one_chunk(0, loss)
    with pytest.raises(StageError, match=r"a backward is requested, .* 'backward done'"):
        stage.backward_one_chunk(0, loss)


def test_the_last_stage_wants_a_loss(stage: PipelineStage) -> None:
    stage.forward_one_chunk(0, (torch.ones(1, DIM),))
    with pytest.raises(StageError, match="stage 0 is the last one: pass its loss"):
        stage.backward_one_chunk(0)


def test_missing_inputs_and_gradients_are_named(middle: PipelineStage) -> None:
    with pytest.raises(StageError, match="no input has come; run get_fwd_recv_ops"):
        middle.forward_one_chunk(0, ())
    with pytest.raises(StageError, match=r"nothing to send; run forward_one_chunk\(\) first"):
        middle.get_fwd_send_ops(0)
    with pytest.raises(StageError, match="shapes are not known yet; pass input_args"):
        middle.get_fwd_recv_ops(0)
    with pytest.raises(StageError, match="no input gradients; run backward_one_chunk"):
        middle.get_bwd_send_ops(0)
    middle.set_local_fwd_input(torch.ones(2, DIM, requires_grad=True), 0)
    middle.forward_one_chunk(0, ())
    with pytest.raises(StageError, match="no gradient has come; run get_bwd_recv_ops"):
        middle.backward_one_chunk(0)
    grads: Any = [torch.ones(2, DIM)]
    with pytest.raises(StageError, match="gradients come as a tuple, got list"):
        middle.set_local_bwd_input(grads, 0)
    with pytest.raises(StageError, match="messages need a process group"):
        middle.get_fwd_send_ops(0)
    middle.set_local_bwd_input((torch.ones(2, DIM), None), 0)
    with pytest.raises(StageError, match="2 gradients have come, expected 1: one, or None, for"):
        middle.backward_one_chunk(0)


def test_the_ends_have_nothing_to_exchange() -> None:
    first, last = make_stages(make_modules(2))
    assert first.get_fwd_recv_ops(0) == [] == first.get_bwd_send_ops(0)
    assert last.get_fwd_send_ops(0) == [] == last.get_bwd_recv_ops(0)


def test_microbatches_out_of_range(stage: PipelineStage) -> None:
    with pytest.raises(StageError, match="stage 0: the microbatch is -1, expected 0 or more"):
        stage.forward_one_chunk(-1, (torch.ones(1, DIM),))
    stage.chunks = 2
    with pytest.raises(StageError, match="the microbatch is 2, expected 0 to 1"):
        stage.forward_one_chunk(2, (torch.ones(1, DIM),))


def test_clearing_forgets_all_microbatches(stage: PipelineStage) -> None:
    loss = stage.forward_one_chunk(0, (torch.ones(1, DIM),)).sum()
    stage.clear_runtime_states()
    with pytest.raises(StageError, match="'not run'"):
        stage.backward_one_chunk(0, loss)


def test_an_unknown_kind_of_backward(stage: PipelineStage) -> None:
    with pytest.raises(StageError, match="'half': expected 'full', 'input' or 'weight'"):
        stage.backward_maybe_with_nosync("half", {})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((nn.Identity(), "0", 2), "stage_index is '0', expected a whole number"),
        ((nn.Identity(), 0.0, 2), "stage_index is 0.0, expected a whole number"),
        ((nn.Identity(), 0, None), "num_stages is None, expected a whole number"),
        ((nn.Identity(), 0, 0), "expected 0 to below num_stages=0"),
        ((None, 0, 2), "stage 0: its module is None, expected an nn.Module"),
    ],
)
def test_arguments_of_another_kind(args: tuple[Any, ...], said: str) -> None:
    with pytest.raises(StageError, match=said):
        PipelineStage(*args, CPU)


def test_a_backward_that_lacks_something(stage: PipelineStage) -> None:
    with pytest.raises(StageError, match=r"'full' takes 'stage_output', but was given \['slot'\]"):
        stage.backward_maybe_with_nosync("full", {"slot": None})


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_stage_index_out_of_range(index: int) -> None:
    with pytest.raises(StageError, match=f"stage_index is {index}, expected 0 to below"):
        PipelineStage(nn.Linear(1, 1), index, 2, CPU)


@pytest.mark.parametrize(
    ("group", "said"),
    [("pp", "is 'pp', expected"), (dist.GroupMember.NON_GROUP_MEMBER, "one that this process is")],
)
def test_a_group_that_is_invalid_or_lacks_this_rank(group: Any, said: str) -> None:
    with pytest.raises(StageError, match=said):
        PipelineStage(nn.Linear(1, 1), 0, 1, CPU, group=group)
    with pytest.raises(StageError, match=said):
        Pipeline([nn.Linear(1, 1)], n_microbatches=1, group=group)


def test_static_shapes_are_checked() -> None:
    example = torch.empty(2, DIM, device="meta")
    first, last = make_stages(make_modules(2), input_args=example, output_args=(example,))
    assert [(t.shape, t.device.type) for t in first.get_outputs_meta()] == [((2, DIM), "meta")]
    with pytest.raises(BoundaryError, match=r"output 0 is float32\[3,5\].*expected .*\[2,5\]"):
        first.forward_one_chunk(0, (torch.ones(3, DIM),))
    with pytest.raises(
        BoundaryError, match=r"input is .*\[3,5\], expected .*\[2,5\] as input_args"
    ):
        last.set_local_fwd_input(torch.ones(3, DIM), 0)
    out = first.forward_one_chunk(1, (torch.ones(2, DIM),))
    last.set_local_fwd_input(out, 1)
    assert last.forward_one_chunk(1, ()).shape == (2, DIM)


@pytest.mark.parametrize("side", ["input", "output"])
def test_static_gradients_say_which_values_take_none(side: str) -> None:
    values = (torch.ones(2, DIM), torch.ones(2, DIM))

    def make_stage(*grads: Tensor | None) -> PipelineStage:
        given: Any = {f"{side}_args": values, f"{side}_grads": grads}
        return PipelineStage(nn.Identity(), 1, 3, CPU, **given)

    with pytest.raises(BoundaryError, match=f"stage 1: 1 {side}_grads for 2 {side}_args"):
        make_stage(torch.ones(2, DIM))
    stage = make_stage(values[0], None)
    static = stage.static_inputs if side == "input" else stage.static_outputs
    assert static is not None
    assert static.grad_slots == (0,)


def test_static_values_may_come_in_lists() -> None:
    values = [torch.ones(2, DIM), torch.ones(2, DIM)]
    stage = PipelineStage(
        nn.Identity(), 1, 3, CPU, input_args=values, output_args=values, output_grads=[None, None]
    )
    assert stage.static_inputs is not None and stage.static_outputs is not None
    assert len(stage.static_inputs.metas) == len(stage.static_outputs.metas) == 2
    assert stage.static_outputs.grad_slots == ()
    shapes: Any = [(2, DIM)]
    with pytest.raises(BoundaryError, match="stage 1: input_args holds a tuple, expected tensors"):
        PipelineStage(nn.Identity(), 1, 3, CPU, input_args=shapes)


def test_output_shapes_are_known_after_the_first_run() -> None:
    first, _ = make_stages(make_modules(2))
    with pytest.raises(StageError, match="shapes are not known yet; pass output_args"):
        first.get_outputs_meta()
    first.forward_one_chunk(0, (torch.ones(4, DIM),))
    (meta,) = first.get_outputs_meta()
    assert (meta.shape, meta.dtype, meta.device.type) == ((4, DIM), torch.float32, "meta")


def test_without_gradients_nothing_is_deferred(stage: PipelineStage) -> None:
    with torch.no_grad():
        out = stage.forward_one_chunk(0, (torch.ones(1, DIM),))
    assert not out.requires_grad


def test_the_module_can_be_called_alone(stage: PipelineStage) -> None:
    x = torch.ones(1, DIM)
    torch.testing.assert_close(stage.forward_maybe_with_nosync(x), stage.submod(x), rtol=0, atol=0)
