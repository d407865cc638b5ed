"""Accelerate's ``prepare_pippy`` over Penstock: its import is swapped, and nothing else."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from tests.integrations.trainer_runs import SIZES
from tests.processes import run_ranks


class Scores(nn.Module):
    """A Llama of two layers that returns scores alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama: Any = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 2})).eval()
        self.llama.config.use_cache = False

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.llama(input_ids=input_ids).logits
        return scores


IDS = torch.arange(3, 43).reshape(4, 10)


def infer(rank: int, num_ranks: int, num_chunks: int) -> Tensor | None:
    """Scores of a batch that rank 0 alone uses, on the last rank."""
    os.environ["LOCAL_RANK"] = str(rank)
    from accelerate import PartialState
    from accelerate.inference import prepare_pippy

    PartialState(cpu=True)
    # Where accelerate imports the names from.
    with patch.dict(sys.modules, {"torch.distributed.pipelining": penstock}):
        piped = prepare_pippy(
            Scores(),
            split_points=["llama.model.layers.1"],
            example_args=(IDS[: len(IDS) // num_chunks],),
            num_chunks=num_chunks,
        )
    assert type(piped.pippy_stage) is penstock.ScheduleGPipe
    with torch.no_grad():
        scores: Tensor | None = piped(IDS)
    return scores


def test_prepare_pippy_by_import_swap() -> None:
    with torch.no_grad():
        expected = Scores()(IDS)
    first, last = (outcome.result() for outcome in run_ranks(infer, 2, 2))
    assert first is None
    torch.testing.assert_close(last, expected)
