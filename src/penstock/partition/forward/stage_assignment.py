"""Assign a stage to each leaf module, from the user's split.

    cuts               wte  wpe  drop  h.0  h.1  h.2  h.3  ln_f  lm_head
    [2, 2]              0    0    -     0    0    1    1    1     1
    ["h.1"]             0    0    -     0    1    1    1    1     1
    [[...], [...]]      as named; a parameter that is left over is an error

A stateless leaf module (-) needs no stage. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.forward.forward_plan import ForwardPlan, first_uses, plan_forward
from penstock.partition.forward.forward_trace import ForwardTrace
from penstock.partition.forward.leaf_modules import LeafModules
from penstock.partition.plan import abbreviate
from penstock.partition.spec import SplitSpec
from penstock.partition.ties import names_by_tensor

__all__ = ["assign_stages", "try_cut"]


def assign_stages(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None
) -> dict[str, int | None]:
    """Assign a stage to each leaf module.

    Args:
        leaves: the model's leaf modules.
        spec: the places to cut.
        trace: the model's trace; without one, definition order is taken as execution order.

    Returns:
        The stage of each leaf module and direct parameter; None for stateless leaf modules.

    Raises:
        PartitionError: a stage is empty, a parameter has no stage, or the cuts are out of order.
    """
    with_state = [name for name in leaves.leaves if leaves.has_state(name)]
    stages: dict[str, int | None] = dict.fromkeys(leaves.leaves)
    stages |= (_by_names if spec.stages else _by_starts)(leaves, spec, trace, with_state)
    unnamed = [name for name in leaves.direct if name not in stages]
    if spec.stages:
        params = dict(leaves.model.named_parameters(remove_duplicate=False))
        _refuse_left_over([name for name in unnamed if name in params], spec)
    uncalled = [name for name in with_state if stages[name] is None]
    if trace is not None and (unnamed or uncalled):
        uses = first_uses(trace, stages, spec.num_stages)
        stages |= _where_used(leaves.model, [*unnamed, *uncalled], uses)
    stages |= {name: 0 for name in unnamed if name not in stages}
    before = 0
    for name in with_state:  # an unused module joins the module defined before it
        at = stages[name]
        stages[name] = before = before if at is None else at
    for stage in range(spec.num_stages):
        if stage not in stages.values():
            raise PartitionError(
                f"stage {stage} would hold no parameter; give it modules that have some, or cut "
                "into fewer stages"
            )
    return stages


def try_cut(leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace) -> ForwardPlan | None:
    """The plan of a model cut at these places; None if it can't be cut."""
    try:
        assignment = assign_stages(leaves, spec, trace)
        return plan_forward(trace, assignment, spec.num_stages, leaves.shared)
    except PartitionError:
        return None


def _by_names(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None, with_state: Sequence[str]
) -> dict[str, int | None]:
    stages: dict[str, int | None] = {}
    for stage, names in enumerate(spec.stages):
        for name in names:
            for leaf in leaves.under(name):
                if leaf in with_state or leaf in leaves.direct:
                    other = stages.setdefault(leaf, stage)
                    if other != stage:
                        raise PartitionError(
                            f"{name} is named in stage {stage}, but is the same module as {leaf}, "
                            f"which stage {other} has; name it once"
                        )
    # A module that occurs several times in a list but is named once stays whole.
    held = {id(leaves.leaves[leaf]): at for leaf, at in stages.items() if leaf in leaves.leaves}
    again = {leaf: held.get(id(leaves.leaves[leaf])) for leaf in with_state}
    stages = {**{leaf: at for leaf, at in again.items() if at is not None}, **stages}
    missing = [leaf for leaf in with_state if leaf not in stages]
    inside = [f"{m}.{p}" for m in missing for p, _ in leaves.leaves[m].named_parameters()]
    _refuse_left_over(inside or missing, spec)
    return stages


def _refuse_left_over(left: Sequence[str], spec: SplitSpec) -> None:
    if left:
        raise PartitionError(
            f"no stage holds the parameters {abbreviate(left)}; name them, or the modules that "
            f"hold them, in one of the {spec.num_stages} stages"
        )


def _by_starts(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None, with_state: Sequence[str]
) -> dict[str, int | None]:
    order: Mapping[str, int] = (
        {name: i for i, name in enumerate(leaves.leaves)} if trace is None else trace.first_calls()
    )
    starts = spec.begins(order)
    firsts = [_first_call(leaves, name, order) for name in starts]
    for (before, first), (name, then) in pairwise(zip(starts, firsts, strict=True)):
        if then <= first:
            raise PartitionError(
                f"a stage is to begin with {before} and the next one with {name}, which does not "
                "run after it; name them in the order in which they run"
            )
    return {
        name: sum(first <= order[name] for first in firsts) for name in with_state if name in order
    }


def _where_used(
    model: nn.Module, names: Sequence[str], uses: Mapping[str, int]
) -> dict[str, int | None]:
    """The first stage that uses each parameter in the top-level forward.

    A head that is never called, since a fused loss takes its weight, goes to this stage.
    """
    found: dict[str, int | None] = {}
    known = {name: every[0] for every in names_by_tensor(model).values() for name in every}
    for part in names:
        inside = (known[name] for name in known if name == part or name.startswith(f"{part}."))
        at = [uses[name] for name in inside if name in uses]
        if at:
            found[part] = min(at)
    return found


def _first_call(leaves: LeafModules, name: str, order: Mapping[str, int]) -> int:
    if name in leaves.direct:
        raise PartitionError(
            f"a stage is to begin with {name}, which is no module; begin with one that is called"
        )
    called = [order[leaf] for leaf in leaves.under(name) if leaf in order]
    if not called:
        raise PartitionError(
            f"a stage is to begin with {name}, but the model did not call it on the example; "
            "begin with a module that it calls"
        )
    return min(called)
