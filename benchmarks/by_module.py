"""What a stage cut by module costs the host: a forward of a Llama of tiny layers, over the model's.

Both stages run in this process, so that nothing is sent. A layer of width 16 computes next to
nothing: what is measured is the launch of its operations, and what the stage checks around it.
"""

from __future__ import annotations

import copy
import time
from importlib import import_module

import torch
from torch import nn

from benchmarks.figures import Figure
from penstock import Pipeline
from penstock.schedule.action import Op

__all__ = ["measure_by_module"]

LAYERS, MICROBATCHES, LENGTH, VOCABULARY = 20, 8, 8, 64


def measure_by_module(rounds: int) -> list[Figure]:
    """Forwards of two stages over those of the whole model; ratios within a round."""
    model = _model()
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    example = {name: rows[:1] for name, rows in batch.items()}
    pipe = Pipeline(
        copy.deepcopy(model), example=example, schedule="1f1b", ranks=2,
        n_microbatches=MICROBATCHES, method="module",
    )  # fmt: skip
    ratios = []
    for _ in range(rounds + 1):
        pipe.step(**batch)
        pipe.zero_grad()
        spans = [s for s in pipe.trace().spans if s.action.op is Op.FORWARD]
        plain_s = sum(_forward_s(model, example) for _ in range(MICROBATCHES))
        ratios.append(sum(span.end - span.start for span in spans) / plain_s)
    return [
        Figure.median_of(
            ratios[1:],  # the first round warms up
            group="cut by module",
            name=f"forward of a Llama of {LAYERS} layers of width 16",
            over="bare",
        )
    ]


def _model() -> nn.Module:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=16, intermediate_size=32, num_attention_heads=2,
        max_position_embeddings=LENGTH, vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _forward_s(model: nn.Module, example: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    loss = model(**example).loss
    taken = time.perf_counter() - start
    loss.backward()
    return taken
