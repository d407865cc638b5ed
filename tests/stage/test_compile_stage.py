"""``compile_stage``: compiled modules whose backward is split into I and W."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import penstock
from penstock import Pipeline, compile_stage
from penstock.stage.stage import holding_back
from penstock.stage.weight_grad import DeferredGrads, compiled_parts, find_undeferred
from tests.stage.deferral_cases import assert_same, gradients

DIM = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).movedim(2, 0).transpose(2, 3)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Checkpointed(Block):
    """Recomputed whole."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


def keep_products(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    if op in products:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Block):
    """All is recomputed but the matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        context = functools.partial(create_selective_checkpoint_contexts, keep_products)
        return checkpoint(  # type: ignore[no-any-return]
            super().forward, x, use_reentrant=False, context_fn=context
        )


class Broken(Block):
    """Two graphs, and a layer between them that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x = self.apart(x)
        return self.down(self.up(x))

    @torch.compiler.disable
    def apart(self, x: Tensor) -> Tensor:
        return self.between(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Steps:
    """F of all microbatches, then I, then W, as a zero-bubble schedule's warm-up."""

    def __init__(self, module: nn.Module, inputs: list[Tensor]) -> None:
        self.module = module
        self.inputs = inputs
        self.compiled = compiled_parts(module)
        self.undeferred: list[nn.Parameter] | None = None

    def forward(self) -> list[tuple[DeferredGrads, Tensor]]:
        flying = []
        for x in self.inputs:
            work = DeferredGrads(self.undeferred or (), self.compiled)
            with work:
                out = self.module(x)
            if self.undeferred is None:
                self.undeferred = find_undeferred([out])
                work.note_undeferred(self.undeferred)
            flying.append((work, out))
        return flying

    def input_grads(self, flying: list[tuple[DeferredGrads, Tensor]]) -> None:
        for work, out in flying:
            with work, holding_back(work.mixed) as held:
                torch.autograd.backward([out], [out.detach().cos()])
            work.add_computed(held)

    def weight_grads(self, flying: list[tuple[DeferredGrads, Tensor]]) -> None:
        for work, _ in flying:
            work.accumulate()

    def run(self) -> None:
        flying = self.forward()
        self.input_grads(flying)
        self.weight_grads(flying)


def some_inputs(*lengths: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, length, DIM, requires_grad=True) for length in lengths]


def plain(module: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor | None]:
    """The gradients of the plain loop."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    for x in inputs:
        out = module(x)
        out.backward(out.detach().cos())
    return gradients(module, tuple(inputs))


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", [Block, Checkpointed, Selective, Broken])
def test_gradients_are_those_of_the_plain_loop(kind: type[Block]) -> None:
    torch.manual_seed(0)
    block = kind()
    expected = plain(copy.deepcopy(block), some_inputs(5, 5, 5))
    inputs = some_inputs(5, 5, 5)
    Steps(compile_stage(block, backend="aot_eager"), inputs).run()
    assert_close(gradients(block, tuple(inputs)), expected)


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(DIM, DIM),
        nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM)),
        nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True),
    ],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_s_own_are_compiled(module: nn.Module) -> None:
    expected = plain(copy.deepcopy(module), some_inputs(5, 5))
    inputs = some_inputs(5, 5)
    steps = Steps(compile_stage(module, backend="aot_eager"), inputs)
    flying = steps.forward()
    assert "CompiledFunction" in {type(out.grad_fn).__name__[:16] for _, out in flying}
    steps.input_grads(flying)
    assert all(parameter.grad is None for parameter in module.parameters())
    steps.weight_grads(flying)
    assert_close(gradients(module, tuple(inputs)), expected)


def test_a_full_backward_is_whole() -> None:
    torch.manual_seed(0)
    block = Block()
    expected = plain(copy.deepcopy(block), some_inputs(5, 5))
    assert_close(plain(compile_stage(block, backend="aot_eager"), some_inputs(5, 5)), expected)


def test_parameters_get_their_gradients_in_w_once() -> None:
    torch.manual_seed(0)
    block = compile_stage(Block(), backend="aot_eager")
    fired: list[str] = []
    for name, parameter in block.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    steps = Steps(block, some_inputs(5))
    flying = steps.forward()
    assert steps.undeferred == []
    steps.input_grads(flying)
    assert fired == []
    assert steps.inputs[0].grad is not None
    steps.weight_grads(flying)
    assert sorted(fired) == sorted(name for name, _ in block.named_parameters())


def num_products(run: Callable[[], object]) -> int:
    """The matrix products that ``run`` computes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    return sum(e.count for e in profiler.key_averages() if e.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize(("kind", "recomputed"), [(Block, 0), (Selective, 0), (Checkpointed, 3)])
def test_nothing_is_computed_twice(kind: type[Block], recomputed: int) -> None:
    """The four layers' products are computed once in F, I and W each; the last one's result is
    needed by no backward, so that it is not recomputed."""
    torch.manual_seed(0)
    steps = Steps(compile_stage(kind(), backend="aot_eager"), some_inputs(8))
    steps.run()
    flying = []
    assert num_products(lambda: flying.extend(steps.forward())) == 4
    assert num_products(lambda: steps.input_grads(flying)) == 4 + recomputed
    assert num_products(lambda: steps.weight_grads(flying)) == 4


def test_layers_and_microbatches_share_one_compilation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(compile_stage(Block(), backend="aot_eager") for _ in range(12)))
    with torch.compiler.set_stance("default"):
        steps = Steps(model, some_inputs(5, 5))
        steps.run()
    with torch.compiler.set_stance("fail_on_recompile"):
        steps.run()


def test_shapes_may_change() -> None:
    torch.manual_seed(0)
    block = Block()
    lengths = (5, 7, 5, 9)
    expected = plain(copy.deepcopy(block), some_inputs(*lengths))
    inputs = some_inputs(*lengths)
    Steps(compile_stage(block, backend="aot_eager", dynamic=True), inputs).run()
    assert_close(gradients(block, tuple(inputs)), expected)


class Tied(nn.Module):
    """A weight used by a compiled layer, and by ``last``, in one of three ways."""

    def __init__(self, last: str) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.second.weight = self.first.weight
        compile_stage(self.first, backend="aot_eager")
        if last == "split":
            compile_stage(self.second, backend="aot_eager")
        elif last == "compiled":
            self.second.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).sin())  # type: ignore[no-any-return]


@pytest.mark.parametrize("last", ["split", "compiled", "eager"])
def test_a_tied_weight_gets_one_gradient(last: str) -> None:
    torch.manual_seed(0)
    model = Tied(last)
    reference = Tied("eager")
    reference.load_state_dict(model.state_dict())
    expected = plain(reference, some_inputs(5, 5))
    fired: list[int] = []
    model.first.weight.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    inputs = some_inputs(5, 5)
    Steps(model, inputs).run()
    assert len(fired) == 2
    assert_close(gradients(model, tuple(inputs)), expected)


def test_autocast_does_not_reach_w() -> None:
    torch.manual_seed(0)
    block = Block()
    reference = copy.deepcopy(block)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(reference.compile(backend="aot_eager") or reference, some_inputs(5, 5))
        inputs = some_inputs(5, 5)
        Steps(compile_stage(block, backend="aot_eager"), inputs).run()
    assert_same(gradients(block, tuple(inputs)), expected)


def test_frozen_parameters_have_no_gradient() -> None:
    torch.manual_seed(0)
    block = Block()
    block.up.weight.requires_grad_(False)
    expected = plain(copy.deepcopy(block), some_inputs(5, 5))
    inputs = some_inputs(5, 5)
    Steps(compile_stage(block, backend="aot_eager"), inputs).run()
    assert block.up.weight.grad is None
    assert_close(gradients(block, tuple(inputs)), expected)


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv", "dualpipev"])
def test_schedules_train_compiled_layers(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    x, target = torch.randn(8, 5, DIM), torch.randn(8, 5, DIM)
    reference = copy.deepcopy(model)
    for part, goal in zip(x.chunk(8), target.chunk(8), strict=True):
        (nn.functional.mse_loss(reference(part), goal) / 8).backward()
    for block in model:
        compile_stage(block, backend="aot_eager")
    pipe = Pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        schedule=schedule,
        n_microbatches=8,
        example=(x[:1],),
        ranks=2,
    )
    pipe.step(x, target=target)
    assert_close(gradients(model, ()), gradients(reference, ()))


class Language(nn.Module):
    """A model that is cut by module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, 11)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).movedim(-1, 1)  # type: ignore[no-any-return]


def test_a_stage_cut_by_module_compiles_its_layers() -> None:
    torch.manual_seed(0)
    model = Language()
    ids, target = torch.randint(11, (2, 8, 5))
    reference = copy.deepcopy(model)
    for part, goal in zip(ids.chunk(8), target.chunk(8), strict=True):
        (nn.functional.cross_entropy(reference(part), goal) / 8).backward()
    pipe = Pipeline(
        model,
        loss_fn=nn.functional.cross_entropy,
        schedule="zbv",
        n_microbatches=8,
        example=(ids[:1],),
        ranks=2,
        wrap_fn=lambda stage, _: compile_stage(stage, backend="aot_eager"),
    )
    with torch.compiler.set_stance("default"):
        pipe.step(ids, target=target)
    found = gradients(model, ())
    assert_close(found, gradients(reference, ()))
    with torch.compiler.set_stance("fail_on_recompile"):
        pipe.step(ids, target=target)


def test_profiles_see_the_weight_gradients_of_each_layer() -> None:
    model = nn.Sequential(*(compile_stage(Block(), backend="aot_eager") for _ in range(3)))
    costs = penstock.profile(model, some_inputs(5)[0].detach(), runs=1).blocks
    assert all(block.weight_grad_s > 0.0 for block in costs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs a C++ compiler")
def test_with_torch_s_own_compiler() -> None:
    torch.manual_seed(0)
    block = Block()
    expected = plain(copy.deepcopy(block), some_inputs(5, 5))
    inputs = some_inputs(5, 5)
    steps = Steps(compile_stage(block), inputs)
    flying = steps.forward()
    steps.input_grads(flying)
    assert all(parameter.grad is None for parameter in block.parameters())
    steps.weight_grads(flying)
    assert_close(gradients(block, tuple(inputs)), expected)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="backend is 'cudagraphs', expected one of inductor, aot"):
        compile_stage(Block(), backend="cudagraphs")
