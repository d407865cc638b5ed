"""NeMo Automodel: its AutoPipeline over a Llama of transformers and over its own, with its loss.

Its recipes need accelerators, tokenizers and data sets. Here stands what their step does:
``schedule.step`` by rank, gradients scaled and clipped by its own function, an optimizer's step.
Batches are random tokens, some labels masked.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from nemo_automodel.components.distributed.pipelining import AutoPipeline
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.llama.model import LlamaForCausalLM as OwnLlama
from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from clients import Case

TITLE = f"NeMo Automodel {version('nemo-automodel')}"

LENGTH, MICROBATCHES, STEPS, VOCABULARY = 16, 8, 3, 96


def make_model(settings: dict[str, Any]) -> Any:
    """The model, with the weights that all runs begin with."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="sdpa",
        torch_dtype=torch.float32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    if settings["model"] == "transformers":
        return LlamaForCausalLM(config)
    # By default its norms are compiled.
    return OwnLlama(config, BackendConfig(attn="sdpa", linear="torch", rms_norm="torch"))


def batch(step: int, replica: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens, and the next ones as labels, of which some are masked."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    tokens = torch.randint(3, VOCABULARY, (MICROBATCHES, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
    return tokens[:, :-1], labels


def shard(module: Any, world_mesh: DeviceMesh, **names: Any) -> None:
    """FSDP2 over the replicas, by layer."""
    layers = module.model.layers
    for layer in layers.values() if hasattr(layers, "values") else layers:
        fully_shard(layer, mesh=world_mesh["dp"])
    fully_shard(module, mesh=world_mesh["dp"])


def prepare(rank: int, num_ranks: int, folder: str) -> None:
    """Nothing: weights and batches are drawn from seeds."""


def train(rank: int, num_ranks: int, case: Case, folder: str) -> dict[str, dict[str, Any]]:
    """Train by the case, and give the record."""
    settings = case.settings
    pipelined = case.schedule is not None
    size = 2 if pipelined else 1
    mesh = init_device_mesh("cpu", (size, num_ranks // size), mesh_dim_names=("pp", "dp"))
    replica, num_replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()
    parallelize = shard if num_replicas > 1 else None
    loss_fn, model = MaskedCrossEntropy(), make_model(settings)
    if pipelined:
        pipeline = AutoPipeline(
            world_mesh=mesh,
            pp_schedule=case.schedule,
            pp_microbatch_size=1,
            pp_batch_size=MICROBATCHES,
            device=torch.device("cpu"),
            dtype=torch.float32,
        ).build(model, loss_fn=loss_fn, parallelize_fn=parallelize)
        parts = pipeline.parts
    else:
        parts = [model]
        if parallelize:
            parallelize(model, mesh)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-3)
    record: dict[str, dict[str, Any]] = {"losses": {}, "gradients": {}}
    for step in range(STEPS):
        length = LENGTH + (step * 4 if settings.get("lengths") else 0)
        tokens, labels = batch(step, replica, length)
        losses: list[Tensor] = []
        if pipelined:
            info = pipeline.info
            if settings.get("lengths"):
                pipeline.update_seq_len(length)
            ends = {"target": labels, "losses": losses} if info.has_last_stage else {}
            info.schedule.step(*((tokens,) if info.has_first_stage else ()), **ends)
        else:
            for i in range(MICROBATCHES):
                if num_replicas > 1:
                    model.set_requires_gradient_sync(i == MICROBATCHES - 1)
                logits = model(tokens[i : i + 1]).logits
                losses.append(loss_fn(logits, labels[i : i + 1]))
                losses[-1].backward()
        if not pipelined or info.has_last_stage:
            record["losses"][f"loss {step}/{replica}"] = float(
                sum(loss.detach() for loss in losses)
            )
        num_labels = MICROBATCHES * length
        if pipelined:
            scale_grads_and_clip_grad_norm(
                1.0,
                parts,
                pp_enabled=True,
                device_mesh=mesh,
                pp_axis_name="pp",
                num_label_tokens=num_labels,
                dp_group_size=num_replicas,
            )
        else:
            for p in model.parameters():
                p.grad.mul_(num_replicas / num_labels)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in parts:
            for name, parameter in part.named_parameters():
                gradient = parameter.grad
                if gradient is None:
                    raise RuntimeError(f"{name} has no gradient")
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                record["gradients"][f"{step + 1}/{replica}/{name}"] = gradient.clone()
        optimizer.step()
        optimizer.zero_grad()
    return record


def cases(
    composition: str, schedules: tuple[str, ...], *, replicas: int = 1, **settings: Any
) -> list[Case]:
    """The composition's reference, then a case per schedule."""
    own = [(None, replicas), *((name, 2 * replicas) for name in schedules)]
    return [
        Case(composition=composition, schedule=name, num_ranks=ranks, settings=settings)
        for name, ranks in own
    ]


LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
CASES = [
    *cases("Llama of transformers", ("1F1B", *LOOPED), model="transformers"),
    *cases("Llama of its own", ("1F1B", *LOOPED), model="own"),
    *cases("Llama × FSDP2=2", ("1F1B", "ZBVZeroBubble"), replicas=2, model="own"),
    *cases("Llama, other lengths", ("1F1B",), model="own", lengths=True),
]
