"""Modules to split the backward of, and the two ways of doing it whose gradients must agree."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.stage.weight_grad import DeferredGrads

Gradients = dict[str, Tensor | None]


def outputs_of(result: object) -> list[Tensor]:
    """The tensors of a module's result that need gradients."""
    items = result if isinstance(result, (tuple, list)) else [result]
    return [item for item in items if isinstance(item, Tensor) and item.requires_grad]


def some_grads(outputs: list[Tensor]) -> list[Tensor]:
    """Gradients of the outputs, the same for equal outputs."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(out.shape, generator=generator).to(out.dtype).to(out.device) for out in outputs
    ]


def fresh(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Leaves with the data and the needs of ``inputs``."""
    # clone() keeps the strides.
    return tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in inputs)


def gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> Gradients:
    """Every gradient that a step left behind, by name."""
    found = {name: p.grad for name, p in module.named_parameters()}
    return found | {f"input {i}": x.grad for i, x in enumerate(inputs)}


def copied(module: nn.Module) -> nn.Module:
    """A copy; torch's own lets go of the dtypes of gradients."""
    copy_of = copy.deepcopy(module)
    for param, original in zip(copy_of.parameters(), module.parameters(), strict=True):
        param.grad_dtype = original.grad_dtype
    return copy_of


def plain(module: nn.Module, inputs: tuple[Tensor, ...], steps: int = 1) -> Gradients:
    """The gradients of ordinary forwards and full backwards."""
    module = copied(module)
    inputs = fresh(inputs)
    for _ in range(steps):
        torch.manual_seed(1)
        outputs = outputs_of(module(*inputs))
        torch.autograd.backward(outputs, some_grads(outputs))
    return gradients(module, inputs)


def split(module: nn.Module, inputs: tuple[Tensor, ...], steps: int = 1) -> Gradients:
    """The gradients of F, I and W, with all the microbatches in flight at once."""
    module = copied(module)
    inputs = fresh(inputs)
    flying = []
    for _ in range(steps):
        torch.manual_seed(1)
        work = DeferredGrads()
        with work:
            outputs = outputs_of(module(*inputs))
        flying.append((work, outputs, some_grads(outputs)))
    for work, outputs, grads in flying:
        with work:
            torch.autograd.backward(outputs, grads)
    for work, _, _ in flying:
        work.accumulate()
    return gradients(module, inputs)


def in_i(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The parameters that have a gradient after F and I, before W."""
    module = copied(module)
    work = DeferredGrads()
    with work:
        outputs = outputs_of(module(*fresh(inputs)))
    with work:
        torch.autograd.backward(outputs, some_grads(outputs))
    found = tuple(name for name, p in module.named_parameters() if p.grad is not None)
    work.accumulate()
    return found


def assert_same(actual: Gradients, expected: Gradients, *, exact: bool = True) -> None:
    """Equal bit for bit, or within the rounding of a sum taken in another order."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert (got is None) == (wanted is None), f"{name}: {got} instead of {wanted}"
        if wanted is None or got is None:
            continue
        assert got.dtype == wanted.dtype
        if exact:
            assert torch.equal(got.to_dense(), wanted.to_dense()), name
        else:
            torch.testing.assert_close(got.to_dense(), wanted.to_dense(), msg=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A module with inputs for it.

    Args:
        make: a new module and its inputs.
        exact: whether each parameter's contributions are summed in autograd's own order.
        in_i: the parameters that have a gradient before W; all others wait for it.
    """

    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    exact: bool = True
    in_i: tuple[str, ...] = ()


class Calls(nn.Module):
    """A module around a function of (itself, x), with the given parameters."""

    def __init__(
        self,
        function: Callable[..., object],
        **members: nn.Module | nn.Parameter,
    ) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Tensor) -> object:
        return self.function(self, *args)


def weight(*shape: int) -> nn.Parameter:
    """A parameter of small random numbers."""
    return nn.Parameter(torch.randn(shape) * 0.3)


def x(*shape: int, grad: bool = True) -> Tensor:
    """An input."""
    return torch.randn(*shape, requires_grad=grad)


class Block(nn.Module):
    """A transformer block as people write it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time, dim = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, time, dim))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


def with_wide_gradients(module: nn.Module) -> nn.Module:
    """``module`` in bfloat16, with gradients in float32, as FSDP2 may set them."""
    for param in module.bfloat16().parameters():
        param.grad_dtype = torch.float32
    return module


def module_cases() -> dict[str, Case]:
    """Modules of torch.nn, at shapes that take their ordinary ways."""

    def of(make: Callable[[], nn.Module], *inputs: Tensor, exact: bool = True) -> Case:
        return Case(make=lambda: (make(), inputs), exact=exact)

    return {
        "linear 2d": of(lambda: nn.Linear(5, 3), x(4, 5)),
        "linear 3d": of(lambda: nn.Linear(5, 3), x(2, 4, 5)),
        "linear 4d": of(lambda: nn.Linear(5, 3), x(2, 2, 4, 5)),
        "linear 4d strided": of(lambda: nn.Linear(5, 3), x(2, 4, 5, 2).permute(0, 3, 1, 2)),
        "linear empty": of(lambda: nn.Linear(5, 3), x(0, 4, 5)),
        "linear 1d": of(lambda: nn.Linear(5, 3), x(5)),
        "linear no bias": of(lambda: nn.Linear(5, 3, bias=False), x(2, 4, 5)),
        "linear constant input": of(lambda: nn.Linear(5, 3), x(2, 4, 5, grad=False)),
        "bilinear": of(lambda: nn.Bilinear(5, 4, 3), x(2, 5), x(2, 4)),
        "conv1d": of(lambda: nn.Conv1d(3, 6, 3, padding=1), x(2, 3, 9)),
        "conv2d": of(lambda: nn.Conv2d(4, 6, 3, stride=2, groups=2), x(2, 4, 9, 9)),
        "conv2d same": of(lambda: nn.Conv2d(4, 6, 3, padding="same"), x(2, 4, 9, 9)),
        "conv2d same uneven": of(lambda: nn.Conv2d(4, 6, 4, padding="same"), x(2, 4, 9, 9)),
        "conv2d unbatched": of(lambda: nn.Conv2d(4, 6, 3, dilation=2), x(4, 9, 9)),
        "conv2d constant input": of(lambda: nn.Conv2d(4, 6, 3), x(2, 4, 9, 9, grad=False)),
        "conv2d depthwise": of(lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), x(2, 4, 9, 9)),
        "conv2d circular": of(
            lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), x(2, 4, 9, 9)
        ),
        "conv3d": of(lambda: nn.Conv3d(2, 3, 2), x(2, 2, 5, 5, 5)),
        "conv transposed 1d": of(lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), x(2, 3, 5)),
        "conv transposed 2d": of(
            lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
            x(2, 4, 5, 5),
        ),
        "conv transposed 3d": of(lambda: nn.ConvTranspose3d(2, 3, 2), x(2, 2, 4, 4, 4)),
        "layer norm": of(lambda: nn.LayerNorm(6), x(2, 3, 6)),
        "layer norm no bias": of(lambda: nn.LayerNorm((3, 6), bias=False), x(2, 3, 6)),
        "rms norm": of(lambda: nn.RMSNorm(6), x(2, 3, 6)),
        "group norm": of(lambda: nn.GroupNorm(2, 4), x(2, 4, 5, 5)),
        "group norm 2d": of(lambda: nn.GroupNorm(2, 4), x(3, 4)),
        "batch norm": of(lambda: nn.BatchNorm2d(4), x(3, 4, 5, 5)),
        "instance norm": of(lambda: nn.InstanceNorm1d(4, affine=True), x(3, 4, 5)),
        "prelu": of(lambda: nn.PReLU(4), x(3, 4, 5)),
        "lstm": of(lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True), x(3, 2, 4)),
        "gru cell": of(lambda: nn.GRUCell(4, 5), x(3, 4)),
        "attention": of(lambda: nn.MultiheadAttention(8, 2), x(5, 2, 8), x(5, 2, 8), x(5, 2, 8)),
        "encoder layer": of(
            lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), x(2, 5, 8)
        ),
        "decoder layer": of(
            lambda: nn.TransformerDecoderLayer(8, 2, 16, norm_first=True), x(5, 2, 8), x(4, 2, 8)
        ),
        "block": of(lambda: Block(16, 2), x(2, 5, 16)),
        "blocks": of(lambda: nn.Sequential(Block(16, 2), Block(16, 4)), x(2, 5, 16)),
        "relu in place": of(
            lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)),
            x(2, 3, 4),
        ),
        "relu in place after constant input": of(
            lambda: nn.Sequential(nn.Conv1d(3, 6, 3), nn.ReLU(inplace=True), nn.Conv1d(6, 2, 1)),
            x(2, 3, 8, grad=False),
        ),
        "weight norm": of(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), x(2, 4)),
        "orthogonal": of(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)), x(2, 4)),
        "spectral norm": of(
            lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), x(2, 4)
        ),
    }


def function_cases() -> dict[str, Case]:
    """Uses of parameters that no module of torch.nn makes, but people do."""

    def of(
        function: Callable[..., object],
        *inputs: Tensor,
        exact: bool = True,
        in_i: tuple[str, ...] = (),
        **members: nn.Parameter | nn.Module,
    ) -> Case:
        return Case(make=lambda: (Calls(function, **members), inputs), exact=exact, in_i=in_i)

    linear = ("l.weight", "l.bias")

    def gained(m: nn.Module, t: Tensor) -> Tensor:
        """The products and their gradients are in float32, the weights are not."""
        scaled: Tensor = m.l((t.float() * m.g).bfloat16()).float() * m.g
        return scaled + F.linear(t, m.l.weight)

    return {
        "wide gradients": Case(
            make=lambda: (
                with_wide_gradients(Calls(gained, l=nn.Linear(4, 4), g=weight(4))),
                (x(3, 4).bfloat16().detach().requires_grad_(),),
            )
        ),
        "matmul": of(lambda m, t: t @ m.w, x(2, 3, 4), w=weight(4, 5)),
        "matmul transposed": of(lambda m, t: t @ m.w.T, x(2, 3, 4), w=weight(5, 4)),
        "matmul strided input": of(
            lambda m, t: t.transpose(1, 2) @ m.w, x(2, 4, 3), w=weight(4, 5)
        ),
        "linear strided input": of(
            lambda m, t: m.l(t.transpose(1, 2)), x(2, 4, 3), l=nn.Linear(4, 5)
        ),
        "linear strided input, no bias": of(
            lambda m, t: F.linear(t.transpose(1, 2), m.w), x(2, 4, 3), w=weight(5, 4)
        ),
        "linear by keywords": of(
            lambda m, t: F.linear(input=t, bias=m.b, weight=m.w),
            x(3, 4),
            w=weight(5, 4),
            b=weight(5),
        ),
        "matmul by keywords": of(
            lambda m, t: torch.matmul(input=t, other=m.w), x(3, 4), w=weight(4, 5)
        ),
        "weight on the left": of(lambda m, t: m.w @ t, x(4, 3), w=weight(5, 4)),
        "weight on the left, batched": of(lambda m, t: m.w @ t, x(2, 4, 3), w=weight(5, 4)),
        "matrix times vector": of(lambda m, t: t @ m.w, x(3, 4), w=weight(4)),
        "addmm": of(lambda m, t: torch.addmm(m.b, t, m.w), x(3, 4), w=weight(4, 5), b=weight(5)),
        "addmm scaled": of(
            lambda m, t: torch.addmm(m.b, t, m.w, beta=0.5), x(3, 4), w=weight(4, 5), b=weight(5)
        ),
        "baddbmm": of(
            lambda m, t: torch.baddbmm(m.b, t, m.w), x(2, 3, 4), w=weight(2, 4, 5), b=weight(5)
        ),
        "experts": of(lambda m, t: torch.bmm(t, m.w), x(2, 3, 4), w=weight(2, 4, 5)),
        "einsum": of(
            lambda m, t: torch.einsum("btk,khd->bhtd", t, m.w), x(2, 3, 4), w=weight(4, 2, 5)
        ),
        "einsum weight first": of(
            lambda m, t: torch.einsum("nk, bk -> bn", m.w, t), x(2, 4), w=weight(5, 4)
        ),
        "einsum summed away": of(
            lambda m, t: torch.einsum("bk,nk->b", t, m.w), x(2, 4), w=weight(5, 4)
        ),
        "gradient that stops": of(
            lambda m, t: Stops.apply(m.l(t)) + m.k(t), x(3, 4), l=nn.Linear(4, 4), k=nn.Linear(4, 4)
        ),
        "einsum of three": of(
            lambda m, t: torch.einsum("bk,kn,n->bn", t, m.w, m.b),
            x(2, 4),
            w=weight(4, 5),
            b=weight(5),
        ),
        "convolution padded by more on one side": of(
            lambda m, t: F.conv1d(t, m.w, padding="same"), x(2, 3, 8), w=weight(5, 3, 4)
        ),
        "norm of a weight": of(
            lambda m, t: t * F.layer_norm(m.p * 2, (4,), m.s), x(3, 4), p=weight(3, 4), s=weight(4)
        ),
        "einsum stretched": of(
            lambda m, t: torch.einsum("bk,nk->bn", t, m.w), x(2, 4), w=weight(5, 1)
        ),
        "scale and shift": of(lambda m, t: t * m.s + m.b, x(2, 3, 4), s=weight(4), b=weight(4)),
        "same shape": of(lambda m, t: m.b + t, x(3, 4), b=weight(3, 4)),
        "difference": of(lambda m, t: (m.a - t) * (t - m.b), x(3, 4), a=weight(4), b=weight(1)),
        "scalar": of(lambda m, t: t * m.s, x(3, 4), s=weight()),
        "in place": of(
            lambda m, t: (t * 2).add_(m.b).sub_(m.a).mul_(m.s),
            x(3, 4),
            a=weight(4),
            b=weight(4),
            s=weight(4),
        ),
        "derived weight": of(
            lambda m, t: F.linear(t, torch.cat([m.a, m.b * 2])),
            x(3, 4),
            a=weight(2, 4),
            b=weight(3, 4),
        ),
        "masked weight": of(
            lambda m, t: F.linear(t, m.w * (torch.arange(4) % 2)), x(3, 4), w=weight(5, 4)
        ),
        "sliced positions": of(lambda m, t: t + m.p[: t.shape[1]], x(2, 3, 4), p=weight(7, 4)),
        "looked up by index": of(
            lambda m, t: t + m.p[torch.tensor([0, 2, 2])], x(2, 3, 4), p=weight(7, 4)
        ),
        "embedded positions": of(
            lambda m, t: t + m.p(torch.arange(3)), x(2, 3, 4), p=nn.Embedding(7, 4)
        ),
        "twice": of(lambda m, t: m.l(m.l(t)), x(2, 4), l=nn.Linear(4, 4)),
        "many times": of(
            lambda m, t: m.l(m.l(m.l(m.l(t)))), x(2, 4), l=nn.Linear(4, 4), exact=False
        ),
        "twice, once transposed": of(
            lambda m, t: F.linear(F.linear(t, m.w), m.w.T), x(2, 4), w=weight(3, 4)
        ),
        "tied": of(
            lambda m, t: F.linear(m.e(torch.arange(3)) + t, m.e.weight),
            x(3, 4),
            e=nn.Embedding(7, 4),
            exact=False,
        ),
        "off the input's path": of(
            lambda m, t: (m.l(t), m.a * 2, m.b(torch.ones(2, 4))),
            x(3, 4),
            in_i=("a",),
            l=nn.Linear(4, 4),
            a=weight(4),
            b=nn.Linear(4, 2),
        ),
        "added off the path": of(
            lambda m, t: m.l(t) + m.a * 2, x(3, 4), l=nn.Linear(4, 4), a=weight(4)
        ),
        "in place on a view": of(
            lambda m, t: view_in_place(m, t), x(3, 4), a=weight(4), b=weight(4)
        ),
        "einsum, then in place": of(
            lambda m, t: torch.einsum("btk,khd->bhtd", t, m.w).relu_(),
            x(2, 3, 4),
            w=weight(4, 2, 5),
        ),
        "weight in and out": of(
            lambda m, t: (m.l(t), m.l.weight),
            x(3, 4),
            in_i=("l.weight",),
            l=nn.Linear(4, 4),
            exact=False,
        ),
        "unused": of(lambda m, t: m.a(t), x(3, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4)),
        "result unused": of(
            lambda m, t: (m.b(t), m.a(t))[1], x(3, 4), a=nn.Linear(4, 4), b=nn.Linear(4, 4)
        ),
        "frozen weight": of(
            lambda m, t: F.linear(t, m.w.detach(), m.b), x(3, 4), w=weight(5, 4), b=weight(5)
        ),
        "no gradient inside": of(no_grad_inside, x(3, 4), l=nn.Linear(4, 4)),
        "mask token": of(
            mask_token, x(2, 3, 4), in_i=("token",), token=weight(1, 1, 4), l=nn.Linear(4, 4)
        ),
        "grid of a weight and a constant": of(
            lambda m, t: t * torch.meshgrid(m.w, torch.arange(4.0), indexing="ij")[0],
            x(3, 4),
            w=weight(3),
        ),
        "view of a changed weight": of(changed_view, x(4), in_i=("w",), w=weight(3, 4)),
        "buffer filled in": of(buffer_filled, x(3, 4), w=weight(4)),
        "gradient replaced by a hook": of(hooked, x(3, 4), l=nn.Linear(4, 4)),
        "hook on a view of a changed result": of(hooked_view, x(3, 4), l=nn.Linear(4, 4)),
        "gradient replaced at the node": of(hooked_node, x(3, 4), l=nn.Linear(4, 4)),
        "custom function": of(
            custom_function, x(3, 4), in_i=("w",), w=weight(4), l=nn.Linear(4, 4)
        ),
        "torch.func.grad": of(func_grad, x(3, 4), exact=False, in_i=linear, l=nn.Linear(4, 4)),
        "torch.func.vjp": of(func_vjp, x(3, 4), exact=False, in_i=linear, l=nn.Linear(4, 4)),
        "torch.func.jacrev": of(
            lambda m, t: m.l(torch.vmap(torch.func.jacrev(lambda row: m.l(row).tanh()))(t).sum(1)),
            x(3, 4),
            exact=False,
            in_i=linear,
            l=nn.Linear(4, 4),
        ),
        "gradient of parameters by torch.func": of(
            func_grad_of_weights, x(3, 4), exact=False, in_i=linear, l=nn.Linear(4, 4)
        ),
        "forward-mode": of(forward_mode, x(3, 4), in_i=linear, l=nn.Linear(4, 4)),
        "vmap": of(
            lambda m, t: torch.func.vmap(lambda row: row * m.s @ m.w)(t),
            x(3, 4),
            in_i=("s", "w"),
            s=weight(4),
            w=weight(4, 2),
        ),
        "hypernetwork": of(
            lambda m, t: F.linear(t, (m.a(t) @ m.b.weight).mean(0).view(2, 4)),
            x(3, 4),
            a=nn.Linear(4, 5),
            b=nn.Linear(8, 5),
        ),
        "complex": of(
            lambda m, t: torch.view_as_real((t.to(torch.complex64) @ m.w) * m.s),
            x(3, 4),
            w=nn.Parameter(torch.randn(4, 2, dtype=torch.complex64)),
            s=nn.Parameter(torch.randn(2, dtype=torch.complex64)),
        ),
        "embedding bag": of(
            lambda m, t: m.e(torch.tensor([[1, 2], [3, 3]])) + t,
            x(2, 4),
            e=nn.EmbeddingBag(5, 4),
        ),
        "sparse embedding": of(
            lambda m, t: m.e(torch.tensor([1, 3, 3])) * t,
            x(3, 4),
            e=nn.Embedding(5, 4, sparse=True),
        ),
        "padded embedding": of(
            lambda m, t: m.e(torch.tensor([1, -1 % 5, 4])) * t,
            x(3, 4),
            e=nn.Embedding(5, 4, padding_idx=-1, scale_grad_by_freq=True),
        ),
        "renormed embedding": of(
            lambda m, t: m.e(torch.tensor([1, 3, 3])) * t,
            x(3, 4),
            e=nn.Embedding(5, 4, max_norm=0.5),
        ),
    }


def no_grad_inside(m: Calls, t: Tensor) -> Tensor:
    with torch.no_grad():
        scale = m.l(t).std()
    return m.l(t) / scale


def mask_token(m: Calls, t: Tensor) -> Tensor:
    tokens = m.token.expand(2, 5, 4).clone()
    tokens[:, :3] = t
    return m.l(tokens)


def changed_view(m: Calls, t: Tensor) -> Tensor:
    table = m.w.clone()
    table[1].copy_(t)
    return F.linear(torch.ones(2, 4), table)


def buffer_filled(m: Calls, t: Tensor) -> Tensor:
    rows = torch.zeros(3, 4)
    rows[0] = m.w
    rows[1] += m.w
    return t * rows


def view_in_place(m: Calls, t: Tensor) -> Tensor:
    whole = t * 2
    whole[0].add_(m.a)
    whole[0].mul_(3).sub_(m.b)
    return whole.relu_()


def hooked(m: Calls, t: Tensor) -> Tensor:
    y = m.l(t)
    y.register_hook(lambda grad: grad * 3)
    return y * 2


def hooked_view(m: Calls, t: Tensor) -> Tensor:
    y = m.l(t)
    row = y[0]
    row.register_hook(lambda grad: grad * 3)
    y.mul_(2)
    return row


def hooked_node(m: Calls, t: Tensor) -> Tensor:
    y = m.l(t)
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda grads: tuple(g * 3 for g in grads))
    return y * 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def, override]
        a, b = ctx.saved_tensors
        return grad * b, (grad * a).sum(0)


class Stops(torch.autograd.Function):
    """The identity, whose backward has no gradient to give."""

    @staticmethod
    def forward(ctx: object, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> None:
        return None


def custom_function(m: Calls, t: Tensor) -> Tensor:
    return m.l(Scale.apply(t, m.w))


def func_grad(m: Calls, t: Tensor) -> Tensor:
    h = m.l(t)
    return m.l(torch.func.grad(lambda probe: m.l(probe).tanh().sum())(h))


def func_vjp(m: Calls, t: Tensor) -> Tensor:
    out, pull = torch.func.vjp(lambda probe: m.l(probe).tanh(), m.l(t))
    return m.l(out + pull(torch.ones_like(out))[0])


def func_grad_of_weights(m: Calls, t: Tensor) -> Tensor:
    def energy(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(m.l, weights, t).square().sum()

    return m.l(t) * torch.func.grad(energy)(dict(m.l.named_parameters()))["bias"]


def forward_mode(m: Calls, t: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t, torch.ones_like(t))
        parts = torch.autograd.forward_ad.unpack_dual(m.l(dual).square())
        assert parts.tangent is not None
        return parts.primal + parts.tangent
