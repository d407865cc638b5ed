"""Runs an example as its users do: with torchrun, or alone, which is done in this process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

RunExample = Callable[..., str]


@pytest.fixture
def run_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunExample:
    """``run_example("gpt.py", num_processes=2, STEPS="3")`` returns what the script prints."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(
        script: str,
        num_processes: int | None = None,
        arguments: Sequence[str] = (),
        **environment: str,
    ) -> str:
        path = str(EXAMPLES / script)
        if num_processes is None:
            with monkeypatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                patch.setattr(sys, "argv", [path, *arguments])
                runpy.run_path(path, run_name="__main__")
            return capsys.readouterr().out
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(num_processes), path, *arguments),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
