"""The model of ``penstock split``: a factory of the user's, or a configuration of transformers.

    package.module:factory      factory() returns (model, example)
    llama, LlamaConfig,         of Hugging Face's transformers: random weights, nothing is fetched,
    LlamaForCausalLM            and nothing is made before its size is known on the meta device

Torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.output import bytes_text
from penstock.cli.settings import option
from penstock.errors import PartitionError
from penstock.partition.balance.costs import LEAST_SAMPLE
from penstock.partition.plan import did_you_mean

if TYPE_CHECKING:
    from torch import nn

    # A model, one microbatch, and the names of all layers of each trunk if only some were made.
    _Loaded = tuple[nn.Module, Any, dict[str, list[str]]]

__all__ = ["ModelRequest", "load_model", "parse_bytes", "user_error"]

_NOT_THE_USERS = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep, importlib.__file__, "<frozen",
)  # fmt: skip
# The number of layers, as configurations call it.
_LAYER_SETTINGS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
)  # fmt: skip
# The heads that a model class may have, the likeliest first.
_HEADS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MODEL = (
    "module:function, which returns (model, example); or a configuration of transformers (llama, "
    "LlamaConfig, LlamaForCausalLM), with random weights."
)
_OWN_FACTORY = "name a function that returns (model, example) as module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model, and the options of the command line for it."""

    model: Annotated[str, typer.Argument(help=_MODEL)]
    set: Annotated[list[str] | None, option("key=value for the configuration; repeatable.")] = None
    batch: Annotated[int, option("Rows of a microbatch.")] = 1
    length: Annotated[int, option("Tokens per row.")] = 128
    device: Annotated[str, option("Where to measure.")] = "cpu"
    dtype: Annotated[str, option("The model's dtype.")] = "float32"
    max_size: Annotated[str, option("The most that parameters may take.")] = "4GB"
    sample: Annotated[int | None, option("Layers to measure; the others cost the same.")] = None


def load_model(request: ModelRequest) -> _Loaded:
    """Load a model to measure, no larger than ``max_size``, with one microbatch."""
    import torch

    from penstock.stage.pytree import map_tensors

    dtype = getattr(torch, request.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PartitionError(f"--dtype {request.dtype} is no dtype of torch's, such as float32")
    load = _from_factory if ":" in request.model else _from_transformers
    model, example, trunks = load(request)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(request.device, dtype if tensor.is_floating_point() else None)

    return model.to(device=request.device, dtype=dtype), map_tensors(moved, example), trunks


def _from_factory(request: ModelRequest) -> _Loaded:
    import torch

    if request.set or request.sample is not None:
        raise PartitionError(
            f"--set and --sample are for configurations of transformers; let {request.model} make "
            "the model that you want"
        )
    module, _, name = request.model.partition(":")
    if os.getcwd() not in sys.path:  # as python -m does
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name, None)
        made = factory() if callable(factory) else None
    except Exception as error:  # whatever the user's code raises
        raise user_error(request.model, error) from error
    if not callable(factory):
        raise PartitionError(f"{request.model}: {module} has no function {name!r}")
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise PartitionError(
            f"{request.model}() returned a {type(made).__name__}, expected (model, example): a "
            "module, and one microbatch as a tuple of positional or a dict of keyword arguments"
        )
    return *made, {}


def user_error(what: str, error: Exception) -> PartitionError:
    """An exception of the user's own code, in one line with its place; ``what`` is what failed."""
    text = " ".join(str(error).split())
    places = [
        f" ({frame.filename}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_USERS) and "site-packages" not in frame.filename
    ]
    return PartitionError(
        f"{what} failed with {type(error).__name__}{': ' if text else ''}{text}"
        f"{places[-1] if places else ''}; call it in Python for the whole traceback"
    )


def parse_bytes(text: str) -> float:
    """Parse a positive number of bytes, with or without a unit: ``16GB``, ``1.5 GiB``, ``300``."""
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?|)b?\s*", text.lower(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < value < float("inf"):
        raise PartitionError(f"{text!r} is no number of bytes; write it as 16GB or 300MiB")
    return value


def _from_transformers(request: ModelRequest) -> _Loaded:
    """A model of transformers with random weights, once its size is known."""
    import torch

    from penstock.partition.blocks import leaf_modules

    if request.sample is not None and request.sample < LEAST_SAMPLE:
        raise PartitionError(f"--sample {request.sample}, expected at least {LEAST_SAMPLE}")
    try:
        import transformers
    except ImportError as error:
        raise PartitionError(
            f"{request.model}: transformers is not installed; install it, or {_OWN_FACTORY}"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its hints are about pretrained models
    config_class, model_class = _classes_of(request.model, transformers)
    settings = _settings_of(request, config_class)
    trunks: dict[str, list[str]] = {}
    try:
        config = config_class(**settings)
        values = config.to_dict()
        layers = {n: values[n] for n in _LAYER_SETTINGS if isinstance(values.get(n), int)}
        with torch.device("meta"):
            on_meta = model_class(config)
            if request.sample is not None:
                for leaf in leaf_modules(on_meta):
                    if leaf.trunk is not None:
                        trunks.setdefault(leaf.trunk, []).append(leaf.name)
                sample = {name: min(number, request.sample) for name, number in layers.items()}
                config = config_class(**settings | sample)
                on_meta = model_class(config)
        _refuse_large(on_meta, layers, request)
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
            f"transformers can't make {request.model} with the settings {settings}: {error}"
        ) from error
    return model, _example_of(config, model, request), trunks


def _classes_of(name: str, transformers: Any) -> tuple[Any, Any]:
    """The configuration class, and the model class: ``name`` itself if it is one, else one with a
    head that computes a loss, if there is one."""
    from transformers.models.auto import configuration_auto, modeling_auto

    names = configuration_auto.CONFIG_MAPPING
    found: Any = names[name] if name in names else getattr(transformers, name, None)
    if inspect.isclass(found) and getattr(found, "config_class", None) is not None:
        return found.config_class, found  # type: ignore[attr-defined]
    if not (inspect.isclass(found) and issubclass(found, transformers.PretrainedConfig)):
        known = [*names, *(each for each in dir(transformers) if each.endswith("Config"))]
        raise PartitionError(
            f"{name!r} is no configuration of transformers{did_you_mean(name, known)}; for a model "
            f"of your own {_OWN_FACTORY}"
        )
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING") for head in _HEADS]
    for mapping in (*mappings, modeling_auto.MODEL_MAPPING):
        if found in mapping:
            model = mapping[found]
            return found, model[0] if isinstance(model, (tuple, list)) else model
    raise PartitionError(f"{name}: transformers knows no model of this configuration")


def _settings_of(request: ModelRequest, config_class: Any) -> dict[str, Any]:
    """The settings of ``--set``, by the configuration's own names."""
    default = config_class()
    known = [*default.to_dict(), *default.attribute_map]
    settings: dict[str, Any] = {}
    for given in request.set or ():
        key, equals, value = given.partition("=")
        if not equals:
            raise PartitionError(f"--set {given}: expected key=value, as in num_hidden_layers=8")
        if key not in known:
            hint = did_you_mean(key, known)
            raise PartitionError(f"--set {given}: {config_class.__name__} has no {key}{hint}")
        key = default.attribute_map.get(key, key)
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def _refuse_large(on_meta: nn.Module, layers: dict[str, int], request: ModelRequest) -> None:
    import torch

    number = sum(param.numel() for param in on_meta.parameters())
    size, most = number * getattr(torch, request.dtype).itemsize, parse_bytes(request.max_size)
    if size > most:
        fewer = next(iter(layers), "num_hidden_layers")
        raise PartitionError(
            f"{request.model} has {number:,} parameters, {bytes_text(size)}, more than --max-size "
            f"{bytes_text(most)}; make it smaller (--set {fewer}=4), measure {LEAST_SAMPLE} of its "
            f"layers with --sample {LEAST_SAMPLE}, or raise --max-size"
        )


def _example_of(config: Any, model: Any, request: ModelRequest) -> dict[str, Any]:
    """A batch of random tokens, with labels if the model takes some."""
    import torch

    if model.main_input_name != "input_ids":
        raise PartitionError(
            f"{request.model} takes {model.main_input_name}, of which no example is made here; "
            f"{_OWN_FACTORY}"
        )
    kind, generator = type(model).__name__, torch.Generator().manual_seed(0)
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or request.length
    shape = (request.batch, min(request.length, most))
    ids = torch.randint(0, text.vocab_size, shape, generator=generator)
    takes_labels = "labels" in inspect.signature(model.forward).parameters
    is_lm = takes_labels and ("LM" in kind or "Generation" in kind)
    return {"input_ids": ids, "labels": ids} if is_lm else {"input_ids": ids}
