"""Compiled layers in stages whose weight gradients are deferred: full graphs, right gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from penstock.stage.weight_grad import DeferredGrads, compiled_parts, find_undeferred
from tests.stage.deferral_cases import assert_same, gradients

Graphs = list[fx.GraphModule]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.up(nn.functional.gelu(x))


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def backend(graphs: Graphs) -> Callable[..., object]:
    def keep(graph: fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    return keep


def in_place(block: Block, graphs: Graphs) -> nn.Module:
    block.compile(backend=backend(graphs))
    return block


def wrapped(block: Block, graphs: Graphs) -> nn.Module:
    return torch.compile(block, backend=backend(graphs))  # type: ignore[return-value]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()  # type: ignore[no-any-return]


def nested(block: Block, graphs: Graphs) -> nn.Module:
    """A compiled layer in a compiled one: traced into one graph."""
    outer = Outer(in_place(block, graphs))
    outer.compile(backend=backend(graphs))
    return outer


def deferred_steps(module: nn.Module, x: Tensor, steps: int) -> None:
    """F, I and W of some microbatches, as a stage does them."""
    compiled = compiled_parts(module)
    excluded: list[nn.Parameter] = []
    for _ in range(steps):
        work = DeferredGrads(excluded, compiled)
        with work:
            out = module(x)
        excluded = find_undeferred([out])
        with work:
            torch.autograd.backward([out], [torch.ones_like(out)])
        work.accumulate()


@pytest.mark.parametrize("compiled", [in_place, wrapped, nested])
def test_a_compiled_layer_stays_one_graph(
    compiled: Callable[[Block, Graphs], nn.Module], graphs: Graphs
) -> None:
    torch.manual_seed(0)
    first, block, last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)
    plain_block = copy.deepcopy(block)
    middle = compiled(block, graphs)
    plain_middle = Outer(plain_block) if compiled is nested else plain_block
    plain = nn.Sequential(copy.deepcopy(first), plain_middle, copy.deepcopy(last))
    module = nn.Sequential(first, middle, last)
    x = torch.randn(2, 3, 8, requires_grad=True)
    deferred_steps(module, x, steps=3)
    x_plain = x.detach().clone().requires_grad_()
    for _ in range(3):
        plain(x_plain).sum().backward()
    assert len(graphs) == 1
    assert sum(node.op == "call_function" for node in graphs[0].graph.nodes) >= 6
    found = {n.replace("_orig_mod.", ""): g for n, g in gradients(module, (x,)).items()}
    assert_same(found, gradients(plain, (x_plain,)))


def test_parameters_of_a_compiled_layer_get_their_gradient_in_i(graphs: Graphs) -> None:
    """Compiled parts in I, the others in W; hooks once."""
    fired: list[str] = []
    module = nn.Sequential(in_place(Block(), graphs), nn.Linear(8, 8))
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    work = DeferredGrads(compiled=compiled_parts(module))
    with work:
        out = module(torch.randn(2, 3, 8, requires_grad=True))
    with work:
        torch.autograd.backward([out], [torch.ones_like(out)])
    names = [name for name, _ in module.named_parameters()]
    assert sorted(fired) == sorted(name for name in names if name.startswith("0."))
    work.accumulate()
    assert sorted(fired) == sorted(names)


def test_compiled_calls_are_replaced_inside_the_with_alone(graphs: Graphs) -> None:
    module = nn.Sequential(in_place(Block(), graphs), wrapped(Block(), graphs))
    calls = module[0]._compiled_call_impl, module[1].forward
    work = DeferredGrads(compiled=compiled_parts(module))
    with work:
        assert (module[0]._compiled_call_impl, module[1].forward) != calls
    assert (module[0]._compiled_call_impl, module[1].forward) == calls
    assert copy.deepcopy(module)(torch.randn(2, 3, 8)).shape == (2, 3, 8)
