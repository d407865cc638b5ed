"""Train a Llama of Hugging Face's transformers over pipeline stages: the model as it is.

    torchrun --nproc-per-node 2 examples/huggingface.py    a process per rank
    python examples/huggingface.py                         all ranks in this process

The weights are random and small; ``from_pretrained`` in the place of the config trains a real one.
Set in the environment: SCHEDULE (1f1b), MICROBATCHES (4), STEPS (20), OUT (runs/llama). Ends with
a checkpoint that the plain model loads.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import load_bytes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.training.checkpoint import load, save

SCHEDULE = os.environ.get("SCHEDULE", "1f1b")
MICROBATCHES = int(os.environ.get("MICROBATCHES", "4"))
STEPS = int(os.environ.get("STEPS", "20"))
OUT = Path(os.environ.get("OUT", "runs/llama"))
BATCH, LENGTH = 8, 64
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    use_cache=False,
)


def batch(step: int) -> dict[str, Tensor]:
    """What the model is called with; it shifts the labels and computes its loss itself."""
    text = load_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    ids = text[starts + torch.arange(LENGTH)]
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    example = {name: x[: BATCH // MICROBATCHES] for name, x in batch(0).items()}
    pipe = penstock.Pipeline(
        LlamaForCausalLM(CONFIG),
        example=example,
        schedule=SCHEDULE,
        n_microbatches=MICROBATCHES,
        ranks=2,
    )
    first = not dist.is_initialized() or dist.get_rank() == 0
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = pipe.step(**batch(step))
        optimizer.step()
        assert loss is not None, "the model computes its loss"
        if first and (step % 5 == 0 or step == STEPS - 1):
            print(f"step {step:3}   loss {loss.item():.4f}")
    save(OUT, pipe, optimizer)
    plain = LlamaForCausalLM(CONFIG)
    load(OUT, plain)
    if first:
        with torch.no_grad():
            after = plain(**batch(STEPS)).loss
        print(f"the plain model with this checkpoint, on the next batch: loss {after.item():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
