"""The training of ``examples/cluster``, by the launchers that this machine has."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock
from tests.processes import run_ranks

from .conftest import EXAMPLES, RunExample

CLUSTER = EXAMPLES / "cluster"
LOSSES = "loss 7.8283 to 6.9968 in 6 steps"


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.parametrize("num_processes", [None, 2], ids=["alone", "processes"])
def test_one_node(num_processes: int | None, run_example: RunExample) -> None:
    assert LOSSES in run_example("cluster/train.py", num_processes, STEPS="6")


def has_namespaces() -> bool:
    name = f"penstock-probe-{os.getpid()}"  # workers of the tests ask at the same time
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    except OSError:
        return False
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return made.returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="network namespaces are not allowed here")
def test_two_agents_in_networks_of_their_own() -> None:
    done = subprocess.run(
        [CLUSTER / "two_nodes.sh"],
        env={**os.environ, "PYTHON": sys.executable, "STEPS": "6"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert LOSSES in done.stdout


FAILING = """
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
import penstock

class Breaks(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            raise ArithmeticError("a sum above zero")
        return super().forward(x)

@record
def main():
    layers = [nn.Linear(4, 4), Breaks(4, 4)]
    with torch.no_grad():
        layers[0].bias.fill_(100.0)
    pipe = penstock.Pipeline(
        nn.Sequential(*layers), loss_fn=nn.functional.mse_loss, n_microbatches=2, split=[1, 1]
    )
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))

main()
"""


def test_error_files_of_all_ranks_name_the_first_cause(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"),
            *("2", "--log-dir", str(tmp_path / "logs"), str(script)),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    found = {}
    for path in (tmp_path / "logs").rglob("error.json"):
        found[path.parent.name] = json.loads(path.read_text())["message"]["message"]
    assert "a sum above zero" in found["1"]
    # Torchrun may end the other rank before it has written its file.
    assert all("rank 1" in text and "a sum above zero" in text for text in found.values())
    assert "a sum above zero" in done.stderr


def step_in_a_thread(rank: int, num_ranks: int) -> float:
    """As an actor's method runs: in a thread, over a group that the framework has made."""
    losses: list[float] = []

    def work() -> None:
        torch.manual_seed(0)
        pipe = penstock.Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)),
            loss_fn=nn.functional.mse_loss,
            n_microbatches=2,
        )
        loss = pipe.step(torch.ones(4, 4), target=torch.ones(4, 1))
        assert loss is not None
        losses.append(loss.item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return losses[0]


def test_a_step_runs_in_any_thread_over_a_group_made_by_others() -> None:
    first, second = (outcome.result() for outcome in run_ranks(step_in_a_thread, 2))
    assert first == second


def test_ray_train(run_example: RunExample) -> None:
    pytest.importorskip("ray.train", reason="ray is no dependency of the tests")
    assert re.search(LOSSES, run_example("cluster/ray_train.py", STEPS="6"))


def test_scripts_of_other_clusters_are_well_formed() -> None:
    subprocess.run(["bash", "-n", CLUSTER / "slurm.sbatch"], check=True)
    text = (CLUSTER / "trainjob.yaml").read_text()
    assert "kind: TrainJob" in text and "\t" not in text
