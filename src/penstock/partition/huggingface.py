"""Support for Hugging Face's transformers: collected outputs, the cache, adapters.

    outputs = self.model(ids, output_router_logits=True)       hooks on every router append to a
    loss += balance(outputs.router_logits)                     list that the model's forward opens

A module on another stage would append nothing, and the auxiliary loss would be wrong. So appended
values count as outputs of their module: they may cross stages, and are appended by its stub.

This module never imports transformers: if it is not loaded, there is nothing to do. Its private
names (``_active_collector``, ``_CAN_RECORD_REGISTRY``) were seen on transformers 5.23.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

from torch import nn

__all__ = [
    "adapters", "capture_since", "install_hooks", "mark", "replay", "reset_conv1d",
    "ties_after_init", "without_cache",
]  # fmt: skip

MODULE = "transformers.utils.output_capturing"


def _open_lists() -> dict[str, list[Any]]:
    """The lists currently collecting, by key."""
    capturing: Any = sys.modules.get(MODULE)
    lists = None if capturing is None else capturing._active_collector.get()
    return {key: values for key, values in (lists or {}).items() if isinstance(values, list)}


def mark() -> dict[str, int]:
    """The lengths of the lists currently collecting, by key."""
    return {key: len(values) for key, values in _open_lists().items()}


def capture_since(marked: Mapping[str, int]) -> dict[str, list[Any]]:
    """The values appended since ``mark``, by key, without empty lists."""
    lists = _open_lists()
    fresh = {key: lists.get(key, [])[start:] for key, start in marked.items()}
    return {key: values for key, values in fresh.items() if values}


def replay(captured: Mapping[str, list[Any]], marked: Mapping[str, int] | None = None) -> None:
    """Append values captured on another stage, in place of all values since ``marked``, if any."""
    lists = _open_lists()
    for key, values in captured.items():
        if key in lists:
            start = len(lists[key]) if marked is None else marked[key]
            lists[key][start:] = values


def install_hooks(model: nn.Module) -> None:
    """Install the hooks on the plain model, so that its copies do not install them again."""
    capturing: Any = sys.modules.get(MODULE)
    for module in model.modules() if capturing else ():
        if capturing._CAN_RECORD_REGISTRY.get(module):
            capturing.maybe_install_capturing_hooks(module)


def without_cache(module: nn.Module) -> None:
    """Turn the cache off in a copy of a module; the model's own configuration stays unchanged."""
    config: Any = vars(module).get("config")
    if getattr(config, "use_cache", False) is True:
        module.config = copy.copy(config)
        module.config.use_cache = False  # type: ignore[union-attr]


def adapters(module: nn.Module) -> Sequence[str]:
    """The children that peft added to a layer; only peft knows how to initialize them."""
    names: Sequence[str] = getattr_static(module, "adapter_layer_names", ())
    return names


def reset_conv1d(module: nn.Module) -> None:
    """Initialize a ``Conv1D`` of GPT-2 as its constructor does, which has no method for it."""
    utils: Any = sys.modules.get("transformers.pytorch_utils")
    if utils is not None and type(module) is utils.Conv1D:
        weight, bias = module.parameters()
        nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(bias)


def ties_after_init(modules: Iterable[nn.Module]) -> bool:
    """True if a model among these modules ties its weights after their initialization."""
    return any(hasattr(type(module), "_tied_weights_keys") for module in modules)
