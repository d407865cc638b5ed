"""Cutting by module: whatever the model does between its modules, the plain model's results."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import PartitionError, Pipeline, split_args_kwargs_into_chunks
from penstock.partition.forward import module_stage
from penstock.partition.forward.by_module import NotByModule, split_by_module
from penstock.partition.forward.forward_trace import ForwardTracer
from penstock.runtime.comm.loopback import LoopbackTransport
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.partition.odd_models import (
    DIM,
    ODD_MODELS,
    Cached,
    Checkpointed,
    Layerwise,
    NetBase,
    TwiceLate,
)


def odd_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ODD_MODELS[name]()


def batch(name: str, rows: int = 4, seed: int = 1) -> dict[str, Any]:
    torch.manual_seed(seed)
    given: dict[str, Any] = {"x": torch.randn(rows, DIM)}
    if name == "Uneven":
        given["rows"] = torch.arange(rows)
    return given


def square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


# Where several stages compute with a parameter or a value, their gradients are summed in another
# order than in one process.
SUMMED = {"Residual", "Skips", "Loose", "TiedInGlue", "InPlace", "CalledTwice", "Structured"}


SPLITS: list[list[Any]] = [[2, 2], [1, 1, 1, 1], ["blocks.1", "blocks.3", "head"]]


@pytest.mark.parametrize(
    ("name", "split", "schedule"),
    # Every model in every split, and both under both schedules.
    [
        (name, split, ("1f1b", "zbv")[(i + j) % 2])
        for i, name in enumerate(ODD_MODELS)
        for j, split in enumerate(SPLITS)
    ],
)
def test_odd_models(name: str, split: Any, schedule: str) -> None:
    stages = len(split) + isinstance(split[0], str)
    model = odd_model(name)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, example=batch(name), loss_fn=square, schedule=schedule, split=split,
        ranks=stages // (2 if schedule == "zbv" else 1), n_microbatches=3,
    )  # fmt: skip
    for rows in (6, 6, 5):  # the last in microbatches of two sizes
        given = batch(name, rows)
        loss = pipe.step(**given)
        expected = plain_step(plain, square, n_microbatches=3, **given)
        assert loss is not None
        torch.testing.assert_close(loss, expected.loss)
        tolerance = ROUNDING if name in SUMMED else None
        assert_same(snapshot(pipe), snapshot(plain), tolerance=tolerance)
    given = batch(name, 6)
    parts = split_args_kwargs_into_chunks((), given, 3)[1]
    with torch.no_grad():
        assert torch.equal(pipe.eval(**given), torch.cat([plain(**part) for part in parts]))


@pytest.mark.parametrize("name", ODD_MODELS)
def test_evaluation_in_inference_mode(name: str) -> None:
    """As the first call and after a step, on tensors made inside and outside of it."""
    model = odd_model(name)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, loss_fn=square, split=["blocks.1", "blocks.3", "head"], ranks=4, n_microbatches=3
    )
    tolerance = ROUNDING if name in SUMMED else None
    for _ in range(2):
        given = batch(name, 6)
        parts = split_args_kwargs_into_chunks((), given, 3)[1]
        with torch.no_grad():
            expected = torch.cat([plain(**part) for part in parts])
        with torch.inference_mode():
            assert torch.equal(pipe.eval(**given), expected)
            inside = {each: value.clone() for each, value in given.items()}
            assert torch.equal(pipe.eval(**inside), expected)
        loss = pipe.step(**given)
        torch.testing.assert_close(loss, plain_step(plain, square, n_microbatches=3, **given).loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=tolerance)


class Annealed(NetBase):
    """Plain arguments, which every stage uses."""

    def forward(self, x: Tensor, scale: float, use_cache: bool, depth: int = 4) -> Tensor:
        x = self.embed(x)
        for block in self.blocks[:depth]:
            x = block(x) * scale
        return self.head(x) + (1.0 if use_cache else scale)


def test_plain_arguments_leave_steps_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No metadata is sent again, and no trace made, for values as before and for other floats."""
    model = Annealed()
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, loss_fn=square, split=["blocks.1", "blocks.3", "head"], ranks=4, n_microbatches=3
    )
    sent, traces = Mock(), Mock()
    monkeypatch.setattr(LoopbackTransport, "send_metadata", count(sent, "send_metadata"))
    monkeypatch.setattr(ForwardTracer, "run", count(traces, "run", ForwardTracer))
    for step in range(6):
        given = {"x": batch("Annealed", 6, step)["x"], "use_cache": step == 5}
        sent.reset_mock()
        traces.reset_mock()
        loss = pipe.step(scale=0.5 + step / 7, **given)
        expected = plain_step(plain, square, n_microbatches=3, scale=0.5 + step / 7, **given)
        torch.testing.assert_close(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING)
        is_new = step in (0, 5)
        assert (sent.call_count > 0, traces.call_count) == (is_new, is_new)
    with torch.no_grad():
        out = pipe.eval(scale=math.pi, **given)
        torch.testing.assert_close(out, plain(scale=math.pi, **given))
    # Other arguments choose among traces, of which no more are kept than there is room for.
    monkeypatch.setattr(module_stage, "MAX_PLANS", 2)
    for depth in (1, 2, 3, 4, 1):
        loss = pipe.step(scale=0.5, depth=depth, **given)
        expected = plain_step(plain, square, n_microbatches=3, scale=0.5, depth=depth, **given)
        torch.testing.assert_close(loss, expected.loss)
    assert all(len(stage.submod._plans) <= 2 for stage in pipe.stages)


def count(calls: Mock, name: str, cls: Any = LoopbackTransport) -> Any:
    """A method of a class that also calls ``calls``."""
    method = getattr(cls, name)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls()
        return method(self, *args, **kwargs)

    return counted


def test_an_argument_that_the_first_stage_lacks_is_an_error() -> None:
    """A later stage's rank passes it alone; what is None, or positional on the first, is not it."""

    class Shifted(NetBase):
        def forward(self, x: Tensor, shift: Any = None, other: Any = None) -> Tensor:
            x = super().forward(x)
            return x if shift is None else x + shift

    first, second = split_by_module(Shifted(), ["blocks.2"]).stages
    x = batch("Shifted")["x"]
    sent = first(x)
    assert torch.equal(second(*sent), second(*sent, x=x, shift=None))
    with pytest.raises(PartitionError, match="argument shift is passed here, but not on the rank"):
        second(*sent, x=x, shift=1)
    sent = first(x, 1)
    assert torch.equal(second(*sent), second(*sent, shift=1))


def test_a_float_that_chooses_modules_is_an_error() -> None:
    class Choosing(NetBase):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            x = self.embed(x)
            for block in self.blocks if scale < 1 else self.blocks[:2]:
                x = block(x)
            return self.head(x)

    pipe = Pipeline(Choosing(), loss_fn=square, split=["blocks.1"], ranks=2, n_microbatches=2)
    pipe.step(batch("Choosing")["x"], 0.5)
    with pytest.raises(PartitionError, match=r"nor on floats.*an int, a bool or a str may choose"):
        pipe.step(batch("Choosing")["x"], 1.0)


def test_an_argument_that_can_not_be_sent_is_an_error() -> None:
    class Scaled(NetBase):
        def forward(self, x: Tensor, scale: Any) -> Tensor:
            return super().forward(x * float(scale.item()))

    first = split_by_module(Scaled(), ["blocks.2"]).stages[0]
    with pytest.raises(PartitionError, match=r"value that can't be sent .* numpy\.ndarray"):
        first(batch("Scaled")["x"], np.ones(()))


def test_without_an_example_the_first_batch_is_one() -> None:
    model = odd_model("Skips")
    plain = copy.deepcopy(model)
    split = split_by_module(model, ["blocks.2"])
    assert split.plan is None
    x = batch("Skips")["x"]
    first, second = split.stages
    assert torch.equal(second(*first(x)), plain(x))
    # Another shape is another trace, on the first stage alone; positional or by name.
    assert torch.equal(second(*first(x=x[:3])), plain(x[:3]))


@pytest.mark.parametrize(
    ("cuts", "names"),
    [
        ([2, 2], ("embed", "blocks.0", "blocks.1")),
        ([["embed", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3", "head"]], None),
        (
            [["embed", "blocks"], ["head"]],
            ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3"),
        ),
        (["blocks.1"], ("embed", "blocks.0")),
        (["blocks"], ("embed",)),
        (["head"], ("embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3")),
    ],
)
def test_three_ways_to_say_it(cuts: Any, names: Any) -> None:
    model = odd_model("NetBase")
    split = split_by_module(model, cuts)
    held = [{id(p): n for n, p in stage.named_parameters()} for stage in split.stages]
    plain = {id(p): n for n, p in model.named_parameters()}
    # The model's own objects under their own names, each once.
    assert {key: name for part in held for key, name in part.items()} == plain
    assert sum(map(len, held)) == len(plain)
    if names is not None:
        tops = {f"{n}." for n in split.names[0]}
        assert all(any(name.startswith(top) for top in tops) for name in held[0].values())
        assert split.names[0] == names


def test_the_order_of_calls_decides_with_an_example() -> None:
    """A head that is defined first runs last; without an example nobody can know."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(DIM, DIM)
            self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in reversed(self.blocks):
                x = block(x)
            return self.head(x)

    model = Backwards()
    split = split_by_module(model, [1, 1], (torch.ones(2, DIM),))
    assert split.names == (("blocks.1",), ("head", "blocks.0"))
    first, second = split.stages
    assert torch.equal(second(*first(torch.ones(2, DIM))), model(torch.ones(2, DIM)))


def test_needed_values_cross() -> None:
    split = split_by_module(odd_model("Skips"), [1, 1, 2], batch("Skips"))
    assert split.plan is not None
    crossing = [[str(source) for source in boundary] for boundary in split.plan.boundary_values]
    # The input itself goes to the third block, on the last stage, by way of the second.
    assert crossing[0] == ["input x", "output 0 of embed", "output 0 of blocks.0"]
    assert crossing[1] == [*crossing[0], "output 0 of blocks.1"]


def test_dropout_between_modules_runs_once() -> None:
    """Its result crosses to all stages that need it: none draws its own."""

    class Drops(NetBase):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.drop(self.embed(x))
            for block in self.blocks:
                x = block(x + kept)
            return self.head(x + kept)

    model = Drops()
    first, *others = split_by_module(model, [1, 1, 2], {"x": torch.ones(2, DIM)}).stages
    torch.manual_seed(7)
    out = first(x=torch.ones(2, DIM))
    for stage in others:
        out = stage(*out)
    torch.manual_seed(7)
    assert torch.equal(out, model(torch.ones(2, DIM)))


def test_nothing_of_the_model_changes() -> None:
    model = nn.Sequential(nn.BatchNorm1d(DIM), odd_model("Loose"))
    inner: Any = model[1]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = dict(model.named_modules())
    given = batch("Loose")
    draws = Layerwise(lambda x: x + torch.rand(()))
    state = torch.get_rng_state()
    split_by_module(inner, [2, 2], given)
    split_by_module(draws, [2, 2], given)
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_rank_releases_modules_of_other_stages() -> None:
    model = odd_model("NetBase")
    split = split_by_module(model, [2, 2], batch("NetBase"))
    first, second = split.stages
    others = weakref.ref(model.head)
    del model, split, second
    gc.collect()
    assert others() is None
    first(**batch("NetBase"))
    first(**batch("NetBase", rows=3))


def test_training_mode_reaches_leaf_modules_and_top_level_forward() -> None:
    class Modes(NetBase):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = block(x) * (2 if self.training else 3)
            return self.head(x)

    model = Modes()
    pipe = Pipeline(model, ranks=2, n_microbatches=1)
    x = torch.ones(2, DIM)
    assert torch.equal(pipe.eval(x), model(x))
    pipe.train(False)
    assert torch.equal(pipe.eval(x), model.eval()(x))
    assert not any(m.training for m in model.blocks.modules() if not isinstance(m, nn.ModuleList))


# --- what can't be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "told"),
    [
        (["blocks.9"], "blocks.9: no such module in this NetBase.*such as blocks.0 to blocks.3"),
        ([["embed", "block.0"], ["head"]], "it names block.0, which the model lacks"),
        ([["embed", "blocks"], []], "stage 1 of the plan is empty"),
        ([["embed", "blocks.0"], ["blocks.0", "head"]], "names blocks.0 in stage 0 and again"),
        ([["embed", "blocks"], ["blocks.1", "head"]], "which holds it; name either"),
        ([["embed"], ["blocks"]], r"no stage holds the parameters head\.weight, head\.bias"),
        ([4, 0], "make 4 blocks, at least 1 per stage"),
        ([1, 1, 1, 1, 1], "make 5 blocks, .*has 4 repeated blocks: blocks.0"),
        ([3, 2], "make 5 blocks, .* this NetBase has 4"),
        (
            [2, "head"],
            "expected .* or the number of its layers, not a mix",
        ),
        ([], "expected 'auto', a plan or its file"),
        (
            ["blocks.2", "blocks.1"],
            "begin with blocks.2, blocks.1, but .* in this order",
        ),
        (["embed", "blocks.0"], "stage 0 would hold no parameter"),
    ],
)
def test_bad_cuts(cuts: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        split_by_module(odd_model("NetBase"), cuts, batch("NetBase"))


def test_modules_named_out_of_order() -> None:
    cuts = [["embed", "head", "blocks.0"], ["blocks.1", "blocks.2", "blocks.3"]]
    with pytest.raises(NotByModule, match="head is in stage 0, but is called with output 0 of bl"):
        split_by_module(odd_model("NetBase"), cuts, batch("NetBase"))


def test_a_module_that_runs_again_later() -> None:
    with pytest.raises(
        NotByModule, match=r"blocks\.0 is in stage 0, but .* which stage 1 computes"
    ):
        split_by_module(TwiceLate(), [2, 2], batch("NetBase"))
    split_by_module(TwiceLate(), ["head"], batch("NetBase"))


def test_a_cache_passed_between_modules_is_refused() -> None:
    with pytest.raises(NotByModule, match=r"writes tensors into the Store.*use_cache=False"):
        split_by_module(Cached(), [2, 2], batch("NetBase"))


def test_unregistered_modules_are_refused() -> None:
    model = odd_model("NetBase")
    model.extra = [nn.Linear(2, 2)]
    with pytest.raises(PartitionError, match=r"the model\.extra holds modules outside"):
        split_by_module(model, [2, 2])


@pytest.mark.parametrize(
    ("between", "told"),
    [
        (lambda x: x if x.sum() > 0 else -x, "needs the value of output 0 of blocks.0"),
        (lambda x: x[x[:, 0] > 0], "needs the value of output 0 of blocks.0"),
        (lambda x: x * float(x.detach().mean()), "needs the value of output 0 of blocks.0"),
        (lambda x: x.tolist() and x, "failed on the example.*tolist"),
    ],
)
def test_a_top_level_forward_that_needs_values_is_refused(between: Any, told: str) -> None:
    with pytest.raises(NotByModule, match=told):
        split_by_module(Layerwise(between), [2, 2], batch("NetBase"))


def test_top_level_draws_run_once_or_are_refused() -> None:
    """On the one stage that needs them; where two do, each would draw its own."""

    class Noisy(NetBase):
        def forward(self, x: Tensor) -> Tensor:
            noisy = F.dropout(self.embed(x), 0.5, self.training)
            x = noisy
            for block in self.blocks:
                x = block(x)
            return self.head(x + (noisy if self.far else 0))

        far = False

    model = Noisy()
    split_by_module(model, [2, 2], batch("NetBase"))
    model.far = True
    with pytest.raises(NotByModule, match=r"draws random numbers.*stages \[0, 1\] need"):
        split_by_module(model, [2, 2], batch("NetBase"))
    split_by_module(model.eval(), [2, 2], batch("NetBase"))


def test_a_forward_that_differs_from_its_trace_is_refused() -> None:
    """Loud, never a wrong number: other calls, other structures, other shapes."""

    class Fickle(NetBase):
        skip = False

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for i, block in enumerate(self.blocks):
                if not (self.skip and i == 1):
                    x = block(x)
            return self.head(x)

    model = Fickle()
    split = split_by_module(model, [2, 2], batch("NetBase"))
    Fickle.skip = True
    with pytest.raises(PartitionError, match=r"calls blocks\.2 where its trace called blocks\.1"):
        split.stages[0](**batch("NetBase"))


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_stage_is_not_copied(act: Callable[[nn.Module], object]) -> None:
    """What runs would be the modules of the one that it is a copy of, or nothing."""
    for stage in split_by_module(NetBase(), [2, 2], batch("NetBase")).stages:
        with pytest.raises(TypeError, match=r"can't be copied or pickled; .* copy its parameters"):
            act(stage)


def test_lost_gradients_are_refused() -> None:
    """A unit runs without gradients within a reentrant checkpoint: what crosses would have none."""
    model = Checkpointed()
    model.reentrant = True
    pipe = Pipeline(model, loss_fn=square, ranks=2, n_microbatches=1)
    with pytest.raises(PartitionError, match=r"blocks\.1 is called within an autograd.*be lost"):
        pipe.step(torch.ones(2, DIM))


def test_gradients_of_placeholders_are_refused() -> None:
    """An autograd function hides that a gradient is needed: the backward says so."""

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, hidden: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return grads[0], torch.ones_like(grads[0])

    class Hides(NetBase):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            return self.head(Adds.apply(x, hidden))

    pipe = Pipeline(Hides(), loss_fn=square, ranks=2, n_microbatches=1)
    with pytest.raises(PartitionError, match="gradient is computed for output 0 of embed"):
        pipe.step(torch.ones(2, DIM))


def test_outputs_that_depend_on_values() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            return x, int(x.sum())

    class Net(NetBase):
        def __init__(self) -> None:
            super().__init__()
            self.count = Counts()

        def forward(self, x: Tensor) -> Tensor:
            x, number = self.count(self.embed(x))
            for block in self.blocks:
                x = block(x) / (number + 1)
            return self.head(x)

    # Counts can't run on shapes: its number in the trace is of made-up values.
    first, _ = split_by_module(Net(), [2, 2], batch("NetBase")).stages
    with pytest.raises(PartitionError, match=r"count returned \(.*, -?\d+\), in its trace \("):
        first(x=batch("NetBase")["x"] + 100)


def test_another_output_structure_is_shown() -> None:
    class Many(nn.Linear):
        many = False

        def forward(self, x: Tensor) -> Any:
            out = super().forward(x)
            return (out, 1) if self.many else {"out": out}

    class Net(NetBase):
        def __init__(self) -> None:
            super().__init__()
            self.embed = Many(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            out = self.embed(x)
            x = out["out"] if isinstance(out, dict) else out[0]
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    model, given = Net(), batch("NetBase")
    first, _ = split_by_module(model, [2, 2], given).stages
    first(**given)
    model.embed.many = True
    shown = re.escape(f"'float32[{len(given['x'])},{DIM}]'")
    told = rf"embed returned \({shown}, 1\), in its trace \{{'out': {shown}\}}; stages run by"
    with pytest.raises(PartitionError, match=told):
        first(**given)


def test_an_example_shows_where_a_module_is_used_that_is_never_called() -> None:
    class Table(NetBase):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x @ self.table.weight)

    given = batch("NetBase")
    first, _ = split_by_module(Table(), [2, 2]).stages
    with pytest.raises(PartitionError, match=r"table.weight lies in stage 1, .* pass example="):
        first(**given)
    model = Table()
    first, second = split_by_module(model, [2, 2], given).stages
    assert torch.equal(second(*first(**given)), model(**given))
