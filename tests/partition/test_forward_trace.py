"""What a trace leaves behind, in the model and for the next trace: nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline, split_by_module
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.partition.odd_models import DIM, Block, own_loss


class Choosy(Block):
    """Looks at values, so that shapes don't do."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else super().forward(x)


class Net(nn.Module):
    """Four blocks, and a loss of its own."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def net(made_of: Any) -> nn.Module:
    class Made(Net):
        block = made_of

    return Made()


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(rows))


def trains_alike(model: nn.Module) -> None:
    """Three steps, each of another shape, as in the plain model."""
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=(batch(4),), ranks=2, n_microbatches=2)
    for rows in (8, 4, 6):
        pipe.step(batch(rows))
        plain_step(plain, own_loss, batch(rows), n_microbatches=2)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)


class Hooks(Block):
    """Registers a hook when it is first called, as models that collect hidden states do."""

    hooked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.linear.register_forward_hook(lambda module, given, output: (output,))
            self.hooked = True
        (y,) = self.linear(x)
        return torch.tanh(y)


class ChoosyHooks(Hooks):
    """The same, run dry on values: the module itself, not a copy."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 1e9 else super().forward(x)


@pytest.mark.parametrize("block", [Hooks, ChoosyHooks])
def test_hooks_that_modules_register_when_they_are_called(block: Any) -> None:
    """However often it is run dry: a second hook would wrap what comes out again."""
    model = net(block)
    split_by_module(model, [2, 2], (batch(),))
    assert not any(layer.linear._forward_hooks for layer in model.get_submodule("layers"))
    trains_alike(model)


class Remembers(Net):
    """Keeps a tensor between its modules, which it did not hold at first."""

    last: Any = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.last = torch.arange(len(x))
        return super().forward(x)


def test_attributes_are_restored_after_a_trace() -> None:
    trains_alike(Remembers())


class Begins(Net):
    """Its modules are called with a parameter of its own, and between them with another's."""

    block = Choosy

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](self.start.expand(2, DIM)).mean()
        bias: Any = self.layers[1].linear.bias
        return super().forward(self.layers[0](x + bias) + first)


def test_parameters_between_modules_in_a_trace_on_values() -> None:
    split_by_module(Begins(), [2, 2], (batch(),))
    trains_alike(Begins())


class Recurrent(Block):
    """Keeps its weights in a list beside the registry, as all of torch's recurrent layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.rnn(x)[0])


def test_weights_in_lists_are_copied_for_the_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="penstock")
    trains_alike(net(Recurrent))
    assert "captured" not in caplog.text and "traced on values" not in caplog.text


class Behind(Net):
    """A loss of which no shapes can tell, as that of CTC; and a skip that it alone looks at."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.layers[0](x)
        scores = torch.log_softmax(self.layers[3](self.layers[2](self.layers[1](first))), -1)
        length = torch.full((len(x),), 3)
        loss = nn.functional.ctc_loss(
            scores.expand(4, *scores.shape), torch.ones(len(x), 2, dtype=torch.long),
            length + 1, length - 1,
        )  # fmt: skip
        return {"loss": loss if first.sum() > -1e9 else -loss}


def test_code_behind_the_last_module_may_look_at_values() -> None:
    """The last stage alone runs it, to which all that is looked at is carried."""
    split_by_module(Behind(), [2, 2], (batch(),))
    trains_alike(Behind())


class BatchFirst(nn.Module):
    """A layer that transposes its result in place, as torch does with ``batch_first``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.GRU(DIM, DIM, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)[0]
        return {"loss": x.square().mean()}


def test_results_that_are_transposed_in_place_cross_as_they_are() -> None:
    model = BatchFirst()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(0))
    split = split_by_module(model, ["layers.1"], (x[:2],))
    assert [call.output.metas[0].shape for call in split.plan.trace.calls] == [(2, 3, DIM)] * 2
    pipe = Pipeline(model, split=["layers.1"], example=(x[:2],), ranks=2, n_microbatches=2)
    pipe.step(x)
    plain_step(plain, own_loss, x, n_microbatches=2)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)
