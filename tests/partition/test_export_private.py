"""The private corners of torch that capturing stands on do what we think, on this torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock._torch_compat import (
    argument_effects,
    shape_check,
)
from penstock.partition.spec import describe

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("target", "shared", "written"),
    [
        (aten.view.default, {"self"}, set()),
        (aten.split.Tensor, {"self"}, set()),
        (aten.add_.Tensor, {"self"}, {"self"}),
        (aten.add.Tensor, set(), set()),
        (aten.reshape.default, {"self"}, set()),
        (aten.contiguous.default, {"self"}, set()),
        (aten.add.out, {"out"}, {"out"}),
    ],
)
def test_schemas_tell_what_is_shared_and_written(
    target: object, shared: set[str], written: set[str]
) -> None:
    effects = argument_effects(target)
    assert effects is not None
    assert {name for name, shares, _ in effects if shares} == shared
    assert {name for name, _, writes in effects if writes} == written


def test_what_has_no_schema() -> None:
    assert argument_effects(torch.relu) is None


class Adds(nn.Module):
    def forward(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        left, right = leaves
        return [left.view(-1, 4) + right]


def test_what_a_program_takes_for_granted_is_checked() -> None:
    auto = torch.export.Dim.AUTO
    example = [torch.ones(6, 2), torch.ones(3, 4)]
    shapes = ([{0: auto, 1: auto}, {0: auto, 1: auto}],)
    program = torch.export.export(Adds(), (example,), dynamic_shapes=shapes)
    check = shape_check(program, "leaves", ("left", "right"))
    assert check([torch.ones(10, 2), torch.ones(5, 4)]) is None
    for left, right in (((6, 2), (3, 5)), ((6, 2), (1, 4)), ((6, 2), (4, 4)), ((6,), (3, 4))):
        told = check([torch.ones(left), torch.ones(right)])
        assert told is not None and "captured for" in told, (left, right)


def test_open_sizes_are_stars() -> None:
    assert describe(torch.ones(2, 3)) == "float32[2,3]"
    assert describe(3) == "int"
