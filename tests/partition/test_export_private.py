"""The private corners of torch that capturing stands on do what we think, on this torch."""

from __future__ import annotations

import torch
from torch import nn

from penstock._torch_compat import shape_check
from penstock.partition.spec import value_text


class Adds(nn.Module):
    def forward(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        left, right = leaves
        return [left.view(-1, 4) + right]


def test_assumptions_of_a_program_are_checked() -> None:
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
    assert value_text(torch.ones(2, 3)) == "float32[2,3]"
    assert value_text(3) == "int"
