"""Programs that recompute or offload activations: right, and without them in the meantime."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from penstock import Op, Pipeline, PipelineStage, Program, StageError, build
from penstock.schedule.passes import offload, recompute
from penstock.schedule.text import parse_csv
from penstock.stage.offload import ActivationOffload
from tests.agreement import ROUNDING, TRAINING, Twins
from tests.compare import plain_step
from tests.models import DIM, features, gpt, images, mlp, token_loss, tokens
from tests.programs import computed_programs

WAYS = {"recompute": recompute, "offload": offload}


@given(computed_programs(backward=True), st.data())
def test_any_program_trains_right(program: Program, data: st.DataObject) -> None:
    stages = data.draw(st.sets(st.integers(0, program.num_stages - 1), min_size=1))
    others = set(range(program.num_stages)) - stages
    assume(program.placement.num_directions == 1)
    program = offload(recompute(program, stages=stages), stages=others)
    both = Twins(mlp(program.num_stages), F.mse_loss, schedule=program, tolerance=ROUNDING)
    for step in range(2):
        inputs, target = features(program.num_microbatches, step)
        both.step(inputs, target=target)
        both.eval(inputs)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [n for n in TRAINING if not n.startswith("po-")])
def test_every_schedule_trains_right(name: str, way: str) -> None:
    """With attention, normalisation and embeddings, split backwards among them."""
    program = WAYS[way](build(name, ranks=2, microbatches=4))
    both = Twins(gpt(program.num_stages), token_loss, schedule=program)
    for step in range(2):
        inputs, target = tokens(8, step)
        both.step(inputs, target=target)
        both.eval(inputs)


def test_a_forward_may_run_again_before_its_output_is_sent() -> None:
    program = parse_csv(
        "0F0,0RECOMPUTE0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", num_microbatches=1
    )
    both = Twins(gpt(2), token_loss, schedule=program)
    for step in range(2):
        inputs, target = tokens(4, step)
        both.step(inputs, target=target)


def norms(*, in_place: bool) -> list[nn.Module]:
    """Stages that count what they see, and may begin with an operation in place."""
    return [
        nn.Sequential(nn.ReLU(inplace=in_place and i > 0), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        for i in range(4)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-zb", "zbv"])
def test_buffers_are_written_once_and_inputs_are_left(name: str, way: str) -> None:
    ranks = 4 if name in ("gpipe", "1f1b") else 2
    program = WAYS[way](build(name, ranks=ranks, microbatches=4))
    both = Twins(norms(in_place=way == "offload"), F.mse_loss, schedule=program)
    for step in range(2):
        inputs, target = images(8, step)
        both.step(inputs, target=target)


@pytest.mark.parametrize("name", ["gpipe", "zbv"])
def test_a_saved_buffer_that_later_microbatches_write_is_refused(name: str) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(DIM, DIM)
            self.register_buffer("scale", torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(0.9)
            return super().forward(x) * self.scale

    ranks = 4 if name == "gpipe" else 2
    program = offload(build(name, ranks=ranks, microbatches=4))
    pipe = Pipeline([Scaled() for _ in range(4)], loss_fn=F.mse_loss, schedule=program)
    inputs, target = features(8, 0)
    with pytest.raises(StageError, match=r"saved tensor of shape \(6,\) was modified in place"):
        pipe.step(inputs, target=target)


def test_random_numbers_are_drawn_once() -> None:
    """Masks are the same as without recomputation, and so are those drawn after it."""
    grads = []
    for way in (None, recompute, offload):
        # Of several ranks in one process, the order in which they draw would change, too.
        program = build("1f1b", ranks=1, microbatches=4)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
        pipe = Pipeline([model], loss_fn=F.mse_loss, schedule=way(program) if way else program)
        torch.manual_seed(5)
        for step in range(2):
            inputs, target = features(8, step)
            pipe.step(inputs, target=target)
        grads.append([param.grad for param in pipe.parameters()])
    for others in grads[1:]:
        torch.testing.assert_close(others, grads[0], rtol=0, atol=0)


class Watched(nn.Module):
    """Notes the memory of what autograd has to save in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.hidden: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x).exp()
        self.hidden.append(StorageWeakRef(hidden.untyped_storage()))
        return hidden * hidden.sum()


@pytest.mark.parametrize(("way", "held"), [(None, 4), (recompute, 0), (offload, 0)])
def test_activations_are_gone_in_the_meantime(way: object, held: int) -> None:
    watched, found = Watched(), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        found.append(sum(not ref.expired() for ref in watched.hidden[:4]))
        return F.mse_loss(output, target)

    program = build("gpipe", ranks=2, microbatches=4)
    if way is not None:
        program = way(program, stages=[0])  # type: ignore[operator]
    pipe = Pipeline([watched, nn.Linear(6, 6)], loss_fn=loss_fn, schedule=program)
    inputs, target = features(8, 0)
    pipe.step(inputs, target=target)
    # Not before the last microbatch has followed the others through the first stage.
    assert found[-1] <= held + (way is offload)
    assert (found[-1] >= held) and len(found) == 4


def test_tensors_of_the_batch_are_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[int] = []
    whole = ActivationOffload.offload
    monkeypatch.setattr(ActivationOffload, "offload", lambda saved: went.append(whole(saved)))
    program = offload(build("gpipe", ranks=1, microbatches=4))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    pipe = Pipeline([model], loss_fn=F.mse_loss, schedule=program)
    pipe.step(torch.ones(32, 8), target=torch.ones(32, 16))
    # Of the batch, of which microbatches are views, nothing; ReLU's output is all that is left.
    assert went == [8 * 16 * 4] * 4


def test_a_buffer_that_changes_late_can_not_be_recomputed() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.linear = nn.Linear(6, 6)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                self.count += 1
            return self.linear(x)

    program = recompute(build("gpipe", ranks=2, microbatches=4), stages=[0])
    pipe = Pipeline([Late(), nn.Linear(6, 6)], loss_fn=F.mse_loss, schedule=program)
    inputs, target = features(8, 0)
    with pytest.raises(StageError, match=r"stage 0, microbatch 2, action 0F2: .*buffer 'count'"):
        pipe.step(inputs, target=target)


class ByRunningMean(nn.Module):
    """A loss over its running mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_state_of_a_loss_is_restored(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain, loss_fn, plain_loss_fn = copy.deepcopy(model), ByRunningMean(), ByRunningMean()
    program = recompute(build(name, ranks=2, microbatches=4))
    pipe = Pipeline(model, loss_fn=loss_fn, schedule=program, ranks=2)
    for step in range(2):
        inputs, target = features(8, step)
        loss = pipe.step(inputs, target=target)
        expected = plain_step(plain, plain_loss_fn, inputs, target=target, n_microbatches=4)
        assert loss == expected.loss and torch.equal(loss_fn.mean, plain_loss_fn.mean)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)


def test_buffers_that_others_take_the_place_of() -> None:
    class Replacing(nn.Linear):
        """Makes one buffer once, uses one up, and counts in new ones, the first forward apart."""

        def __init__(self) -> None:
            super().__init__(6, 6)
            self.register_buffer("seen", None)
            self.register_buffer("once", torch.ones(()))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            if self.seen is not None:
                self.count = self.count + 1
            self.seen = torch.ones(())
            scale, self.once = 1 if self.once is None else 2, None
            return super().forward(x) * scale

    program = recompute(build("gpipe", ranks=2, microbatches=4), stages=[0])
    both = Twins([Replacing(), nn.Linear(6, 6)], F.mse_loss, schedule=program)
    for step in range(2):
        inputs, target = features(8, step)
        both.step(inputs, target=target)


def test_forwards_alone_keep_nothing_to_recompute() -> None:
    program = recompute(build("1f1b", ranks=2, microbatches=4))
    pipe = Pipeline(mlp(2), loss_fn=F.mse_loss, schedule=program)
    assert pipe.eval(features(8, 0)[0]).shape == (8, 6)
    assert {a.op for a in replace(program).actions()} >= {Op.RECOMPUTE}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("kind", ["conjugated", "negated", "nested", "forward-mode"])
def test_tensors_saved_in_another_layout_than_in_memory(kind: str) -> None:
    """Conjugated, a negated imaginary part, rows of several lengths, a value with its tangent."""
    use = {
        "conjugated": lambda x: (torch.complex(x, x.cos()).conj() * torch.complex(x, x)).abs(),
        "negated": lambda x: torch.complex(x, x.cos()).conj().imag * x,
        "forward-mode": lambda x: sum(
            torch.func.jvp(lambda t: (t @ torch.ones(6, 6)).tanh(), (x,), (torch.ones_like(x),))
        ),
        "nested": lambda x: torch.nested.as_nested_tensor([*x]).relu().to_padded_tensor(0.0),
    }[kind]

    class Using(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return use(super().forward(x))

    program = offload(build("gpipe", ranks=2, microbatches=4))
    both = Twins([Using(6, 6), nn.Linear(6, 6)], F.mse_loss, schedule=program)
    both.step(features(8, 0)[0], target=features(8, 0)[1])


class Writes(nn.Module):
    """Writes into what it is given: its input, or a keyword argument."""

    def __init__(self, *, scales: bool) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(6, 6), scales

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.linear(x if self.scales else x.mul_(2)) * (
            scale.add_(1) if self.scales else scale
        )


@pytest.mark.parametrize("scales", [True, False])
def test_a_recomputed_forward_that_writes_into_its_inputs_is_refused(scales: bool) -> None:
    stages = [PipelineStage(Writes(scales=scales), i, 2, torch.device("cpu")) for i in range(2)]
    program = recompute(build("1f1b", ranks=2, microbatches=2))
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule=program)
    x, target = features(4, 0)
    with pytest.raises(StageError, match=r"writes into its inputs in place .* don't recompute"):
        pipe.step(x, target=target, scale=torch.rand(4, 1))


class Slopes(nn.Module):
    """A layer that differentiates in its own forward, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        return h + torch.func.vmap(torch.func.grad(lambda row: row.square().sum()))(h)


def test_tensors_hidden_by_torch_func_are_not_offloaded() -> None:
    layers = [Slopes() for _ in range(4)]
    pipe = Pipeline(layers, loss_fn=F.mse_loss, schedule="po-f", ranks=2, n_microbatches=2)
    with pytest.raises(StageError, match=r"torch\.func\..* saved tensor hooks"):
        pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
