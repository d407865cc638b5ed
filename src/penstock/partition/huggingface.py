"""Habits of Hugging Face's models that stages have to know of.

What they collect from within their parts, beside what these return:

    outputs = self.model(ids, output_router_logits=True)       hooks on every router append to a
    loss += balance(outputs.router_logits)                     list that the model's forward opens

A part that runs on another stage appends nothing there, and the auxiliary loss would be another
number. So what a part appends is taken for one of its outputs: it can cross, and where the part
is absent, it is appended in its place. And the cache of keys and values, which serves generation,
but is filled in training as well unless it is turned off: the parts would write into it on
different stages. And the plans for pipelines that many of them bring along; and the adapters that
peft puts into their layers. Seen to work on
transformers 5.23 (``tests/partition/test_huggingface.py`` says so again on each run). Nothing is
imported here: where transformers is not loaded, there is nothing to know.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from inspect import getattr_static
from typing import Any, TypeAlias

from torch import nn

__all__ = [
    "CapturedOutputs",
    "PlanEntry",
    "adapters",
    "capture_since",
    "install_hooks",
    "mark",
    "published_plan",
    "replay",
    "without_cache",
]

MODULE = "transformers.utils.output_capturing"
CapturedOutputs: TypeAlias = dict[str, list[Any]]
PlanEntry: TypeAlias = tuple[Sequence[str], Sequence[str]]
"""What a module takes, and what it gives."""


def collector() -> dict[str, Any] | None:
    """The lists that are open now, by key."""
    capturing: Any = sys.modules.get(MODULE)
    return None if capturing is None else capturing._active_collector.get()


def mark() -> Mapping[str, int] | None:
    """How long each open list is now; None where none is open."""
    lists = collector()
    if not lists:
        return None
    return {key: len(values) for key, values in lists.items() if isinstance(values, list)}


def capture_since(marked: Mapping[str, int] | None) -> CapturedOutputs:
    """What was appended since ``mark``, by key; empty lists are left out."""
    lists = collector()
    if not marked or not lists:
        return {}
    fresh = {key: list(lists[key][start:]) for key, start in marked.items()}
    return {key: values for key, values in fresh.items() if values}


def replay(captured: CapturedOutputs, marked: Mapping[str, int] | None = None) -> None:
    """Append what a part appended elsewhere; if ``marked``, in place of all since ``mark``."""
    lists = collector()
    for key, values in captured.items():
        if lists is not None and key in lists:
            start = len(lists[key]) if marked is None else marked[key]
            lists[key][start:] = values


def install_hooks(model: nn.Module) -> None:
    """Have the hooks installed once, on the plain model: copies of it must not do it again."""
    capturing: Any = sys.modules.get(MODULE)
    if capturing is None:
        return
    for module in model.modules():
        if capturing._CAN_RECORD_REGISTRY.get(module):
            capturing.maybe_install_capturing_hooks(module)


def without_cache(module: nn.Module) -> None:
    """Turn the cache off in a copy of a module, whose configuration is the model's own."""
    config: Any = vars(module).get("config")
    if getattr(config, "use_cache", False) is True:
        quiet = copy.copy(config)
        quiet.use_cache = False
        module.config = quiet


def adapters(module: nn.Module) -> Sequence[str]:
    """The children of a layer that were added to it, to be trained in its stead: those of peft.

    What they begin with (zeros, a copy of the layer's weight) is known to who made them alone.
    """
    names: Sequence[str] = getattr_static(module, "adapter_layer_names", ())
    return names


def published_plan(model: nn.Module) -> dict[str, PlanEntry]:
    """The plan for pipelines of a model, or of the outermost parts of it that bring one along.

    ``base_model_pp_plan`` of a configuration speaks of the model without its head; with what the
    class of the whole model adds to it, it is kept on the model, under the names there.

    Args:
        model: any module.

    Returns:
        By the qualified names of modules, what each takes and gives; empty where nothing is said.
    """
    found: dict[str, PlanEntry] = {}
    planned: list[str] = []
    for name, module in model.named_modules():
        # A wrapper may answer for what it wraps, with names as they are in there.
        plan = getattr_static(module, "_pp_plan", None)
        if not isinstance(plan, dict) or not plan:
            continue
        if any(name.startswith(each) for each in planned):
            continue
        prefix = f"{name}." if name else ""
        planned.append(prefix)
        for key, (takes, gives) in plan.items():
            found[f"{prefix}{key}"] = takes, gives
    return found
