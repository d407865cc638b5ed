"""What a profile says crosses is what stages that are cut by module send."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import profile, split_by_module
from penstock.stage.boundary import shape_text
from tests.real_models import REAL_MODELS

FAMILIES = ("gpt2", "llama", "t5", "bert", "mixtral", "unet")


def crossing_tensors(stages: Any, example: dict[str, Any]) -> list[list[Tensor]]:
    """The tensors that each stage but the last returns."""
    found = []
    output = stages[0](**example)
    for stage in stages[1:]:
        found.append(list(output[1]))
        output = stage(*output)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_lists_the_tensors_that_stages_send(name: str) -> None:
    case = REAL_MODELS[name]
    model, example = case.model(), case.example()
    measured = profile(model, example, runs=1)
    first = len(measured.blocks) // 2
    for counts in [(first, len(measured.blocks) - first), (2, 1, len(measured.blocks) - 3)]:
        plan = measured.plan(counts)
        split = split_by_module(model, plan, example)
        sent = crossing_tensors(split.stages, example)
        assert split.plan is not None
        assert [len(each) for each in sent] == [len(each) for each in split.plan.boundary_values]
        *ends, last = (measured.blocks[end - 1] for end in accumulate(counts))
        assert [list(block.sends) for block in ends] == [
            [shape_text(tensor) for tensor in tensors] for tensors in sent
        ]
        assert [block.sent_bytes for block in ends] == [
            sum(tensor.nbytes for tensor in tensors) for tensors in sent
        ]
        assert last.sends == ()


def test_inputs_that_every_stage_has_cross_and_tables_that_each_computes_do_not() -> None:
    case = REAL_MODELS["gpt2"]
    example = case.example(rows=2)
    measured = profile(case.model(), example, runs=1)
    ids = "int64[2,6]"  # the tokens, the mask and the labels
    assert all(block.sends == (ids, ids, ids, "float32[2,6,32]") for block in measured.blocks[:-1])
    assert measured.blocks[0].sent_bytes == 3 * 2 * 6 * 8 + 2 * 6 * 32 * 4


def test_one_tensor_is_an_example_like_others() -> None:
    model = REAL_MODELS["llama"].model()
    ids = REAL_MODELS["llama"].example()["input_ids"]
    one, named = profile(model, ids, runs=1), profile(model, {"input_ids": ids}, runs=1)
    assert [b.sends for b in one.blocks] == [b.sends for b in named.blocks]
    assert one.blocks[1].sends[0] == "int64[4,6]"


def test_models_not_cut_by_module_use_observed_outputs() -> None:
    class Counting(nn.Module):
        """Asks for values between its layers, which a trace has not."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                if x.mean() > 100:
                    x = x / 2
            return x

    measured = profile(Counting(), torch.ones(2, 4), runs=1)
    assert [block.sends for block in measured.blocks] == [("float32[2,4]",)] * 2 + [()]
