"""The smaller examples, run as their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_sharded_pipeline_loses_what_the_plain_loop_loses() -> None:
    script = str(EXAMPLES / "pipeline_and_fsdp.py")
    out = run([*TORCHRUN, "--nproc-per-node", "4", script], STEPS="3", SCHEDULE="zbv")
    assert "zbv: 2 ranks x 2 replicas, 3 steps" in out
    first, last = re.findall(r"step +([\d.]+) +plain loop ([\d.]+)", out)
    for ours, plain in (first, last):
        # Four decimals are shown; replicas sum their gradients in another order.
        assert float(ours) == pytest.approx(float(plain), abs=2e-4)
    assert float(last[0]) < float(first[0])


@pytest.mark.parametrize(
    "launcher", [[sys.executable], [*TORCHRUN, "--nproc-per-node", "2"]], ids=["python", "torchrun"]
)
def test_hugging_face(launcher: list[str], tmp_path: Path) -> None:
    out = run([*launcher, str(EXAMPLES / "huggingface.py")], STEPS="6", OUT=str(tmp_path))
    losses = [float(found) for found in re.findall(r"step +\d+ +loss ([\d.]+)", out)]
    assert losses == sorted(losses, reverse=True)
    (after,) = re.findall(r"the plain model .* loss ([\d.]+)", out)
    assert float(after) == pytest.approx(losses[-1], abs=0.4)
    assert (tmp_path / ".metadata").exists()
