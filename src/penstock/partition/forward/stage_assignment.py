"""Assign a stage to each leaf module, from the user's split.

    cuts               wte  wpe  drop  h.0  h.1  h.2  h.3  ln_f  lm_head
    [2, 2]              0    0    -     0    0    1    1    1     1
    ["h.1"]             0    0    -     0    1    1    1    1     1
    [[...], [...]]      as named; a parameter that is left over is an error

A stateless leaf module (-) needs no stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

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
    if spec.stages:
        stages |= _by_names(leaves, spec, with_state)
    else:
        stages |= _by_starts(leaves, spec, trace, with_state)
    unassigned = [name for name in leaves.direct if name not in stages]
    unassigned += [name for name in with_state if stages[name] is None]
    if trace is not None and unassigned:
        # A head that is never called, since a fused loss takes its weight, goes where it is used.
        uses = first_uses(trace, stages, spec.num_stages)
        first = {n: names[0] for names in names_by_tensor(leaves.model).values() for n in names}
        for name in unassigned:
            inside = (first[n] for n in first if n == name or n.startswith(f"{name}."))
            stages[name] = min((uses[each] for each in inside if each in uses), default=None)
    stages |= {name: 0 for name in leaves.direct if stages.get(name) is None}
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


def _by_names(leaves: LeafModules, spec: SplitSpec, with_state: Sequence[str]) -> dict[str, int]:
    stages: dict[str, int] = {}
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
    modules = leaves.leaves
    by_module = {id(modules[leaf]): at for leaf, at in stages.items() if leaf in modules}
    again = {leaf: by_module.get(id(modules[leaf])) for leaf in with_state}
    stages = {leaf: at for leaf, at in again.items() if at is not None} | stages
    params = dict(leaves.model.named_parameters(remove_duplicate=False))
    missing = [name for name in leaves.direct if name in params and name not in stages]
    for leaf in with_state:
        if leaf not in stages:
            inside = [f"{leaf}.{name}" for name, _ in modules[leaf].named_parameters()]
            missing += inside or [leaf]
    if missing:
        raise PartitionError(
            f"no stage holds the parameters {abbreviate(missing)}; name them, or the modules that "
            f"hold them, in one of the {spec.num_stages} stages"
        )
    return stages


def _by_starts(
    leaves: LeafModules, spec: SplitSpec, trace: ForwardTrace | None, with_state: Sequence[str]
) -> dict[str, int]:
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


def _first_call(leaves: LeafModules, name: str, order: Mapping[str, int]) -> int:
    called = [order[leaf] for leaf in leaves.under(name) if leaf in order]
    if not called:
        raise PartitionError(
            f"a stage is to begin with {name}, but the model does not call it on the example; "
            "begin with a module that it calls"
        )
    return min(called)
