"""Models of Hugging Face's transformers by the name of their configuration.

Weights are random and nothing is fetched. What a model would take is reckoned on the meta device
before it is made. transformers and torch are imported when a model is asked for, not before.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.cli.asked import Asked, Loaded
from penstock.cli.values import bytes_text
from penstock.errors import PartitionError
from penstock.partition.balance.sample import LEAST_SAMPLE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["from_transformers"]

# What configurations call their number of layers.
LAYER_SETTINGS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
)
# The heads that a model class may have, the likeliest first.
HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION")


def from_transformers(asked: Asked) -> Loaded:
    """A model of transformers with random weights, no larger than asked for."""
    if asked.sample is not None and asked.sample < LEAST_SAMPLE:
        raise PartitionError(f"--sample {asked.sample}, expected at least {LEAST_SAMPLE}")
    try:
        import transformers
    except ImportError as error:
        raise PartitionError(
            f"{asked.name}: transformers is not installed; install it, or name a factory of your "
            "own as module:factory"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its hints are about pretrained models
    config_class, model_class = classes_of(asked.name, transformers)
    settings = settings_of(asked, config_class)
    try:
        config = config_class(**settings)
        model_class = model_class or head_of(config, asked.name)
        whole = shape_of(model_class, config)
        trunks: dict[str, list[str]] = {}
        if asked.sample is not None:
            trunks = trunks_of(whole)
            config = config_class(**{**settings, **fewer_layers(config, asked.sample)})
            whole = shape_of(model_class, config)
        refuse_large(whole, config, asked)
        quiet(config)
        model = model_class(config)
    except PartitionError:
        raise
    except Exception as error:
        raise PartitionError(
            f"transformers can't make {asked.name} with the settings {settings}: {error}"
        ) from error
    return Loaded(model=model, example=example_of(config, whole, asked), trunks=trunks)


def shape_of(model_class: Any, config: Any) -> nn.Module:
    """The model on the meta device, where it takes no memory."""
    import torch

    with torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def classes_of(name: str, transformers: Any) -> tuple[Any, Any | None]:
    """The configuration class, and the model class where that was named."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if name in CONFIG_MAPPING:
        return CONFIG_MAPPING[name], None
    found = getattr(transformers, name, None)
    if inspect.isclass(found) and issubclass(found, transformers.PretrainedConfig):
        return found, None
    config_class = getattr(found, "config_class", None)
    if inspect.isclass(found) and config_class is not None:
        return config_class, found
    known = [*CONFIG_MAPPING, *(each for each in dir(transformers) if each.endswith("Config"))]
    raise PartitionError(
        f"{name!r} is no configuration of transformers{did_you_mean(name, known)}; for a model of "
        "your own name a function that returns (model, example) as module:function"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What a message says of names that are near; nothing where none is."""
    close = difflib.get_close_matches(name, known, n=3)
    return f", did you mean {' or '.join(close)}?" if close else ""


def head_of(config: Any, name: str) -> Any:
    """The model class of a configuration: with a head that gives a loss, where there is one."""
    from transformers.models.auto import modeling_auto

    for head in HEADS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING")
        if type(config) in mapping:
            return first(mapping[type(config)])
    if type(config) in modeling_auto.MODEL_MAPPING:
        return first(modeling_auto.MODEL_MAPPING[type(config)])
    raise PartitionError(f"{name}: transformers knows no model of this configuration")


def first(found: Any) -> Any:
    """Of several model classes, the one that is meant by default."""
    return found[0] if isinstance(found, (tuple, list)) else found


def settings_of(asked: Asked, config_class: Any) -> dict[str, Any]:
    """The settings, each of which the configuration knows."""
    default = config_class()
    known = [*default.to_dict(), *default.attribute_map]
    settings: dict[str, Any] = {}
    for given in asked.settings:
        key, equals, value = given.partition("=")
        if not equals:
            raise PartitionError(f"--set {given}: expected key=value, as in num_hidden_layers=8")
        if key not in known:
            near = did_you_mean(key, known)
            raise PartitionError(f"--set {given}: {config_class.__name__} has no {key}{near}")
        try:
            settings[default.attribute_map.get(key, key)] = json.loads(value)
        except json.JSONDecodeError:
            settings[default.attribute_map.get(key, key)] = value
    return settings


def fewer_layers(config: Any, most: int) -> dict[str, int]:
    """The settings that make no more layers than ``most``."""
    values = config.to_dict()
    numbers = {name: values[name] for name in LAYER_SETTINGS if isinstance(values.get(name), int)}
    if not numbers:
        raise PartitionError(
            f"--sample: {type(config).__name__} does not say how many layers it has; make it "
            "smaller with --set"
        )
    return {name: min(number, most) for name, number in numbers.items()}


def trunks_of(model: nn.Module) -> dict[str, list[str]]:
    """The names of the layers of each trunk."""
    from penstock.partition.blocks import leaf_modules

    trunks: dict[str, list[str]] = {}
    for unit in leaf_modules(model):
        if unit.trunk is not None:
            trunks.setdefault(unit.trunk, []).append(unit.name)
    return trunks


def refuse_large(whole: nn.Module, config: Any, asked: Asked) -> None:
    """Nobody wants 7 billion parameters on a laptop by surprise."""
    import torch

    number = sum(param.numel() for param in whole.parameters())
    size = number * getattr(torch, asked.dtype).itemsize
    if size <= asked.max_bytes:
        return
    layers = [name for name in LAYER_SETTINGS if name in config.to_dict()]
    smaller = f"--set {layers[0]}=4" if layers else "--set"
    sample = "" if asked.sample else f", measure {LEAST_SAMPLE} of its layers with --sample 3"
    raise PartitionError(
        f"{asked.name} has {number:,} parameters, {bytes_text(size)}, more than --max-size "
        f"{bytes_text(asked.max_bytes)}; make it smaller ({smaller}){sample}, or raise --max-size"
    )


def quiet(config: Any) -> None:
    """Settings that training has and defaults have not."""
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


def example_of(config: Any, model: Any, asked: Asked) -> dict[str, Any]:
    """A batch of random inputs, with labels where the model takes some."""
    import torch

    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or asked.length
        shape = (asked.batch, min(asked.length, most))
        ids = torch.randint(0, text.vocab_size, shape, generator=generator)
        makes_tokens = "LM" in type(model).__name__ or "Generation" in type(model).__name__
        return {"input_ids": ids} | ({"labels": ids} if makes_tokens and "labels" in takes else {})
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        image = (asked.batch, getattr(config, "num_channels", 3), height, width)
        batch = {"pixel_values": torch.randn(image, generator=generator)}
        if "ForImageClassification" in type(model).__name__:
            batch["labels"] = torch.zeros(asked.batch, dtype=torch.int64)
        return batch
    raise PartitionError(
        f"{asked.name} takes {model.main_input_name}, of which no example is made here; name a "
        "function that returns (model, example) as module:function"
    )
