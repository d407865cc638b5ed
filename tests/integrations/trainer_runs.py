"""Runs of ``PipelineTrainer`` in each rank's process, and of the plain Trainer in one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from penstock.errors import PenstockError
from penstock.integrations.transformers import PipelineTrainer

__all__ = ["CASES", "EXACT", "REPLICA_CASES", "llama", "lora", "piped", "run"]

VOCABULARY, PAD = 64, 0
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": PAD,
}


def llama(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": layers}))


def gpt2(dropout: float = 0.0) -> nn.Module:
    """Its head is its embedding."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **tokens, **dropouts))


def lora() -> nn.Module:
    base: Any = llama()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, config)


def texts(start: int, num: int) -> list[list[int]]:
    """Token numbers of rising sequences, of various lengths."""
    found = []
    for seed in range(start, start + num):
        generator = torch.Generator().manual_seed(seed)
        length, first = torch.randint(4, 12, (2,), generator=generator).tolist()
        found.append([3 + (first + i) % (VOCABULARY - 3) for i in range(length)])
    return found


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Texts without a number, each of which every process reads."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(texts(0, 200))


def collate(rows: list[list[int]]) -> dict[str, Tensor]:
    """A batch as long as its longest row; padding is no target."""
    length = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    mask = (ids != PAD).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def collate_by_rank(rows: list[list[int]]) -> dict[str, Tensor]:
    """A collator that draws random numbers, other ones in each process."""
    batch = collate(rows)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    noise = torch.randint(3, VOCABULARY, batch["input_ids"].shape, generator=generator)
    kept = torch.rand(noise.shape, generator=generator) < 0.5
    batch["input_ids"] = torch.where(kept, batch["input_ids"], noise) * batch["attention_mask"]
    return batch


def accuracy(prediction: Any) -> dict[str, float]:
    scores, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    scores, labels = scores[labels != -100], labels[labels != -100]
    right = scores.argmax(-1) == labels
    return {"accuracy": float(right.mean()), "sum": float(abs(scores).sum())}


def summed_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    scores = outputs.logits[:, :-1].flatten(0, 1).float()
    loss = nn.functional.cross_entropy(scores, labels[:, 1:].flatten(), reduction="sum")
    num: Tensor = num_items_in_batch
    return loss / num


class Freezing(TrainerCallback):
    """Freezes layers of both stages after the step behind the first checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 4:
            for name, param in model.named_parameters():
                param.requires_grad_("layers.0" not in name and "lm_head" not in name)


# By name: the settings, the Trainer's arguments, and the pipeline's.
_EVERY: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
# The first checkpoint lies within the first of two epochs.
_SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2}
# The norm of gradients, of which clipping takes a part, is summed in another order.
_UNCLIPPED = {"max_grad_norm": 1e9}
EXACT = ("bf16", "unclipped", "early stopping")
_BEST: dict[str, Any] = {
    **_EVERY,
    **_UNCLIPPED,
    "save_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "metric_for_best_model": "loss",
    "load_best_model_at_end": True,
    "learning_rate": 0.3,
    "num_train_epochs": 4,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llama": (_SAVES | _EVERY, {}, {}),
    "tied": (_SAVES, {"model": lambda: gpt2()}, {}),
    "zbv": (
        {"lr_scheduler_type": "cosine", "warmup_steps": 2},
        {"model": lambda: llama(4)},
        {"schedule": "zbv"},
    ),
    "bf16": (_UNCLIPPED | _EVERY | {"bf16": True}, {}, {}),
    "lora": (_SAVES | {"learning_rate": 0.05}, {"model": lora}, {}),
    "smoothing": ({"label_smoothing_factor": 0.1} | _EVERY, {}, {}),
    "own loss": ({**_EVERY}, {"compute_loss_func": summed_loss}, {}),
    "metrics": ({**_EVERY}, {"compute_metrics": accuracy}, {}),
    "checkpointing": ({"activation_checkpointing": True}, {}, {}),
    "unclipped": (_UNCLIPPED, {}, {}),
    "no limit": ({"max_grad_norm": 0.0, "optim": "adafactor"}, {}, {}),
    "random batches": ({}, {"data_collator": collate_by_rank}, {}),
    "early stopping": (_BEST, {"callbacks": [EarlyStoppingCallback(1)]}, {}),
    "freezing": (_SAVES | {"max_grad_norm": 0.0}, {"callbacks": [Freezing()]}, {}),
    "no remainder": ({"max_steps": 2, "gradient_accumulation_steps": 1}, {}, {}),
}
# Two replicas do the work of twice as many accumulated batches, in the order of the data.
_IN_ORDER = {"train_sampling_strategy": "sequential", "per_device_eval_batch_size": 2, **_EVERY}
# A pipeline in one process draws the same numbers.
DROPOUT = {"dropout": ({"num_train_epochs": 2}, {"model": lambda: gpt2(0.3)}, {})}
REPLICA_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "replicas": (_IN_ORDER | _SAVES, {}, {}),
    "replicas stream": (_IN_ORDER | {"max_steps": 3}, {"train_dataset": None}, {}),
    "replicas lora": (_IN_ORDER, {"model": lora, "compute_metrics": accuracy}, {}),
}


def settings(folder: str, given: dict[str, Any]) -> TrainingArguments:
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        # Gradients of key biases are rounding errors, which a small epsilon would blow up.
        "adam_epsilon": 1e-3,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**arguments, **given})


def run(kind: type[Trainer], name: str, folder: str, pipeline: Any = None, **more: Any) -> Trainer:
    """Make the trainer of a case."""
    transformers.utils.logging.disable_progress_bar()
    given, arguments, options = (CASES | DROPOUT | REPLICA_CASES)[name]
    args = settings(folder, given | more)
    own: dict[str, Any] = {}
    if issubclass(kind, PipelineTrainer):
        own = {"pipeline": pipeline or options, "replicas": 2 if name in REPLICA_CASES else 1}
    elif name in REPLICA_CASES:
        args.gradient_accumulation_steps *= 2
        args.per_device_eval_batch_size *= 2
    model = arguments.get("model", llama)
    made = {
        "train_dataset": texts(0, 28),
        "eval_dataset": texts(100, 8 if name in REPLICA_CASES else 10),
        "data_collator": collate,
        **arguments,
        "model": model and model(),
    }
    if made["train_dataset"] is None:
        made["train_dataset"] = Stream()
    return kind(args=args, **made, **own)


def results(trainer: Trainer) -> dict[str, Any]:
    """What a run logged, without times, and its model."""
    timed = ("runtime", "per_second", "preparation_time")
    return {
        "logs": [
            {key: value for key, value in entry.items() if not any(t in key for t in timed)}
            for entry in trainer.state.log_history
        ],
        "weights": {name: value.clone() for name, value in trainer.model.state_dict().items()},
        "step": trainer.state.global_step,
        "best": trainer.state.best_metric,
    }


def piped(rank: int, num_ranks: int, folder: str, name: str) -> Any:
    """Train a case by a pipeline."""
    os.environ["LOCAL_RANK"] = str(rank)
    if name in OTHERS:
        return OTHERS[name](rank, folder)
    trainer = run(PipelineTrainer, name, f"{folder}/{name}")
    trainer.train()
    if name in ("llama", "lora"):
        trainer.save_model(f"{folder}/{name} model")
    return results(trainer)


# --- other runs ----------------------------------------------------------------------------------


RESUMED = ("llama", "tied", "lora")


def resume(rank: int, folder: str) -> Any:
    """Go on from checkpoints, the last of which is the plain Trainer's."""
    found = []
    for saved in (*RESUMED, "plain llama"):
        trainer = run(PipelineTrainer, saved.removeprefix("plain "), f"{folder}/resumed {saved}")
        trainer.train(resume_from_checkpoint=f"{folder}/{saved}/checkpoint-3")
        if saved == "tied":  # again, after what a push to the hub does
            trainer.save_model(f"{folder}/hub", _internal_call=True)
            trainer.train(resume_from_checkpoint=f"{folder}/{saved}/checkpoint-3")
        found.append(results(trainer))
    return found


def report(rank: int, folder: str) -> Any:
    """Write a board; only one rank does."""
    place = f"{folder}/board {rank}"
    os.environ["TENSORBOARD_LOGGING_DIR"] = place
    run(PipelineTrainer, "no limit", f"{folder}/board", report_to=["tensorboard"]).train()
    return sorted(path.name for path in Path(place).rglob("events*"))


def predict(rank: int, folder: str) -> Any:
    """Predict with a pipeline that has never trained."""
    trainer = run(PipelineTrainer, "llama", f"{folder}/predict")
    output = trainer.predict(texts(100, 10))  # type: ignore[arg-type]
    return torch.from_numpy(output.predictions), torch.from_numpy(output.label_ids)


def twice(rank: int, folder: str) -> Any:
    """A loss of two calls of the model, which a pipeline can't have."""

    class Doubled(PipelineTrainer):
        def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Any:
            return model(**inputs).loss + model(**inputs).loss

    args = settings(f"{folder}/twice", {})
    trainer = Doubled(llama(), args, collate, texts(0, 28))  # type: ignore[arg-type]
    try:
        trainer.train()
    except PenstockError as error:
        return str(error)
    return "nothing was raised"


def given_optimizer(rank: int, folder: str) -> Any:
    """An optimizer of the whole model, made by the caller."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    args = settings(f"{folder}/given", {"lr_scheduler_type": "constant"})
    trainer = PipelineTrainer(
        model,
        args,
        collate,
        texts(0, 28),
        optimizers=(optimizer, None),  # type: ignore[arg-type]
    )
    trainer.train()
    return results(trainer)


def own_optimizer(rank: int, folder: str) -> Any:
    """An optimizer that a subclass makes; returns of how many parameters its state is saved."""

    class Own(PipelineTrainer):
        def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            return self.optimizer

    run(Own, "llama", f"{folder}/own optimizer").train()
    return len(torch.load(f"{folder}/own optimizer/checkpoint-3/optimizer.pt")["state"])


OTHERS: dict[str, Any] = {
    "resume": resume,
    "report": report,
    "predict": predict,
    "given optimizer": given_optimizer,
    "own optimizer": own_optimizer,
    "twice": twice,  # the last one: a failed step ends what the ranks have in common
}
