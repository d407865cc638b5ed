"""The demo, run as a user runs it, for a few steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_by_name

from .conftest import EXAMPLES, RunExample


def row(output: str, name: str) -> list[str]:
    """The cells of a row of the table that the demo ends with."""
    (line,) = (line for line in output.splitlines() if line.startswith(f"│ {name}"))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def expect_agreement(output: str) -> None:
    ours, theirs = row(output, "loss, last step")
    assert theirs.endswith(" plain loop")
    # Six digits are shown; what is beyond them is rounding.
    assert float(ours) == pytest.approx(float(theirs.split()[0]), abs=2e-6)
    first, _ = row(output, "loss, first step")
    assert float(first) == pytest.approx(5.5, abs=0.3), "as good as chance before training"
    assert float(ours) < float(first)


@pytest.mark.usefixtures("run_example")
def test_the_model_is_plain_and_causal() -> None:
    import gpt

    torch.manual_seed(0)
    model = gpt.gpt(gpt.Config(num_blocks=4, dim=16))
    assert gpt.Config().num_blocks >= 4
    text = gpt.load_bytes()
    assert len(text) >= 200_000
    before, changed = text[None, :10], text[None, :10].clone()
    changed[0, 6] ^= 1
    scores, others = model(before), model(changed)
    assert scores.shape == (1, 10, 256)
    assert torch.equal(scores[:, :6], others[:, :6])
    assert (scores[:, 6:] != others[:, 6:]).any(-1).all()
    assert "penstock" not in (EXAMPLES / "gpt.py").read_text()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_all_ranks_in_one_process(tmp_path: Path, run_example: RunExample) -> None:
    output = run_example(
        "train_gpt.py", STEPS="3", OUT=str(tmp_path), SCHEDULE="zbv", MICROBATCHES="4"
    )
    expect_agreement(output)
    assert "zbv: 2 ranks, 4 microbatches" in output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [e["name"] for e in events if e["ph"] == "X" and re.search(r"[FBIW]\d+$", e["name"])]
    assert shown.count("0F3") == 1
    assert len([name for name in shown if re.fullmatch(r"\dF\d", name)]) == 4 * 4
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [("seq1f1b", "splits sequences, for which layers take state"), ("forward-only", "no backward")],
)
@pytest.mark.parametrize("arguments", [[], ["--check"]])
def test_a_schedule_that_can_not_train_it_is_refused_in_one_line(
    schedule: str, reason: str, arguments: list[str], run_example: RunExample
) -> None:
    with pytest.raises(SystemExit, match=reason) as ended:
        run_example("train_gpt.py", arguments=arguments, SCHEDULE=schedule)
    assert isinstance(ended.value.code, str) and "\n" not in ended.value.code


def test_the_demo_checks_first_what_it_can_train(run_example: RunExample) -> None:
    assert run_example("train_gpt.py", arguments=["--check"], SCHEDULE="zbv") == ""
    demo = (EXAMPLES.parent / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert demo.index("train_gpt.py --check") < demo.index("torchrun")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_process_per_rank(tmp_path: Path, run_example: RunExample) -> None:
    output = run_example("train_gpt.py", 2, torchrun=True, STEPS="3", OUT=str(tmp_path))
    expect_agreement(output)
    assert "1f1b: 2 ranks, 8 microbatches" in output
    for rank in range(2):
        (peak, _) = row(output, f"peak memory, rank {rank}")
        assert float(peak.removesuffix(" MB").replace(",", "")) > 50
    measured, simulated = row(output, "bubble")
    assert 0 < float(measured.removesuffix("%")) < 100
    assert 0 < float(simulated.removesuffix("% simulated")) < 100
    # The checkpoint of two ranks goes into the plain model.
    import gpt

    model = gpt.gpt(gpt.Config(num_blocks=8, dim=96, max_length=64))
    for param in model.parameters():
        torch.nn.init.constant_(param, float("nan"))
    load_by_name({"model": model.state_dict()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert all(param.isfinite().all() for param in model.parameters())
