"""Forecasts of a step's time and memory, beside what steps then take, on gloo processes.

    predict   10 steps   predict   10 steps   ...   predict

Each round makes a new pipeline, which measures the model and predicts, and then trains ten steps
with AdamW. The median of the ten counts, beside the mean of the predictions before and after, since
a machine's speed drifts; and over rounds the median of the errors. Memory is that of tensors, as
torch's profiler sees it allocated and freed in one more step, beside the parameters and the state
of AdamW: peak resident memory would also show what measuring left to the C library.
"""

from __future__ import annotations

import json
import time
import warnings
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.figures import Figure
from penstock import Pipeline
from tests.processes import run_ranks

__all__ = ["CASES", "measure_forecasts", "predict_and_train"]

RANKS, MICROBATCHES, ROWS, LENGTH, VOCABULARY = 2, 8, 4, 128, 4096
STEPS = 10
# Model and schedule; "auto" also chooses the schedule.
CASES = (
    ("gpt2", "1f1b"),
    ("gpt2", "zbv"),
    ("gpt2", "auto"),
    ("llama", "interleaved-1f1b"),
    ("llama", "zb-h1"),
    ("llama", "auto"),
)


def measure_forecasts(rounds: int, steps: int = STEPS) -> list[Figure]:
    """Predicted and measured times, and the errors of time and memory."""
    figures = []
    for model, schedule in CASES:
        outcomes = run_ranks(
            predict_and_train, RANKS, model, schedule, rounds, steps, timeout_s=1800
        )
        by_rank = [outcome.result() for outcome in outcomes]
        times, group, name = by_rank[0]["times"], "forecast", f"{model}, {schedule}"
        errors = sorted(predicted / measured - 1 for predicted, measured in times)
        low, error, high = quantiles(errors, n=4) if rounds > 1 else errors * 3
        for what, number in (("predicted", 0), ("measured", 1)):
            seconds = median(each[number] for each in times)
            figures.append(
                Figure(group=group, name=f"{name}: {what}", over="", value=seconds, unit="s")
            )
        figures.append(
            Figure(
                group=group,
                name=f"{name}: error",
                over="measured",
                value=abs(error),
                bound=0.05,
                spread=(high - low) / 2,
            )
        )
        figures += [
            Figure(
                group=group,
                name=f"{name}: peak memory of rank {rank}, error",
                over="measured",
                value=abs(result["bytes"][0] / result["bytes"][1] - 1),
                bound=0.10,
            )
            for rank, result in enumerate(by_rank)
        ]
    return figures


# --- in each process -----------------------------------------------------------------------------


def make_model(name: str) -> nn.Module:
    """A causal model of transformers; its dropout is on, if it has any."""
    transformers = import_module("transformers")
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=8, n_embd=256, n_head=8, n_positions=LENGTH, vocab_size=VOCABULARY,
            use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]
    config = transformers.LlamaConfig(
        num_hidden_layers=10, hidden_size=192, intermediate_size=512, num_attention_heads=6,
        max_position_embeddings=LENGTH, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def predict_and_train(
    rank: int, num_ranks: int, name: str, schedule: str, rounds: int, steps: int
) -> dict[str, Any]:
    """One rank: by round the predicted and the median measured seconds of a step, and the predicted
    and measured bytes of the first round."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = make_model(name)
    tokens = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    example = {key: value[:ROWS] for key, value in batch.items()}
    predicted, measured, sizes = [], [], (0.0, 0.0)
    for number in range(rounds + 1):
        pipe = Pipeline(
            model, example=example, schedule=schedule, split="auto", n_microbatches=MICROBATCHES
        )
        forecast = pipe.forecast
        assert forecast is not None
        predicted.append(forecast.step_s + forecast.optimizer_s)
        if number == rounds:
            break
        optimizer = torch.optim.AdamW([{"params": list(pipe.parameters())}])
        taken = []
        for _ in range(1 + steps):  # the first warms up
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            pipe.step(**batch)
            optimizer.step()
            dist.barrier()
            taken.append(time.perf_counter() - start)
        measured.append(median(taken[1:]))
        pipe.zero_grad()
        if number == 0:
            held = 3 * sum(param.nbytes for param in pipe.parameters())
            sizes = (forecast.peak_bytes[rank], held + _allocated_bytes(pipe, batch))
            pipe.zero_grad()
    times = [
        (sum(pair) / 2, taken_s)
        for pair, taken_s in zip(pairwise(predicted), measured, strict=True)
    ]
    return {"times": times, "bytes": sizes}


def _allocated_bytes(pipe: Pipeline, batch: dict[str, Any]) -> int:
    """The peak of the memory that a step allocates."""
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        pipe.step(**batch)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: float(event["ts"]))
    return int(max(accumulate(event["args"]["Bytes"] for event in changes)))
