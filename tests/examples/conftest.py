"""Runs an example as its users do: alone, which is done in this process, or a process per rank."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.processes import fork_server, free_port

EXAMPLES = Path(__file__).parents[2] / "examples"

RunExample = Callable[..., str]


@pytest.fixture
def run_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> RunExample:
    """``run_example("gpt.py", num_processes=2, STEPS="3")`` returns what the script prints.

    Processes have the environment that torchrun gives them, and with ``torchrun=True`` are started
    by it, which takes several times as long.
    """
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(
        script: str,
        num_processes: int | None = None,
        arguments: Sequence[str] = (),
        torchrun: bool = False,
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
        if not torchrun:
            return _in_processes(
                [path, *arguments], num_processes, environment, tmp_path / "output"
            )
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


def _in_processes(
    command: list[str], num: int, environment: Mapping[str, str], output: Path
) -> str:
    """What all ranks print, in order of ranks."""
    context = fork_server()
    shared = {
        **environment,
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = []
    for rank in range(num):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(context.Process(target=_as_rank, args=(command, own, f"{output} {rank}")))
        ranks[-1].start()
    deadline = time.monotonic() + 200
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join()
    printed = "".join(Path(f"{output} {rank}").read_text() for rank in range(num))
    assert [process.exitcode for process in ranks] == [0] * num, printed
    return printed


def _as_rank(command: list[str], environment: Mapping[str, str], output: str) -> None:
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(EXAMPLES))
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    runpy.run_path(command[0], run_name="__main__")
