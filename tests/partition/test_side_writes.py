"""Modules that write beside what they return: carried if that can be, else refused, never wrong."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import PartitionError, Pipeline, _torch_compat, draw_step_seed, microbatch_rng
from penstock.partition.forward.by_module import NotByModule, split_by_module
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.partition.odd_models import DIM, Block, own_loss


class Net(nn.Module):
    """Four blocks, and a loss of its own."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


def batch(rows: int = 8) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, DIM)


def trains_alike(model: nn.Module, split: Any = None, **options: Any) -> None:
    """Two steps, each as in the plain model."""
    plain = copy.deepcopy(model)
    x = batch()
    pipe = Pipeline(model, example=(x[:2],), split=split, n_microbatches=4, **options)
    for _ in range(2):
        loss = pipe.step(x)
        expected = plain_step(plain, own_loss, x, n_microbatches=4)
        assert loss is not None
        torch.testing.assert_close(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)


def refused(model: nn.Module, told: str, split: Any = None) -> None:
    with pytest.raises(NotByModule, match=told):
        split_by_module(model, split or [2, 2], (batch()[:2],))


# --- attributes --------------------------------------------------------------------------------


class Keeps(Block):
    """Keeps an auxiliary loss on itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = y.square().mean()
        return y


class KeepsList(Block):
    """Keeps a list of losses, a new one in each call."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.aux = [y.square().mean(), {"z": y.mean()}]
        return y


class Outer(nn.Module):
    """Holds a module that keeps an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Keeps()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Defaulted(Keeps):
    """The class has a default, which stands for what is elsewhere."""

    aux: Any = 0.0


def sums(block: Any, read: Any) -> nn.Module:
    class Sums(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            loss = super().forward(x)["loss"]
            return {"loss": loss + sum(read(layer) for layer in self.layers)}

    Sums.block = block
    return Sums()


@pytest.mark.parametrize(
    ("block", "read", "name"),
    [
        (Keeps, lambda layer: layer.aux, "aux"),
        (Keeps, lambda layer: getattr(layer, "aux", 0.0), "aux"),
        (Keeps, lambda layer: layer.aux if hasattr(layer, "aux") else 0.0, "aux"),
        (Defaulted, lambda layer: layer.aux, "aux"),
        (Outer, lambda layer: layer.inner.aux, "inner.aux"),
        (KeepsList, lambda layer: layer.aux[0] + layer.aux[1]["z"], "aux"),
    ],
)
def test_reads_of_losses_in_attributes_are_refused(block: Any, read: Any, name: str) -> None:
    told = rf"reads layers\.0\.{name}, which layers\.0 sets .* have the module return it"
    refused(sums(block, read), told)


def test_unread_attributes_do_not_cross() -> None:
    class Quiet(Net):
        block = Keeps

    model = Quiet()
    split = split_by_module(model, [2, 2], (batch()[:2],))
    assert split.plan is not None
    crossing = [str(source) for source in split.plan.boundary_values[0]]
    assert crossing == ["output 0 of layers.1"]
    assert not any("aux" in vars(layer) for layer in model.layers)


def test_tensors_in_attributes_unseen_in_the_trace_are_refused() -> None:
    """The trace did not see it, and a getattr with a default would not notice either."""

    class Sometimes(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if y.requires_grad:
                self.aux = y.square().mean()
            return y

    pipe = Pipeline(
        sums(Sometimes, lambda layer: getattr(layer, "aux", 0.0)),
        example=(batch()[:2],), ranks=2, n_microbatches=4,
    )  # fmt: skip
    with pytest.raises(PartitionError, match=r"layers\.0 keeps tensors in its attribute aux"):
        pipe.step(batch())


def test_tensors_in_attributes_of_later_calls_are_refused() -> None:
    """Every call is looked at, not just the first."""

    class Later(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.calls += 1
            if self.calls > 3:
                self.keep(y)
            return y

        def keep(self, y: Tensor) -> None:
            self.aux = y.square().mean()

    class Grows(Later):
        def keep(self, y: Tensor) -> None:
            self.seen.append(y)

    for block, name in ((Later, "aux"), (Grows, "seen")):
        model = sums(block, lambda layer: getattr(layer, "aux", 0.0))
        pipe = Pipeline(model, example=(batch()[:2],), ranks=2, n_microbatches=2)
        pipe.step(batch())
        with pytest.raises(
            PartitionError, match=rf"layers\.0 keeps tensors in its attribute {name}"
        ):
            pipe.step(batch())


class Numbers(Block):
    """Keeps a number, which does not cross."""

    def forward(self, x: Tensor) -> Tensor:
        self.scale = float(x.shape[0]) + getattr(self, "scale", 0.0)
        return super().forward(x)


def test_reads_of_numbers_in_attributes_are_refused() -> None:
    told = r"reads layers\.0\.scale, which layers\.0 sets when it is called"
    refused(sums(Numbers, lambda layer: layer.scale), told)
    refused(sums(Numbers, lambda layer: getattr(layer, "scale", 1.0) + 1), told)

    class Quiet(Net):
        block = Numbers

    trains_alike(Quiet(), ranks=2)


def test_reads_of_attributes_before_they_are_set_are_refused() -> None:
    """It would be of the microbatch before, or of none."""

    class Before(Net):
        block = Defaulted

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            old = sum(layer.aux * 1.0 for layer in self.layers)
            return {"loss": super().forward(x)["loss"] + old}

    refused(Before(), r"reads layers\.0\.aux, which layers\.0 sets when it is called")


class SharesState(nn.Module):
    """A block with a module that several blocks have, and that keeps something."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.shared(x))  # type: ignore[no-any-return]


class Replaces(nn.Module):
    """Puts another tensor in a buffer's place, or into an attribute, or counts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls, self.last = kind, 0, torch.zeros(())
        self.register_buffer("ema", None if kind == "late" else torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        match self.kind:
            case "calls":
                self.calls += 1
                return x * self.calls
            case "last":
                x, self.last = x + self.last, mean.mean()
                return x
            case "values":
                mean = mean * (1 if mean.sum() > 0 else 2)  # can't run on shapes
        self.ema = mean if self.ema is None else self.ema * 0.5 + mean
        return x + self.ema  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "what"),
    [("buffer", "ema"), ("late", "ema"), ("values", "ema"), ("calls", "calls"), ("last", "last")],
)
def test_stateful_inner_modules_of_several_stages_are_refused(kind: str, what: str) -> None:
    shared = Replaces(kind)

    class Shares(Net):
        def block(self) -> nn.Module:
            return SharesState(shared)

    model = Shares()
    before = shared.ema
    refused(model, rf"layers\.0\.shared is one module within several.*changes its {what}")
    assert shared.ema is before and shared.calls == 0 and shared.last == 0
    split_by_module(model, ["head"], (batch()[:2],))


# --- containers and tensors that are handed on -------------------------------------------------


class Appends(Block):
    def forward(self, x: Tensor, acc: list[Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        acc.append(y.square().mean())
        return y


class Fills(Block):
    def forward(self, x: Tensor, acc: dict[str, Any]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        acc["aux"] = acc.get("aux", 0) + y.mean()
        return y


class Adds(Block):
    def forward(self, x: Tensor, acc: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        acc += y.mean(0)
        return y


def collects(block: Any, make: Any, read: Any) -> nn.Module:
    class Collects(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            acc = make()
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x, acc)
            return {"loss": self.head(x).square().mean() + read(acc)}

    Collects.block = block
    return Collects()


@pytest.mark.parametrize(
    ("block", "make", "read", "told"),
    [
        (Appends, list, sum, r"layers\.0 writes tensors into the list or dict"),
        (Fills, dict, lambda acc: acc["aux"], r"layers\.0 writes tensors into the list or dict"),
        (
            Adds,
            lambda: torch.zeros(DIM),
            lambda acc: acc.square().sum(),
            r"layers\.[01], in stage 0, writes into the tensor.*argument 1.*stage 1 computes with",
        ),
    ],
)
def test_writes_into_arguments_are_refused(block: Any, make: Any, read: Any, told: str) -> None:
    refused(collects(block, make, read), told)


def test_tensors_that_are_written_and_used_in_one_stage() -> None:
    trains_alike(
        collects(Adds, lambda: torch.zeros(DIM), lambda acc: acc.square().sum()),
        ["layers.0"], ranks=2,
    )  # fmt: skip


def test_a_skip_that_a_block_writes_into() -> None:
    class Skip(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = first = self.embed(x)
            kept = first * 2
            for layer in self.layers:
                x = layer(x)
            return {"loss": (self.head(x) + first + kept).square().mean()}

    Skip.block = lambda self: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(DIM, DIM))
    refused(Skip(), r"layers\.0, in stage 0, writes into the tensor")


def test_shared_containers_are_refused() -> None:
    box: list[Tensor] = []

    class Shares(Block):
        def __init__(self) -> None:
            super().__init__()
            self.box = box

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x) + sum(self.box)
            self.box.append(y)
            return y

    class Boxes(Net):
        block = Shares

    refused(Boxes(), r"layers\.0 puts tensors into its attribute box")
    assert not box


# --- hooks -------------------------------------------------------------------------------------


def hooked(after: int) -> nn.Module:
    class Hooked(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == after and x.requires_grad:
                    x.register_hook(lambda grad: grad * 2)
            return {"loss": self.head(x).square().mean()}

    return Hooked()


def test_hooks_on_crossing_tensors_are_refused() -> None:
    pipe = Pipeline(hooked(1), example=(batch()[:2],), ranks=2, n_microbatches=4)
    with pytest.raises(PartitionError, match=r"stage 1: .*registers a hook on a tensor"):
        pipe.step(batch())


def test_a_hook_that_one_stage_runs() -> None:
    trains_alike(hooked(3), ranks=2)


def test_hooks_seen_in_the_trace_are_refused() -> None:
    class Always(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            x.register_hook(lambda grad: grad * 2)
            for layer in self.layers:
                x = layer(x)
            return {"loss": self.head(x).square().mean()}

    refused(Always(), "cannot register a hook on a tensor that doesn't require gradient")


@pytest.mark.parametrize("always", [True, False])
def test_a_hook_on_a_node_of_the_graph(always: bool) -> None:
    """Who puts one there reads grad_fn first."""

    class Node(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            if always or x.requires_grad:
                node = x.grad_fn
                if node is not None:
                    node.register_prehook(lambda grads: (grads[0] * 2,))
            for layer in self.layers:
                x = layer(x)
            return {"loss": self.head(x).square().mean()}

    model = Node()
    with pytest.raises(PartitionError, match="reads a tensor's grad_fn"):
        Pipeline(model, example=(batch()[:2],), ranks=2, n_microbatches=4).step(batch())
    # What was watched is as before.
    assert "grad_fn" not in vars(Tensor)
    assert Tensor.register_hook.__module__ == "torch._tensor"


def test_code_of_packages_named_like_torch_is_the_users() -> None:
    """Of torchvision, for instance, whose folder lies beside torch's."""
    folder = f"{Path(torch.__file__).parent}vision"
    scope: dict[str, Any] = {}
    exec(compile("def read(x): return x.grad_fn", f"{folder}/ops.py", "exec"), scope)
    reported: list[str] = []
    x = torch.ones(2, requires_grad=True) * 2
    with _torch_compat.HookWatch(reported.append):
        scope["read"](x)
    assert reported == ["reads a tensor's grad_fn"]


class Shifts(Net):
    """Adds a parameter of its own, spread over the rows, where the second stage begins."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.layers[1](self.layers[0](self.embed(x)))
        x = self.layers[2](x + self.shift.expand(len(x), DIM))
        return {"loss": self.head(self.layers[3](x)).square().mean()}


def test_deferral_of_top_level_parameters_reads_grad_fn() -> None:
    """That looks at the graph too, for every operation on a parameter that none other is for."""
    first, second = ["embed", "layers.0", "layers.1"], ["shift", "layers.2", "layers.3", "head"]
    split_by_module(Shifts(), [first, second], (batch()[:2],))
    trains_alike(Shifts(), split=[first, second], schedule="zb-h1")


def test_backward_hooks_of_containers_are_refused() -> None:
    model = Net()
    model.register_full_backward_hook(lambda *_: None)
    refused(model, "the model has a backward hook")


# --- state of the code between -----------------------------------------------------------------


class Averages(Net):
    """Keeps an average of what comes in, in a buffer or beside."""

    registered = True
    in_place = False
    late = True

    def __init__(self) -> None:
        super().__init__()
        if self.registered:
            self.register_buffer("ema", torch.zeros(()))
        else:
            self.ema = torch.zeros(())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mean = x.detach().mean()
        if self.in_place:
            self.ema += mean
        else:
            self.ema = self.ema * 0.5 + mean
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.late else layer(x + self.ema)
        return {"loss": (self.head(x) + self.ema).square().mean()}


@pytest.mark.parametrize(
    ("registered", "in_place", "late", "told"),
    [
        (True, False, True, "assigns a new tensor to ema"),
        (False, False, True, "assigns a new tensor to ema"),
        (True, True, False, r"writes into ema, which lies in stage 0, but stages \[0, 1\] compute"),
        (False, True, True, "writes into ema, a tensor that is neither parameter nor buffer"),
    ],
)
def test_state_of_the_top_level_forward(
    registered: bool, in_place: bool, late: bool, told: str
) -> None:
    class Here(Averages):
        pass

    Here.registered, Here.in_place, Here.late = registered, in_place, late
    model = Here()
    refused(model, told)
    assert type(model.ema) is Tensor and model.ema == 0


class Counts(Net):
    """Counts its calls in a buffer that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        return super().forward(x)


def test_a_count_of_calls_at_top_level() -> None:
    refused(Counts(), "writes into calls, which lies in stage 0, but no stage computes with it")


class Remembers(Net):
    """Keeps of each call what a later one in another form would use, as for generation."""

    deltas: Tensor | None = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.deltas is None or x.dim() == 2:
            self.deltas = x.detach().mean(1, keepdim=True)
        x = self.embed(x) + self.deltas
        for layer in self.layers:
            x = layer(x)
        return {"loss": self.head(x).square().mean()}


def test_unused_state_of_an_earlier_call() -> None:
    model = Remembers()
    model(batch())
    assert model.deltas is not None
    trains_alike(model, ranks=2)


def test_a_buffer_that_one_stage_writes() -> None:
    class Here(Averages):
        in_place = True

    trains_alike(Here(), ranks=2)


class SharesNorm(nn.Module):
    """A block with a module that all blocks have."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(x)))


def test_a_batch_norm_within_blocks_of_several_stages() -> None:
    norm = nn.BatchNorm1d(DIM)

    class Norms(Net):
        def block(self) -> nn.Module:
            return SharesNorm(norm)

    refused(Norms(), r"layers\.0\.norm is one module within several, in the stages \[0, 1\]")
    split_by_module(Norms(), ["head"], (batch()[:2],))
    split_by_module(Norms().eval(), [2, 2], (batch()[:2],))


# --- random numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("after", range(4))
def test_dropout_between_modules_draws_the_plain_masks(after: int, ranks: int) -> None:
    class Drops(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == after:
                    x = F.dropout(x, 0.5, self.training)
            return {"loss": F.dropout(self.head(x), 0.5, self.training).square().mean()}

    model, x = Drops(), batch()
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, example=(x[:2],), ranks=ranks, n_microbatches=4, microbatch_rng=True)
    torch.manual_seed(3)
    loss = pipe.step(x)
    torch.manual_seed(3)
    seed, losses = draw_step_seed(), []
    for number, rows in enumerate(x.chunk(4)):
        with microbatch_rng(seed, number):
            losses.append(plain(rows)["loss"].item())
    assert loss is not None
    torch.testing.assert_close(loss.item(), sum(losses) / 4)


def test_one_draw_that_several_stages_use() -> None:
    """Made of nothing that is absent, each stage would draw another."""

    class Masked(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            mask = torch.rand(DIM) < 0.5
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x) * mask
            return {"loss": self.head(x).square().mean()}

    refused(Masked(), r"draws random numbers .*stages \[0, 1\] need")


def test_an_early_draw_that_a_later_stage_alone_uses() -> None:
    """It would draw where it runs, after others: not the plain model's mask."""

    class Early(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            kept = F.dropout(x, 0.5, self.training)
            for layer in self.layers:
                x = layer(x)
            return {"loss": self.head(x + kept).square().mean()}

    refused(Early(), r"draws random numbers .* in stage 0, for values that the stages \[1\] need")
    split_by_module(Early().eval(), [2, 2], (batch()[:2],))


def test_a_draw_that_only_decides() -> None:
    class Decides(Net):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.embed(x)
            for layer in self.layers:
                if torch.rand([]) < 0:
                    continue
                x = layer(x)
            return {"loss": self.head(x).square().mean()}

    trains_alike(Decides(), ranks=2)
