"""Layers, wrappers and hooks that users bring, under every schedule."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from penstock import Pipeline
from penstock.schedule.registry import family
from tests.agreement import TRAINING, Twins
from tests.compare import Tolerance, plain_step
from tests.models import CASES, DIM, VOCABULARY, features, mlp, sequences

SCHEDULES = pytest.mark.parametrize("schedule", TRAINING)


def made(model: Any, schedule: str, loss_fn: Any = F.mse_loss, **options: Any) -> Twins:
    """Twins of four stages, three microbatches."""
    virtual = family(schedule).default_virtual
    return Twins(
        model,
        loss_fn,
        schedule=schedule,
        ranks=4 // virtual,
        virtual=virtual,
        n_microbatches=3,
        **options,
    )


# --- layers ----------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """(B, 4, T) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(4, 4, 3, padding=1, groups=2),
            nn.ConvTranspose1d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm1d(4, affine=True),
            nn.PReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, num_layers=2, bidirectional=True, batch_first=True)
        self.join = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.gru(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(DIM, DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bilinear(x, x.tanh()) * self.scale + self.scale
        return self.attention(h, h, h)[0]


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, 2, DIM // 2))
        self.bias = nn.Parameter(torch.randn(2, DIM // 2))
        self.table = nn.Parameter(torch.randn(4, DIM))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("btd,dhk->bthk", x, self.weight) + self.bias
        return h.flatten(2) + self.table @ torch.eye(DIM)


class FrozenInside(nn.Module):
    """Uses its weights with and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.first(x)
        h = h + F.linear(x, self.first.weight.detach(), self.first.bias)
        return self.second(x) + h + x @ self.second.weight.t().contiguous()


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, 2, 8, dropout=0.0, batch_first=True, norm_first=True)


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "convolution, recurrence, attention, einsum": lambda: [
        Recurrence(),
        Convolutions(),
        Attention(),
        Einsum(),
    ],
    "transformer encoders": lambda: [encoder() for _ in range(4)],
    "weights without gradients": lambda: [FrozenInside() for _ in range(4)],
    "parametrizations": lambda: [
        weight_norm(nn.Linear(DIM, DIM)),
        spectral_norm(nn.Linear(DIM, DIM)),
        orthogonal(nn.Linear(DIM, DIM)),
        nn.Sequential(weight_norm(nn.Linear(DIM, DIM)), nn.PReLU()),
    ],
}


@SCHEDULES
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, schedule: str) -> None:
    """Parameters used several times in a stage sum their gradients in another order there."""
    torch.manual_seed(0)
    both = made(nn.Sequential(*LAYERS[name]()), schedule, tolerance=Tolerance(relative=1e-5))
    for step in range(2):
        inputs, target = sequences(6, step)
        both.step(inputs, target=target)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, DIM)
        self.padded = nn.Embedding(VOCABULARY, DIM, padding_idx=0, max_norm=1.0)
        self.by_frequency = nn.Embedding(VOCABULARY, DIM, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.bag(x) + self.padded(x).mean(1) + self.by_frequency(x).mean(1)


@SCHEDULES
def test_embeddings(schedule: str) -> None:
    both = made(nn.Sequential(Bags(), *mlp(3)), schedule)
    for step in range(2):
        inputs, _ = CASES["gpt"].batch(6, step)
        both.step(inputs, target=features(6, step)[1])


@SCHEDULES
def test_sparse_gradients(schedule: str) -> None:
    embedding = nn.Embedding(VOCABULARY, DIM, sparse=True)
    both = made(nn.Sequential(embedding, *mlp(3)), schedule)
    inputs, _ = CASES["gpt"].batch(6, 0)
    target = torch.randn(6, 5, DIM)
    both.pipe.step(inputs, target=target)
    plain_step(both.plain, F.mse_loss, inputs, target=target, n_microbatches=3)
    grad, expected = embedding.weight.grad, both.plain[0].weight.grad
    assert grad is not None
    assert grad.is_sparse
    assert torch.equal(grad.to_dense(), expected.to_dense())


@SCHEDULES
def test_complex_models(schedule: str) -> None:
    class Magnitude(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.abs()

    layers = [nn.Linear(DIM, DIM, dtype=torch.complex64) for _ in range(4)]
    layers[3:] = [nn.Sequential(layers[3], Magnitude())]
    both = made(nn.Sequential(*layers), schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(torch.complex(inputs, inputs.sin()), target=target)


@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes(schedule: str, dtype: torch.dtype) -> None:
    both = made(mlp(4).to(dtype), schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs.to(dtype), target=target.to(dtype))


@SCHEDULES
def test_autocast(schedule: str) -> None:
    both = made(CASES["gpt"].make(4), schedule, CASES["gpt"].loss_fn)
    for step in range(2):
        inputs, target = CASES["gpt"].batch(6, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            both.step(inputs, target=target)


class Island(nn.Linear):
    """Computes in float32, whatever autocast says."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@SCHEDULES
def test_a_layer_that_leaves_autocast(schedule: str) -> None:
    """It is differentiated in float32, as by a backward outside of autocast."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(DIM, DIM), Island(DIM, DIM))]
    stages = [nn.Sequential(*layers[i : i + 2]) for i in range(0, 8, 2)]
    both = made(nn.Sequential(*stages), schedule)
    for step in range(2):
        inputs, target = features(6, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            both.step(inputs, target=target)


class Averaging(nn.Linear):
    """Sends the running mean of its inputs along, and takes that of the layer before."""

    mean: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__(DIM, DIM)
        if kind == "buffer":
            self.register_buffer("mean", torch.zeros(DIM))
        elif kind == "parameter":
            self.mean = nn.Parameter(torch.zeros(DIM), requires_grad=False)
        else:
            self.mean = torch.zeros(DIM)

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        x, mean = value if isinstance(value, tuple) else (value, 0)
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0))
        return super().forward(x + mean).tanh(), self.mean


@SCHEDULES
@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute"])
def test_state_that_is_sent(schedule: str, kind: str) -> None:
    """The next stage reads the value of its microbatch, though later ones write into the state."""

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.mse_loss(output[0] + output[1], target)

    both = made(nn.Sequential(*(Averaging(kind) for _ in range(4))), schedule, loss_fn)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@SCHEDULES
def test_channels_last(schedule: str) -> None:
    """Layouts cross boundaries as they are, so that the next kernel is the same one."""
    model = CASES["convnet"].make(4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    both = made(model, schedule)
    for step in range(2):
        inputs, target = CASES["convnet"].batch(6, step)
        both.step(inputs.to(memory_format=torch.channels_last), target=target)


@SCHEDULES
def test_reentrant_checkpointing(schedule: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.module, x, use_reentrant=True)

    both = made(nn.Sequential(*map(Checkpointed, mlp(4))), schedule)
    for step in range(2):
        inputs, target = features(6, step)
        # It needs an input that takes gradients, or it computes none.
        both.step(inputs.requires_grad_(), target=target)


@SCHEDULES
def test_a_loss_with_parameters(schedule: str) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(DIM))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return ((output - target) ** 2 * self.weight).mean()

    loss_fn = Weighted()
    plain_loss_fn = copy.deepcopy(loss_fn)
    both = made(mlp(4), schedule, loss_fn)
    inputs, target = features(6, 0)
    both.pipe.step(inputs, target=target)
    plain_step(both.plain, plain_loss_fn, inputs, target=target, n_microbatches=3)
    both.compare()
    assert loss_fn.weight.grad is not None
    assert torch.equal(loss_fn.weight.grad, plain_loss_fn.weight.grad)


# --- gradients and hooks ---------------------------------------------------------------------


@SCHEDULES
def test_gradients_are_added_in_place(schedule: str) -> None:
    """To whatever is there, such as views of one flat buffer."""
    both = made(mlp(4), schedule)
    for model in (both.pipe, both.plain):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
    held = [param.grad for param in both.pipe.parameters()]
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    assert all(p.grad is g for p, g in zip(both.pipe.parameters(), held, strict=True))


@SCHEDULES
def test_hooks_fire_once_per_microbatch(schedule: str) -> None:
    both = made(mlp(4), schedule)
    fired: Counter[tuple[str, str]] = Counter()

    def note(kind: str, name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            fired[kind, name] += 1

        return hook

    for name, param in both.pipe.named_parameters():
        param.register_hook(note("gradient", name))
        param.register_post_accumulate_grad_hook(note("accumulated", name))
    for stage in both.pipe.stages:
        for name, module in stage.submod.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(note("forward", name))
                module.register_full_backward_pre_hook(note("backward", name))
    for step in range(2):
        inputs, target = features(6, step)
        # A module's backward hook warns where nothing before it takes a gradient.
        both.step(inputs.requires_grad_(), target=target)
    names = [name for name, _ in both.pipe.named_parameters()]
    wanted = {(kind, name): 6 for kind in ("gradient", "accumulated") for name in names}
    wanted |= {(kind, f"{i}.0"): 6 for kind in ("forward", "backward") for i in range(4)}
    assert fired == wanted


@SCHEDULES
def test_hooks_that_change_gradients(schedule: str) -> None:
    both = made(mlp(4), schedule)

    def halve(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    for model in (both.pipe, both.plain):
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            param.register_post_accumulate_grad_hook(halve)
    inputs, target = features(6, 0)
    both.step(inputs, target=target)


@SCHEDULES
def test_optimizer_in_backward(schedule: str) -> None:
    """The parameter is stepped as soon as its gradient is there: one microbatch, one step.

    With several, later forwards would meet other weights than in the plain loop.
    """
    virtual = family(schedule).default_virtual
    both = Twins(
        mlp(4),
        F.mse_loss,
        schedule=schedule,
        ranks=4 // virtual,
        virtual=virtual,
        n_microbatches=1,
    )

    def descend(param: Tensor) -> None:
        with torch.no_grad():
            param -= 0.1 * param.grad
        param.grad = None

    for model in (both.pipe, both.plain):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(descend)
    for step in range(3):
        inputs, target = features(2, step)
        both.step(inputs, target=target)
    pairs = zip(both.pipe.parameters(), both.plain.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


# --- memory ----------------------------------------------------------------------------------


@SCHEDULES
def test_nothing_of_a_step_is_held_after_it(schedule: str) -> None:
    both = made(mlp(4), schedule)
    refs: list[weakref.ref[Any]] = []

    def note(_: nn.Module, args: Any, output: Any) -> None:
        tensors = [x for x in (*args, output) if isinstance(x, Tensor)]
        tensors += [x for part in (*args, output) if isinstance(part, tuple) for x in part]
        refs.extend(weakref.ref(x) for x in tensors)

    for stage in both.pipe.stages:
        stage.submod.register_forward_hook(note)
    gc.disable()  # nothing is held in a cycle either
    try:
        for step in range(2):
            inputs, target = features(6, step)
            refs += [weakref.ref(inputs), weakref.ref(target)]
            both.pipe.step(inputs, target=target)
            both.pipe.eval(inputs)
            del inputs, target
            assert len(refs) > 12
            assert [ref() for ref in refs if ref() is not None] == []
            refs.clear()
    finally:
        gc.enable()


def test_a_sent_output_is_freed() -> None:
    """Of what a stage has sent on, only the edge of its graph is kept until the backward."""
    refs: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            alive.append(sum(ref() is not None for ref in refs))
            output = self.linear(x)
            refs.append(weakref.ref(output))
            return output

    pipe = Pipeline([Watched(), *mlp(1)], loss_fn=F.mse_loss, schedule="gpipe", n_microbatches=6)
    inputs, target = features(12, 0)
    pipe.step(inputs, target=target)
    # GPipe: five other microbatches are in flight when the last one comes.
    assert alive == [0] * 6


def test_1f1b_holds_activations_of_microbatches_in_flight_alone() -> None:
    held: list[int] = []
    refs: list[weakref.ref[Any]] = []

    class Saves(nn.Module):
        """Saves its output for the backward; the graph, and nothing else, keeps it."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            refs.append(weakref.ref(hidden))
            held.append(sum(ref() is not None for ref in refs))
            return hidden * hidden

    pipe = Pipeline([Saves(), *mlp(2)], loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=12)
    inputs, target = features(12, 0)
    pipe.step(inputs, target=target)
    assert max(held) == 3, "as many as there are ranks"
