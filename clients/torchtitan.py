"""torchtitan: its Trainer, with its own models, pipeline functions, checkpointer and validator.

Its Trainer is made for accelerators. What the CPU lacks is given to it here: properties of the
device, attention by scaled dot products (its FlexAttention has no backward on the CPU), and batches
of random tokens in place of a tokenizer's.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as device_utils
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset

from clients import SIDE, Case


def cpu_module() -> ModuleType:
    """``torch.cpu`` with the properties of a device that torchtitan asks for."""
    module = ModuleType("cpu_module")
    module.__dict__.update(vars(torch.cpu))
    nothing = {"reset_peak_memory_stats": None, "empty_cache": None, "memory_stats": {}}
    for name, value in nothing.items():
        setattr(module, name, lambda *args, value=value: value)
    module.get_device_name = lambda device: "CPU"
    module.get_device_properties = lambda device: SimpleNamespace(total_memory=2**30)
    return module


# Before the modules that take these names from it.
device_utils.device_type, device_utils.device_module = "cpu", cpu_module()

import torchtitan.trainer
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import deepseek_v3, llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

TITLE = f"torchtitan {version('torchtitan')}"

LENGTH, MICROBATCHES, STEPS = 32, 8, 3
MODELS = {"Llama 3": llama3, "DeepSeek-V3": deepseek_v3, "Qwen 3": qwen3}


def model_spec(name: str) -> Any:
    """The library's model for debugging, for the CPU and for a pipeline."""
    spec = MODELS[name].model_registry("debugmodel")
    if name == "Qwen 3":  # torchtitan refuses tied embeddings in a pipeline
        spec.model.enable_weight_tying = False
        spec.model.tok_embeddings.param_init = {"weight": torch.nn.init.normal_}
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


class Tokens(IterableDataset):
    """Random tokens, other ones on each replica."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self.vocabulary, self.seed = vocabulary, seed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = torch.randint(self.vocabulary, (LENGTH + 1,), generator=generator)
            yield {"input": tokens[:-1], "positions": torch.arange(LENGTH)}, tokens[1:]


class TokenLoader(ParallelAwareDataloader):
    """The library's loader over random tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        vocabulary: int = 2048
        seed: int = 0
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_rank: int, dp_world_size: int, local_batch_size: int, **_: Any
    ) -> None:
        tokens = Tokens(config.vocabulary, 100 * config.seed + dp_rank)
        super().__init__(tokens, dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    """Nothing is tokenized."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def trainer_config(case: Case, folder: str) -> Trainer.Config:
    """The case's configuration."""
    settings = case.settings
    spec = model_spec(settings["model"])
    vocabulary = spec.model.vocab_size
    microbatches = MICROBATCHES if case.schedule else 1
    replicas = settings.get("fsdp", 1)
    loss = CrossEntropyLoss.Config(global_vocab_size=vocabulary)
    if settings.get("chunked_loss"):
        loss = ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=4)
    return Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=NoTokenizer.Config(),
        loss=loss,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10),
        dataloader=TokenLoader.Config(vocabulary=vocabulary),
        metrics=MetricsProcessor.Config(log_freq=1),
        training=TrainingConfig(
            local_batch_size=microbatches,
            global_batch_size=MICROBATCHES * replicas,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=settings.get("dtype", "float32"),
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=replicas,
            tensor_parallel_degree=settings.get("tp", 1),
            expert_parallel_degree=settings.get("ep", 1),
            spmd_backend=settings.get("spmd_backend", "spmd_types"),
            pipeline_parallel_degree=2 if case.schedule else 1,
            pipeline_parallel_schedule=settings.get("schedule", case.schedule) or "1F1B",
            pipeline_parallel_schedule_csv=csv_file(folder) if settings.get("csv") else "",
        ),
        activation_checkpoint={
            "full": FullAC.Config(),
            "selective": SelectiveAC.Config(),
        }.get(settings.get("recompute", "")),
        compile=CompileConfig(enable=settings.get("compile", False), components=["model"]),
        checkpoint=CheckpointManager.Config(
            enable=True, load_only=True, initial_load_path=f"{folder}/{settings['model']}/step-0"
        ),
        validator=Validator.Config(
            enable=settings.get("validate", False),
            freq=1,
            steps=2,
            dataloader=TokenLoader.Config(vocabulary=vocabulary, seed=1),
        ),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
    )


def csv_file(folder: str) -> str:
    """A schedule of one's own for two ranks of two stages: forwards, input and weight gradients."""
    path = f"{folder}/schedule.csv"
    rows = []
    for rank in (0, 1):
        rounds = [(stage, "F") for stage in (rank, rank + 2)]
        rounds += [(stage, op) for op in "IW" for stage in (rank + 2, rank)]
        cells = [f"{stage}{op}{mb}" for stage, op in rounds for mb in range(MICROBATCHES)]
        rows.append(",".join(cells))
    with open(path, "w") as file:
        file.write("\n".join(rows) + "\n")
    return path


class Recorder:
    """The losses that the trainer logs, and the gradients that its optimizer takes."""

    def __init__(self, place: int) -> None:
        self.place = place  # the rank's place among those of its stages
        self.losses: dict[str, float] = {}
        self.gradients: dict[str, Tensor] = {}

    def watch(self, trainer: Trainer) -> None:
        """Record what the trainer does."""
        trainer.metrics_processor.log = self._logger(trainer, "loss")
        trainer.metrics_processor.log_validation = self._logger(trainer, "validation loss")
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._take(trainer))

    def _logger(self, trainer: Trainer, name: str) -> Any:
        ends = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage

        def log(*args: Any, **kwargs: Any) -> None:
            loss = kwargs["loss"] if "loss" in kwargs else args[1]
            if ends:  # elsewhere torchtitan logs -1
                self.losses[f"{name} {trainer.step}"] = float(loss)

        return log

    def _take(self, trainer: Trainer) -> None:
        if trainer.step == 0:  # a step of zeros, by which it makes the optimizer's state
            return
        for part in trainer.model_parts:
            for name, parameter in part.named_parameters():
                for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):
                    name = name.replace(wrapper, "")
                gradient = parameter.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                self.gradients[f"{trainer.step}/{self.place}/{name}"] = gradient.clone()


def all_to_all(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """``torch.distributed.all_to_all`` of chunks along the first dimension."""
    sizes = [[len(chunk) for chunk in chunks] for chunks in (outputs, inputs)]
    received = torch.cat(outputs)
    torch.distributed.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, chunk in zip(outputs, received.split(sizes[0]), strict=True):
        output.copy_(chunk)


def for_cpu(rank: int) -> None:
    """What a launcher does, and what gloo lacks left out."""
    os.environ["LOCAL_RANK"] = str(rank)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # Another deadline for each process group, after a barrier on a device.
    dist_utils.set_pg_timeouts = lambda **_: None
    # Two seconds of sleep.
    torchtitan.trainer.time = SimpleNamespace(**vars(torchtitan.trainer.time))
    torchtitan.trainer.time.sleep = lambda seconds: None
    # Without division FSDP2 scales in its reductions, which gloo can't: let it sum alone.
    undivided = fsdp.disable_fsdp_gradient_division

    def sum_alone(model: torch.nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = sum_alone
    # Chunks of any sizes, of which gloo exchanges only whole tensors.
    torch.distributed.all_to_all = all_to_all
    # What its init_distributed does; the group is there already.
    torch.autograd.set_multithreading_enabled(False)


def prepare(rank: int, num_ranks: int, folder: str) -> None:
    """Save the weights that all runs begin with, as torchtitan's seed checkpoints."""
    for_cpu(rank)
    for model in {case.settings["model"] for case in CASES}:
        case = Case(composition="seed", schedule=None, num_ranks=1, settings={"model": model})
        config = trainer_config(case, folder)
        config.checkpoint = CheckpointManager.Config(
            enable=True, folder=model, create_seed_checkpoint=True
        )
        trainer = Trainer(config)
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()


def train(rank: int, num_ranks: int, case: Case, folder: str) -> dict[str, dict[str, Any]]:
    """Train by the case, and give the record."""
    for_cpu(rank)
    legs = [trainer_config(case, folder)]
    if case.schedule and case.settings.get("resume"):
        legs.append(trainer_config(case, folder))
        own = f"resumed-{os.environ[SIDE]}-{case.schedule}"
        for leg in legs:
            leg.checkpoint.folder, leg.checkpoint.interval = own, 1
            leg.checkpoint.load_only = leg.checkpoint.last_save_model_only = False
        legs[0].training.steps -= 1
    place = rank % (num_ranks // 2) if case.schedule else rank
    recorder = Recorder(place)
    for leg in legs:
        trainer = Trainer(leg)
        if case.schedule:
            assert type(trainer.pp_schedule).__module__.split(".")[0] == os.environ[SIDE]
        recorder.watch(trainer)
        trainer.train()
        trainer.close()
    return {"losses": recorder.losses, "gradients": recorder.gradients}


SCHEDULES = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
WHOLE_AND_SPLIT = ("1F1B", "ZBVZeroBubble", "DualPipeV")  # the backward


def cases(
    composition: str,
    schedules: tuple[str, ...],
    **settings: Any,
) -> list[Case]:
    """The composition's reference, then a case per schedule."""
    ranks = settings.get("fsdp", 1) * settings.get("tp", 1)
    own = [(None, ranks), *((name, 2 * ranks) for name in schedules)]
    return [
        Case(
            composition=composition,
            schedule=name,
            num_ranks=ranks,
            settings=settings | ({"csv": True, "schedule": SCHEDULES[1]} if name == "CSV" else {}),
        )
        for name, ranks in own
    ]


BFLOAT16 = {"dtype": "bfloat16"}
LLAMA = {"model": "Llama 3"}
DEEPSEEK = {"model": "DeepSeek-V3"}

CASES = [
    *cases("Llama 3", (*SCHEDULES, "CSV"), **LLAMA),
    *cases("Llama 3, FSDP2 in bfloat16", SCHEDULES, **LLAMA, fsdp=2, **BFLOAT16),
    *cases("Llama 3, TP", SCHEDULES, **LLAMA, tp=2),
    *cases("DeepSeek-V3", WHOLE_AND_SPLIT, **DEEPSEEK),
    *cases(
        "DeepSeek-V3, FSDP2 and EP in bfloat16", SCHEDULES, **DEEPSEEK, fsdp=2, ep=2, **BFLOAT16
    ),
    *cases("Llama 3, full checkpointing", WHOLE_AND_SPLIT, **LLAMA, recompute="full"),
    *cases("Llama 3, selective checkpointing", WHOLE_AND_SPLIT, **LLAMA, recompute="selective"),
    *cases("Llama 3, validated and resumed", WHOLE_AND_SPLIT, **LLAMA, validate=True, resume=True),
    *cases("Llama 3, layers compiled", WHOLE_AND_SPLIT, **LLAMA, compile=True),
    *cases("Llama 3, loss in chunks", WHOLE_AND_SPLIT, **LLAMA, chunked_loss=True),
    *cases("Qwen 3", WHOLE_AND_SPLIT, model="Qwen 3"),
]
