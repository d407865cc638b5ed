"""Run a function on several ranks: real processes, joined by gloo.

    def work(rank: int, num_ranks: int) -> float:
        ...                                   # torch.distributed is initialised here
        return 1.0

    outcomes = run_ranks(work, 2)
    assert [o.result() for o in outcomes] == [1.0, 1.0]

Each process has one thread. A process that neither returns nor raises in time is ended, and its
outcome says so: a test of hangs can't hang.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock._torch_compat import COMPILER

__all__ = ["Outcome", "run_ranks"]

Work = Callable[..., Any]

# DistributedDataParallel and torch.export import torch's compiler, which takes seconds.
_IMPORTED = (
    "penstock.assembly",
    "penstock.partition.export.capture",
    "penstock.pipeline",
    "penstock.schedule.families.table",
    "penstock.training.checkpoint",
    COMPILER,
    "torch.distributed.fsdp",
    "torch.export",
)
# A file of this name signals that all ranks have finished.
OVER = "over"
MAX_STAY_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a rank.

    Args:
        value: what the function returned: tensors, plain values, and containers of them.
        error_type: class name of the exception that it raised, if it did.
        message: the exception's message and traceback.
        elapsed_s: how long the function took.
        exit_code: the process's exit code; None where it had to be ended.
    """

    value: Any
    error_type: str | None
    message: str
    elapsed_s: float
    exit_code: int | None

    def result(self) -> Any:
        """The value.

        Raises:
            AssertionError: the function raised, or the process died or hung.
        """
        assert self.error_type is None, f"{self.error_type}: {self.message}"
        assert self.exit_code == 0, f"the process ended with exit code {self.exit_code}"
        return self.value


def run_ranks(work: Work, num_ranks: int, *args: Any, timeout_s: float = 60) -> list[Outcome]:
    """Call ``work(rank, num_ranks, *args)`` in ``num_ranks`` processes.

    Args:
        work: a function at the top level of an importable module.
        num_ranks: how many processes.
        args: what else it is called with; picklable.
        timeout_s: after how many seconds processes that still run are ended.

    Returns:
        The outcomes, by rank.
    """
    # A server that has imported once what is slow to import, and runs no thread: each rank is a
    # cheap fork of it.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    port = _free_port()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(work, rank, num_ranks, port, folder, args))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        _await(processes, Path(folder), time.monotonic() + timeout_s)
        outcomes = []
        for rank, process in enumerate(processes):
            hung = process.is_alive()
            if hung:
                process.kill()
                process.join()
            outcomes.append(_read(Path(folder), rank, None if hung else process.exitcode))
    return outcomes


def _await(processes: list[Any], folder: Path, deadline: float) -> None:
    """Wait until all processes have ended, and signal to them when all ranks have finished."""
    while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
        ended = [(folder / f"{r}.pt").exists() for r in range(len(processes))]
        if all(e or not p.is_alive() for e, p in zip(ended, processes, strict=True)):
            (folder / OVER).touch()
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _read(folder: Path, rank: int, exit_code: int | None) -> Outcome:
    path = folder / f"{rank}.pt"
    if exit_code is None or not path.exists():
        message = "still running at the deadline" if exit_code is None else "died"
        return Outcome(
            value=None, error_type="Died", message=message, elapsed_s=0.0, exit_code=exit_code
        )
    # weights_only: only tensors and plain values are unpickled.
    return Outcome(**torch.load(path, weights_only=True), exit_code=exit_code)


def _main(
    work: Work, rank: int, num_ranks: int, port: int, folder: str, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    value, error_type, message = None, None, ""
    start = time.monotonic()
    try:
        value = work(rank, num_ranks, *args)
    except Exception as error:
        error_type, message = type(error).__name__, f"{error}\n{traceback.format_exc()}"
    outcome = {"value": value, "error_type": error_type, "message": message}
    outcome["elapsed_s"] = time.monotonic() - start
    path = Path(folder) / f"{rank}.pt"
    torch.save(outcome, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    # Rank 0 hosts the store, so it stays alive until the other ranks have read their values.
    waited = time.monotonic()
    while not (Path(folder) / OVER).exists() and time.monotonic() - waited < MAX_STAY_S:
        time.sleep(0.01)
    if error_type is None:
        dist.destroy_process_group()
