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

import io
import multiprocessing
import os
import random
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Outcome", "fork_server", "free_port", "run_ranks"]

Work = Callable[..., Any]

# DistributedDataParallel and torch.export import torch's compiler, which takes seconds, and models
# of transformers take as long. What is not installed is left out.
_IMPORTED = (
    "penstock.assembly",
    "penstock.partition.export.capture",
    "penstock.pipeline",
    "penstock.schedule.families.table",
    "penstock.stage.weight_grad",
    "penstock.training.checkpoint",
    "pytest",  # by the modules of tests
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",  # beside which some ranks compare
    "torch.distributed.tensor.debug",
    "torch.export._trace",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "tests.frozen",  # last
)
_ENDING_S = 20.0  # the time that a process which has reported waits for the others, and to end
# To start a process is to look at all that have ended, and an exit code can be read only once: a
# thread that starts one and a thread that ends one would both read it.
_READS_EXIT_CODES = threading.Lock()


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

    value: Any = None
    error_type: str | None = None
    message: str = ""
    elapsed_s: float = 0.0
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
    context = fork_server()
    port = free_port()
    processes, connections = [], []
    for rank in range(num_ranks):
        here, there = context.Pipe()
        own = (there, work, rank, num_ranks, port, args)
        processes.append(context.Process(target=_main, args=own))
        connections.append(here)
        with _READS_EXIT_CODES:
            processes[-1].start()
        there.close()
    deadline = time.monotonic() + timeout_s
    reports = [_report(connection, deadline) for connection in connections]
    for connection in connections:
        connection.close()  # by which a rank knows that all have ended
    return [_outcome(*each) for each in zip(processes, reports, strict=True)]


def fork_server() -> Any:
    """The context of processes that are cheap to start.

    They are forks of a server that has imported once what is slow to import, and runs no thread.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_IMPORTED))
    return context


def free_port() -> int:
    """A port of this machine for a store, below those that the system gives to connections: one of
    these could be taken before the store listens."""
    while True:
        port = random.SystemRandom().randrange(16_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


def _report(connection: Any, deadline: float) -> bytes | None:
    """A process's report; empty if it died, None if it is still running at the deadline."""
    try:
        if not connection.poll(max(0.0, deadline - time.monotonic())):
            return None
        return bytes(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return b""


def _outcome(process: Any, report: bytes | None) -> Outcome:
    wait([process.sentinel], 0 if report is None else _ENDING_S)
    with _READS_EXIT_CODES:
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        exit_code = None if hung else process.exitcode
    if hung or not report:
        message = "still running at the deadline" if hung else "died"
        return Outcome(error_type="Died", message=message, exit_code=exit_code)
    # weights_only: only tensors and plain values are unpickled.
    return Outcome(**torch.load(io.BytesIO(report), weights_only=True), exit_code=exit_code)


def _main(
    connection: Any, work: Work, rank: int, num_ranks: int, port: int, args: tuple[Any, ...]
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
    report = io.BytesIO()
    torch.save(outcome, report)
    connection.send_bytes(report.getvalue())
    connection.poll(_ENDING_S)  # rank 0 hosts the store, and stays until the others are done
    if error_type is None:
        dist.destroy_process_group()
