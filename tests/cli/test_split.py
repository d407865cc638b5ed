"""``penstock split``: from a model's name to a table and a plan that a Pipeline takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import PartitionError, Plan
from penstock.cli.app import main
from penstock.cli.models import parse_bytes
from penstock.partition import profile as profiling
from penstock.partition.balance.costs import BlockCosts, Profile

FACTORY = """
from dataclasses import dataclass

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tiny():
    return Tiny(), (torch.zeros(2, 5, dtype=torch.int64),)


@dataclass
class Batch:
    x: torch.Tensor


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, batch):
        return self.layers[1](self.layers[0](batch.x))


def of_a_dataclass():
    return Reads(), (Batch(torch.ones(2, 8)),)


def model_alone():
    return Tiny()


number = 3


def bad_weights():
    raise ValueError("no weights")


"""

# Fixed costs, so that what is shown does not depend on the machine.
COSTS = Profile(
    model="Tiny",
    blocks=(
        BlockCosts(
            modules=("embed",),
            forward_s=0.001,
            parameters=128,
            parameter_bytes=512,
            sent_bytes=320,
            sends=("float32[2,5,8]",),
        ),
        *(
            BlockCosts(
                modules=(f"layers.{i}",),
                forward_s=0.001,
                input_grad_s=0.001,
                weight_grad_s=0.001,
                activation_bytes=1000,
                parameters=88,
                parameter_bytes=352,
                sent_bytes=320,
                sends=("float32[2,5,8]",),
            )
            for i in range(6)
        ),
        BlockCosts(
            modules=("head",),
            forward_s=0.006,
            activation_bytes=320,
            parameters=144,
            parameter_bytes=576,
        ),
    ),
)


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of Tiny in place of a measurement."""
    monkeypatch.setattr(profiling, "profile", lambda *_, **options: COSTS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of one's own, with a model in it, and a wide terminal."""
    (tmp_path / "mine.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def run(*arguments: str) -> None:
    """The command, which ends well."""
    with pytest.raises(SystemExit) as ended:
        main(["split", *arguments])
    assert not ended.value.code


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it does not."""
    with pytest.raises(SystemExit) as ended:
        main(["split", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


# --- the table ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("costs")
def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    run("mine:tiny", "--stages", "3")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "Tiny: 8 blocks, 3 stages"
    assert lines[2].split() == (
        ["stage", "modules", "parameters", "time", "share", "activations", "sends", "across"]
    )
    assert [" ".join(line.split()) for line in lines[4:9]] == [
        "0 embed 304 7 ms 28.00% 2.0 kB 320 bytes float32[2,5,8]",
        "layers.0-1",
        "1 layers.2-4 264 9 ms 36.00% 3.0 kB 320 bytes float32[2,5,8]",
        "2 layers.5 232 9 ms 36.00% 1.3 kB",
        "head",
    ]
    assert lines[10:] == [
        "slowest stage 9 ms per microbatch, forward and backward; 8.00% above the mean of all "
        "stages",
        "balanced for the slowest stage",
    ]


@pytest.mark.usefixtures("costs")
def test_memory_is_shown_where_it_is_limited(capsys: pytest.CaptureFixture[str]) -> None:
    run("mine:tiny", "-s", "2", "--memory-limit", "14kB", "--state-factor", "2")
    out = capsys.readouterr().out
    assert "holds" in out
    # Two microbatches in flight: 2 × (512 + 4 × 352) + 2 × 4000.
    assert "11.8 kB" in out
    told = error_of(capsys, "mine:tiny", "-s", "2", "--memory-limit", "5kB")
    assert "the least that works is" in told


# --- models ------------------------------------------------------------------------------------


def test_a_users_model_is_measured_and_trained_by_the_plan(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("mine:tiny", "--stages", "2", "--runs", "1", "-o", "plan.toml")
    assert "wrote plan.toml" in capsys.readouterr().out
    plan = Plan.load(here / "plan.toml")
    assert [name for names in plan.stages for name in names] == [
        name for block in COSTS.blocks for name in block.modules
    ]

    sys.path.insert(0, str(here))
    import mine  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model, (tokens,) = mine.tiny()

    def loss_fn(out: Any, target: Any) -> torch.Tensor:
        return out.square().mean()

    expected = loss_fn(model(tokens), None)
    pipe = penstock.Pipeline(
        model, split="plan.toml", loss_fn=loss_fn, n_microbatches=1, example=(tokens,)
    )
    assert len(pipe.stages) == 2
    torch.testing.assert_close(pipe.step(tokens, target=tokens).detach(), expected.detach())


SMALL = ["--set", "hidden_size=16", "--set", "intermediate_size=16", "--set", "vocab_size=64"]
SMALL += ["--set", "num_attention_heads=2", "--set", "num_key_value_heads=2", "--length", "8"]


def test_an_example_in_a_dataclass_is_converted(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("mine:of_a_dataclass", "-s", "2", "--runs", "1", "--dtype", "float64")
    assert "float64[2,8]" in capsys.readouterr().out


def test_a_model_of_transformers_by_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "num_hidden_layers=2", "--runs", "1", "--json", "--stages", "2"]
    run("llama", *SMALL, *options)
    plan = Plan.from_dict(json.loads(capsys.readouterr().out))
    assert plan.model == "LlamaForCausalLM"
    assert {"model.layers.0", "model.layers.1", "lm_head"} <= {n for s in plan.stages for n in s}


def test_a_large_model_is_not_made_by_surprise(capsys: pytest.CaptureFixture[str]) -> None:
    told = error_of(capsys, "llama", "--stages", "4")
    assert "llama has 6,738,415,616 parameters, 27.0 GB, more than --max-size 4.0 GB" in told
    assert "--set num_hidden_layers=4" in told


# --- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["mine:tiny"], "Missing option '--stages'"),
        (["mine:tiny", "-s", "9"], "8 blocks can't make 9 stages"),
        (["mine:tiny", "-s", "2", "--rule", "uniform"], "No such option: --rule"),
        (["mine:tiny", "-s", "2", "--memory-limit", "much"], "'much' is no number of bytes"),
        (["mine:tiny", "-s", "2", "--objective", "step"], "No such option: --objective"),
        (["mine:tiny", "-s", "2", "-o", "plan.json"], "a plan is a .toml file"),
        (["mine:tiny", "-s", "2", "--dtype", "float"], None),
        (["mine:tiny", "-s", "2", "--dtype", "real"], "no dtype for a model"),
        (["mine:tiny", "-s", "2", "--dtype", "int64"], "no dtype for a model"),
        (["mine:tiny", "-s", "2", "--set", "a=1"], "--set is for configurations"),
        (["mine:none", "-s", "2"], "mine has no function 'none'"),
        (["mine:number", "-s", "2"], "mine has no function 'number'"),
        (["mine:model_alone", "-s", "2"], "expected (model, example)"),
        (["not_there:tiny", "-s", "2"], "No module named 'not_there'"),
        (["mine:tiny", "-s", "2", "--ranks", "2"], "of a --schedule; name one"),
        (
            ["mine:tiny", "-s", "3", "--schedule", "zbv"],
            "3 stages, but zbv on 1 rank with 2 per rank needs 2",
        ),
        (["mine:tiny", "-s", "4", "--schedule", "zbv", "-r", "4"], "zbv"),
        (["mine:tiny", "-s", "2", "--schedule", "zb"], "zb"),
        (["llamma", "-s", "2"], "no causal language model 'llamma'"),
        (["llama", "-s", "2", "--set", "num_layer=2"], "LlamaConfig has no num_layer"),
        (["llama", "-s", "2", "--set", "num_layers"], "expected NAME=VALUE"),
        (["llama", "-s", "2", "--set", "num_attention_heads=3"], "no causal language model"),
        (["t5", "-s", "2"], "name a function that returns (model, example)"),
    ],
)
def test_invalid_input_is_refused_in_one_message(
    arguments: list[str], told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if told is None:
        run(*arguments, "--runs", "1")
        return
    output = error_of(capsys, *arguments, "--runs", "1")
    assert told in output
    assert "Traceback" not in output


def test_an_error_of_the_users_model_has_its_traceback() -> None:
    with pytest.raises(ValueError, match="no weights"):
        main(["split", "mine:bad_weights", "-s", "2"])


# --- for a schedule ------------------------------------------------------------------------------


@pytest.mark.usefixtures("costs")
def test_the_ranks_of_a_schedule_are_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    """1 + 6 × 3 + 6 ms on two ranks: 12 and 13, as near as layers of 3 ms go."""
    run("mine:tiny", "--stages", "4", "--schedule", "zbv")
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[2].startswith("stage rank modules")
    assert [line[:3] for line in lines if line[:1] in "0123" and line] == [
        "0 0",
        "1 1",
        "2 1",
        "3 0",
    ]
    assert "slowest rank 13 ms per microbatch, forward and backward; 4.00% above" in out
    assert "balanced for zbv" in out


@pytest.mark.usefixtures("costs")
def test_memory_is_that_of_the_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """GPipe has all microbatches in flight on both stages."""
    options = ["-s", "2", "--schedule", "gpipe", "--state-factor", "1", "-m", "8"]
    run("mine:tiny", *options, "--memory-limit", "40kB")
    out = capsys.readouterr().out
    assert "33.9 kB" in out  # 512 + 4 × 352 + 8 × 4000
    told = error_of(capsys, "mine:tiny", *options, "--memory-limit", "3kB")
    assert "the least that works is" in told
    told = error_of(capsys, "mine:tiny", "-s", "4", "--schedule", "zbv", "--memory-limit", "1GB")
    assert "--memory-limit is for one stage on each rank, zbv has several" in told


@pytest.mark.parametrize(
    ("text", "number"),
    [("16GB", 16e9), ("1.5 GiB", 1.5 * 2**30), ("300", 300), ("2k", 2000), ("1e3MB", 1e9)],
)
def test_parse_bytes(text: str, number: float) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.2.3GB", "0", "16XB", "1e999GB"])
def test_parse_bytes_refuses_other_texts(text: str) -> None:
    with pytest.raises(PartitionError, match="no number of bytes"):
        parse_bytes(text)


def test_the_command_loads_torch_only_for_a_model() -> None:
    code = (
        "import sys, penstock.cli.app\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("costs")
def test_json_is_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run("mine:tiny", "-s", "2", "--json", "-o", "plan.toml")
    assert Plan.from_dict(json.loads(capsys.readouterr().out)) == Plan.load("plan.toml")


@pytest.mark.usefixtures("costs")
def test_the_folder_of_a_plan_is_made(here: Path) -> None:
    run("mine:tiny", "--stages", "3", "-o", "new/plan.toml")
    assert (here / "new/plan.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--stages", "0"), "--stages"),
        (("--stages", "3", "--batch", "0"), "--batch"),
        (("--stages", "3", "--device", "nowhere"), "--device nowhere: "),
    ],
)
def test_numbers_and_devices_that_are_none(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert said in error_of(capsys, "mine:tiny", *arguments)
