"""What crosses a boundary, over messages (gpipe) and between stages of one rank (zbv)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import BoundaryError, Pipeline, PipelineStage
from penstock.schedule.text import parse_csv
from tests.agreement import ROUNDING, Twins
from tests.compare import plain_step
from tests.crossings import CROSSINGS, SUMMED, crossing_model
from tests.models import DIM, features, mlp

SCHEDULES = [("gpipe", 4), ("zbv", 2), ("looped-bfs", 2)]
PLACES = pytest.mark.parametrize(("schedule", "ranks"), SCHEDULES)


@pytest.mark.parametrize(
    ("name", "schedule", "ranks", "dynamic_shapes"),
    # Each value under every schedule, and with both settings, as is each schedule.
    [
        (name, schedule, ranks, (i + j) % 2 == 1)
        for i, name in enumerate(CROSSINGS)
        for j, (schedule, ranks) in enumerate(SCHEDULES)
    ],
)
def test_boundary_values(name: str, schedule: str, ranks: int, dynamic_shapes: bool) -> None:
    both = Twins(
        crossing_model(name),
        F.mse_loss,
        schedule=schedule,
        ranks=ranks,
        n_microbatches=3,
        dynamic_shapes=dynamic_shapes,
        tolerance=ROUNDING if name in SUMMED else None,
    )
    for step, rows in enumerate((6, 5, 6)):
        inputs, target = features(rows, step)
        both.step(inputs, target=target)
        both.eval(inputs)


@pytest.mark.parametrize("dynamic_shapes", [False, True])
@pytest.mark.parametrize("rows", [4, 3])
def test_messages_in_another_order_than_computations(rows: int, dynamic_shapes: bool) -> None:
    program = parse_csv(
        "0F0,0F1,0SEND_F1,0RECV_B1,0B1,0SEND_F0,0RECV_B0,0B0\n"
        "1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    options = {"schedule": program, "dynamic_shapes": dynamic_shapes}
    both = Twins(mlp(2), F.mse_loss, tolerance=ROUNDING, **options)
    for step in range(2):
        inputs, target = features(rows, step)
        both.step(inputs, target=target)
        both.eval(inputs)


# --- the two conventions ---------------------------------------------------------------------


class Many(nn.Module):
    """Returns several values in one container, for a next stage that takes them one by one."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind((self.linear(x), 2.0, x.detach()))


class TakesMany(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor, scale: float, other: Tensor) -> Tensor:
        return self.linear(hidden * scale + other)


class TakesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = TakesMany()

    def forward(self, value: Any) -> Tensor:
        return self.many(*value)


@pytest.mark.parametrize("kind", [tuple, list])
def test_stages_cut_by_hand_take_the_items_as_arguments(kind: type[Any]) -> None:
    modules = [Many(kind), TakesMany()]
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, 2, device) for i, m in enumerate(modules)]
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=2)
    inputs, target = features(5, 0)
    loss = pipe.step(inputs, target=target)
    grads = [p.grad for m in modules for p in m.parameters()]
    for module in modules:
        module.zero_grad(set_to_none=True)
    expected = plain_step(
        lambda x: modules[1](*modules[0](x)), F.mse_loss, inputs, target=target, n_microbatches=2
    )
    assert torch.equal(loss, expected.loss)
    assert all(map(torch.equal, grads, [p.grad for m in modules for p in m.parameters()]))


@pytest.mark.parametrize("kind", [tuple, list])
def test_layers_of_a_sequence_take_one_value(kind: type[Any]) -> None:
    both = Twins([Many(kind), TakesOne()], F.mse_loss, schedule="1f1b", ranks=2, n_microbatches=2)
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


class GivesWeight(nn.Module):
    """Hands a parameter on as a view, as models with tied weights that are cut by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(DIM) * 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight, self.weight.T


class TakesWeight(nn.Module):
    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        hidden, weight = value
        return hidden.tanh() @ weight


def test_a_view_of_a_parameter_crosses_in_training_and_in_evaluation() -> None:
    both = Twins([GivesWeight(), TakesWeight()], F.mse_loss, schedule="1f1b", ranks=2)
    inputs, target = features(8, 0)
    for _ in range(2):
        both.step(inputs, target=target)
        both.eval(inputs)


def test_an_evaluation_sends_the_same_tensors_as_training() -> None:
    """A parameter, by a stage that makes nothing of it; told first in an evaluation."""
    both = Twins(
        [GivesWeight(), nn.Identity(), TakesWeight()],
        F.mse_loss,
        schedule="1f1b",
        ranks=3,
        n_microbatches=4,
    )
    inputs, target = features(8, 0)
    for _ in range(2):
        both.eval(inputs)
        both.step(inputs, target=target)


class Gapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x).real.unflatten(1, (2, DIM // 2)).transpose(1, 2)


class Viewed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.transpose(1, 2) * 2).view(len(x), DIM)


def test_dimensions_keep_their_order_in_memory_where_gaps_lie_between() -> None:
    modules = [nn.Sequential(nn.Linear(DIM, DIM), Gapped()), Viewed()]
    both = Twins(modules, F.mse_loss, schedule="gpipe", ranks=2, n_microbatches=2)
    inputs, target = features(4, 0)
    both.step(inputs, target=target)


def test_keyword_arguments_reach_every_stage() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, *, scale: Tensor, power: int) -> Tensor:
            return super().forward(x) * scale**power

    modules = [Scaled(DIM, DIM) for _ in range(3)]
    device = torch.device("cpu")
    stages = [PipelineStage(m, i, 3, device) for i, m in enumerate(modules)]
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=2)

    def whole(x: Tensor, **kwargs: Any) -> Tensor:
        for module in modules:
            x = module(x, **kwargs)
        return x

    inputs, target = features(5, 0)
    scale = torch.rand(5, 1)
    loss = pipe.step(inputs, target=target, scale=scale, power=2)
    grads = [p.grad for m in modules for p in m.parameters()]
    for module in modules:
        module.zero_grad(set_to_none=True)
    expected = plain_step(
        whole, F.mse_loss, inputs, target=target, n_microbatches=2, scale=scale, power=2
    )
    assert torch.equal(loss, expected.loss)
    assert all(map(torch.equal, grads, [p.grad for m in modules for p in m.parameters()]))


# --- parameters and inputs as outputs --------------------------------------------------------


class HandsOn(nn.Module):
    """Returns a parameter of its own beside its input, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Any) -> Any:
        return (self.weight, x)


class Multiplies(nn.Module):
    def forward(self, value: Any) -> Tensor:
        weight, (_, x) = value
        return torch.tanh(x) @ weight + x @ value[1][0]


@PLACES
def test_parameters_and_inputs_handed_on(schedule: str, ranks: int) -> None:
    layers = [HandsOn(), HandsOn(), Multiplies(), nn.Linear(DIM, DIM)]
    both = Twins(layers, F.mse_loss, schedule=schedule, ranks=ranks, n_microbatches=3)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
        out = both.pipe.eval(inputs)
        assert not out.requires_grad


@PLACES
def test_the_gradient_of_an_input_handed_on(schedule: str, ranks: int) -> None:
    layers = [HandsOn(), HandsOn(), Multiplies(), nn.Linear(DIM, DIM)]
    both = Twins(layers, F.mse_loss, schedule=schedule, ranks=ranks, n_microbatches=3)
    for step in range(2):
        inputs, target = features(6, step)
        mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
        plain_step(both.plain, F.mse_loss, theirs, target=target, n_microbatches=3)
        both.pipe.step(mine, target=target)
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)
        both.compare()


# --- shapes, structures and values that change -----------------------------------------------


class Changing(nn.Module):
    """What it returns depends on the number of rows: another structure, values and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        rows = x.size(0)
        hidden = self.linear(x)
        match rows % 3:
            case 0:
                return {"kind": "plain", "scale": float(rows), "hidden": hidden}
            case 1:
                return [hidden.double(), hidden.detach(), rows]
            case _:
                return hidden


class TakesChanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, value: Any) -> Tensor:
        match value:
            case {"scale": scale, "hidden": hidden}:
                return self.linear(hidden * scale)
            case [hidden, other, rows]:
                return self.linear(hidden.float() * rows + other)
            case _:
                return self.linear(value)


def ready(sizes: tuple[int, ...], seed: int) -> dict[str, Any]:
    pairs = [features(rows, seed * 100 + i) for i, rows in enumerate(sizes)]
    return {"arg_mbs": [(x,) for x, _ in pairs], "target_mbs": [y for _, y in pairs]}


CHANGING = [Changing, TakesChanging, Changing, TakesChanging]


@PLACES
@pytest.mark.parametrize("options", [{"dynamic_shapes": True}, {}], ids=["dynamic", "static"])
def test_shapes_and_values_change_between_microbatches(
    schedule: str, ranks: int, options: dict[str, Any]
) -> None:
    """Without dynamic_shapes too, if values depend on input shapes: these tell them apart."""
    layers = [layer() for layer in CHANGING]
    both = Twins(layers, F.mse_loss, schedule=schedule, ranks=ranks, n_microbatches=4, **options)
    for step, sizes in enumerate([(1, 2, 3, 4), (6, 6, 5, 1), (2, 2, 2, 2), (7, 3, 8, 1)]):
        both.step(**ready(sizes, step))


class Counting(nn.Module):
    """What it returns changes from call to call, whatever the input's shape."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.values = values
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        value = self.values[self.calls % len(self.values)]
        self.calls += 1
        return (hidden, value(hidden) if callable(value) else value)


class Ignores(nn.Module):
    def forward(self, value: Any) -> Tensor:
        hidden, other = value
        return hidden + other.float().mean() if isinstance(other, Tensor) else hidden


CHANGES: dict[str, list[Any]] = {
    "shape": [lambda h: h[:1], lambda h: h[:1, :2]],
    "number of dimensions": [lambda h: h[:1], lambda h: h[0]],
    "dtype": [lambda h: h, lambda h: h.double()],
    "value": [1, 2],
    "type of value": [1, True],
    "structure": [lambda h: [h], lambda h: (h,)],
    "a tensor and a value": [lambda h: h, 1],
    "None": [lambda h: h, None],
    "key": [lambda h: {"a": h}, lambda h: {"b": h}],
    "need of a gradient": [lambda h: h.detach(), lambda h: h],
}


@PLACES
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_an_error_and_fine_if_allowed(change: str, schedule: str, ranks: int) -> None:
    model = [Counting(CHANGES[change]), Ignores(), nn.Linear(DIM, DIM), nn.Tanh()]
    options: dict[str, Any] = {"schedule": schedule, "ranks": ranks, "n_microbatches": 2}
    inputs, target = features(4, 0)
    pipe = Pipeline(model, loss_fn=F.mse_loss, **options)
    with pytest.raises(BoundaryError, match="dynamic_shapes=True") as caught:
        pipe.step(inputs, target=target)
    assert (caught.value.stage, caught.value.microbatch) == (0, 1)
    model[0].calls = 0
    model[0].zero_grad()
    both = Twins(model, F.mse_loss, dynamic_shapes=True, **options)
    for step in range(2):
        inputs, target = features(4, step)
        both.step(inputs, target=target)


class Narrows(nn.Module):
    """Its output's shape follows from a value that it is given."""

    def forward(self, value: Any) -> Tensor:
        hidden, width = value
        narrow: Tensor = hidden[:, :width]
        return narrow


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) * self.scale


def test_a_value_that_crosses_may_change_from_step_to_step() -> None:
    model = [Counting([1, 1, 2, 2]), Ignores(), nn.Linear(DIM, DIM)]
    both = Twins(model, F.mse_loss, schedule="1f1b", ranks=3, n_microbatches=2)
    for step in range(4):
        inputs, target = features(4, step)
        both.step(inputs, target=target)


def test_shapes_that_follow_from_such_a_value_need_dynamic_shapes() -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "ranks": 3, "n_microbatches": 2}
    inputs, target = features(4, 0)[0], torch.zeros(4, 1)
    pipe = Pipeline([Counting([2, 2, 3, 3]), Narrows(), Averages()], loss_fn=F.mse_loss, **options)
    pipe.step(inputs, target=target)
    with pytest.raises(BoundaryError, match="dynamic_shapes=True"):
        pipe.step(inputs, target=target)
    model = [Counting([2, 2, 3, 3]), Narrows(), Averages()]
    both = Twins(model, F.mse_loss, dynamic_shapes=True, **options)
    for _ in range(2):
        both.step(inputs, target=target)


# --- what can't cross ------------------------------------------------------------------------


class Local:
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (lambda: Local(), "Local, which can't cross"),
        (lambda: {"deep": [object()]}, "object, which can't cross"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
        (lambda: {object(): 1}, "a key, .* holds a object"),
        (lambda: {1, 2}, "set, which can't cross"),
        (lambda: len, "which can't cross"),
    ],
)
def test_values_that_cannot_cross(value: Any, told: str) -> None:
    pipe = Pipeline(
        [Counting([lambda h: value()]), Ignores()],
        loss_fn=F.mse_loss,
        schedule="1f1b",
        ranks=2,
        n_microbatches=2,
    )
    inputs, target = features(4, 0)
    with pytest.raises(BoundaryError, match=told) as caught:
        pipe.step(inputs, target=target)
    assert caught.value.stage == 0
    assert caught.value.action is not None


def test_shapes_given_in_advance_are_held_to() -> None:
    def pipeline(**wrong: Any) -> Pipeline:
        device = torch.device("cpu")
        static = {"input_args": torch.empty(2, DIM), "output_args": torch.empty(2, DIM)}
        stages = [
            PipelineStage(m, i, 2, device, **(static | (wrong if i == 1 else {})))
            for i, m in enumerate(mlp(2))
        ]
        return Pipeline(stages, loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=2)

    inputs, target = features(4, 0)
    pipeline().step(inputs, target=target)
    with pytest.raises(
        BoundaryError, match=r"input is .*\[2,6\], expected .*\[3,6\] as input_args"
    ):
        pipeline(input_args=torch.empty(3, DIM)).step(inputs, target=target)
    with pytest.raises(BoundaryError, match=r"is float32.*expected float64.*input_args"):
        pipeline(input_args=torch.empty(2, DIM).double()).step(inputs, target=target)


# --- tensors with memory in common -----------------------------------------------------------


class Pair(nn.Module):
    """Returns a tensor, and what shares its memory or does not."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(DIM, DIM), other

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(x)) * 1
        first: Tensor = self.other[0](h)
        return first, self.other[1](h)


class WritesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, *given: Any) -> Tensor:
        x, other = given if len(given) == 2 else given[0]  # as in the plain model
        y: Tensor = self.linear(F.pad(x.mul_(2), (0, DIM - x.shape[1])))
        return y + other.mean()


def whole(h: Tensor) -> Tensor:
    return h


APART = [(whole, torch.clone)]
SHARED = [
    (whole, whole),
    (whole, lambda h: h[:, 1:]),
    (whole, Tensor.detach),
    (lambda h: h[:, ::2], lambda h: h[:, 1::2]),
]


def pair_of(other: Any, ranks: int = 2) -> Twins:
    model = [Pair(other), WritesFirst()]
    return Twins(model, F.mse_loss, schedule="1f1b", ranks=ranks, n_microbatches=2)


@pytest.mark.parametrize("other", APART)
def test_tensors_that_share_no_memory_may_be_written(other: Any) -> None:
    both = pair_of(other)
    for step in range(2):
        inputs, target = features(4, step)
        both.step(inputs, target=target)


@pytest.mark.parametrize("other", SHARED)
def test_writes_that_others_would_have_seen_are_refused(other: Any) -> None:
    inputs, target = features(4, 0)
    with pytest.raises(
        BoundaryError, match=r"into tensor 0 .* in common with tensor 1 in the stage"
    ):
        pair_of(other).pipe.step(inputs, target=target)
    with pytest.raises(BoundaryError, match="in common with tensor 1"):
        pair_of(other).pipe.eval(inputs)
