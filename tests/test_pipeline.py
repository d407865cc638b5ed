"""The front door: what it takes, what it makes of it, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import penstock
from penstock import PartitionError, Pipeline, PipelineStage, ScheduleError, StageError
from tests.agreement import Twins
from tests.compare import Tolerance, assert_same, plain_step, snapshot
from tests.models import CASES, DIM, features, mlp

CPU = torch.device("cpu")


def named_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            embed=nn.Linear(DIM, DIM),
            block0=nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)),
            block1=nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()),
            head=nn.Linear(DIM, DIM),
        )
    )


def hand_cut(num: int = 2) -> list[PipelineStage]:
    return [PipelineStage(m, i, num, CPU) for i, m in enumerate(mlp(num))]


# --- models and splits -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "sizes"),
    [
        (None, [2, 2]),
        ([1, 3], [1, 3]),
        ([3, 1], [3, 1]),
        ([["embed", "block0", "block1"], ["head"]], [3, 1]),
    ],
)
def test_splits(split: Any, sizes: list[int]) -> None:
    both = Twins(named_model(), F.mse_loss, split=split, ranks=2, n_microbatches=2)
    inputs, target = features(6, 0)
    both.step(inputs, target=target)
    assert [len(list(s.submod.children())) for s in both.pipe.stages] == sizes


def test_the_plain_models_names() -> None:
    model = named_model()
    pipe = Pipeline(model, split=[1, 1, 2], n_microbatches=2)
    for mine, theirs in (
        (pipe.named_parameters(), model.named_parameters()),
        (pipe.named_buffers(), model.named_buffers()),
    ):
        found, expected = dict(mine), dict(theirs)
        assert list(found) == list(expected)
        assert all(found[name] is expected[name] for name in expected)
    assert [id(p) for p in pipe.parameters()] == [id(p) for p in model.parameters()]


def compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapped


def test_wrapping_stages_changes_no_name() -> None:
    """Whole stages and parts of them, wrapped after the pipeline is made."""
    model = named_model()
    names = [
        [*model.state_dict()],
        *([n for n, _ in f()] for f in (model.named_parameters, model.named_buffers)),
    ]
    pipe = Pipeline(model, loss_fn=F.mse_loss, split=[1, 1, 2], n_microbatches=2)
    state = {
        name: torch.randn_like(t) if t.is_floating_point() else t + 3
        for name, t in model.state_dict().items()
    }
    first, second, third = pipe.stages
    first.submod = compiled(first.submod)
    second.submod.block0[0] = compiled(second.submod.block0[0])
    third.submod = compiled(checkpoint_wrapper(third.submod))
    inputs, target = features(6, 0)
    pipe.step(inputs, target=target)
    found = [
        [*pipe.state_dict(full=True)],
        *([n for n, _ in f()] for f in (pipe.named_parameters, pipe.named_buffers)),
    ]
    assert found == names
    pipe.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in pipe.state_dict().items())
    # The layers are the model's own: they hold what was loaded.
    assert torch.equal(model.get_parameter("head.weight"), state["head.weight"])


def test_a_model_with_compiled_parts_loads_its_own_state() -> None:
    model = named_model()
    model.block1 = compiled(model.block1)
    pipe = Pipeline(model, ranks=2, n_microbatches=2)
    assert "block1._orig_mod.0.weight" in model.state_dict()
    assert "block1.0.weight" in pipe.state_dict()
    pipe.load_state_dict({name: t + 1 for name, t in model.state_dict().items()})
    pipe.load_state_dict(pipe.state_dict())


def test_layers_that_stand_in_several_places() -> None:
    """One activation object between all layers, and one linear layer at both ends."""
    act, linear = nn.Tanh(), nn.Linear(DIM, DIM)
    model = nn.Sequential(linear, act, nn.Linear(DIM, DIM), act, linear, act)
    both = Twins(
        model,
        F.mse_loss,
        split=[1, 2, 2, 1],
        n_microbatches=2,
        # The shared layer's two stages add up apart from each other.
        tolerance=Tolerance(relative=2e-6),
    )
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


def test_a_list_of_modules_is_a_list_of_stages() -> None:
    both = Twins(list(mlp(3)), F.mse_loss, n_microbatches=2)
    assert both.pipe.num_ranks == len(both.pipe.stages) == 3
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


def test_a_list_of_layers_with_a_split() -> None:
    both = Twins(list(mlp(5)), F.mse_loss, split=[3, 2], n_microbatches=2)
    assert len(both.pipe.stages) == 2
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


def test_stages_cut_by_hand() -> None:
    stages = hand_cut(4)
    whole = nn.Sequential(*(s.submod for s in stages))
    plain = copy.deepcopy(whole)
    pipe = Pipeline(stages, loss_fn=F.mse_loss, schedule="zbv", n_microbatches=3)
    assert (pipe.num_ranks, pipe.stages) == (2, tuple(stages))
    inputs, target = features(6, 0)
    loss = pipe.step(inputs, target=target)
    expected = plain_step(plain, F.mse_loss, inputs, target=target, n_microbatches=3)
    assert torch.equal(loss, expected.loss)
    assert_same(snapshot(whole), snapshot(plain))


def test_one_rank_is_a_pipeline_too() -> None:
    both = Twins(mlp(3), F.mse_loss, ranks=1, n_microbatches=2)
    inputs, target = features(5, 0)
    both.step(inputs, target=target)


@pytest.mark.parametrize(
    ("model", "options", "error", "told"),
    [
        (mlp(4), {}, ScheduleError, "pass ranks="),
        (mlp(2), {"ranks": 3}, PartitionError, "2 layers can't make 3 stages"),
        (mlp(4), {"split": [2, 1]}, PartitionError, "counts 3 layers, but there are 4"),
        (mlp(4), {"split": [2, 2], "ranks": 3}, ScheduleError, "2 stages, but 1f1b on 3 ranks"),
        (list(mlp(3)), {"ranks": 2}, ScheduleError, "3 stages, but 1f1b on 2 ranks"),
        (mlp(6), {"split": [2, 2, 2], "schedule": "zbv"}, ScheduleError, "3 stages, but zbv"),
        (mlp(4), {"ranks": 2, "virtual": 2}, ScheduleError, "virtual=2"),
        (mlp(4), {"ranks": 2, "schedule": "1f2b"}, ScheduleError, "did you mean '1f1b'"),
        (mlp(4), {"ranks": 0}, ScheduleError, "ranks=0"),
        (mlp(4), {"ranks": 2, "n_microbatches": 0}, ScheduleError, "microbatches=0"),
        (nn.Linear(2, 2), {"ranks": 2}, PartitionError, "no list of repeated blocks"),
        ([], {"ranks": 1}, PartitionError, "empty"),
        ([nn.Tanh(), torch.tanh], {"ranks": 2}, PartitionError, "item 1"),
        ([nn.Tanh(), hand_cut()[1]], {"ranks": 2}, PartitionError, "item 1"),
        (hand_cut()[::-1], {}, ScheduleError, "rising order"),
        (hand_cut()[:1], {}, ScheduleError, r"needs the stages .*given \[0\]"),
        (hand_cut()[:1] * 2, {}, ScheduleError, "pass each stage once"),
        ([hand_cut(2)[0], hand_cut(3)[1]], {}, ScheduleError, "disagree on num_stages"),
    ],
)
def test_values_that_do_not_fit(model: Any, options: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        Pipeline(model, loss_fn=F.mse_loss, **({"n_microbatches": 2} | options))


# --- schedules -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages"),
    [("1f1b", 4, 4), ("gpipe", 2, 2), ("zbv", 2, 4), ("interleaved-1f1b", 2, 4)],
)
def test_ranks_follow_from_the_stages(schedule: str, ranks: int, stages: int) -> None:
    pipe = Pipeline(mlp(stages), split=[1] * stages, schedule=schedule, n_microbatches=2)
    assert (pipe.num_ranks, len(pipe.stages)) == (ranks, stages)
    assert pipe.program.num_ranks == ranks


def test_a_job_of_one_process_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun --nproc-per-node 1; elsewhere the number is asked for."""
    with pytest.raises(ScheduleError, match="say on how many ranks to run"):
        Pipeline(mlp(2), loss_fn=F.mse_loss)
    monkeypatch.setenv("WORLD_SIZE", "1")
    pipe = Pipeline(mlp(2), loss_fn=F.mse_loss)
    assert pipe.num_ranks == 1
    inputs, target = features(8, 0)
    assert pipe.step(inputs, target=target) > 0


def test_stages_per_rank_follow_from_ranks_and_stages() -> None:
    pipe = Pipeline(mlp(6), split=[1] * 6, schedule="interleaved-1f1b", ranks=2, n_microbatches=2)
    assert pipe.program.placement.stage_ranks == (0, 1, 0, 1, 0, 1)


@pytest.mark.parametrize("name", ["1F1B", "Schedule1F1B", "schedule_1f1b", "dapple"])
def test_schedules_by_any_of_their_names(name: str) -> None:
    pipe = Pipeline(mlp(2), schedule=name, ranks=2, n_microbatches=2)
    assert pipe.program.name == "1f1b"


def test_a_program_as_schedule() -> None:
    program = penstock.build("looped-bfs", ranks=2, microbatches=3, virtual=2)
    both = Twins(mlp(4), F.mse_loss, schedule=program)
    inputs, target = features(7, 0)
    both.step(inputs, target=target)
    assert both.pipe.program.name == "looped-bfs"
    assert len(both.pipe.losses) == 3


@pytest.mark.parametrize(
    ("model", "options", "told"),
    [
        (mlp(4), {"n_microbatches": 4}, "n_microbatches=4.*has 3"),
        (mlp(4), {"ranks": 3}, "ranks=3, but the program .*has 2"),
        (mlp(4), {"virtual": 1}, "stages per rank=1, but the program .*has 2"),
        (mlp(5), {"split": [1] * 5}, "stages=5, but the program .*has 4"),
        (mlp(3), {"split": [1] * 3}, "stages=3, but the program .*has 4"),
        (list(mlp(5)), {}, "stages=5, but the program .*has 4"),
        (hand_cut(2), {}, "stages=2, but the program .*has 4"),
    ],
)
def test_values_that_do_not_fit_a_program(model: Any, options: Any, told: str) -> None:
    """Above all, no layer is left out because the program has fewer stages."""
    program = penstock.build("looped-bfs", ranks=2, microbatches=3, virtual=2)
    with pytest.raises(ScheduleError, match=told):
        Pipeline(model, loss_fn=F.mse_loss, schedule=program, **options)


def test_eight_microbatches_by_default() -> None:
    both = Twins(mlp(2), F.mse_loss, ranks=2)
    inputs, target = features(9, 0)
    both.step(inputs, target=target)
    assert len(both.pipe.losses) == 8


# --- steps -----------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_the_microbatches() -> None:
    model = mlp(2)
    pipe = Pipeline(model, loss_fn=F.mse_loss, ranks=2, n_microbatches=3)
    inputs, target = features(6, 0)
    loss = pipe.step(inputs, target=target)
    assert loss.shape == ()
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.mse_loss(model(inputs), target).detach())
    assert torch.equal(loss, torch.stack(pipe.losses).mean())


def test_a_whole_training() -> None:
    """With any optimizer, over the pipeline's parameters: the same model in the end."""
    both = Twins(CASES["gpt"].make(4), CASES["gpt"].loss_fn, ranks=2, n_microbatches=4)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1)
        for each in (both.pipe, both.plain)
    ]
    losses = []
    for step in range(6):
        for each in (both.pipe, both.plain):
            each.zero_grad()
        inputs, target = CASES["gpt"].batch(8, step % 2)
        losses.append(both.step(inputs, target=target).loss)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < losses[0]
    state, expected = both.pipe.state_dict(), both.plain.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_gradients_are_forgotten_on_demand() -> None:
    both = Twins(mlp(2), F.mse_loss, ranks=2, n_microbatches=2)
    inputs, target = features(4, 0)
    both.step(inputs, target=target)
    before = [p.grad for p in both.pipe.parameters()]
    both.pipe.zero_grad(set_to_none=False)
    for param, grad in zip(both.pipe.parameters(), before, strict=True):
        assert param.grad is grad and not grad.any()
    both.pipe.zero_grad()
    assert all(p.grad is None for p in both.pipe.parameters())


def test_training_and_evaluation_mode() -> None:
    pipe = Pipeline(named_model(), ranks=2, n_microbatches=2)
    assert pipe.train(False) is pipe
    assert not any(m.training for s in pipe.stages for m in s.submod.modules())
    # eval() runs the model; in which mode is the user's to say.
    pipe.train()
    pipe.eval(features(4, 0)[0])
    assert all(m.training for s in pipe.stages for m in s.submod.modules())


def test_a_failed_step_is_the_last() -> None:
    class Fails(nn.Module):
        is_mended = False

        def forward(self, x: Tensor) -> Tensor:
            if self.is_mended:
                return x
            raise ZeroDivisionError("in the user's own code")

    layers = [*mlp(1), Fails()]
    pipe = Pipeline(layers, loss_fn=F.mse_loss, n_microbatches=2)
    inputs, target = features(4, 0)
    with pytest.raises(StageError, match="in the user's own code") as caught:
        pipe.step(inputs, target=target)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert (caught.value.rank, caught.value.stage, caught.value.microbatch) == (1, 1, 0)
    with pytest.raises(penstock.PeerError, match=r"failed, .*make a new one over the same model"):
        pipe.eval(inputs)
    Fails.is_mended = True
    again = Pipeline(layers, loss_fn=F.mse_loss, n_microbatches=2)
    again.step(inputs, target=target)
    assert all(param.grad is not None for param in pipe.parameters())


# --- state -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("zbv", 1), ("looped-bfs", 2)])
def test_state_goes_both_ways(schedule: str, ranks: int) -> None:
    """From the plain model into a pipeline and back, whatever the cut."""
    plain = named_model()
    with torch.no_grad():
        for i, (_, value) in enumerate(plain.state_dict().items()):
            value.fill_(i)
    torch.manual_seed(1)
    pipe = Pipeline(copy.deepcopy(named_model()), schedule=schedule, ranks=ranks, n_microbatches=2)
    pipe.load_state_dict(plain.state_dict())
    state = pipe.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    again = named_model()
    again.load_state_dict(state)


def test_state_that_is_not_there() -> None:
    pipe = Pipeline(named_model(), ranks=2, n_microbatches=2)
    state = pipe.state_dict()
    del state["head.bias"]
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    changed = {name: value + 1 for name, value in state.items()} | {"tail.weight": torch.ones(1)}
    with pytest.raises(PartitionError, match=r"lacks head\.bias; it has tail\.weight, unknown"):
        pipe.load_state_dict(changed)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


def test_state_of_another_shape() -> None:
    pipe = Pipeline(named_model(), ranks=2, n_microbatches=2)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    changed = {name: value + 1 for name, value in before.items()} | {"head.bias": torch.ones(2)}
    with pytest.raises(PartitionError, match=r"head\.bias has shape \(2,\), expected \(6,\)"):
        pipe.load_state_dict(changed)
    assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


@pytest.mark.parametrize("left", ["embed.weight", "head.weight"])
def test_a_tied_parameter_is_loaded_by_either_name(left: str) -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Linear(DIM, DIM), head=nn.Linear(DIM, DIM)))
    model.head.weight = model.embed.weight
    pipe = Pipeline(model, ranks=2, n_microbatches=2)
    state = {name: value + 1 for name, value in pipe.state_dict().items() if name != left}
    pipe.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items()
               if name != left)  # fmt: skip
    assert torch.equal(model.head.weight, model.embed.weight)
    missing = {name: value for name, value in state.items() if "weight" not in name}
    with pytest.raises(PartitionError, match=r"lacks embed\.weight, head\.weight"):
        pipe.load_state_dict(missing)


def test_a_tied_parameter_with_two_values_is_refused() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Linear(DIM, DIM), head=nn.Linear(DIM, DIM)))
    model.head.weight = model.embed.weight
    pipe = Pipeline(model, ranks=2, n_microbatches=2)
    state = pipe.state_dict(full=True)
    state["embed.weight"] += 1
    with pytest.raises(PartitionError, match=r"embed\.weight and head\.weight are tied here, and"):
        pipe.load_state_dict(state)
    state["head.weight"] += 1
    pipe.load_state_dict(state)
    assert torch.equal(model.embed.weight, state["head.weight"])


# --- what is shown, and what is refused ---------------------------------------------------------


def test_its_repr_says_where_each_layer_went() -> None:
    pipe = Pipeline(named_model(), loss_fn=F.mse_loss, schedule="zbv", ranks=2, n_microbatches=4)
    assert repr(pipe).splitlines() == [
        "Pipeline of zbv: 2 ranks, 4 stages, 4 microbatches",
        "  rank 0, stage 0: embed",
        "  rank 0, stage 3: head",
        "  rank 1, stage 1: block0",
        "  rank 1, stage 2: block1",
    ]
    layers = Pipeline(nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(9))), split=[8, 1])
    assert repr(layers).splitlines()[1:] == ["  rank 0, stage 0: 0-7", "  rank 1, stage 1: 8"]
    assert repr(Pipeline(hand_cut(), n_microbatches=2)).splitlines() == [
        "Pipeline of 1f1b: 2 ranks, 2 stages, 2 microbatches",
        "  rank 0, stage 0",
        "  rank 1, stage 1",
    ]


@pytest.mark.parametrize("method", ["module", "export"])
def test_its_repr_names_the_modules_of_any_model(method: Any) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(DIM, DIM)
            self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(5))
            self.head = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    example = (torch.ones(2, DIM),)
    pipe = Pipeline(Net(), split=["layers.3"], n_microbatches=2, example=example, method=method)
    assert repr(pipe).splitlines()[1:] == [
        "  rank 0, stage 0: embed, layers.0-2",
        "  rank 1, stage 1: layers.3-4, head",
    ]
    whole = Pipeline(Net(), ranks=1, n_microbatches=2, example=example)
    assert repr(whole).splitlines()[1:] == ["  rank 0, stage 0: Net"]


def test_mistaking_it_for_a_module_says_what_to_do() -> None:
    pipe = Pipeline(mlp(4), loss_fn=F.mse_loss, split=[2, 2], n_microbatches=2)
    inputs, target = features(4, 0)
    with pytest.raises(TypeError, match=r"pipe\.step\(inputs, target=labels\) runs .*pipe\.eval"):
        pipe(inputs)
    with pytest.raises(TypeError, match=r"in pipe\.stages: penstock\.compile_stage"):
        torch.compile(pipe, backend="eager")
    with pytest.raises(AttributeError, match="'Pipeline' object has no attribute 'backward'"):
        pipe.backward()  # type: ignore[attr-defined]
    loss = pipe.step(inputs, target=target)
    with pytest.raises(
        StageError, match=r"has run the backward already.* leave loss\.backward\(\)"
    ):
        loss.backward()
    assert all(param.grad is not None for param in pipe.parameters())


def test_the_loss_is_a_plain_tensor_in_every_other_use(tmp_path: Path) -> None:
    pipe = Pipeline(mlp(4), loss_fn=F.mse_loss, split=[2, 2], n_microbatches=2)
    inputs, target = features(4, 0)
    loss = pipe.step(inputs, target=target)
    assert type(loss) is Tensor and not loss.requires_grad
    torch.save({"loss": loss}, tmp_path / "checkpoint")
    loaded = torch.load(tmp_path / "checkpoint", weights_only=True)["loss"]
    for same in (loaded, copy.deepcopy(loss), pickle.loads(pickle.dumps(loss)), loss.clone()):
        assert torch.equal(same, loss)
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    weight = torch.ones((), requires_grad=True)
    (loss * weight).backward()
    assert torch.equal(weight.grad, loss)  # type: ignore[arg-type]


def test_one_microbatch_over_several_ranks_is_remarked_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Pipeline(mlp(4), split=[2, 2], n_microbatches=2)
    Pipeline(mlp(4), ranks=1, n_microbatches=1)
    assert not caplog.messages
    Pipeline(mlp(4), split=[2, 2], n_microbatches=1)
    (message,) = caplog.messages
    assert (
        message.startswith("n_microbatches=1: 2 ranks take turns") and "n_microbatches=2" in message
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied: Callable[[Pipeline], object]) -> None:
    pipe = Pipeline(mlp(4), loss_fn=F.mse_loss, split=[2, 2])
    with pytest.raises(TypeError, match="copied or pickled"):
        copied(pipe)


def test_stages_with_names_in_common_have_no_common_state() -> None:
    """One would overwrite the other, in a checkpoint above all."""
    pipe = Pipeline(hand_cut(), n_microbatches=2)
    with pytest.raises(PartitionError, match=r"'0\.bias', '0\.weight'"):
        pipe.state_dict()
    with pytest.raises(PartitionError, match="names"):
        pipe.load_state_dict({"0.weight": torch.ones(DIM, DIM), "0.bias": torch.ones(DIM)})
    assert len(list(pipe.parameters())) == 4


@pytest.mark.parametrize("layer", [nn.Dropout(0.1), nn.BatchNorm1d(DIM)])
def test_an_evaluation_in_training_mode_is_remarked_once(
    layer: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    model = [*mlp(3), layer]
    pipe = Pipeline(model, split=[2, 2], ranks=2, schedule="forward-only", n_microbatches=2)
    x = torch.ones(4, DIM)
    pipe.train(False).eval(x)
    assert not caplog.messages
    pipe.train()
    for _ in range(2):
        pipe.eval(x)
    (message,) = caplog.messages
    assert f"({type(layer).__name__}) in training mode; call pipe.train(False) before" in message


def test_modules_that_compute_alike_in_both_modes_need_no_remark(
    caplog: pytest.LogCaptureFixture,
) -> None:
    still = [nn.Dropout(0.0), nn.Dropout().eval(), nn.BatchNorm1d(DIM, track_running_stats=False)]
    pipe = Pipeline(
        [*mlp(1), *still], split=[2, 2], ranks=2, schedule="forward-only", n_microbatches=2
    )
    pipe.eval(torch.ones(4, DIM))
    assert not caplog.messages


def test_a_full_state_is_a_copy() -> None:
    pipe = Pipeline(named_model(), loss_fn=F.mse_loss, split=[1, 1, 2], n_microbatches=2)
    before = pipe.state_dict(full=True)
    with torch.no_grad():
        for param in pipe.parameters():
            param.add_(1)
    after = pipe.state_dict(full=True)
    assert all(torch.equal(after[n], before[n] + 1) for n, _ in pipe.named_parameters())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tiemout_s": 3}, "unexpected keyword argument 'tiemout_s'"),
        ({"is_single_process": True}, "unexpected keyword argument 'is_single_process'"),
        ({"timeout_s": -3}, "timeout_s=-3: expected a number of seconds above 0"),
        ({"loss_fn": "mse"}, "loss_fn is 'mse', expected a callable"),
    ],
)
def test_wrong_options_are_found_before_the_model_is_initialized(
    options: dict[str, Any], said: str
) -> None:
    def fill(module: nn.Module) -> None:
        raise AssertionError("too early")

    with torch.device("meta"):
        model = named_model()
    with pytest.raises((TypeError, ScheduleError), match=said):
        Pipeline(model, **{"loss_fn": F.mse_loss, "ranks": 1, "init_fn": fill, **options})
