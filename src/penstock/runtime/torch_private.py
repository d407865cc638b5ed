"""The private torch calls of the runtime, in one place.

Seen to work on torch 2.13.0 (``tests/runtime/test_torch_private.py`` says so again on each run).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["has_grad_hooks", "profiler_is_on", "takes_cpu_tensors"]


def has_grad_hooks(param: Tensor) -> bool:
    """Whether hooks run whenever the gradient of ``param`` has been accumulated."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether one of the group's backends moves CPU tensors."""
    return torch.device("cpu") in group._device_types


def profiler_is_on() -> bool:
    """Whether ``torch.profiler`` is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)
