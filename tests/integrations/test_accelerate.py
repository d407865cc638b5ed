"""Accelerate's ``prepare_pippy`` over Penstock: its import is swapped, and nothing else."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.integrations.transformers import PrefetchingLoader
from tests.integrations.trainer_runs import SIZES
from tests.processes import run_ranks


class Scores(nn.Module):
    """A Llama of two layers that returns scores alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
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


@pytest.mark.parametrize("is_prepared", [True, False])
def test_a_loader_is_looked_ahead_to_its_end(is_prepared: bool) -> None:
    """Accelerate tells of the last batch, but for a loader that it has not prepared."""
    state = SimpleNamespace(end_of_dataloader=False)
    accelerator, batches = SimpleNamespace(gradient_state=state, is_ahead=False), list[int]()

    def loader() -> Any:
        for number in range(5):
            state.end_of_dataloader = is_prepared and number == 4
            yield number

    seen = []
    for batch in PrefetchingLoader(loader(), 2, batches, accelerator):
        seen.append((batch, batches[:], accelerator.is_ahead))
    pairs = [[0, 1], [0, 1], [2, 3], [2, 3], [4]]
    aheads = [True, False, True, False, False]
    assert seen == list(zip(range(5), pairs, aheads, strict=True))
