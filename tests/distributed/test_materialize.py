"""Stages of models built on the meta device begin as in one process, and fit in memory."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from penstock import PartitionError, Pipeline, PipelineStage
from penstock.partition.sequential import SequentialStage
from penstock.stage.dtensor import full_tensor, is_dtensor
from tests.compare import plain_step
from tests.distributed.replicas import make_meshes
from tests.processes import run_ranks
from tests.real_models import hugging_face

DIM, VOCABULARY, LAYERS = 8, 12, 8
TIMEOUT_S = 20.0


class Block(nn.Module):
    """Initializes its children a second time, by draws whose number depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)
        self.scale = nn.Parameter(torch.empty(DIM))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.up.weight, std=0.5, a=-0.5, b=0.5)
        nn.init.orthogonal_(self.down.weight)
        self.down.bias.data.normal_(std=0.1)
        nn.init.normal_(self.scale)

    def forward(self, x_BTD: Tensor) -> Tensor:
        normed = self.norm(x_BTD)
        x_BTD = x_BTD + self.attention(normed, normed, normed, need_weights=False)[0]
        return x_BTD + self.scale * self.down(F.silu(self.up(x_BTD)))


class Decoder(nn.Module):
    def __init__(self, num_layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM, padding_idx=0)
        self.layers = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Reinitialized(Decoder):
    """Has tied weights, and a method that initializes all modules after they are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight = self.head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)


def sequence() -> nn.Sequential:
    """Layers in a row, of which the last has the first one's weight."""
    embed, layers = nn.Embedding(VOCABULARY, DIM), [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    head = nn.Linear(DIM, VOCABULARY, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, *layers, head)


def llama(*, tied: bool) -> Callable[[], nn.Module]:
    return hugging_face(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "tied, initialized again": Reinitialized,
    "sequence": sequence,
    "llama": llama(tied=False),
    "tied llama": llama(tied=True),
}


def meta_and_plain(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A model on the meta device, the plain one, and the generator's state after that; the seed is
    set again."""
    with torch.device("meta"):
        model = MODELS[name]()
    torch.manual_seed(3)
    plain = MODELS[name]()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    return model, plain, state


def differing(pipe: Pipeline, plain: nn.Module) -> list[str]:
    named = [*pipe.named_parameters(), *pipe.named_buffers()]
    wanted = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    return [name for name, t in named if not torch.equal(full_tensor(t), wanted[name])]


def initial_values(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """Per model and schedule, the tensors that differ from those of one process."""
    found = {}
    for name in MODELS:
        for schedule in ("1f1b", "zbv"):
            model, plain, state = meta_and_plain(name)
            pipe = Pipeline(model, schedule=schedule, n_microbatches=8, timeout_s=TIMEOUT_S)
            found[f"{name}, {schedule}"] = differing(pipe, plain)
            if not torch.equal(torch.get_rng_state(), state):
                found[f"{name}, {schedule}"].append("the generator's state")
            del pipe
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_initial_values_are_those_of_one_process(num_ranks: int) -> None:
    for outcome in run_ranks(initial_values, num_ranks):
        assert not {case: names for case, names in outcome.result().items() if names}


# --- wrapped before there is memory --------------------------------------------------------------


def token_loss(output: Any, target: Tensor) -> Tensor:
    logits = output if isinstance(output, Tensor) else output["logits"]
    return F.cross_entropy(logits.transpose(1, 2), target)


# Under ZB-V the first and the last stage, which share a weight, are on one rank.
SHARDED = (("decoder", "1f1b"), ("sequence", "1f1b"), ("sequence", "zbv"), ("llama", "1f1b"))


def sharded(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """Two stages, each sharded over two ranks while it is on the meta device, trained one step.

    Returns per model the tensors that differ from those of one process.
    """
    pipeline, replicas = make_meshes()
    found = {}
    wrapped: list[int] = []

    def shard(module: nn.Module, stage_index: int) -> None:
        wrapped.append(stage_index)
        assert all(param.is_meta for param in module.parameters())
        (trunk,) = [m for m in module.modules() if isinstance(m, nn.ModuleList | SequentialStage)]
        for layer in trunk.children():
            fully_shard(layer, mesh=replicas)
        fully_shard(module, mesh=replicas)

    for name, schedule in SHARDED:
        model, plain, _ = meta_and_plain(name)
        pipe = Pipeline(
            model,
            loss_fn=token_loss,
            schedule=schedule,
            n_microbatches=4,
            wrap_fn=shard,
            group=pipeline.get_group(),
            timeout_s=TIMEOUT_S,
        )
        assert all(is_dtensor(param) for param in pipe.parameters())
        assert wrapped == [stage.stage_index for stage in pipe.stages]
        wrapped.clear()
        found[f"{name}, {schedule}"] = differing(pipe, plain)
        tokens = torch.randint(VOCABULARY, (4, 5), generator=torch.Generator().manual_seed(1))
        loss = pipe.step(tokens, target=tokens)
        expected = plain_step(plain, token_loss, tokens, target=tokens, n_microbatches=4)
        torch.testing.assert_close(loss, expected.loss)
        wanted = dict(plain.named_parameters(remove_duplicate=False))
        for param_name, param in pipe.named_parameters():
            torch.testing.assert_close(full_tensor(param.grad), wanted[param_name].grad)
    return found


def test_a_stage_is_sharded_before_it_is_materialized() -> None:
    for outcome in run_ranks(sharded, 4):
        assert not {case: names for case, names in outcome.result().items() if names}


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_stage_may_be_replaced_by_its_wrapper(on_meta: bool) -> None:
    torch.manual_seed(3)
    plain = sequence()
    with torch.device("meta" if on_meta else "cpu"):
        model = sequence()
    torch.manual_seed(3)
    pipe = Pipeline(
        model if on_meta else plain,
        ranks=2,
        n_microbatches=2,
        wrap_fn=lambda module, _: torch.compile(module, backend="eager"),
    )
    assert all("OptimizedModule" in type(stage.submod).__name__ for stage in pipe.stages)
    assert set(pipe.state_dict()) == set(plain.state_dict())
    tokens = torch.arange(8).reshape(2, 4)
    assert torch.equal(pipe.eval(tokens), torch.cat([plain(row[None]) for row in tokens]))


def test_wrap_fn_is_refused_where_it_can_not_help() -> None:
    with pytest.raises(PartitionError, match="wrap_fn returned a int, expected the wrapped module"):
        Pipeline(sequence(), ranks=2, n_microbatches=2, wrap_fn=lambda *_: 1)  # type: ignore
    stages = [PipelineStage(nn.Linear(1, 1), i, 2, torch.device("cpu")) for i in range(2)]
    with pytest.raises(PartitionError, match="before making their PipelineStages"):
        Pipeline(stages, ranks=2, n_microbatches=2, wrap_fn=lambda *_: None)


# --- memory --------------------------------------------------------------------------------------


def kept(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """Per way to cut, the other stages' parameters that live on once this rank's are made."""
    tokens = torch.ones(1, 4, dtype=torch.int64)
    ways: dict[str, dict[str, Any]] = {
        "by module": {},
        "with an example": {"example": (tokens,)},
        "by export": {"method": "export", "example": (tokens,)},
        "a sequence": {},
    }
    found = {}
    for way, options in ways.items():
        model = sequence() if way == "a sequence" else Decoder(num_layers=2)
        pipe = Pipeline(model, n_microbatches=2, **options)
        refs = {name: weakref.ref(param) for name, param in model.named_parameters()}
        own = {name for name, _ in pipe.named_parameters()}
        del model
        gc.collect()
        found[way] = [name for name, ref in refs.items() if ref() is not None and name not in own]
    return found


def test_no_process_keeps_the_whole_model() -> None:
    for outcome in run_ranks(kept, 2):
        assert not {way: names for way, names in outcome.result().items() if names}


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def peak_memory(rank: int, num_ranks: int) -> tuple[int, int]:
    """The bytes of the whole model, and the most that this rank held while it made its shards."""
    pipeline, replicas = make_meshes()

    def shard(module: nn.Module, _: int) -> None:
        for layer in module.children():
            fully_shard(layer, mesh=replicas)

    def make(width: int) -> tuple[Pipeline, int]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(16)))
        size = sum(param.nbytes for param in model.parameters())
        return Pipeline(model, n_microbatches=2, wrap_fn=shard, group=pipeline.get_group()), size

    make(8)  # libraries load, and threads start
    # M_MMAP_THRESHOLD: freed tensors return to the system at once, so that the peak is of living
    # ones. By default glibc keeps freed blocks, to a varying extent.
    assert ctypes.CDLL(None).mallopt(-3, 1 << 16)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    _, size = make(2048)
    return size, resident("VmHWM") - before


def test_peak_memory_is_that_of_the_shards_and_one_module() -> None:
    for outcome in run_ranks(peak_memory, 4):
        size, peak = outcome.result()
        # A quarter is kept. A layer, a sixteenth, is whole while it is drawn, then with its shard.
        assert peak < 0.4 * size
