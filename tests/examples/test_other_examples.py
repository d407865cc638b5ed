"""The smaller examples, run as their users run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import RunExample


def test_a_sharded_pipeline_has_the_losses_of_the_plain_loop(run_example: RunExample) -> None:
    out = run_example("pipeline_and_fsdp.py", 4, STEPS="3", SCHEDULE="zbv")
    assert "zbv: 2 ranks x 2 replicas, 3 steps" in out
    first, last = re.findall(r"step +([\d.]+) +plain loop ([\d.]+)", out)
    for ours, plain in (first, last):
        # Four decimals are shown; replicas sum their gradients in another order.
        assert float(ours) == pytest.approx(float(plain), abs=2e-4)
    assert float(last[0]) < float(first[0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("num_processes", [None, 2], ids=["alone", "processes"])
def test_hugging_face(num_processes: int | None, tmp_path: Path, run_example: RunExample) -> None:
    out = run_example("huggingface.py", num_processes, STEPS="6", OUT=str(tmp_path))
    losses = [float(found) for found in re.findall(r"step +\d+ +loss ([\d.]+)", out)]
    assert losses == sorted(losses, reverse=True)
    (after,) = re.findall(r"the plain model .* loss ([\d.]+)", out)
    assert float(after) == pytest.approx(losses[-1], abs=0.4)
    assert (tmp_path / ".metadata").exists()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
@pytest.mark.parametrize("num_processes", [None, 2], ids=["alone", "processes"])
def test_hugging_faces_trainer(
    num_processes: int | None, tmp_path: Path, run_example: RunExample
) -> None:
    out = run_example("hf_trainer.py", num_processes, STEPS="8", OUT=str(tmp_path))
    losses = [float(found) for found in re.findall(r"^loss ([\d.]+)", out, re.M)]
    assert losses == sorted(losses, reverse=True) and len(losses) == 4
    (held_out,) = re.findall(r"eval_loss ([\d.]+)", out)
    (after,) = re.findall(r"the saved model: loss ([\d.]+)", out)
    assert float(after) == pytest.approx(float(held_out), abs=0.4)
