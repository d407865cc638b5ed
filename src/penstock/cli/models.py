"""The model that a subcommand is asked about: a factory of the user's, or a configuration.

    package.module:factory      factory() returns (model, example)
    llama, LlamaConfig,         of Hugging Face's transformers: random weights, nothing is fetched,
    LlamaForCausalLM            and nothing is made before its size is known

Torch and transformers are imported when a model is asked for, not before.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from penstock.cli.asked import Asked, Loaded
from penstock.cli.huggingface import from_transformers
from penstock.errors import PartitionError

__all__ = ["failed", "load_model"]

OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def load_model(asked: Asked) -> Loaded:
    """The model that is asked for, and an example.

    Args:
        asked: which, and how.

    Raises:
        PartitionError: there is no such model, it takes no such settings, or it is larger than
            ``max_bytes``.
    """
    import torch

    from penstock.stage.pytree import map_tensors

    dtype = getattr(torch, asked.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise PartitionError(f"--dtype {asked.dtype} is no dtype of torch's, such as float32")
    loaded = from_factory(asked) if ":" in asked.name else from_transformers(asked)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(asked.device, dtype if tensor.is_floating_point() else None)

    model = loaded.model.to(device=asked.device, dtype=dtype)
    return Loaded(model=model, example=map_tensors(moved, loaded.example), trunks=loaded.trunks)


# --- a factory of the user's -------------------------------------------------------------------


def from_factory(asked: Asked) -> Loaded:
    """What ``module:factory`` returns."""
    import torch

    module_name, _, name = asked.name.partition(":")
    if asked.settings or asked.sample is not None:
        raise PartitionError(
            f"--set and --sample are for configurations of transformers; let {asked.name} make "
            "the model that you want"
        )
    if os.getcwd() not in sys.path:  # as python -m does
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise PartitionError(
            f"{asked.name}: {error}; name a module that python can import from here"
        ) from error
    except Exception as error:  # whatever the user's module raises
        raise failed(f"{asked.name}: the import of {module_name}", error) from error
    for part in name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise PartitionError(f"{asked.name}: {module_name} has no function {name!r}")
    try:
        made = factory()
    except Exception as error:  # whatever the user's function raises
        raise failed(f"{asked.name}: {name}()", error) from error
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        kinds = [type(each).__name__ for each in made] if isinstance(made, tuple) else made
        raise PartitionError(
            f"{asked.name}() returned {kinds}, expected (model, example): a module, and one "
            "microbatch as a tuple of positional or a dict of keyword arguments"
        )
    return Loaded(model=made[0], example=made[1], trunks={})


def failed(what: str, error: Exception) -> PartitionError:
    """The error of the user's own code, in one line that names the place.

    Args:
        what: what failed, at the head of the line.
        error: what it raised.
    """
    told = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not is_library(frame.filename)] or frames
        place = f"{own[-1].filename}, line {own[-1].lineno}"
    return PartitionError(
        f"{what} failed with {type(error).__name__}{': ' if told else ''}{told} ({place}); call "
        "it in Python for the whole traceback"
    )


def is_library(filename: str) -> bool:
    """Whether a line is none of the user's."""
    return filename.startswith((OURS, "<frozen")) or "site-packages" in filename
