"""From step to step: shapes, modes, frozen and shared parameters, wrapped modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import BoundaryError, Pipeline, PipelineStage
from penstock.schedule.registry import family
from tests.agreement import ROUNDING, TRAINING, Twins
from tests.compare import plain_step
from tests.models import CASES, DIM, features, mlp, token_loss, tokens

SCHEDULES = pytest.mark.parametrize("schedule", TRAINING)
# One, two and several stages on a rank, and both ways along the ranks.
FEW = pytest.mark.parametrize("schedule", ["gpipe", "zbv", "interleaved-1f1b", "looped-bfs"])


def made(model: Any, loss_fn: Any, schedule: str, mbs: int = 3, **options: Any) -> Twins:
    """Twins of four stages, on as many ranks as the schedule then takes."""
    virtual = family(schedule).default_virtual
    ranks = 4 // virtual
    return Twins(
        model,
        loss_fn,
        schedule=schedule,
        ranks=ranks,
        virtual=virtual,
        n_microbatches=mbs,
        **options,
    )


# --- shapes ----------------------------------------------------------------------------------


@SCHEDULES
def test_shapes_change_from_step_to_step(schedule: str) -> None:
    """Short last batches, longer sequences, and back: steps, with evaluations in between."""
    both = made(CASES["gpt"].make(4), token_loss, schedule)
    shapes = [(6, 5), (4, 5), (6, 9), (3, 1), (6, 5), (7, 9)]
    for step, (rows, length) in enumerate(shapes):
        inputs, target = tokens(rows, step, length)
        both.step(inputs, target=target)
        seen, _ = tokens(rows + step, 50 + step, length + 1)
        both.eval(seen)


@SCHEDULES
def test_dtypes_change_from_step_to_step(schedule: str) -> None:
    class Cast(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    both = made(nn.Sequential(Cast(), *mlp(3)), F.mse_loss, schedule)
    for step, dtype in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float32)):
        inputs, target = features(6, step)
        both.step(inputs.to(dtype), target=target)


class Annealed(nn.Module):
    """Passes on a number that is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Any:
        return self.linear(x), self.temperature


class Cools(nn.Linear):
    def forward(self, value: Any) -> Tensor:
        return super().forward(value[0] / value[1])


@SCHEDULES
def test_values_that_cross_change_from_step_to_step(schedule: str) -> None:
    both = made(nn.Sequential(Annealed(), Cools(DIM, DIM), *mlp(2)), F.mse_loss, schedule)
    for step, temperature in enumerate((1.0, 0.5, 0.25, 0.25)):
        for model in (both.plain, both.pipe.stages[0].submod):
            next(m for m in model.modules() if isinstance(m, Annealed)).temperature = temperature
        inputs, target = features(6, step)
        both.step(inputs, target=target)
        both.eval(inputs)


@FEW
def test_values_that_cross_do_not_change_within_a_step(schedule: str) -> None:
    class Counts(Annealed):
        def forward(self, x: Tensor) -> Any:
            self.temperature += 1
            return super().forward(x)

    both = made(nn.Sequential(Counts(), Cools(DIM, DIM), *mlp(2)), F.mse_loss, schedule)
    inputs, target = features(6, 0)
    with pytest.raises(BoundaryError, match=r"is 3\.0, expected 2\.0; pass dynamic_shapes=True"):
        both.step(inputs, target=target)


class Repeats(nn.Linear):
    def forward(self, x: Tensor, times: int) -> Tensor:
        return super().forward(x[:, :DIM]).repeat(1, times)


@FEW
def test_arguments_that_set_a_length_change_from_step_to_step(schedule: str) -> None:
    def loss_fn(out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(out[:, :DIM], target) * out.size(1)

    stages = [PipelineStage(Repeats(DIM, DIM), index, 4, torch.device("cpu")) for index in range(4)]
    plain = copy.deepcopy([stage.submod for stage in stages])
    virtual = family(schedule).default_virtual
    pipe = Pipeline(
        stages,
        loss_fn=loss_fn,
        schedule=schedule,
        virtual=virtual,
        n_microbatches=3,
    )

    def whole(x: Tensor, times: int) -> Tensor:
        for module in plain:
            x = module(x, times)
        return x

    for step, times in enumerate((1, 2, 3, 1)):
        inputs, target = features(6, step)
        loss = pipe.step(inputs, target=target, times=times)
        expected = plain_step(
            whole,
            loss_fn,
            inputs,
            target=target,
            n_microbatches=3,
            times=times,
        )
        assert torch.equal(loss, expected.loss)
        got, wanted = grads_of(s.submod for s in stages), grads_of(plain)
        assert all(map(torch.equal, got, wanted))


@FEW
def test_autocast_switched_on_and_off(schedule: str) -> None:
    both = made(mlp(4), lambda out, target: F.mse_loss(out.float(), target), schedule)
    for step, is_on in enumerate((False, True, False, True)):
        inputs, target = features(6, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            both.step(inputs, target=target)
            both.eval(inputs)


@FEW
def test_modules_that_return_more_in_training(schedule: str) -> None:
    class More(nn.Linear):
        def forward(self, x: Any) -> Any:
            out = super().forward(x)
            return {"x": out, "aux": out.sum()} if self.training else {"x": out}

    class Less(nn.Linear):
        def forward(self, value: Any) -> Tensor:
            return super().forward(value["x"] + value.get("aux", 0))

    both = made(nn.Sequential(More(DIM, DIM), Less(DIM, DIM), *mlp(2)), F.mse_loss, schedule)
    for step, trains in enumerate((True, False, True)):
        both.plain.train(trains)
        both.pipe.train(trains)
        inputs, target = features(6, step)
        both.step(inputs, target=target)
        both.eval(inputs)


# --- frozen, unused and shared parameters ----------------------------------------------------


@SCHEDULES
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 1, 2), (1, 2, 3)])
def test_frozen_stages(schedule: str, frozen: tuple[int, ...]) -> None:
    """Gradients pass through a frozen stage where one before it is to be trained."""
    model = mlp(4)
    for layer in frozen:
        model[layer].requires_grad_(False)
    both = made(model, F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
    for name, param in both.pipe.named_parameters():
        assert (param.grad is None) == (int(name.split(".")[0]) in frozen), name


def set_trained(both: Twins, layers: tuple[int, ...], trained: bool) -> None:
    """Freeze or unfreeze layers of both models."""
    for model in (both.plain, both.pipe):
        for name, param in model.named_parameters():
            if int(name.split(".")[0]) in layers:
                param.requires_grad_(trained)


@SCHEDULES
@pytest.mark.parametrize("frozen", [(0,), (1,), (3,), (0, 1), (0, 1, 2)])
def test_frozen_between_steps(schedule: str, frozen: tuple[int, ...]) -> None:
    """Fewer gradients are needed than in the first step; what is frozen keeps what it had."""
    both = made(mlp(4), F.mse_loss, schedule)
    for step in range(4):
        if step == 2:
            set_trained(both, frozen, False)
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@SCHEDULES
def test_unfrozen_again(schedule: str) -> None:
    """A shape that has crossed with a gradient may do so again."""
    both = made(mlp(4), F.mse_loss, schedule)
    for step, trained in enumerate((True, False, True)):
        set_trained(both, (0,), trained)
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@SCHEDULES
@pytest.mark.parametrize("layers", [(0,), (0, 1), (0, 1, 2)])
def test_unfrozen_between_steps(schedule: str, layers: tuple[int, ...]) -> None:
    """What crossed without a gradient crosses with one, from then on or now and then."""
    both = made(mlp(4), F.mse_loss, schedule)
    for step, trained in enumerate((False, True, True, False, True)):
        set_trained(both, layers, trained)
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@FEW
def test_unfrozen_from_the_top_down(schedule: str) -> None:
    both = made(mlp(4), F.mse_loss, schedule)
    set_trained(both, (0, 1, 2), False)
    for layer in (3, 2, 1, 0):
        set_trained(both, (layer,), True)
        for step in range(2):
            inputs, target = features(6, step)
            both.step(inputs, target=target)


class PartlyUsed(nn.Module):
    """Has a parameter that its forward never touches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(DIM, DIM)
        self.unused = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.scale


@SCHEDULES
def test_unused_parameters_have_no_gradient(schedule: str) -> None:
    both = made(nn.Sequential(*(PartlyUsed() for _ in range(4))), F.mse_loss, schedule)
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    bare = {name for name, p in both.pipe.named_parameters() if p.grad is None}
    assert bare == {f"{i}.unused.{kind}" for i in range(4) for kind in ("weight", "bias")}


class OffPath(nn.Module):
    """Its parameter does not depend on the input, and its input takes no gradient from it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x.detach() + self.bias.exp()


@SCHEDULES
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_stage_that_cuts_the_graph(schedule: str, place: int) -> None:
    """Stages before it get no gradient at all: None, as on one device, not zeros."""
    layers = list(mlp(4))
    layers[place] = OffPath()
    both = made(nn.Sequential(*layers), F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
    trained = {int(n.split(".")[0]) for n, p in both.pipe.named_parameters() if p.grad is not None}
    assert trained == set(range(place, 4))


class Cuts(nn.Module):
    """Cuts the graph in the calls whose number ``when`` names."""

    def __init__(self, when: set[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.when = when
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        cut = self.calls in self.when
        self.calls += 1
        return self.linear(x.detach() if cut else x)


# Calls 0, 1, 2 are the first step's, of three microbatches.
CUTS = pytest.mark.parametrize("when", [{3, 4, 5}, {0, 1, 2}, {1}, {0}, {4}])


@SCHEDULES
@CUTS
def test_gradients_that_come_at_times(schedule: str, when: set[int]) -> None:
    """In one step or microbatch, not in another: told exactly, where it may change."""
    model = nn.Sequential(*mlp(2), Cuts(when), *mlp(1))
    both = made(model, F.mse_loss, schedule, dynamic_shapes=True)
    for step in range(3):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
        both.descend()


@SCHEDULES
@CUTS
def test_gradients_that_come_unannounced(schedule: str, when: set[int]) -> None:
    """Never zeros for none, which an optimizer with weight decay would take for a gradient."""
    model = nn.Sequential(*mlp(2), Cuts(when), *mlp(1))
    both = made(model, F.mse_loss, schedule)
    with pytest.raises(BoundaryError, match="dynamic_shapes=True"):
        for step in range(2):
            inputs, target = features(6, step)
            both.step(inputs, target=target)
            both.descend()


@SCHEDULES
def test_parameters_shared_between_stages_of_one_process(schedule: str) -> None:
    """Each stage adds its part at its own time, so the sum is rounded in another order."""
    layers = [nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)]
    layers[3].weight = layers[0].weight
    layers[2].bias = layers[0].bias
    both = made(nn.Sequential(*layers), F.mse_loss, schedule, tolerance=ROUNDING)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
    assert len(list(both.pipe.parameters())) == len(list(both.plain.parameters())) == 4


@SCHEDULES
def test_one_layer_in_several_places_of_a_stage(schedule: str) -> None:
    """Within a microbatch autograd sums a parameter's uses before it adds them to ``.grad``."""
    shared = nn.Linear(DIM, DIM)
    layers = [nn.Sequential(shared, nn.Tanh(), shared), *mlp(3)]
    both = made(nn.Sequential(*layers), F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)


# --- inputs that take gradients --------------------------------------------------------------


@SCHEDULES
def test_inputs_that_require_grad(schedule: str) -> None:
    """An embedding computed by the user, say: its gradient flows back to the user."""
    both = made(mlp(4), F.mse_loss, schedule)
    inputs, target = features(7, 0)
    mine, theirs = inputs.clone().requires_grad_(), inputs.clone().requires_grad_()
    plain_step(both.plain, both.loss_fn, theirs, target=target, n_microbatches=3)
    both.pipe.step(mine, target=target)
    assert mine.grad is not None
    assert torch.equal(mine.grad, theirs.grad)
    both.compare()


@SCHEDULES
def test_inputs_with_a_graph_behind_them(schedule: str) -> None:
    """A parameter outside of the pipeline is trained through each microbatch's own inputs."""
    both = made(mlp(4), F.mse_loss, schedule)
    inputs, target = features(6, 0)
    weights = [torch.full((DIM,), 1.5, requires_grad=True) for _ in range(2)]
    rows, targets = inputs.tensor_split(3), target.tensor_split(3)
    plain_step(
        both.plain, both.loss_fn, arg_mbs=[(x * weights[0],) for x in rows], target_mbs=targets
    )
    both.pipe.step(arg_mbs=[(x * weights[1],) for x in rows], target_mbs=targets)
    assert weights[1].grad is not None
    assert torch.equal(weights[0].grad, weights[1].grad)
    both.compare()


@SCHEDULES
def test_the_callers_tensors_stay_as_they_are(schedule: str) -> None:
    both = made(mlp(4), F.mse_loss, schedule)
    inputs, target = features(6, 0)
    before = inputs.clone(), target.clone()
    both.step(inputs, target=target)
    both.pipe.eval(inputs, target=target)
    assert torch.equal(inputs, before[0])
    assert torch.equal(target, before[1])
    assert not inputs.requires_grad
    assert inputs.grad is None


# --- modules ---------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Any wrapper around a stage's module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def grads_of(stages: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for s in stages for p in s.parameters()]


@SCHEDULES
@pytest.mark.parametrize("wrap", [Wrapped, lambda m: torch.compile(m, backend="eager")])
def test_a_module_wrapped_between_steps(schedule: str, wrap: Any) -> None:
    both = made(mlp(4), F.mse_loss, schedule)
    modules = [stage.submod for stage in both.pipe.stages]
    for step in range(3):
        inputs, target = features(6, step)
        plain_step(both.plain, both.loss_fn, inputs, target=target, n_microbatches=3)
        both.pipe.step(inputs, target=target)
        got, expected = grads_of(modules), grads_of([both.plain])
        assert all(map(torch.equal, got, expected))
        if step == 0:
            for stage in both.pipe.stages:
                stage.submod = wrap(stage.submod)


@SCHEDULES
def test_activation_checkpointing_in_a_stage(schedule: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.module, x, use_reentrant=False)

    both = made(nn.Sequential(*map(Checkpointed, mlp(4))), F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)


@SCHEDULES
def test_a_stage_without_parameters(schedule: str) -> None:
    for place in range(4):
        layers: list[nn.Module] = list(mlp(4))
        layers[place] = nn.Tanh()
        both = made(nn.Sequential(*layers), F.mse_loss, schedule)
        inputs, target = features(6, 0)
        both.step(inputs, target=target)


@SCHEDULES
def test_a_stage_that_changes_its_output_in_place(schedule: str) -> None:
    """The next stage may write into what it was given, as a layer of one model may."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            y.mul_(2).add_(1)
            return F.relu(y, inplace=True)

    class WritesIntoItsInput(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            return self.linear(x.add_(1))

    layers = [InPlace(), WritesIntoItsInput(), InPlace(), WritesIntoItsInput()]
    both = made(nn.Sequential(*layers), F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)


class AddsInPlace(nn.Module):
    """Writes into its input, and no attribute says so."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.add_(1), inplace=True)


@SCHEDULES
def test_a_stage_that_begins_with_an_operation_in_place(schedule: str) -> None:
    """Such as a model cut between a convolution and its ReLU, as a module or as a function."""

    def stage(first: nn.Module) -> nn.Module:
        return nn.Sequential(first, nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))

    firsts = (nn.ReLU(inplace=True), AddsInPlace(), nn.Tanh())
    both = made(nn.Sequential(nn.Linear(DIM, DIM), *map(stage, firsts)), F.mse_loss, schedule)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
        both.eval(inputs)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("part", ["", "1", "2"])
@pytest.mark.parametrize("first", [AddsInPlace, Wrapped])
def test_an_operation_in_place_in_a_stage_that_is_compiled(
    schedule: str, part: str, first: Any
) -> None:
    """As a whole, or a layer of it; a compiled layer that writes into nothing is compiled once,
    though it is given what may be written into before that is known, and then is not."""
    compiled = 0

    def backend(graph: Any, _: object) -> Any:
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch.compiler.reset()
    writer = AddsInPlace() if first is AddsInPlace else Wrapped(nn.Tanh())
    layers = [*mlp(2), nn.Linear(DIM, DIM), nn.Sequential(writer, *map(Wrapped, mlp(2)))]
    both = made(nn.Sequential(*layers), F.mse_loss, schedule)
    stage = both.pipe.stages[3]
    if part:
        stage.submod.get_submodule(f"3.{part}").compile(backend=backend)
    else:
        stage.submod.compile(backend=backend)
    for step in range(2):
        inputs, target = features(6, step)
        both.step(inputs, target=target)
    assert compiled == 1


@FEW
def test_a_stage_that_writes_into_its_input_at_times(schedule: str) -> None:
    """A copy is made where memory does not lie in the order asked for: not of a single row."""

    class Ordered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t().contiguous().t()

    def stage() -> nn.Module:
        return nn.Sequential(Ordered(), nn.ReLU(inplace=True), nn.Linear(DIM, DIM))

    both = made(nn.Sequential(*(stage() for _ in range(4))), F.mse_loss, schedule)
    for rows in (6, 4):
        inputs, target = features(rows, rows)
        both.step(inputs * 1, target=target)


@SCHEDULES
def test_two_pipelines_over_the_same_modules(schedule: str) -> None:
    """Nothing of a pipeline is kept in the modules."""
    model = mlp(4)
    both = made(model, F.mse_loss, schedule)
    second = Pipeline(list(model), loss_fn=F.mse_loss, schedule="gpipe", ranks=4, n_microbatches=2)
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    second.step(inputs, target=target)
    plain_step(both.plain, both.loss_fn, inputs, target=target, n_microbatches=2)
    both.compare()
