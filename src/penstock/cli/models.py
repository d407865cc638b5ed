"""The model of ``penstock split``: a factory of the user's, or a configuration of transformers.

    package.module:factory      factory() returns (model, example)
    llama, LlamaConfig,         of Hugging Face's transformers: random weights, nothing is fetched,
    LlamaForCausalLM            and nothing is made before its size is known on the meta device

Torch and transformers are imported when a model is asked for, not before.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cli.values import bytes_text
from penstock.errors import PartitionError
from penstock.partition.balance.costs import LEAST_SAMPLE
from penstock.partition.plan import did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Loaded", "ModelRequest", "load_model", "user_error"]

LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep
# The number of layers, as configurations call it.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model, as the command line asks for it.

    Args:
        name: ``module:factory``, or the name of a configuration or model class.
        settings: ``key=value`` for the configuration.
        batch: rows of the example.
        length: tokens per row, of a model that takes tokens.
        device: the device to measure on.
        dtype: the model's dtype, by torch's name.
        max_bytes: the most that its parameters may take.
        sample: the number of layers to make of each trunk; None for all.
    """

    name: str
    settings: tuple[str, ...] = ()
    batch: int = 1
    length: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    max_bytes: float = 4e9
    sample: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """A model to measure, with one microbatch.

    ``trunks`` has the names of all layers of each trunk if only some of them were made.
    """

    model: nn.Module
    example: Any
    trunks: Mapping[str, Sequence[str]]


def load_model(request: ModelRequest) -> Loaded:
    """The requested model, and an example.

    Raises:
        PartitionError: there is no such model, it takes no such settings, or it is larger than
            ``max_bytes``.
    """
    import torch

    from penstock.stage.pytree import map_tensors

    dtype = getattr(torch, request.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PartitionError(f"--dtype {request.dtype} is no dtype of torch's, such as float32")
    loaded = _from_factory(request) if ":" in request.name else _from_transformers(request)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(request.device, dtype if tensor.is_floating_point() else None)

    model = loaded.model.to(device=request.device, dtype=dtype)
    return Loaded(model=model, example=map_tensors(moved, loaded.example), trunks=loaded.trunks)


# --- a factory of the user's -------------------------------------------------------------------


def _from_factory(request: ModelRequest) -> Loaded:
    import torch

    module_name, _, name = request.name.partition(":")
    if request.settings or request.sample is not None:
        raise PartitionError(
            f"--set and --sample are for configurations of transformers; let {request.name} make "
            "the model that you want"
        )
    if os.getcwd() not in sys.path:  # as python -m does
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PartitionError(
            f"{request.name}: {error}; name a module that python can import from here"
        ) from error
    except Exception as error:  # whatever the user's module raises
        raise user_error(f"{request.name}: the import of {module_name}", error) from error
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise PartitionError(f"{request.name}: {module_name} has no function {name!r}")
    try:
        made = factory()
    except Exception as error:  # whatever the user's function raises
        raise user_error(f"{request.name}: {name}()", error) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise PartitionError(
            f"{request.name}() returned a {type(made).__name__}, expected (model, example): a "
            "module, and one microbatch as a tuple of positional or a dict of keyword arguments"
        )
    return Loaded(model=made[0], example=made[1], trunks={})


def user_error(what: str, error: Exception) -> PartitionError:
    """The error of the user's own code, in one line that names the place.

    Args:
        what: the part that failed, at the head of the line.
        error: the exception.
    """
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        skipped = (LIBRARY, "<frozen")
        own = [
            frame
            for frame in frames
            if not frame.filename.startswith(skipped) and "site-packages" not in frame.filename
        ]
        place = f"{(own or frames)[-1].filename}, line {(own or frames)[-1].lineno}"
    return PartitionError(
        f"{what} failed with {type(error).__name__}{': ' if text else ''}{text} ({place}); call "
        "it in Python for the whole traceback"
    )


# --- transformers -------------------------------------------------------------------------------


def _from_transformers(request: ModelRequest) -> Loaded:
    """A model of transformers with random weights, no larger than asked for."""
    if request.sample is not None and request.sample < LEAST_SAMPLE:
        raise PartitionError(f"--sample {request.sample}, expected at least {LEAST_SAMPLE}")
    try:
        import transformers
    except ImportError as error:
        raise PartitionError(
            f"{request.name}: transformers is not installed; install it, or name a factory of "
            "your own as module:factory"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its hints are about pretrained models
    config_class, model_class = _classes_of(request.name, transformers)
    settings = _settings_of(request, config_class)
    try:
        config = config_class(**settings)
        model_class = model_class or _model_class(config, request.name)
        whole = _on_meta(model_class, config)
        trunks: dict[str, list[str]] = {}
        if request.sample is not None:
            trunks = _trunks_of(whole)
            config = config_class(**{**settings, **_fewer_layers(config, request.sample)})
            whole = _on_meta(model_class, config)
        _refuse_large(whole, config, request)
        config.use_cache = False
        if getattr(config, "is_encoder_decoder", False):
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(config, name, None) is None:
                    setattr(config, name, 0)
        model = model_class(config)
    except PartitionError:
        raise
    except Exception as error:
        raise PartitionError(
            f"transformers can't make {request.name} with the settings {settings}: {error}"
        ) from error
    return Loaded(model=model, example=_example_of(config, whole, request), trunks=trunks)


def _on_meta(model_class: Any, config: Any) -> nn.Module:
    import torch

    with torch.device("meta"):
        model: nn.Module = model_class(config)
    return model


def _classes_of(name: str, transformers: Any) -> tuple[Any, Any | None]:
    """The configuration class, and the model class if ``name`` is one."""
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


def _model_class(config: Any, name: str) -> Any:
    """The model class of a configuration: with a head that computes a loss, if there is one."""
    from transformers.models.auto import modeling_auto

    mappings = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING") for head in HEADS]
    for mapping in (*mappings, modeling_auto.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise PartitionError(f"{name}: transformers knows no model of this configuration")


def _settings_of(request: ModelRequest, config_class: Any) -> dict[str, Any]:
    default = config_class()
    known = [*default.to_dict(), *default.attribute_map]
    settings: dict[str, Any] = {}
    for given in request.settings:
        key, equals, value = given.partition("=")
        if not equals:
            raise PartitionError(f"--set {given}: expected key=value, as in num_hidden_layers=8")
        if key not in known:
            hint = did_you_mean(key, known)
            raise PartitionError(f"--set {given}: {config_class.__name__} has no {key}{hint}")
        try:
            settings[default.attribute_map.get(key, key)] = json.loads(value)
        except json.JSONDecodeError:
            settings[default.attribute_map.get(key, key)] = value
    return settings


def _fewer_layers(config: Any, most: int) -> dict[str, int]:
    values = config.to_dict()
    numbers = {name: values[name] for name in LAYER_SETTINGS if isinstance(values.get(name), int)}
    if not numbers:
        raise PartitionError(
            f"--sample: {type(config).__name__} does not say how many layers it has; make it "
            "smaller with --set"
        )
    return {name: min(number, most) for name, number in numbers.items()}


def _trunks_of(model: nn.Module) -> dict[str, list[str]]:
    from penstock.partition.blocks import leaf_modules

    trunks: dict[str, list[str]] = {}
    for leaf in leaf_modules(model):
        if leaf.trunk is not None:
            trunks.setdefault(leaf.trunk, []).append(leaf.name)
    return trunks


def _refuse_large(whole: nn.Module, config: Any, request: ModelRequest) -> None:
    """Nobody wants 7 billion parameters on a laptop by surprise."""
    import torch

    number = sum(param.numel() for param in whole.parameters())
    size = number * getattr(torch, request.dtype).itemsize
    if size <= request.max_bytes:
        return
    layers = [name for name in LAYER_SETTINGS if name in config.to_dict()]
    smaller = f"--set {layers[0]}=4" if layers else "--set"
    sample = "" if request.sample else f", measure {LEAST_SAMPLE} of its layers with --sample 3"
    raise PartitionError(
        f"{request.name} has {number:,} parameters, {bytes_text(size)}, more than --max-size "
        f"{bytes_text(request.max_bytes)}; make it smaller ({smaller}){sample}, or raise --max-size"
    )


def _example_of(config: Any, model: Any, request: ModelRequest) -> dict[str, Any]:
    """A batch of random inputs, with labels if the model takes some."""
    import torch

    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_ids":
        text = config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or request.length
        shape = (request.batch, min(request.length, most))
        ids = torch.randint(0, text.vocab_size, shape, generator=generator)
        makes_tokens = "LM" in type(model).__name__ or "Generation" in type(model).__name__
        return {"input_ids": ids} | ({"labels": ids} if makes_tokens and "labels" in takes else {})
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        image = (request.batch, getattr(config, "num_channels", 3), height, width)
        batch = {"pixel_values": torch.randn(image, generator=generator)}
        if "ForImageClassification" in type(model).__name__:
            batch["labels"] = torch.zeros(request.batch, dtype=torch.int64)
        return batch
    raise PartitionError(
        f"{request.name} takes {model.main_input_name}, of which no example is made here; name a "
        "function that returns (model, example) as module:function"
    )
