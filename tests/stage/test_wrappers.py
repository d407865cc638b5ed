"""Wrappers around modules change no name, wherever they stand and however many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock.stage.wrappers import named_plainly, plain_name, unwrapped


def compiled(module: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(module, backend="eager")  # type: ignore[assignment]
    return wrapped


class Module(nn.Module):
    """Its layers are called as wrappers call what they hold."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.module = wrap(nn.Linear(2, 2))
        self.blocks = nn.Sequential(wrap(nn.BatchNorm1d(2)), nn.Sequential(wrap(nn.Linear(2, 2))))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda m: m,
    "compiled": compiled,
    "compiled in place": lambda m: (m.compile(backend="eager"), m)[1],
    "checkpointed": checkpoint_wrapper,
    "compiled, then checkpointed": lambda m: checkpoint_wrapper(compiled(m)),
    "checkpointed, then compiled": lambda m: compiled(checkpoint_wrapper(m)),
}


@pytest.mark.parametrize("inside", WRAPS)
@pytest.mark.parametrize("outside", WRAPS)
def test_names_are_those_of_the_plain_module(inside: str, outside: str) -> None:
    plain = Module(WRAPS["none"])
    wrapped = WRAPS[outside](Module(WRAPS[inside]))
    names = [name for name, _ in named_plainly(wrapped, buffers=False)]
    assert names == [name for name, _ in plain.named_parameters()]
    names = [name for name, _ in named_plainly(wrapped, buffers=True)]
    assert names == [name for name, _ in plain.named_buffers()]
    assert [plain_name(wrapped, name) for name in wrapped.state_dict()] == [*plain.state_dict()]


def test_other_modules_are_not_unwrapped() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    assert unwrapped(outer) is outer
    assert unwrapped(compiled(checkpoint_wrapper(outer))) is outer
