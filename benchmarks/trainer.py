"""PipelineTrainer over the plain Trainer, at the same work per core.

    plain       core 0   M batches of the whole model         core 1   the same, by itself
    pipeline    core 0   2M microbatches of half of it   ──►  core 1   2M of the other half

Without any cost of its own a pipeline's step takes the plain one's time, and the bubble. Both train
side by side on all cores, so that these share the memory alike; runs of the two take turns.
"""

from __future__ import annotations

import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.figures import Figure
from tests.processes import run_ranks

__all__ = ["measure_trainer", "train"]

RANKS, BATCHES, ROWS, LENGTH, VOCABULARY = 2, 8, 4, 128, 512


def measure_trainer(rounds: int, steps: int = 8) -> list[Figure]:
    """A step's time over that of the plain Trainer with the bubble of 1F1B."""
    ratios = []
    for _ in range(rounds):
        with ThreadPoolExecutor(RANKS) as pool:
            runs = [pool.submit(run_ranks, train, 1, steps, timeout_s=600) for _ in range(RANKS)]
            plain = median(run.result()[0].result() for run in runs)
        piped = run_ranks(train, RANKS, steps, timeout_s=600)[0].result()
        microbatches = RANKS * BATCHES
        ratios.append(piped / plain / (1 + (RANKS - 1) / microbatches))
    return [
        Figure.median_of(
            ratios,
            group="Trainer",
            name="PipelineTrainer, Llama of 8 layers of 256, 1F1B",
            over="Trainer and bubble",
            bound=1.10,
        )
    ]


def train(rank: int, num_ranks: int, steps: int) -> float:
    """The median time of a step: of the plain Trainer on one rank, of a pipeline on several."""
    warnings.simplefilter("ignore")
    if num_ranks > 1:  # else Trainer would wrap the model for replicas
        os.environ["LOCAL_RANK"] = str(rank)
    import transformers

    from penstock.integrations.transformers import PipelineTrainer

    transformers.utils.logging.set_verbosity_error()
    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
    )
    texts = torch.randint(VOCABULARY, (256, LENGTH))
    with TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=num_ranks * BATCHES,
            max_steps=steps,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
            use_cpu=True,
        )
        kind = transformers.Trainer if num_ranks == 1 else PipelineTrainer
        data: Any = [{"input_ids": text, "labels": text} for text in texts]
        kind(
            transformers.LlamaForCausalLM(config), args, train_dataset=data, callbacks=[Clock()]
        ).train()
    return median(end - start for start, end in pairwise(ends[1:]))
