"""``split="auto"``: a model measured, and the plan that suits what its stages are to run.

    model, example ──measuring.py──► costs per block ──for_program.py──► counts ──► plan

This module cuts nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import PartitionError
from penstock.partition.balance.for_program import balance_for
from penstock.partition.balance.measuring import measure_model
from penstock.partition.plan import Plan
from penstock.partition.spec import Example
from penstock.schedule.program import Program

__all__ = ["balanced_plan"]

logger = logging.getLogger(__name__)


def balanced_plan(
    model: nn.Module | Sequence[nn.Module],
    program: Program,
    example: Example | None,
    *,
    device: torch.device,
    loss_fn: Callable[..., Any] | None = None,
) -> Plan:
    """The plan of a model that suits a program, measured on this machine.

    Args:
        model: the model, on one device.
        program: what the stages run.
        example: one microbatch.
        device: where the stages will live; it is measured there.
        loss_fn: counted with the last stage, on stand-ins for targets; if None, the model's own,
            where it has one.

    Raises:
        PartitionError: there is no example to measure with, or there are too few blocks.
    """
    if example is None:
        raise PartitionError(
            "split='auto' measures the model: pass example=, one microbatch as a tuple of "
            "positional or a dict of keyword arguments"
        )
    measured = measure_model(model, example, device=device, loss_fn=loss_fn)
    found = balance_for(measured, program)
    logger.info(
        "split='auto': %d blocks into %s; the busiest rank takes %.3g s per microbatch, all "
        "together %.3g s",
        len(measured.blocks),
        list(found.counts),
        found.bottleneck_s,
        sum(found.rank_time_s),
    )
    return measured.plan(found.counts, made=f"balanced on this machine, for {program.name}")
