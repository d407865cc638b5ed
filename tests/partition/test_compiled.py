"""Compiled models and parts: cut around them as they are, within them uncompiled or not at all."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, pipeline
from penstock.partition.forward.by_module import NotByModule, split_by_module
from tests.compare import assert_same, snapshot
from tests.partition.capturing import cuts_before
from tests.partition.odd_models import DIM, NetBase
from tests.partition.test_top_level_forward import X, trains_alike


class Outer(nn.Module):
    """A trunk between two layers, all of which may be compiled."""

    def __init__(self, compiled: str = "") -> None:
        torch.manual_seed(0)
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.trunk: Any = NetBase()
        self.tail = nn.Linear(DIM, DIM)
        match compiled:
            case "blocks in place":
                for block in self.trunk.blocks:
                    block.compile(backend="eager")
            case "blocks":
                made = (torch.compile(block, backend="eager") for block in self.trunk.blocks)
                self.trunk.blocks = nn.ModuleList(made)  # type: ignore[arg-type]
            case "trunk in place":
                self.trunk.compile(backend="eager")
            case "trunk":
                self.trunk = torch.compile(self.trunk, backend="eager")
            case "its forward":
                self.trunk.forward = torch.compile(self.trunk.forward, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tail(self.trunk(self.stem(x)))
        return y


WHOLE = ("trunk in place", "trunk", "its forward")


def within(compiled: str) -> str:
    return "trunk._orig_mod.blocks.2" if compiled == "trunk" else "trunk.blocks.2"


# Dynamo looks at what it is called with, which no leaf is that comes from another module.
@pytest.mark.parametrize(
    ("compiled", "schedule"), [("blocks in place", "1f1b"), ("blocks", "zb-h1")]
)
def test_compiled_blocks_are_cut_between(compiled: str, schedule: str) -> None:
    model = Outer(compiled)
    split = split_by_module(model, ["trunk.blocks.2"], (X[:2],))
    assert split.names[1][0] == "trunk.blocks.2"
    trains_alike(Outer(compiled), Outer(), schedule=schedule)


def test_compiled_blocks_need_no_values_for_their_trace() -> None:
    with torch.device("meta"):
        model = Outer("blocks in place")
    assert split_by_module(model, [2, 2], (X[:2],)).plan is not None


@pytest.mark.parametrize("compiled", WHOLE)
def test_a_cut_within_a_compiled_module(compiled: str, caplog: pytest.LogCaptureFixture) -> None:
    """By module it is refused, and the way out told; captured it runs, uncompiled."""
    with pytest.raises(
        NotByModule, match=r"trunk is one piece by torch.compile.*before or after it.*layer.comp"
    ):
        split_by_module(Outer(compiled), [within(compiled)], (X[:2],))
    with caplog.at_level(logging.INFO, "penstock"):
        trains_alike(Outer(compiled), Outer(), split=[within(compiled)], ranks=None)
    assert any("cut by torch.export" in line and "one piece" in line for line in caplog.messages)


@pytest.mark.parametrize("compiled", WHOLE)
def test_a_cut_around_a_compiled_module(compiled: str) -> None:
    split = split_by_module(Outer(compiled), ["tail"], (X[:2],))
    assert split.names == (("stem", "trunk"), ("tail",))
    trains_alike(Outer(compiled), Outer(), split=["trunk"], ranks=None)


def test_a_whole_compiled_model() -> None:
    model, plain = NetBase(), NetBase()
    plain.load_state_dict(model.state_dict())
    model.compile(backend="eager")
    trains_alike(model, plain)


@pytest.mark.filterwarnings("ignore")
def test_a_cut_within_a_scripted_module() -> None:
    """Neither way can take it apart, and both say so."""
    model = Outer()
    model.trunk = torch.jit.trace(model.trunk, (X[:2],))
    with pytest.raises(NotByModule, match=r"trunk is one piece by torch.jit"):
        split_by_module(model, ["trunk.blocks"], (X[:2],))
    with pytest.raises(PartitionError, match="outside of compiled or fused regions; take"):
        pipeline(model, (X[:2],), split_spec=cuts_before("trunk.blocks"))


class Keyworded(nn.Sequential):
    def forward(self, x: Tensor, *, scale: Tensor) -> Any:
        return {"out": super().forward(x * scale)}


def test_captured_stages_are_compiled() -> None:
    """Trees of arguments and outputs, which the compiler has its own of, are left to us."""
    model = Keyworded(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    plain = copy.deepcopy(model)
    cut = pipeline(model, (X[:2],), {"scale": X[:2]}, cuts_before("2"))
    for i in range(2):
        cut.get_stage_module(i).compile(backend="eager")
    for output in (cut(X, scale=X)[0], plain(X, scale=X)["out"]):
        output.square().mean().backward()
    assert_same(snapshot(model), snapshot(plain))
