"""Profiles: which blocks there are, what they cost, and that measuring leaves no trace."""

from __future__ import annotations

import functools
import random
import time
import warnings
from collections import OrderedDict
from itertools import accumulate, combinations, count, pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import PartitionError
from penstock.partition.balance.balance import balance
from penstock.partition.balance.costs import BlockCosts, Profile
from penstock.partition.blocks import gather, leaf_modules
from penstock.partition.forward.by_module import split_by_module
from penstock.partition.profile import profile
from penstock.partition.profiled_model import ObservedPass, ProfiledModel
from tests.real_models import REAL_MODELS

DIM = 8


class Layer(nn.Module):
    """A residual layer, with a submodule as layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Tiny(nn.Module):
    """Embeddings, layers, a head; the norm is registered before what runs first."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.body = nn.Identity()  # never called
        self.norm = nn.LayerNorm(DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.embed = nn.Embedding(16, DIM)
        self.drop = nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.head = nn.Linear(DIM, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens)) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def tokens() -> Tensor:
    return torch.zeros(2, 5, dtype=torch.int64)


def modules(measured: Profile) -> list[tuple[str, ...]]:
    return [block.modules for block in measured.blocks]


# --- which blocks there are --------------------------------------------------------------------


def test_blocks_are_found_by_structure_and_ordered_by_how_they_run() -> None:
    measured = profile(Tiny(), tokens(), runs=1)
    assert modules(measured) == [
        # What never runs goes with what is registered before it.
        ("scale", "embed", "drop", "body"),
        ("layers.0",),
        ("layers.1",),
        ("layers.2",),
        ("norm", "head"),
    ]
    assert measured.model == "Tiny"


def test_every_parameter_is_in_the_plan_of_a_profile() -> None:
    model = Tiny()
    measured = profile(model, tokens(), runs=1)
    plan = measured.plan(balance(measured, 3).counts)
    plan.check(model)
    counted = sum(block.parameters for block in measured.blocks)
    assert counted == sum(p.numel() for p in model.parameters()) - DIM


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models_are_measured_and_cut_by_their_plans(name: str) -> None:
    real = REAL_MODELS[name]
    model, batch = real.model(), real.example()
    measured = profile(model, batch, runs=1)
    layers = len(real.trunk)
    if name not in ("resnet50", "unet"):  # which have several trunks, and parts between them
        assert len(measured.blocks) == layers + 2
    assert all(block.forward_s > 0 and block.time_s > 0 for block in measured.blocks)
    assert all(block.sends for block in measured.blocks[:-1])
    assert measured.blocks[-1].sends == ()
    plan = measured.plan(balance(measured, 4).counts)
    plan.check(model)
    stages = split_by_module(model, plan, batch).stages
    output = stages[0](**batch)
    for stage in stages[1:]:
        output = stage(*output)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ["0", "1"]),
        (
            nn.Sequential(OrderedDict(a=nn.Embedding(2, 2), b=nn.Linear(2, 2), c=nn.ReLU())),
            ["a", "b", "c"],
        ),
        (
            nn.ModuleDict({"layers": nn.ModuleDict({"x": Layer(), "y": Layer()}), "z": Layer()}),
            ["layers.x", "layers.y", "z"],
        ),
        # A list of plain layers beside lists of blocks is a detail.
        (
            nn.ModuleDict(
                {
                    "layers": nn.ModuleList([Layer(), Layer()]),
                    "heads": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
                }
            ),
            ["layers.0", "layers.1", "heads.0", "heads.1"],
        ),
    ],
)
def test_units(model: nn.Module, names: list[str]) -> None:
    assert [unit.name for unit in leaf_modules(model)] == names


def test_modules_between_layers_join_their_trunk() -> None:
    """The norm that ends an encoder goes with it, what opens the decoder with that."""
    encoder = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "norm": nn.LayerNorm(2)})
    decoder = nn.ModuleDict({"embed": nn.LayerNorm(2), "layers": nn.ModuleList([Layer(), Layer()])})
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "head": nn.Linear(2, 2)})
    order = [
        *("encoder.layers.0", "encoder.layers.1", "encoder.norm"),
        *("decoder.embed", "decoder.layers.0", "decoder.layers.1", "head"),
    ]
    found = gather(leaf_modules(model), order)
    assert [[unit.name for unit in block] for block in found] == [
        ["encoder.layers.0"],
        ["encoder.layers.1", "encoder.norm"],
        ["decoder.embed", "decoder.layers.0"],
        ["decoder.layers.1"],
        ["head"],
    ]


def test_large_modules_between_layers_are_blocks() -> None:
    down, up = nn.ModuleList([Layer(), Layer()]), nn.ModuleList([Layer(), Layer()])
    model = nn.ModuleDict({"down": down, "middle": Layer(), "up": up})
    found = gather(leaf_modules(model), ["down.0", "down.1", "middle", "up.0", "up.1"])
    assert [len(block) for block in found] == [1] * 5


def test_modules_that_do_not_run_join_a_block_without_a_trunk_too() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("first", "unused", "last")})
    found = gather(leaf_modules(model), ["first", "last"])
    assert [[unit.name for unit in block] for block in found] == [["first", "unused"], ["last"]]


def test_a_list_of_layers_is_taken_as_it_is() -> None:
    measured = profile([Layer(), nn.Sequential(Layer(), Layer())], torch.zeros(2, DIM), runs=1)
    assert modules(measured) == [("0",), ("1",)]
    assert [block.parameters for block in measured.blocks] == [88, 176]


# --- what they cost ----------------------------------------------------------------------------


class Nap(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Napping(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.naps = forward_s, backward_s
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return Nap.apply(self.linear(x), *self.naps)


def test_time_counts_where_it_is_spent() -> None:
    naps = [(0.0, 0.0), (0.08, 0.0), (0.0, 0.16), (0.04, 0.06)]
    measured = profile(nn.Sequential(*(Napping(*nap) for nap in naps)), torch.ones(1, DIM), runs=3)
    for block, (forward_s, backward_s) in zip(measured.blocks, naps, strict=True):
        assert forward_s <= block.forward_s < forward_s + 0.06
        assert backward_s <= block.input_grad_s < backward_s + 0.06
        assert 0 < block.weight_grad_s < 0.035


def test_sparse_gradients_have_no_storage_to_count() -> None:
    model = nn.Sequential(nn.Embedding(8, DIM, sparse=True), nn.Linear(DIM, DIM))
    measured = profile(model, torch.arange(8), runs=2)
    assert measured.blocks[0].parameter_bytes == 8 * DIM * 4
    assert all(param.grad is None for param in model.parameters())


def test_a_delay_that_moves_between_blocks_counts() -> None:
    """One of three layers naps in each forward, and each in one of three runs: no median does."""

    class NappingInTurn(Napping):
        calls = turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return Nap.apply(
                self.linear(x), 0.09 if (self.calls + self.turn) % 3 == 0 else 0.0, 0.0
            )

    layers = [NappingInTurn(0.0, 0.0) for _ in range(3)]
    for turn, layer in enumerate(layers):
        layer.turn = turn
    measured = profile(nn.Sequential(*layers), torch.ones(1, DIM), runs=3)
    assert 0.09 <= sum(block.forward_s for block in measured.blocks) < 0.15


def test_the_loss_counts_with_the_last_block() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    x = torch.ones(1, DIM)
    measured = profile(model, x, runs=1, loss_fn=lambda out: Nap.apply(out, 0.03, 0.05).sum())
    assert measured.blocks[-1].forward_s >= 0.03
    assert measured.blocks[-1].input_grad_s >= 0.05
    assert measured.blocks[0].time_s < 0.03


def test_weights_take_time_in_w() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    first, relu, last = profile(model, torch.ones(256, 512)).blocks
    assert min(first.weight_grad_s, last.weight_grad_s) > 10 * relu.weight_grad_s


def test_bytes_are_those_that_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    model[0].bias.requires_grad_(False)
    first, relu, last = profile(model, torch.ones(3, 4), runs=1).blocks
    # The first layer keeps the model's input, which is there anyway; the others keep (3, 8).
    assert (first.activation_bytes, relu.activation_bytes, last.activation_bytes) == (0, 96, 96)
    assert (first.parameter_bytes, relu.parameter_bytes, last.parameter_bytes) == (160, 0, 64)
    assert (first.frozen_bytes, relu.frozen_bytes, last.frozen_bytes) == (32, 0, 0)
    assert (first.sent_bytes, relu.sent_bytes, last.sent_bytes) == (96, 96, 0)


class Skipping(nn.Module):
    """A table made at the start goes to every layer; the first layer's result to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(1, DIM, bias=False)
        self.layers = nn.ModuleList(nn.Bilinear(DIM, DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table(torch.ones(x.shape[0], 1))
        first = self.layers[0](x, table)
        hidden = self.layers[1](first * 2, table)
        return self.layers[2](first, hidden)


def test_boundary_values_are_all_inputs_of_later_blocks() -> None:
    measured = profile(Skipping(), torch.ones(5, DIM), runs=1)
    tensor = "float32[5,8]"
    # The table and the input; the table and the first result; the first and the second result.
    assert [block.sends for block in measured.blocks] == [
        (tensor, tensor),
        (tensor, tensor),
        (tensor, tensor),
        (),
    ]


class Joining(nn.Module):
    """A skip connection that is joined between modules: the last layer takes a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        hidden = self.layers[2](self.layers[1](first.relu()))
        return self.layers[3](torch.cat([first, hidden])[:5] * 2)


def test_values_joined_between_modules_cross_too() -> None:
    measured = profile(Joining(), torch.ones(5, DIM), runs=1)
    assert [len(block.sends) for block in measured.blocks] == [1, 2, 2, 0]


def test_where_the_backward_cannot_be_split_it_counts_with_i() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = nn.Sequential(nn.Linear(DIM, DIM), Inner(DIM, DIM))
    measured = profile(model, torch.ones(2, DIM), runs=1)
    assert [block.weight_grad_s for block in measured.blocks] == [0, 0]
    assert all(block.input_grad_s > 0 for block in measured.blocks)


def test_a_gradient_taken_in_the_forward_is_no_arrival() -> None:
    """By a clock that ticks when it is looked at: two ticks of the second block, one of the first.

    A gradient of the first block's output, taken in the second's forward, came before the backward.
    """

    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(x.square().sum(), x, create_graph=True)[0]

    model = nn.Sequential(nn.Linear(2, 2), Inner())
    profiled = ProfiledModel(model, leaf_modules(model), torch.ones(1, 2), torch.sum)
    observed = ObservedPass(profiled, clock=map(float, count()).__next__)
    observed.forward()
    assert observed.backward() == (1.0, 2.0)


class Spacious(nn.Module):
    """Holds a megabyte in its forward or in its backward, and keeps none."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.backward:
            y.register_hook(lambda grad: grad + 0 * torch.ones(1 << 18).sum())
            return y.tanh()
        return y + 0 * torch.ones(1 << 18).sum()


def test_temporary_tensors_are_counted_in_both_directions() -> None:
    model = nn.Sequential(
        nn.Linear(DIM, DIM), Spacious(backward=False), Spacious(backward=True), nn.Linear(DIM, DIM)
    )
    measured = profile(model, torch.ones(2, DIM), runs=1)
    sizes = [block.temporary_bytes for block in measured.blocks]
    assert [round(size / 2**20) for size in sizes] == [0, 1, 1, 0]
    assert max(block.activation_bytes for block in measured.blocks) < 1 << 10


def test_weight_gradients_hold_less_than_their_activation() -> None:
    """A weight's gradient needs the input of its layer and the gradient of the output."""
    first = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Tanh(), nn.Tanh())
    layers = [first, nn.Tanh(), nn.Linear(DIM, DIM)]
    # The first layer's input is the batch, and the last one's is the output of the block before.
    before, tanh, _ = profile(layers, torch.ones(64, DIM), runs=1).blocks
    assert before.weight_grad_bytes == tanh.weight_grad_bytes == 64 * DIM * 4
    assert before.activation_bytes > 2 * before.weight_grad_bytes


# --- no trace ----------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Everything that a run may leave behind: statistics, draws, gradients, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(DIM)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.norm(x)) * random.random()


def test_the_model_is_left_unchanged() -> None:
    torch.manual_seed(0)
    model = Noisy()
    seen: list[Tensor] = []
    weight = model.layers[0].linear.weight
    weight.register_post_accumulate_grad_hook(seen.append)
    weight.register_hook(seen.append)
    weight.grad = torch.full_like(weight, 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, numbers = torch.get_rng_state(), random.getstate()
    params = dict(model.named_parameters())

    profile(model, torch.randn(4, DIM, generator=torch.Generator().manual_seed(1)), runs=1)

    assert not seen
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert all(param is params[name] for name, param in model.named_parameters())
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))
    assert all(p.grad is None for p in model.parameters() if p is not weight)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert random.getstate() == numbers
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.training


@pytest.mark.parametrize("reentrant", [True, False])
def test_modules_recomputed_in_the_backward_are_left_unchanged(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return found

    model = nn.Sequential(nn.Linear(DIM, DIM), Checkpointed())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile(model, torch.ones(4, DIM), runs=1)
    assert all(param.grad is None for param in model.parameters())
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_attributes_of_modules_are_restored() -> None:
    """A recurrent layer keeps its weights in a list, too, by which it would run on ours."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(DIM, DIM)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            found: Tensor = self.gru(x)[0]
            return found

    model = nn.Sequential(nn.Linear(DIM, DIM), Recurrent())
    profile(model, torch.ones(4, DIM), runs=1)
    assert model[1].calls == 0
    weights = model[1].gru._flat_weights
    assert all(one is other for one, other in zip(weights, model[1].gru.parameters(), strict=True))


def test_a_failing_model_is_left_unchanged_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    with pytest.raises(RuntimeError, match="shapes"):
        profile(model, torch.ones(1, 2))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_it_measures_within_no_grad_too() -> None:
    with torch.no_grad():
        measured = profile(Tiny(), tokens(), runs=1)
    assert all(block.input_grad_s > 0 for block in measured.blocks)


# --- progress, files, mistakes -----------------------------------------------------------------


class Aside(nn.Module):
    """Its layers' weights are used, the layers never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer.weight
        return x


class Moody(nn.Module):
    """Leaves a layer out after its first runs."""

    def __init__(self, first: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.first, self.runs = first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        for layer in self.layers[: 2 if self.runs > self.first else 3]:
            x = layer(x)
        return x


class Routed(nn.Module):
    """Runs one expert or two, by what dropout has left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.layers[0](x))
        y = self.layers[1](x)
        return self.layers[2](y) if x.sum() > 0 else y


@pytest.mark.parametrize("seed", range(6))
def test_a_router_that_follows_dropout_takes_one_way_in_all_runs(seed: int) -> None:
    torch.manual_seed(seed)
    costs = profile(Routed(), torch.randn(1, DIM), runs=2)
    assert len(costs.blocks) in (2, 3)  # an expert that does not run joins another's block
    assert all(block.forward_s and block.backward_s for block in costs.blocks)


@pytest.mark.parametrize(
    ("model", "example", "told"),
    [
        (nn.Linear(2, 2), torch.ones(1, 2), "no modules to cut between"),
        (Aside(), torch.ones(1, DIM), r"calls none of layers\.0, layers\.1"),
        *(
            (Moody(first), torch.ones(1, DIM), "runs 2 blocks where it ran 3")
            for first in (2, 6, 33)
        ),
        (Tiny().requires_grad_(False), tokens(), "takes no gradient"),
        (Tiny().to("meta"), tokens(), "meta device"),
        ([], tokens(), "takes no gradient"),
        ([nn.ReLU(), torch.relu], tokens(), "builtin_function"),
    ],
)
def test_models_that_cannot_be_measured(model: Any, example: Any, told: str) -> None:
    with pytest.raises(PartitionError, match=told):
        profile(model, example)


def test_no_runs() -> None:
    with pytest.raises(PartitionError, match="runs is 0"):
        profile(Tiny(), tokens(), runs=0)


def test_costs_are_numbers() -> None:
    with pytest.raises(PartitionError, match="activation_bytes of a block is -1"):
        BlockCosts(activation_bytes=-1)
    with pytest.raises(PartitionError, match="forward_s of head is inf"):
        BlockCosts(modules=("head",), forward_s=float("inf"))


# --- uneven real models, against every split there is -------------------------------------------


def brute_force(measured: Profile, num_stages: int) -> float:
    """What the slowest stage takes at least, over all splits."""
    sums = [0.0, *accumulate(block.time_s for block in measured.blocks)]
    last = len(measured.blocks)
    return min(
        max(sums[j] - sums[i] for i, j in pairwise((0, *cuts, last)))
        for cuts in combinations(range(1, last), num_stages - 1)
    )


def uneven(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Real models with heads as heavy as several layers, or layers of which none is alike."""
    t: Any = transformers
    ids = torch.randint(1, 8000, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    words = {"vocab_size": 8000, "bos_token_id": 0, "eos_token_id": 0}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    match name:
        case "gpt2":
            return t.GPT2LMHeadModel(t.GPT2Config(n_layer=10, n_embd=64, n_head=4, **words)), batch
        case "llama":
            few = {"num_hidden_layers": 10, "num_key_value_heads": 2}
            return t.LlamaForCausalLM(t.LlamaConfig(**small, **few, vocab_size=8000)), batch
        case "t5":
            sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 5, "num_heads": 4}
            config = t.T5Config(**sizes, vocab_size=8000, decoder_start_token_id=0, pad_token_id=0)
            return t.T5ForConditionalGeneration(config), batch
        case "vit":
            config = t.ViTConfig(**small, num_hidden_layers=10, image_size=64, num_labels=40_000)
            return t.ViTForImageClassification(config), {
                "pixel_values": torch.randn(4, 3, 64, 64),
                "labels": torch.arange(4),
            }
    case = REAL_MODELS[name]
    return case.model(), case.example()


@functools.cache
def measured_costs(name: str) -> tuple[nn.Module, Profile]:
    """An uneven model, and its costs on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = uneven(name)
    return model, profile(model, batch, runs=2)


BLOCKS = {
    **dict.fromkeys(["gpt2", "llama", "vit"], 12),
    "t5": 13,  # the decoder has a copy of the embedding
    "resnet50": 15,  # the first three are too small to be a trunk
    "unet": 9,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_uneven_real_models_come_out_at_the_optimum(name: str) -> None:
    model, measured = measured_costs(name)
    assert len(measured.blocks) == BLOCKS[name]
    times = [block.time_s for block in measured.blocks]
    assert max(times) > 1.5 * min(times)  # uneven indeed
    for num_stages in (2, 4, 6):
        found = balance(measured, num_stages)
        best = brute_force(measured, num_stages)
        assert found.bottleneck_s == pytest.approx(best, rel=1e-9)
        measured.plan(found.counts).check(model)


def test_a_layer_used_several_times_keeps_its_parameters() -> None:
    """``functional_call`` would leave another parameter in it: three names for one place."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)
    before = list(map(id, model.parameters()))
    profile(model, torch.ones(2, 4))
    assert list(map(id, model.parameters())) == before
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_the_compiler_sees_nothing_of_the_measuring(way: str) -> None:
    """It would compile what measures, anew in each run, until it gives the layers up."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    layers: list[Any] = [Layer() for _ in range(3)]
    for index, layer in enumerate(layers):
        if way == "in place":
            layer.compile(backend=keep)
        else:
            layers[index] = torch.compile(layer, backend=keep)
    model = nn.Sequential(*layers)
    example = torch.ones(2, DIM)
    model(example).sum().backward()
    compiled = len(graphs)
    assert compiled
    with warnings.catch_warnings(), torch.compiler.set_stance("fail_on_recompile"):
        warnings.simplefilter("error")
        measured = profile(model, example, runs=2)
        model(example).sum().backward()
    assert len(graphs) == compiled
    assert all(block.input_grad_s > block.weight_grad_s for block in measured.blocks)
