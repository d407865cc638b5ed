"""The model of ``penstock split``: a factory of the user's, or a language model of transformers.

    package.module:factory    factory() returns (model, example)
    llama                     a model type of Hugging Face's transformers, with random weights:
                              nothing is fetched, and its size is computed on the meta device first

Torch and transformers are imported when a model is loaded.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from penstock.cli.settings import option
from penstock.errors import PartitionError
from penstock.schedule.family import parse_options

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ModelRequest", "load_model", "parse_bytes"]

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_MODEL = (
    "module:function, which returns (model, example); or a causal language model of transformers "
    "by its type (llama), with random weights."
)
_OWN_FACTORY = "name a function that returns (model, example) as module:function"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A model, and the options of the command line for it."""

    model: Annotated[str, typer.Argument(help=_MODEL)]
    set: Annotated[list[str] | None, option("key=value for the configuration; repeatable.")] = None
    batch: Annotated[int, option("Rows of a microbatch.", min=1)] = 1
    length: Annotated[int, option("Tokens per row.", min=1)] = 128
    device: Annotated[str, option("Where to measure.")] = "cpu"
    dtype: Annotated[str, option("The model's dtype.")] = "float32"
    max_size: Annotated[str, option("The most that parameters may take.")] = "4GB"


def load_model(request: ModelRequest) -> tuple[nn.Module, Any]:
    """Load a model to measure, and one microbatch for it."""
    import torch

    from penstock.stage.pytree import map_tensors

    dtype = getattr(torch, request.dtype, None)
    if not isinstance(dtype, torch.dtype) or not (dtype.is_floating_point or dtype.is_complex):
        raise PartitionError(f"--dtype {request.dtype} is no dtype for a model, such as float32")
    try:
        torch.empty(0, device=request.device)
    except (RuntimeError, AssertionError) as error:
        raise PartitionError(f"--device {request.device}: {str(error).splitlines()[0]}") from error
    load = _from_factory if ":" in request.model else _from_transformers
    model, example = load(request)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(request.device, dtype if tensor.is_floating_point() else None)

    return model.to(device=request.device, dtype=dtype), map_tensors(moved, example)


def _from_factory(request: ModelRequest) -> tuple[nn.Module, Any]:
    import torch

    if request.set:
        raise PartitionError(
            f"--set is for configurations of transformers; let {request.model} make the model that "
            "you want"
        )
    module, _, name = request.model.partition(":")
    if os.getcwd() not in sys.path:  # as python -m does
        sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise PartitionError(f"{request.model}: {error}") from error
    if not callable(factory):
        raise PartitionError(f"{request.model}: {module} has no function {name!r}")
    made = factory()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        raise PartitionError(
            f"{request.model}() returned a {type(made).__name__}, expected (model, example): a "
            "module, and one microbatch as a tuple of positional or a dict of keyword arguments"
        )
    return made


def _from_transformers(request: ModelRequest) -> tuple[nn.Module, Any]:
    """A model of transformers with random weights, once its size is known."""
    import torch

    try:
        import transformers
    except ImportError as error:
        raise PartitionError(
            f"{request.model}: transformers is not installed; install it, or {_OWN_FACTORY}"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its hints are about pretrained models
    settings = parse_options(request.set or ())
    make: Any = transformers.AutoModelForCausalLM.from_config
    try:
        config: Any = transformers.AutoConfig.for_model(request.model)
        unknown = [name for name in settings if not hasattr(config, name)]
        if unknown:
            raise ValueError(f"{type(config).__name__} has no {unknown[0]}")
        config = transformers.AutoConfig.for_model(request.model, **settings)
        config.use_cache = False
        with torch.device("meta"):
            on_meta: nn.Module = make(config)
    except Exception as error:
        raise PartitionError(
            f"transformers makes no causal language model {request.model!r}: "
            f"{shorten(str(error), 160)}; for another model {_OWN_FACTORY}"
        ) from error
    number = sum(param.numel() for param in on_meta.parameters())
    size, most = number * getattr(torch, request.dtype).itemsize, parse_bytes(request.max_size)
    if size > most:
        raise PartitionError(
            f"{request.model} has {number:,} parameters, {decimal(size)}, more than --max-size "
            f"{decimal(int(most))}; make it smaller (--set num_hidden_layers=4), or raise that"
        )
    ids = torch.randint(config.get_text_config().vocab_size, (request.batch, request.length))
    return make(config), {"input_ids": ids, "labels": ids}


def parse_bytes(text: str) -> float:
    """Parse a positive number of bytes, with or without a unit: ``16GB``, ``1.5 GiB``, ``300``."""
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]i?|)b?\s*", text.lower(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < value < float("inf"):
        raise PartitionError(f"{text!r} is no number of bytes; write it as 16GB or 300MiB")
    return value
