"""The runs of a client on one side: python -m clients.side CLIENT FOLDER [WORD ...].

The side is read from the environment, which may say to prepare instead. Each run is made by
processes over gloo, forked from one that has imported the client. Records go into the folder.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from importlib import import_module
from multiprocessing import forkserver
from typing import Any

# Before torch starts: one thread per process.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

from clients import SIDE, Case
from tests.processes import run_ranks

TIMEOUT_S = 400


def run_case(client: Any, case: Case, folder: str) -> dict[str, Any]:
    """The record of all ranks; or the first error."""
    outcomes = run_ranks(client.train, case.num_ranks, case, folder, timeout_s=TIMEOUT_S)
    failed = [outcome for outcome in outcomes if outcome.error_type]
    if failed:
        # A process that waits for one that failed is ended, and has nothing to tell.
        first = min(failed, key=lambda outcome: (outcome.error_type == "Died", outcome.elapsed_s))
        return {"error": f"{first.error_type}: {first.message}"}
    record: dict[str, Any] = {"losses": {}, "gradients": {}}
    for outcome in outcomes:
        for name, values in outcome.result().items():
            record[name].update(values)
    return record


def main() -> None:
    name, folder, *words = sys.argv[1:]
    multiprocessing.set_forkserver_preload([f"clients.{name}"])
    forkserver.ensure_running()
    client = import_module(f"clients.{name}")
    side = os.environ[SIDE]
    if side == "prepare":
        for outcome in run_ranks(client.prepare, 1, folder, timeout_s=TIMEOUT_S):
            outcome.result()
        return
    chosen = [case for case in client.CASES if all(word in str(case) for word in words)]
    compositions = {case.composition for case in chosen}
    for case in client.CASES:
        reference = case.schedule is None and case.composition in compositions
        if case in chosen if case.schedule else reference and side == "torch":
            print(f"{side}: {case}", flush=True)
            torch.save(run_case(client, case, folder), f"{folder}/{side}: {case}.pt")


if __name__ == "__main__":
    main()
