"""The private torch calls around DDP and FSDP2, in one place.

Seen to work on torch 2.13.0 (``tests/stage/test_data_parallel.py`` says so again on each run).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["ddp_has_comm_hook", "fsdp_finish_backward", "fsdp_roots"]


def ddp_has_comm_hook(module: DistributedDataParallel) -> bool:
    """Whether the user registered a communication hook."""
    return bool(getattr(module, "_comm_hooks", None))


def fsdp_finish_backward(root: FSDPModule) -> None:
    """Reduce-scatter what the parameters of ``root`` have gathered, as after a last backward.

    FSDP does so from a callback of the autograd engine at the end of ``backward()``; here the
    weight gradients may come after any engine run.
    """
    state: Any = root._get_fsdp_state()
    state._root_post_backward_final_callback()


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules within ``module``, itself included."""
    found: list[FSDPModule] = []
    # Its import takes a second or more. Who has sharded a module has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return found

    def visit(child: nn.Module) -> None:
        if isinstance(child, fsdp.FSDPModule):
            found.append(child)
            return
        for grandchild in child.children():
            visit(grandchild)

    visit(module)
    return found
