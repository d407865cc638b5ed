"""What a model says itself of how it is to be cut: the pipeline plan of a Hugging Face model.

    model.embed_tokens    input_ids → inputs_embeds             a list of modules is a trunk, to
    model.layers          hidden_states, … → hidden_states      be cut between its members; what
    model.norm            hidden_states → hidden_states         stands before and after it follows
    lm_head               hidden_states → logits                from what each takes and gives

Such a plan (``base_model_pp_plan`` of a configuration) tells the trunk from lists that are none,
and the order in which modules run where they are defined in another. What crosses it does not
tell well enough: that is found by running the model. A plan that does not fit the model is left
aside, and why is told. This module runs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from penstock.partition.balance.plan import prefixes, shortened
from penstock.partition.huggingface import PlanEntry, published_plan

__all__ = ["OwnPlan"]

logger = logging.getLogger(__name__)

# Of a model's parameters; a plan that names less is one of a part, as of the text half of a model
# that sees.
LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPlan:
    """The plan that a model brings along.

    Args:
        order: its modules in the order in which they run; empty where there is no plan, or none
            that fits.
        trunks: those of them that are lists of layers.
        misfit: why a plan is left aside; empty where there is none, or it fits.
    """

    order: tuple[str, ...] = ()
    trunks: tuple[str, ...] = ()
    misfit: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> OwnPlan:
        """The plan of a model.

        Args:
            model: any module, on any device.

        Example:
            >>> OwnPlan.of(nn.Sequential(nn.Linear(2, 2)))
            OwnPlan(order=(), trunks=(), misfit='')
        """
        entries = published_plan(model)
        if not entries:
            return cls()
        modules = dict(model.named_modules(remove_duplicate=False))
        unknown = [name for name in entries if name not in modules]
        if unknown:
            return cls(misfit=f"it names {shortened(unknown)}, which the model lacks")
        trunks = tuple(name for name in entries if is_list(modules[name]))
        if not trunks:
            return cls(misfit="it names no list of layers")
        held = {id(p): p.numel() for name in entries for p in modules[name].parameters()}
        share = sum(held.values()) / max(1, sum(p.numel() for p in model.parameters()))
        if share < LEAST_SHARE:
            return cls(misfit=f"its modules hold {share:.0%} of the parameters")
        return cls(order=tuple(run_order(entries)), trunks=trunks)

    def arrange(self, names: Sequence[str]) -> list[str]:
        """Names in the order in which they run, as far as the plan tells.

        Args:
            names: of modules, in the order of their definition. Those that the plan does not name
                keep their places.

        Example:
            >>> plan = OwnPlan(order=("embed", "layers", "norm"), trunks=("layers",))
            >>> plan.arrange(["norm", "rotary", "embed", "layers.0", "layers.1"])
            ['embed', 'rotary', 'layers.0', 'layers.1', 'norm']
        """
        rank = {name: self._rank(name) for name in names}
        told = iter(sorted((n for n in names if rank[n] is not None), key=lambda n: rank[n] or 0))
        return [name if rank[name] is None else next(told) for name in names]

    def tell(self, model: str) -> None:
        """Say in the log whether there is a plan, and whether it is used."""
        if self.misfit:
            logger.warning(
                "%s: its own pipeline plan is not used, since %s; blocks are found by its "
                "structure",
                model,
                self.misfit,
            )
        elif self.order:
            logger.info("%s: its own pipeline plan names %s", model, ", ".join(self.order))

    def check_order(self, model: str, calls: Mapping[str, int]) -> None:
        """Say in the log where the model runs in another order than its plan has.

        Args:
            model: what to call it.
            calls: for each module that ran, its first call.
        """
        ran = [
            name for name in sorted(calls, key=calls.__getitem__) if self._rank(name) is not None
        ]
        for before, after in pairwise(ran):
            if (self._rank(before) or 0) > (self._rank(after) or 0):
                logger.warning(
                    "%s: it runs %s before %s, in another order than its own pipeline plan has; "
                    "the order of the run counts",
                    model,
                    before,
                    after,
                )
                return

    def _rank(self, name: str) -> int | None:
        """Which of the plan's modules holds a module; None where none does."""
        found = [each for each in (name, *prefixes(name)) if each in self.order]
        return self.order.index(found[0]) if found else None


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of layers."""
    is_row = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
    return is_row and len(list(module.children())) > 1


def run_order(entries: Mapping[str, PlanEntry]) -> list[str]:
    """The modules of a plan, each behind those that make what it takes.

    Several that turn a value into one of the same name run as they are listed.
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
