"""What can't be captured or cut says so: what, where, and what to do instead."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import (
    BoundaryError,
    PartitionError,
    Pipeline,
    SplitPoint,
    StageError,
    pipe_split,
    pipeline,
)
from penstock.partition.export.graph_cut import Cut, assign
from penstock.partition.forward.by_module import split_by_module
from tests.partition.capturing import Pair, cuts_before

X = torch.ones(2, 4)


def three() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4))


class Of(nn.Module):
    """A model of one function over a few linear layers."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.compute = compute
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.spare = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


# --- split points ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"layer.1": SplitPoint.END}, r"'layer.1' is no module of the Of; name one of its"),
        ({"": SplitPoint.END}, "'' is no module"),
        ({"layers.1": "end"}, r"split point of 'layers.1' is 'end', expected SplitPoint"),
        ({"spare": SplitPoint.END}, "no one place 'after spare'.* calls module spare 0 times"),
        ({"layers.0": SplitPoint.BEGINNING}, "stage 0 of 2 is empty.*'before layers.0'"),
        ({"layers.2": SplitPoint.END}, "stage 1 of 2 is empty.*'after layers.2' and its end"),
        (
            {"layers.0": SplitPoint.END, "layers.1": SplitPoint.BEGINNING},
            "stage 1 of 3 is empty: .*between 'after layers.0' and 'before layers.1'; leave one",
        ),
    ],
)
def test_wrong_split_points(spec: Any, told: str) -> None:
    model = Of(lambda m, x: m.layers[2](m.layers[1](m.layers[0](x))))
    with pytest.raises(PartitionError, match=told):
        pipeline(model, (X,), split_spec=spec)


def test_a_stage_that_would_only_reshape() -> None:
    model = Of(lambda m, x: m.layers[1](m.layers[0](x)).view(-1, 2, 2).transpose(1, 2))
    with pytest.raises(
        PartitionError, match=r"stage 1 of 2 is empty.*'after layers.1' and its end"
    ):
        pipeline(model, (X,), split_spec={"layers.1": SplitPoint.END})


def test_a_module_that_runs_twice_is_no_one_place() -> None:
    model = Of(lambda m, x: m.layers[0](m.layers[1](m.layers[0](x))))
    with pytest.raises(PartitionError, match=r"calls module layers.0 2 times.*call pipe_split\(\)"):
        pipeline(model, (X,), split_spec={"layers.0": SplitPoint.END})


def test_two_ways_to_say_where() -> None:
    with pytest.raises(PartitionError, match="either"):
        pipeline(three(), (X,), split_spec=cuts_before("2"), split_policy=lambda gm: gm)
    with pytest.raises(PartitionError, match="split_policy returned a NoneType"):
        pipeline(three(), (X,), split_policy=lambda gm: None)  # type: ignore[arg-type,return-value]


def test_an_example_that_does_not_fit() -> None:
    with pytest.raises(PartitionError, match=r"example does not fit Sequential.forward"):
        pipeline(three(), (X, X))


def test_a_stage_that_is_not_there() -> None:
    cut = pipeline(three(), (X,), split_spec=cuts_before("2"))
    with pytest.raises(PartitionError, match="stage 2: the pipe has stages 0 to 1"):
        cut.get_stage_module(2)
    stage = cut.build_stage(1, torch.device("cpu"))
    assert stage.get_stage_index_of_submod("submod_pp_1") == 1
    with pytest.raises(StageError, match=r"no stage is called 'x'; .*'submod_pp_0', 'submod_pp_1'"):
        stage.get_stage_index_of_submod("x")


# --- what no graph can hold ------------------------------------------------------------------


def depends(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    if x.sum() > 0:
        return x
    return -x


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def hooked(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


def differentiates(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    (grad,) = torch.autograd.grad(x.sum(), model.layers[0].weight, create_graph=True)
    return x + grad.sum()


@pytest.mark.parametrize(
    ("compute", "told"),
    [
        (depends, r"branch on values: .*torch.where"),
        (
            lambda m, x: Straight.apply(x),
            "runs the autograd function Straight with its own backward, .* or cut by module",
        ),
        (hooked, r"registers a hook on a tensor, .* or cut by module"),
    ],
)
def test_effects_that_a_graph_would_lose_are_refused(compute: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        pipeline(Of(compute), (X,))


def test_gradients_taken_in_the_forward_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"takes gradients by torch.autograd.grad\(\)"):
        pipeline(Of(differentiates), (X,))


def test_backward_hooks_of_modules_are_refused_where_they_are_traced_into() -> None:
    model = Of(lambda m, x: m.layers[0](x))
    model.register_full_backward_hook(lambda *_: None)
    with pytest.raises(PartitionError, match=r"'Of' has backward hooks.*take them off"):
        pipeline(model, (X,))


def test_patches_of_the_capture_are_undone() -> None:
    before = (torch.autograd.Function.__dict__["apply"], Tensor.register_hook, torch.autograd.grad)
    for compute in (hooked, lambda m, x: m.layers[0](x)):
        with suppress(PartitionError):
            pipeline(Of(compute), (X,))
        after = torch.autograd.Function.__dict__["apply"], Tensor.register_hook, torch.autograd.grad
        assert after == before


# --- what a forward keeps for the next call ---------------------------------------------------


class Keeps(nn.Module):
    """A model that keeps something in its forward, in the model itself or in a block."""

    last: Tensor | None = None

    def __init__(self, keep: Callable[..., Any]) -> None:
        super().__init__()
        self.keep = keep
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.calls = 0
        self.seen: list[Tensor] = []
        self.tables: dict[str, Tensor] = {}
        self.register_buffer("average", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[1](self.keep(self, self.layers[0](x)))
        return self.layers[2](y)  # type: ignore[no-any-return]


class InBlock(nn.Module):
    """The same, one level down."""

    def __init__(self, keep: Callable[..., Any]) -> None:
        super().__init__()
        self.block, self.head = Keeps(keep), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        pipe_split()
        return self.head(self.block(x))  # type: ignore[no-any-return]


def keeps_the_last(model: Keeps, x: Tensor) -> Tensor:
    y = x if model.last is None else x + model.last
    model.last = x.detach().mean(0)
    return y


def counts_calls(model: Keeps, x: Tensor) -> Tensor:
    model.calls += 1
    return x if model.calls % 2 else 2.0 * x


def replaces_a_buffer(model: Keeps, x: Tensor) -> Tensor:
    model.average = 0.5 * model.average + x.detach().mean(0)
    return x * model.average


def appends(model: Keeps, x: Tensor) -> Tensor:
    model.seen.append(x.detach())
    return x


def fills_a_dict(model: Keeps, x: Tensor) -> Tensor:
    model.tables["scale"] = x.detach().mean(0)
    return x


def goes_past(model: Keeps, x: Tensor) -> Tensor:
    vars(model)["calls"] = model.calls + 1
    return x * model.calls


def keeps_for_this_call(model: Keeps, x: Tensor) -> Tensor:
    model.last = x.square().mean(0)
    model.calls = 0  # as it is
    return x + model.last


@pytest.mark.parametrize("where", ["", "block."])
@pytest.mark.parametrize(
    ("keep", "told"),
    [
        (keeps_the_last, "the forward changes {}last, which a graph would not"),
        (counts_calls, "the forward changes {}calls, which a graph would not"),
        (replaces_a_buffer, "the forward changes {}average, .*buffer that is written in place"),
        (appends, "the forward changes {}seen, "),
        (fills_a_dict, "the forward changes {}tables, "),
        (goes_past, "the forward changes {}calls, "),
        (keeps_for_this_call, "the forward changes {}last, "),
    ],
)
def test_values_kept_for_the_next_call_are_refused(keep: Any, told: str, where: str) -> None:
    """A graph would do in every microbatch what the example's call did."""
    inner = Keeps(keep)
    model = inner
    spec = {"layers.1": SplitPoint.BEGINNING}
    if where:
        model = InBlock(keep)  # type: ignore[assignment]
        inner, spec = model.block, {"block.layers.1": SplitPoint.BEGINNING}  # type: ignore
    with pytest.raises(PartitionError, match=told.format(where)):
        pipeline(model, (X,), split_spec=spec)
    assert (inner.last, inner.calls, inner.seen, inner.tables) == (None, 0, [], {})
    assert torch.equal(inner.average, torch.ones(4))  # type: ignore[arg-type]


def test_numbers_drawn_on_the_host_are_refused() -> None:
    """They would be constants of the graph."""
    model = Of(lambda m, x: m.layers[1](m.layers[0](x)) * random.random())
    with pytest.raises(PartitionError, match=r"draws numbers from random or numpy\.random"):
        pipeline(model, (X,), split_spec=cuts_before("layers.1"))


# --- what can't cross ------------------------------------------------------------------------


def written_views(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    view = x[:, :2]
    y = model.layers[1](x)
    pipe_split()
    view.mul_(2.0)
    return model.layers[2](x + y)


def test_memory_shared_across_a_cut_and_written_after_it() -> None:
    """Copies on the two sides would differ, and gradients with them."""
    with pytest.raises(
        PartitionError,
        match=r"cut 'pipe_split\(\)': .*share memory, and mul_\w* writes into it after the cut.*"
        r"it can be cut 'after layers.0', 'before layers.2'",
    ):
        pipeline(Of(written_views), (X,))


def written_parts(model: Of, x: Tensor) -> Tensor:
    left, right = model.layers[0](x).split(2, dim=1)
    whole = torch.cat((left, right), dim=1)
    pipe_split()
    left.mul_(2.0)
    return model.layers[1](whole) + left.sum() + right.sum()


def test_parts_of_one_tensor_of_which_one_is_written() -> None:
    """They may overlap for all that is known, so they may not be sent apart."""
    with pytest.raises(PartitionError, match="modified inplace"):
        pipeline(Of(written_parts), (X,))


def counts(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x) + model.count
    pipe_split()
    with torch.no_grad():
        model.count.add_(1.0)
    return model.layers[1](x)


def test_a_buffer_changed_in_one_stage_and_used_in_another() -> None:
    with pytest.raises(
        PartitionError, match=r"forward changes count in stage 1 .*uses count, .* in stage 0 too"
    ):
        pipeline(Of(counts), (X,))


def averages(model: Of, x: Tensor) -> Tensor:
    model.count += x.detach().mean(0)
    x = model.layers[0](x)
    pipe_split()
    return model.layers[1](x) + model.count


def averages_a_view(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    with torch.no_grad():
        model.count.add_(x.detach().mean(0))
    y = x + model.count[:4].view(4)
    pipe_split()
    return model.layers[2](model.layers[1](y)) * model.count.detach()


@pytest.mark.parametrize("compute", [averages, averages_a_view])
def test_a_buffer_that_is_changed_and_then_sent_on(compute: Any) -> None:
    """Under 1F1B the next microbatch has changed it before the last stage reads it."""
    with pytest.raises(
        PartitionError, match=r"changes count in stage 0 \(.* in stage 1 too, .*x\.clone\(\)"
    ):
        pipeline(Of(compute), (X,))


def averages_late(model: Of, x: Tensor) -> Tensor:
    x = model.layers[1](model.layers[0](x))
    model.count.add_(x.detach().mean(0))
    y = x + model.count
    pipe_split()
    return model.layers[2](y) + model.count


def test_the_cuts_that_keep_such_a_buffer_together_are_listed() -> None:
    with pytest.raises(PartitionError, match=r"stage 1 too.*can be cut .*'after layers.1'"):
        pipeline(Of(averages_late), (X,))


def averages_and_sends_a_copy(model: Of, x: Tensor) -> Tensor:
    model.count.add_(x.detach().mean(0))
    mean = model.count.clone()
    x = model.layers[0](x)
    pipe_split()
    return model.layers[1](x) + mean


def test_a_copy_of_such_a_buffer_may_cross() -> None:
    pair = Pair(Of(averages_and_sends_a_copy), (X,))
    pair.train(nn.functional.mse_loss, torch.randn(8, 4), target=torch.ones(8, 4))


def sparse(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    table = x.detach().relu().to_sparse()
    pipe_split()
    return model.layers[1](x) + table.to_dense()


def test_a_sparse_value_is_refused_where_it_would_cross() -> None:
    with pytest.raises(PartitionError, match=r"Of can't be captured: "):
        pipeline(Of(sparse), (X,))


def test_a_value_that_can_not_cross_is_named() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    dense = graph.call_function(torch.relu, (x,))
    table = graph.call_function(torch.neg, (dense,))
    back = graph.call_function(torch.tanh, (table,))
    graph.output([graph.call_function(torch.add, (back, dense))])
    for node, module in ((dense, "a"), (table, "b.pack"), (back, "b.unpack")):
        node.meta = {"val": X, "modules": (module.split(".")[0], module)}
    table.meta["val"] = X.to_sparse()
    with pytest.raises(
        PartitionError,
        match=r"cut 'here': neg \(float32\[2,4\]\) of b.pack would cross, and a torch.sparse_coo "
        r"tensor can't; it can be cut 'before b', 'after b'",
    ):
        assign(graph, [Cut(label="here", position=2)])


# --- a mode that can't be captured -----------------------------------------------------------


def trains_only(model: Of, x: Tensor) -> Tensor:
    if not model.training and x.sum() > 0:
        return x
    return model.layers[0](x)


def cut_in_training(model: Of, x: Tensor) -> Tensor:
    x = model.layers[0](x)
    if model.training:
        pipe_split()
    return model.layers[1](x)


def test_an_uncapturable_mode_is_an_error_when_requested() -> None:
    cut = pipeline(Of(trains_only), (X,))
    assert cut(X)[0].shape == (2, 4)
    with pytest.raises(StageError, match=r"captured in train mode, and can't be in eval mode: .*"):
        cut.eval()(X)
    assert cut.train()(X)[0].shape == (2, 4)
    cut = pipeline(Of(cut_in_training), (X,))
    with pytest.raises(StageError, match="can't be in eval mode: 1 instead of 2 stages there"):
        cut.eval()(X)


class Fusable(nn.Module):
    """Two layers, that may be compiled as one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["1._orig_mod.b", "1.b", "2"])
def test_compiled_models(name: str) -> None:
    """They are captured as what they compile, so that a cut may go through them as well."""
    model = nn.Sequential(nn.Linear(4, 4), Fusable(), nn.Linear(4, 4))
    expected = model(X)
    if "_orig_mod" in name:
        model[1] = torch.compile(model[1], backend="eager")  # type: ignore[assignment]
    else:
        model[1].compile(backend="eager")
    cut = pipeline(model, (X,), split_spec=cuts_before(name))
    assert cut.num_stages == 2
    torch.testing.assert_close(cut(X)[0], expected)


def test_a_captured_stage_is_not_pickled() -> None:
    cut = pipeline(three(), (X,), split_spec=cuts_before("2"))
    with pytest.raises(TypeError, match="can't be pickled; save its state_dict"):
        pickle.dumps(cut.get_stage_module(0))


def test_a_size_that_the_code_takes_the_root_of() -> None:
    """As of a square of patches, of which the graph has the side built in."""

    def compute(model: Of, x: Tensor) -> Any:
        return model.layers[1](model.layers[0](x) * int(x.size(1) ** 0.5))

    model = Of(compute)
    cut = pipeline(model, (torch.ones(2, 4, 4),), split_spec=cuts_before("layers.1"))
    x = torch.ones(3, 5, 4)
    assert torch.equal(cut(x)[0], model(x))
    with pytest.raises(BoundaryError, match=r"captured for math\.trunc\(.*x\.shape\[1\]\).* == 2"):
        cut(torch.ones(3, 9, 4))


def test_sizes_that_can_not_be_open_are_refused() -> None:
    """They are never fixed behind the user's back; int(size) fixes one in the model's own code."""
    scales = {3: 0.5, 6: 2.0}

    def compute(model: Of, x: Tensor) -> Any:
        length = x.size(1) if model.training else int(x.size(1))
        return model.layers[1](model.layers[0](x) * scales[length])

    example = (torch.ones(2, 3, 4),)
    with pytest.raises(PartitionError, match=r"can't be captured: .*SymInt; .* pass int\(size\)"):
        pipeline(Of(compute), example, split_spec=cuts_before("layers.1"))
    with pytest.raises(PartitionError, match=r"can't be captured"):
        Pipeline(Of(compute), example=example, ranks=2, loss_fn=torch.sum, method="export")
    model = Of(compute).eval()
    cut = pipeline(model, example, split_spec=cuts_before("layers.1"))
    x = torch.ones(5, 3, 4)
    assert torch.equal(cut(x)[0], model(x))
    with pytest.raises(BoundaryError, match=r"captured for .*shape\[1\] == 3"):
        cut(torch.ones(5, 6, 4))


def test_tensors_in_an_object_are_not_built_in() -> None:
    """Nor found by module; such as a batch of graphs, which can be called too."""

    class Graphs:
        def __init__(self) -> None:
            self.store = {"x": X}

        def __call__(self) -> Tensor:
            return self.store["x"]

    model = Of(lambda m, graphs: m.layers[1](m.layers[0](graphs())))
    told = r"is a .*Graphs, an object in which stages don't find tensors; .*register_pytree_node"
    with pytest.raises(PartitionError, match=f"input x {told}"):
        pipeline(model, (Graphs(),), split_spec=cuts_before("layers.1"))
    told = r"output 0 is a .*Graphs, which can't cross between stages; .* registered with torch's"
    with pytest.raises(PartitionError, match=told):
        split_by_module(model, ["layers.1"], (Graphs(),))


def test_values_that_no_stage_can_pass_on_are_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Though training and evaluation are captured apart."""
    model = Of(lambda m, x: {"out": m.layers[1](m.layers[0](x)), "cache": object()})
    cut = pipeline(model, (X,), split_spec=cuts_before("layers.1"))
    assert caplog.text.count("holds object, which no stage can pass on") == 1
    assert cut.split_gm(X)["cache"] is None
