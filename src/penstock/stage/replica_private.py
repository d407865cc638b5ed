"""The private torch calls around DDP and FSDP2, in one place.

``tests/test_torch.py`` names the versions of torch that they were seen to work on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed._composable.replicate import DDP as ComposableDdp
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

__all__ = [
    "broadcast_ddp_buffers",
    "composable_syncs",
    "ddp_casts",
    "ddp_comm_hook",
    "ddp_parameters",
    "ddp_within",
    "fsdp_finish_backward",
    "is_composable_ddp",
    "is_fsdp",
    "is_fsdp1",
    "switch_ddp_sink",
]


# Importing these parts of torch takes a second. Whoever has wrapped a module has imported them;
# where nobody has, no module is wrapped.


def _loaded(module_name: str, name: str) -> Any:
    return getattr(sys.modules.get(module_name), name, ())


def is_fsdp(module: object) -> TypeGuard[FSDPModule]:
    """Whether ``module`` was given to ``fully_shard``."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FSDPModule"))


def is_fsdp1(module: object) -> TypeGuard[FullyShardedDataParallel]:
    """Whether ``module`` is wrapped in the first FSDP."""
    return isinstance(module, _loaded("torch.distributed.fsdp", "FullyShardedDataParallel"))


def is_composable_ddp(module: object) -> TypeGuard[ComposableDdp]:
    """Whether ``module`` was given to the ``replicate`` that stands on DDP."""
    return isinstance(module, _loaded("torch.distributed._composable.replicate", "DDP"))


def _replicate_state(module: ComposableDdp) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate.state(module)  # type: ignore[arg-type]


def ddp_casts(module: DistributedDataParallel) -> bool:
    """Whether DDP itself casts parameters and gradients: it was given ``mixed_precision``."""
    return module.mixed_precision is not None


def ddp_comm_hook(module: DistributedDataParallel) -> Callable[[Any], Any] | None:
    """The communication hook that the user registered, its state filled in."""
    for hook, state in module._comm_hooks:
        return partial(hook, state)
    return None


def broadcast_ddp_buffers(module: DistributedDataParallel) -> None:
    """Give every replica the buffers of the first one, those that DDP was told to ignore aside."""
    module._sync_buffers()  # type: ignore[no-untyped-call]


def ddp_parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters that DDP keeps alike: not those it was told to ignore."""
    held: list[nn.Parameter] = module._module_parameters
    return [p for p in held if p.requires_grad]


def switch_ddp_sink(module: DistributedDataParallel, *, off: bool) -> bool:
    """Whether ``static_graph`` is kept from its own all-reduce at the end of the first backward.

    With a static graph, DDP puts off the first all-reduce to the end of the first backward, even
    under ``no_sync()``, where it then fails.

    Returns:
        What it was before.
    """
    if not module.static_graph:
        return off
    before: bool = module._static_graph_delay_allreduce_enqueued
    module._static_graph_delay_allreduce_enqueued = off
    return before


def ddp_within(module: ComposableDdp) -> DistributedDataParallel:
    """The DDP module behind a module given to ``replicate``; made now if it was not yet."""
    state = _replicate_state(module)
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    ddp: DistributedDataParallel = state._ddp
    return ddp


def composable_syncs(module: ComposableDdp) -> bool:
    """Whether a module given to ``replicate`` reduces its gradients."""
    state = _replicate_state(module)
    return not state._no_sync


def fsdp_finish_backward(root: FSDPModule) -> None:
    """Reduce-scatter what the parameters of ``root`` have gathered, as after a last backward.

    FSDP does so from a callback of the autograd engine at the end of ``backward()``; here the
    weight gradients may come after any engine run. Where it sees no tensor in a module's output,
    the callback was never set, and the parameters count as done with since their last microbatch.
    """
    state: Any = root._get_fsdp_state()
    for each in state._state_ctx.all_states:
        for group in _fsdp_groups(each):
            group._training_state = type(group._training_state).IDLE
    # Of torch 2.15, likewise set by the callback.
    context, manual = state._state_ctx, "manual_backward_finalization_active"
    setattr(context, manual, getattr(context, manual, None) or False)
    state._root_post_backward_final_callback()


def _fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that one module's FSDP gathers; torch 2.11 has one at most."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [group for group in (state._fsdp_param_group,) if group is not None]
