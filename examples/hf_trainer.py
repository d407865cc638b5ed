"""Train a Llama with Hugging Face's Trainer, over pipeline stages.

    torchrun --nproc-per-node 2 examples/hf_trainer.py     a process per rank
    python examples/hf_trainer.py                          all ranks in this process

But for ``PipelineTrainer`` and its last two arguments it is a script of ``transformers.Trainer``.
Set in the environment: SCHEDULE (1f1b), REPLICAS (1), MICROBATCHES (4), STEPS (20), OUT
(runs/trainer). Ends with a folder that ``from_pretrained`` loads.
"""

from __future__ import annotations

import os

import torch
from gpt import load_bytes
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from penstock.integrations.transformers import PipelineTrainer

STEPS = int(os.environ.get("STEPS", "20"))
OUT = os.environ.get("OUT", "runs/trainer")
LENGTH = 64
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def texts() -> list[dict[str, Tensor]]:
    """Pieces of the text, which the model shifts to get its labels."""
    pieces = load_bytes().split(LENGTH)
    return [{"input_ids": piece, "labels": piece} for piece in pieces if len(piece) == LENGTH]


def main() -> None:
    set_seed(0)
    pieces = texts()
    args = TrainingArguments(
        OUT,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=int(os.environ.get("MICROBATCHES", "4")),
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_steps=STEPS,
        logging_steps=max(STEPS // 4, 1),
        eval_strategy="steps",
        eval_steps=STEPS,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    is_launched = "WORLD_SIZE" in os.environ
    trainer = PipelineTrainer(
        LlamaForCausalLM(CONFIG),
        args,
        train_dataset=pieces[:-16],
        eval_dataset=pieces[-16:],
        replicas=int(os.environ.get("REPLICAS", "1")),
        pipeline={
            "schedule": os.environ.get("SCHEDULE", "1f1b"),
            "ranks": None if is_launched else 2,
        },
    )
    trainer.train()
    trainer.save_model()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            print("   ".join(f"{key} {value:.4g}" for key, value in entry.items() if "loss" in key))
        plain = LlamaForCausalLM.from_pretrained(OUT)
        batch = {name: x[None] for name, x in pieces[-1].items()}
        with torch.no_grad():
            print(f"the saved model: loss {plain(**batch).loss.item():.4f} on the last piece")
    trainer.end()


if __name__ == "__main__":
    main()
