"""Train in Ray Train's workers, which make the process group themselves.

    pip install "ray[train]"
    python examples/cluster/ray_train.py      two CPU workers in a cluster of this machine

Set WORKERS for another number of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train.torch import TorchTrainer

HERE = str(Path(__file__).parent)


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs."""
    sys.path.insert(0, HERE)
    from train import train

    losses = train(config["steps"])
    if ray.train.get_context().get_world_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps")


def main() -> None:
    workers = int(os.environ.get("WORKERS", "2"))
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"steps": int(os.environ.get("STEPS", "20"))},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=False),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
