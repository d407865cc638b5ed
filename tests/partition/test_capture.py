"""Models as they are, captured and cut: every value crosses, and gradients are the model's own."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock import BoundaryError, SplitPoint, pipe_split, pipeline
from tests import models
from tests.agreement import TRAINING
from tests.partition.capturing import ROUNDING, Pair, cuts_before

DIM, VOCABULARY = 8, 11


def output_loss(output: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


# --- everything crosses, under every schedule ------------------------------------------------


class Block(nn.Module):
    """Linear layers, with a table of the stage's own and one from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, DIM)
        self.register_buffer("own", torch.linspace(0.5, 1.5, DIM), persistent=False)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
        y = torch.tanh(self.inner(self.norm(x) * table)) * self.own
        return y if mask is None else y.masked_fill(mask[..., None] == 0, 0.0)


@dataclass
class Scored:
    """An output with a loss that the model has computed."""

    loss: Tensor | None
    logits: Tensor
    hidden: tuple[Tensor, ...]
    scale: float
    note: None = None


class Everything(nn.Module):
    """Skips to several stages, side values of all kinds, tied weights, a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("frequencies", torch.linspace(0.1, 1.0, DIM), persistent=False)
        self.never = nn.Linear(2, 2)

    def forward(
        self,
        ids: Tensor,
        *,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        scale: float = 1.0,
    ) -> Scored:
        with torch.no_grad():
            positions = torch.arange(ids.size(1), device=ids.device)
            table = torch.cos(positions[:, None] * self.frequencies)
        x = self.embed(ids) * scale
        kept = []
        for i, block in enumerate(self.blocks):
            x = block(x, table, mask)
            if i in (2, 3):
                x = x + kept[0] + kept[-1] * 0.5  # kept[0] goes to two later stages
            kept.append(x)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Scored(loss=loss, logits=logits, hidden=tuple(kept[:2]), scale=scale)


def tokens(rows: int, length: int = 5, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    mask = (torch.arange(length) < length - 1).long().expand(rows, length)
    labels = torch.randint(VOCABULARY, (rows, length), generator=generator)
    return {"ids": ids, "mask": mask, "labels": labels}


@cache
def everything() -> Pair:
    torch.manual_seed(0)
    spec = cuts_before("blocks.1", "blocks.2", "blocks.3")
    return Pair(Everything(), (), {**tokens(2), "scale": 2.0}, spec=spec, tolerance=ROUNDING)


@pytest.mark.parametrize("schedule", TRAINING)
def test_everything_crosses_under_every_schedule(schedule: str) -> None:
    batch = tokens(16, seed=1)
    everything().train(output_loss, schedule=schedule, n_microbatches=8, scale=2.0, **batch)


def test_the_output_is_the_models() -> None:
    pair = everything()
    expected = pair.model(**tokens(4, seed=2), scale=2.0)
    out = pair.cut.split_gm(**tokens(4, seed=2), scale=2.0)
    assert type(out) is Scored
    assert (out.scale, out.note) == (2.0, None)
    torch.testing.assert_close(out.logits, expected.logits, rtol=0, atol=0)
    assert len(out.hidden) == 2
    again = pair.cut.split_gm(**tokens(4, seed=2), scale=2.0)
    torch.testing.assert_close(again.logits, expected.logits, rtol=0, atol=0)


def test_other_batches_and_lengths_need_no_other_capture() -> None:
    for rows, length, num in ((9, 5, 4), (6, 7, 3), (12, 3, 2)):
        everything().train(
            output_loss, n_microbatches=num, scale=2.0, **tokens(rows, length, seed=rows)
        )


def test_positional_and_keyword_calls_mean_the_same() -> None:
    batch = tokens(8)
    ids = batch.pop("ids")
    everything().train(output_loss, ids, scale=2.0, **batch)


def test_stages_by_hand_take_the_models_arguments() -> None:
    """build_stage and a schedule's class, as a script written for torch has them."""
    pair = everything()
    plain = copy.deepcopy(pair.model)
    cut = pipeline(plain, (), {**tokens(2), "scale": 2.0}, cuts_before("blocks.2"))
    stages = [cut.build_stage(i, torch.device("cpu")) for i in range(2)]
    assert [type(stage) for stage in stages] == [penstock.TracedStage] * 2
    program = penstock.build("interleaved-1f1b", ranks=1, microbatches=2, virtual=2)
    # As in torch, a traced stage gives the tensors of the model's output.
    schedule = penstock.ScheduleProgram(stages, program, lambda output: output[0])
    losses: list[Tensor] = []
    schedule.step(**tokens(4), scale=2.0, losses=losses)
    again = copy.deepcopy(pair.model)
    halves = [{k: v[i : i + 2] for k, v in tokens(4).items()} for i in (0, 2)]
    for half, loss in zip(halves, losses, strict=True):
        torch.testing.assert_close(again(**half, scale=2.0).loss, loss)
    # By hand, a stage takes the arguments that have not crossed to it.
    half = halves[0]
    crossing = stages[0].forward_one_chunk(0, (), {**half, "scale": 2.0})
    without = tuple(None if value is half["labels"] else value for value in crossing)
    assert None in without
    stages[1].set_local_fwd_input(without, 0)
    output = stages[1].forward_one_chunk(0, (), {"labels": half["labels"]})
    torch.testing.assert_close(output[0], losses[0])


def test_shared_parameters_are_listed_and_stay_shared() -> None:
    pair = everything()
    assert pair.cut.shared == ({0: "embed.weight", 3: "head.weight"},)
    assert pair.cut.info().shared == pair.cut.shared
    first, last = pair.modules[0], pair.modules[3]
    assert first.get_parameter("embed.weight") is last.get_parameter("head.weight")


# --- names and objects ---------------------------------------------------------------------------


def test_stages_hold_the_models_own_state_under_its_names() -> None:
    model = Everything()
    cut = pipeline(model, (), tokens(2), cuts_before("blocks.1", "blocks.3"))
    modules = [cut.get_stage_module(i) for i in range(3)]
    for named in ("named_parameters", "named_buffers"):
        theirs = dict(getattr(model, named)(remove_duplicate=False))
        mine = [
            (n, t) for module in modules for n, t in getattr(module, named)(remove_duplicate=False)
        ]
        assert sorted(name for name, _ in mine) == sorted(theirs)
        assert all(tensor is theirs[name] for name, tensor in mine)
    states = [module.state_dict() for module in modules]
    assert sorted(name for state in states for name in state) == sorted(model.state_dict())
    other = Everything().state_dict()
    for module in modules:
        module.load_state_dict({name: other[name] for name in module.state_dict()})
    assert all(torch.equal(model.state_dict()[name], other[name]) for name in other)


def test_a_stage_can_be_copied_cast_and_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    cut = pipeline(model, (torch.ones(2, 4),), split_spec=cuts_before("2"))
    first = copy.deepcopy(cut.get_stage_module(0))
    assert first.get_parameter("0.weight") is not model[0].weight
    assert torch.equal(first(torch.ones(2, 4))[0], cut.get_stage_module(0)(torch.ones(2, 4))[0])
    assert first.to(torch.float64).get_parameter("0.weight").dtype is torch.float64


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Everything()
        example = {k: v.to("meta") for k, v in tokens(2).items()}
    cut = pipeline(model, (), example, cuts_before("blocks.2"))
    source = Everything()
    values: Any = tokens(4)
    states = {**source.state_dict(), **dict(source.named_buffers())}
    for index in range(2):
        module = cut.get_stage_module(index).to_empty(device="cpu")
        for named in (module.named_parameters, module.named_buffers):
            for name, tensor in named():
                tensor.data.copy_(states[name])
    out = cut.split_gm(**values)
    torch.testing.assert_close(out.logits, source(**values).logits, rtol=0, atol=0)


# --- training and evaluation ---------------------------------------------------------------------


class Moody(nn.Module):
    """BatchNorm, dropout, and a branch of Python that asks for the mode."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(True))
        self.second = nn.Sequential(nn.Conv1d(4, 3, 3, padding=1), nn.BatchNorm1d(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.second(self.first(x)))
        return y + 0.1 * x if self.training else y


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_running_statistics_end_as_in_the_plain_loop(schedule: str) -> None:
    torch.manual_seed(1)
    pair = Pair(Moody(0.0), (torch.randn(2, 3, 6),), spec=cuts_before("second"))
    x = torch.randn(8, 3, 6)
    pipe = pair.train(F.mse_loss, x, target=torch.randn(8, 3, 6), schedule=schedule)
    buffers = dict(pipe.named_buffers())
    assert int(buffers["first.1.num_batches_tracked"]) == 4


def test_evaluation_is_the_models_evaluation() -> None:
    torch.manual_seed(1)
    model = Moody(0.9)
    for _ in range(3):
        model(torch.randn(8, 3, 6))
    for mode in (True, False):  # whichever mode it is captured in
        pair = Pair(model.train(mode), (torch.randn(2, 3, 6),), spec=cuts_before("second"))
        pair.evaluate(torch.randn(4, 3, 6))


def test_dropout_drops_in_training_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    cut = pipeline(model, (torch.ones(2, 4),), split_spec=cuts_before("2"))
    x = torch.ones(3, 4)
    dropped = cut.train()(x)[0]
    assert 0.3 < (dropped == 0).float().mean() < 0.7
    assert not torch.equal(dropped, cut(x)[0])
    kept = cut.eval()(x)[0]
    assert torch.equal(kept, model.eval()(x))
    assert torch.equal(kept, cut(x)[0])


def test_the_same_seed_drops_the_same() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    cut = pipeline(model, (torch.ones(2, 4),), split_spec=cuts_before("2"))
    x = torch.ones(3, 4)
    torch.manual_seed(3)
    expected = model(x)
    torch.manual_seed(3)
    assert torch.equal(cut(x)[0], expected)


def test_capturing_changes_nothing_of_the_model() -> None:
    model = Moody(0.5)
    model.second.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    generator = torch.get_rng_state()
    pipeline(model, (torch.randn(2, 3, 6, generator=torch.Generator()),))
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --- regions, constants, in place ----------------------------------------------------------------


class Regions(nn.Module):
    """Parts without gradients and under autocast, each with a cut in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = torch.tanh(self.layers[0](x))
            pipe_split()
            y = y * torch.sigmoid(self.layers[0].bias.sum() * 0 + x)
        x = self.layers[1](x) + y
        with torch.autocast("cpu", torch.bfloat16):
            x = self.layers[2](x)
            pipe_split()
            x = self.layers[3](x)
            with torch.autocast("cpu", enabled=False):
                x = x.float() * torch.tensor([1.5])
        return x


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_regions_are_cut_in_their_midst(schedule: str) -> None:
    torch.manual_seed(2)
    pair = Pair(Regions(), (torch.randn(2, DIM),), tolerance=ROUNDING)
    assert len(pair.modules) == 3
    x, target = torch.randn(8, DIM), torch.randn(8, DIM)
    pair.train(F.mse_loss, x, target=target, schedule=schedule)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_a_failure_in_a_region_leaves_it() -> None:
    cut = pipeline(Regions(), (torch.randn(2, DIM),))
    with pytest.raises(RuntimeError):
        cut.get_stage_module(0).get_submodule("layers.0")  # it is there
        module: Any = cut.get_stage_module(0)
        module.get_submodule("layers.0").weight.data = torch.ones(3, 3)
        module(torch.randn(2, DIM))
    assert torch.is_grad_enabled()


class InPlace(nn.Module):
    """Writes into what comes over the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pipe_split()
        x += 1.0
        x = self.second(F.relu(x, inplace=True))
        pipe_split()
        return x.mul_(2.0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_writes_into_received_values(schedule: str) -> None:
    pair = Pair(InPlace(), (torch.randn(2, DIM),))
    assert len(pair.modules) == 3
    pair.train(F.mse_loss, torch.randn(8, DIM), target=torch.zeros(8, DIM), schedule=schedule)


# --- where to cut --------------------------------------------------------------------------------


def test_cuts_after_modules_and_in_the_code() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
    for spec in ({"1": SplitPoint.END}, {"2": SplitPoint.BEGINNING}):
        cut = pipeline(model, (torch.ones(2, 4),), split_spec=spec)
        held = [[n for n, _ in cut.get_stage_module(i).named_parameters()] for i in range(2)]
        assert held == [["0.weight", "0.bias"], ["2.weight", "2.bias"]]


def test_annotated_split_points_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    penstock.annotate_split_points(model, {"0": SplitPoint.END, "2": SplitPoint.BEGINNING})
    assert pipeline(model, (torch.ones(2, 4),)).num_stages == 3
    assert model(torch.ones(2, 4)).shape == (2, 4)


def test_a_policy_puts_cuts_into_the_graph() -> None:
    def before_each_linear(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
        linears = [n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default]
        for node in linears[1:]:
            with gm.graph.inserting_before(node):
                gm.graph.call_function(pipe_split)
        gm.recompile()
        return gm

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    example = (torch.ones(2, 4),)
    cut = pipeline(model, example, split_policy=before_each_linear)
    assert cut.num_stages == 3
    assert torch.equal(cut(torch.ones(3, 4))[0], model(torch.ones(3, 4)))
    assert penstock.Pipe.from_tracing(model, example, None, before_each_linear).num_stages == 3


def test_a_pipe_shows_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    cut = pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.ones(2, 4),))
    cut.print_readable()
    assert "torch.ops.aten.linear.default" in capsys.readouterr().out


# --- what export can't see into ------------------------------------------------------------------


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Rounded(nn.Module):
    """Control flow that depends on data, a gradient of its own, an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        y: Tensor = Straight.apply(self.lstm(x)[0] * 4)
        return y / 4


def test_modules_that_are_no_operations_are_refused() -> None:
    """By module they run whole, and may be anything."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(DIM, DIM), Rounded(), nn.Dropout(0.0), Rounded())
    with pytest.raises(penstock.PartitionError, match=r"can't be captured: .*branch on values"):
        pipeline(model, (torch.randn(2, 3, DIM),), split_spec=cuts_before("1", "3"))


class Nested(nn.Module):
    """Arguments of all kinds, and an output that is a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, *xs: Tensor, config: dict[str, Any], **more: Tensor) -> Any:
        x = self.layers[0](xs[0]) - xs[1]
        pipe_split()
        y = self.layers[1](x) * config["weights"]["z"]
        pipe_split()
        return [self.layers[2](y), {"kept": (x, config["flag"])}, more["extra"].sum(), None]


def test_one_tensor_passed_as_several_arguments_is_several() -> None:
    """As ids and labels are, in the example: in the next batch they may differ."""
    model, x = Nested(), torch.randn(2, DIM)
    example = {"config": {"weights": {"z": x}, "flag": "yes"}, "extra": x}
    cut = pipeline(model, (x, x), example)
    args = (torch.randn(3, DIM), torch.randn(3, DIM))
    kwargs = {
        "config": {"weights": {"z": torch.randn(3, DIM)}, "flag": "yes"},
        "extra": torch.randn(3, DIM),
    }
    expected = model(*args, **kwargs)
    flat = cut(*args, **kwargs)
    assert flat[2] == "yes" and flat[4] is None
    nested = [flat[0], {"kept": flat[1:3]}, *flat[3:]]
    for output in (nested, cut.split_gm(*args, **kwargs)):
        assert output[1]["kept"][1] == "yes" and output[3] is None
        for mine, theirs in zip(
            (output[0], output[1]["kept"][0], output[2]),
            (expected[0], expected[1]["kept"][0], expected[2]),
            strict=True,
        ):
            assert torch.equal(mine, theirs)


class Values(nn.Module):
    """Sizes and numbers that only data tells, which cross as numbers and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        longest = lengths.max().item()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0.2 * i).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out * longest


def test_data_dependent_sizes() -> None:
    torch.manual_seed(0)
    x, lengths = torch.randn(4, DIM), torch.tensor([3, 1, 2, 2])
    pair = Pair(
        Values(),
        (x, lengths),
        spec=cuts_before("experts.1", "experts.2"),
        tolerance=ROUNDING,
    )
    pair.train(
        F.mse_loss,
        torch.randn(8, DIM),
        torch.tensor([3, 1, 3, 2, 1, 3, 3, 0]),
        target=torch.randn(8, DIM),
        n_microbatches=2,
        dynamic_shapes=True,
    )


# --- calls that differ from the example ----------------------------------------------------------


def test_calls_that_do_not_fit_the_graph() -> None:
    cut = everything().cut
    with pytest.raises(BoundaryError, match=r"argument scale is 3.0, but .* captured with 2.0"):
        cut(**tokens(2), scale=3.0)
    with pytest.raises(BoundaryError, match=r"inputs are \(ids, labels, scale\), but .*mask"):
        cut(ids=tokens(2)["ids"], labels=tokens(2)["labels"], scale=2.0)
    with pytest.raises(BoundaryError, match="do not fit forward"):
        cut(**tokens(2), scale=2.0, unknown=1)
    batch = tokens(2)
    batch["ids"] = batch["ids"].float()
    with pytest.raises(BoundaryError, match=r"argument ids is torch.float32.*int64"):
        cut(**batch, scale=2.0)


def test_a_shape_that_the_code_has_fixed_is_named() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    cut = pipeline(model, (torch.ones(2, 3, 4),))
    assert cut(torch.ones(5, 3, 4))[0].shape == (5, 2)
    for wrong, told in (
        (torch.ones(2, 3, 5), r"input: .2, 3, 5., but .*captured for .*== 12"),
        (torch.ones(1, 3, 4), r"captured for 2 <= input.shape\[0\] <= int_oo"),
        (torch.ones(2, 12), r"captured for input.dim\(\) == 3"),
    ):
        with pytest.raises(BoundaryError, match=told):
            cut(wrong)


def test_the_example_may_be_a_view_and_microbatches_none() -> None:
    """What export notes of the batch that the example was cut out of, holds for no other input."""
    batch, _ = models.tokens(6, 0)
    cut = pipeline(models.gpt(4), (batch[:2],), split_spec={"2": SplitPoint.BEGINNING})
    stage = cut.build_stage(0, torch.device("cpu"))
    assert len(stage.submod(batch[:3].clone())) > 0
