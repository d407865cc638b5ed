"""Support for Hugging Face's transformers: collected outputs, the cache, adapters, pipeline plans.

    outputs = self.model(ids, output_router_logits=True)       hooks on every router append to a
    loss += balance(outputs.router_logits)                     list that the model's forward opens

A module on another stage would append nothing, and the auxiliary loss would be wrong. So appended
values count as outputs of their module: they may cross stages, and are appended where the module is
replaced by its stub. The key-value cache serves generation, but training fills it too unless it is
turned off.

This module never imports transformers: if it is not loaded, there is nothing to do. Its private
names here (``_active_collector``, ``_CAN_RECORD_REGISTRY``, ``_pp_plan``) were seen on transformers
5.23; ``tests/partition/test_huggingface.py`` checks them.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import Any, TypeAlias

from torch import nn

from penstock.partition.plan import abbreviate, prefixes

__all__ = [
    "CapturedOutputs",
    "HFPipelinePlan",
    "adapters",
    "capture_since",
    "install_hooks",
    "mark",
    "replay",
    "without_cache",
]

logger = logging.getLogger(__name__)

MODULE = "transformers.utils.output_capturing"
# As a share of the parameters; a plan that covers less describes only a part, such as the text half
# of a model.
LEAST_SHARE = 0.5

CapturedOutputs: TypeAlias = dict[str, list[Any]]
PlanEntry: TypeAlias = tuple[Sequence[str], Sequence[str]]
"""The names of a module's inputs, and of its outputs."""


def collector() -> dict[str, Any] | None:
    """The lists currently collecting, by key; None without transformers or open lists."""
    capturing: Any = sys.modules.get(MODULE)
    return None if capturing is None else capturing._active_collector.get()


def mark() -> Mapping[str, int] | None:
    """The lengths of the lists currently collecting; None if there are none."""
    lists = collector()
    if not lists:
        return None
    return {key: len(values) for key, values in lists.items() if isinstance(values, list)}


def capture_since(marked: Mapping[str, int] | None) -> CapturedOutputs:
    """The values appended since ``mark``, by key, without empty lists."""
    lists = collector()
    if not marked or not lists:
        return {}
    fresh = {key: list(lists[key][start:]) for key, start in marked.items()}
    return {key: values for key, values in fresh.items() if values}


def replay(captured: CapturedOutputs, marked: Mapping[str, int] | None = None) -> None:
    """Append values captured on another stage; with ``marked``, replace all values since
    ``mark``."""
    lists = collector()
    for key, values in captured.items():
        if lists is not None and key in lists:
            start = len(lists[key]) if marked is None else marked[key]
            lists[key][start:] = values


def install_hooks(model: nn.Module) -> None:
    """Install the hooks on the plain model, so that its copies do not install them again."""
    capturing: Any = sys.modules.get(MODULE)
    if capturing is None:
        return
    for module in model.modules():
        if capturing._CAN_RECORD_REGISTRY.get(module):
            capturing.maybe_install_capturing_hooks(module)


def without_cache(module: nn.Module) -> None:
    """Turn the cache off in a copy of a module; the model's own configuration stays unchanged."""
    config: Any = vars(module).get("config")
    if getattr(config, "use_cache", False) is True:
        quiet = copy.copy(config)
        quiet.use_cache = False
        module.config = quiet


def adapters(module: nn.Module) -> Sequence[str]:
    """The children that peft added to a layer; only peft knows how to initialize them."""
    names: Sequence[str] = getattr_static(module, "adapter_layer_names", ())
    return names


# --- pipeline plans -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPipelinePlan:
    """The pipeline plan of a Hugging Face model (``base_model_pp_plan`` of its configuration).

        model.embed_tokens    input_ids → inputs_embeds             a list of modules is a trunk,
        model.layers          hidden_states, … → hidden_states      cut between its members;
        model.norm            hidden_states → hidden_states         the order follows from what
        lm_head               hidden_states → logits                each takes and gives

    The plan gives the trunk, and the execution order if it differs from definition order. Crossing
    values are still found by running the model. A plan that does not fit the model is ignored, with
    a logged warning.

    Args:
        order: the plan's modules in execution order; empty without a fitting plan.
        trunks: the lists of layers among them.
        misfit: the reason why the plan is ignored; empty if there is no plan, or it fits.
    """

    order: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    misfit: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> HFPipelinePlan:
        """The plan of a model.

        Args:
            model: any module, on any device.

        Example:
            >>> HFPipelinePlan.of(nn.Sequential(nn.Linear(2, 2)))
            HFPipelinePlan(order=(), trunks=(), misfit='')
        """
        entries = published_plan(model)
        if not entries:
            return cls()
        modules = dict(model.named_modules(remove_duplicate=False))
        unknown = [name for name in entries if name not in modules]
        if unknown:
            return cls(misfit=f"it names {abbreviate(unknown)}, which the model lacks")
        trunks = tuple(name for name in entries if _is_list(modules[name]))
        if not trunks:
            return cls(misfit="it names no list of layers")
        held = {id(p): p.numel() for name in entries for p in modules[name].parameters()}
        share = sum(held.values()) / max(1, sum(p.numel() for p in model.parameters()))
        if share < LEAST_SHARE:
            return cls(misfit=f"its modules hold {share:.0%} of the parameters")
        return cls(order=tuple(_run_order(entries)), trunks=trunks)

    def arrange(self, names: Sequence[str]) -> list[str]:
        """Sort names of modules by the plan's execution order.

        Args:
            names: the names in definition order. Modules outside the plan keep their places.

        Example:
            >>> plan = HFPipelinePlan(order=("embed", "layers", "norm"), trunks=("layers",))
            >>> plan.arrange(["norm", "rotary", "embed", "layers.0", "layers.1"])
            ['embed', 'rotary', 'layers.0', 'layers.1', 'norm']
        """
        rank = {name: self._rank(name) for name in names}
        known = iter(sorted((n for n in names if rank[n] is not None), key=lambda n: rank[n] or 0))
        return [name if rank[name] is None else next(known) for name in names]

    def log(self, model: str) -> None:
        """Log if the plan is used; ``model`` is the model's name in the message."""
        if self.misfit:
            logger.warning(
                "%s: its own pipeline plan is not used, since %s; blocks are found by its "
                "structure",
                model,
                self.misfit,
            )
        elif self.order:
            logger.info("%s: its own pipeline plan names %s", model, ", ".join(self.order))

    def _rank(self, name: str) -> int | None:
        """The position in the plan of the module that contains ``name``; None outside the plan."""
        found = [each for each in (name, *prefixes(name)) if each in self.order]
        return self.order.index(found[0]) if found else None


def _is_list(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return is_list and len(list(module.children())) > 1


def _run_order(entries: Mapping[str, PlanEntry]) -> list[str]:
    """The modules of a plan, each after the producers of its inputs.

    Modules whose inputs and outputs have the same names run in listed order.
    """
    left = dict(entries)
    order: list[str] = []
    while left:
        ready = (
            name
            for name, (takes, gives) in left.items()
            if not any(
                value in given and (value not in gives or value not in taken)
                for other, (taken, given) in left.items()
                if other != name
                for value in takes
            )
        )
        name = next(ready, next(iter(left)))
        order.append(name)
        del left[name]
    return order


def published_plan(model: nn.Module) -> dict[str, PlanEntry]:
    """The pipeline plan of a model, or of the outermost submodules with a plan.

    Returns:
        A mapping from qualified module names to the names of their inputs and outputs.
    """
    found: dict[str, PlanEntry] = {}
    planned: list[str] = []
    for name, module in model.named_modules():
        # Static lookup: a wrapper may forward the attribute of the wrapped model, with names
        # relative to that model. A model's attribute includes the head, its configuration's does
        # not.
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
