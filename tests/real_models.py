"""Models that people train, small and with random weights: for tests of both ways to cut a model.

Those of ``transformers`` are made from their config classes and compute their own loss from
labels; ResNet-50 and U-Net are written out here, with BatchNorm and skip connections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["REAL_MODELS", "RealModel", "own_loss"]

VOCABULARY, LENGTH, CLASSES = 64, 6, 5
# Of most models; of a few, whose stages have several.
LAYERS, MORE_LAYERS = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model, how to make a batch for it, and where it can be cut.

    Args:
        name: what tests call it.
        make: makes the model, its parameters drawn from the global seed, in training mode.
        batch: ``batch(rows, generator)`` gives the keyword arguments of a batch, labels included.
        trunk: names of the repeated blocks in the order in which they run.
        head: the module after the trunk, whose output goes to the loss.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], dict[str, Any]]
    trunk: tuple[str, ...]
    head: str

    def model(self, seed: int = 0) -> nn.Module:
        """The model, its parameters drawn from ``seed``; no dropout, in training mode."""
        torch.manual_seed(seed)
        return self.make().train()

    def split(self, stages: int) -> tuple[str, ...] | None:
        """Where to cut into up to four stages; None where there is a block for each."""
        return (*self.trunk, self.head)[1 - stages :] if stages > len(self.trunk) else None

    def example(self, rows: int = 4, seed: int = 0) -> dict[str, Any]:
        """The keyword arguments of one batch."""
        return self.batch(rows, torch.Generator().manual_seed(1000 + seed))


def own_loss(output: Any) -> Tensor:
    """The loss that the model itself has computed."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


# --- transformers --------------------------------------------------------------------------------


def hugging_face(config: str, model: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = import_module("transformers")
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return make


def tokens(rows: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)


def text(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """Token numbers to predict from one another; the second half of the rows ends in padding."""
    ids = tokens(rows, generator)
    mask = torch.ones_like(ids)
    mask[rows // 2 :, -1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def translation(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """A text, and the one to make of it."""
    given = text(rows, generator)
    given["labels"] = tokens(rows, generator)
    return given


def pictures(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """(rows, 3, 16, 16) pixels and a class for each row."""
    return {
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def blocks(prefix: str, num: int = LAYERS) -> tuple[str, ...]:
    return tuple(f"{prefix}.{i}" for i in range(num))


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = SMALL | {"use_cache": False}
GROUPED = CAUSAL | {"num_key_value_heads": 2}
ENCODER = SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEQ2SEQ_TRUNK = (*blocks("model.encoder.layers", 2), *blocks("model.decoder.layers", 2))


def causal(name: str, config: str, model: str, **options: Any) -> RealModel:
    return RealModel(
        name=name,
        make=hugging_face(config, model, **(GROUPED | options)),
        batch=text,
        trunk=blocks("model.layers", options.get("num_hidden_layers", LAYERS)),
        head="lm_head",
    )


# --- convolutional networks ----------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions with BatchNorm, around which the input is added."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x_BCHW)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        return self.relu(y)


class ResNet50(nn.Module):
    """ResNet-50 as published but for its width. Source: arXiv:1512.03385, table 1."""

    def __init__(self, width: int = 4, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inputs = width
        for number, depth in enumerate((3, 4, 6, 3), start=1):
            inner = width * 2 ** (number - 1)
            layers = []
            for i in range(depth):
                layers.append(Bottleneck(inputs, inner, 2 if number > 1 and i == 0 else 1))
                inputs = 4 * inner
            self.add_module(f"layer{number}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        logits = self.fc(x.mean((2, 3)))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class DoubleConv(nn.Module):
    """Two convolutions with BatchNorm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y: Tensor = self.layers(x_BCHW)
        return y


class UNet(nn.Module):
    """Every level on the way down is joined to its like on the way up.

    Source: arXiv:1505.04597, fig. 1.
    """

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**i for i in range(depth + 1)]
        self.inc = DoubleConv(3, width)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(DoubleConv(b, a) for a, b in reversed(pairs))
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        levels = [self.inc(pixel_values)]
        for down in self.down:
            levels.append(down(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat((levels.pop(), up(x)), dim=1))
        logits = self.out(x)
        return {"loss": F.mse_loss(logits, labels), "logits": logits}


def masks(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """(rows, 3, 16, 16) pixels, and a value for each."""
    return {
        "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
        "labels": torch.randn(rows, 1, 16, 16, generator=generator),
    }


def photos(rows: int, generator: torch.Generator) -> dict[str, Any]:
    """(rows, 3, 64, 64) pixels and a class for each row."""
    return {
        "pixel_values": torch.randn(rows, 3, 64, 64, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


# --- all of them ---------------------------------------------------------------------------------

GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": MORE_LAYERS,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": LAYERS,
    "n_heads": 4,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "use_cache": False,
}
VIT = ENCODER | {"image_size": 16, "patch_size": 4, "num_channels": 3, "num_labels": CLASSES}
MIXTRAL = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
}

ALL = (
    RealModel(
        name="gpt2",
        make=hugging_face("GPT2Config", "GPT2LMHeadModel", **GPT2),
        batch=text,
        trunk=blocks("transformer.h", MORE_LAYERS),
        head="lm_head",
    ),
    causal("llama", "LlamaConfig", "LlamaForCausalLM", num_hidden_layers=MORE_LAYERS),
    causal("mistral", "MistralConfig", "MistralForCausalLM"),
    causal("qwen2", "Qwen2Config", "Qwen2ForCausalLM"),
    causal("gemma", "GemmaConfig", "GemmaForCausalLM", head_dim=8),
    causal("phi", "PhiConfig", "PhiForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0),
    causal("mixtral", "MixtralConfig", "MixtralForCausalLM", **MIXTRAL),
    RealModel(
        name="opt",
        make=hugging_face("OPTConfig", "OPTForCausalLM", **(CAUSAL | OPT)),
        batch=text,
        trunk=blocks("model.decoder.layers"),
        head="lm_head",
    ),
    RealModel(
        name="gpt-neox",
        make=hugging_face("GPTNeoXConfig", "GPTNeoXForCausalLM", **CAUSAL),
        batch=text,
        trunk=blocks("gpt_neox.layers"),
        head="lm_head",
    ),
    RealModel(
        name="bert",
        make=hugging_face(
            "BertConfig", "BertForMaskedLM", **ENCODER | {"num_hidden_layers": MORE_LAYERS}
        ),
        batch=text,
        trunk=blocks("bert.encoder.layer", MORE_LAYERS),
        head="cls",
    ),
    RealModel(
        name="roberta",
        make=hugging_face("RobertaConfig", "RobertaForMaskedLM", **ENCODER),
        batch=text,
        trunk=blocks("roberta.encoder.layer"),
        head="lm_head",
    ),
    RealModel(
        name="distilbert",
        make=hugging_face("DistilBertConfig", "DistilBertForMaskedLM", **DISTILBERT),
        batch=text,
        trunk=blocks("distilbert.transformer.layer"),
        head="vocab_projector",
    ),
    RealModel(
        name="t5",
        make=hugging_face("T5Config", "T5ForConditionalGeneration", **T5),
        batch=translation,
        trunk=(*blocks("encoder.block", 2), *blocks("decoder.block", 2)),
        head="lm_head",
    ),
    RealModel(
        name="bart",
        make=hugging_face("BartConfig", "BartForConditionalGeneration", **BART),
        batch=translation,
        trunk=SEQ2SEQ_TRUNK,
        head="lm_head",
    ),
    RealModel(
        name="vit",
        make=hugging_face("ViTConfig", "ViTForImageClassification", **VIT),
        batch=pictures,
        trunk=blocks("vit.layers"),
        head="classifier",
    ),
    RealModel(
        name="resnet50",
        make=ResNet50,
        batch=photos,
        trunk=("layer1", "layer2", "layer3", "layer4"),
        head="fc",
    ),
    RealModel(
        name="unet",
        make=UNet,
        batch=masks,
        trunk=("down.0", "down.2", "join.0", "join.2"),
        head="out",
    ),
)
REAL_MODELS = {each.name: each for each in ALL}
