"""Consistency checks between ranks: same calls, same order, same program and options.

An error names the ranks that differ and the values that differ.

    agree           compares options, programs and batches before a schedule's first step
    pack_header     prefixes each gathered value with the call of its rank
    exclusive_step  refuses a step within a step, which other ranks would not join

This module sends only through transports, and depends on neither programs nor stages.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ScheduleError

if TYPE_CHECKING:
    from penstock.runtime.comm.base import Transport

__all__ = [
    "agree",
    "digest",
    "exclusive_step",
    "pack_header",
    "unpack_headers",
]

_log = logging.getLogger(__name__)

# A header consists of an integer and the description of a call.
INT_BYTES, HEADER_BYTES = 16, 160


def digest(text: str) -> str:
    """A short hash of a long text.

    Example:
        >>> digest("0F0,0B0")
        'b83c824ac403bb94'
    """
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(
    facts: Mapping[str, Any],
    transports: Sequence[Transport],
    shown: Mapping[str, str],
    inputs: tuple[int, int] = (0, 0),
) -> None:
    """Compare facts over all ranks; a collective call.

    Args:
        facts: this process's JSON values, by the name that messages use.
        transports: one per rank of this process.
        shown: by fact, a text that messages show in place of the value.
        inputs: the digest of the first batch (see ``microbatch.inputs_digest``). Different digests
            are only logged, since they usually, but not always, are a mistake.

    Raises:
        ScheduleError: the ranks differ; raised on every rank.
    """
    mine = json.dumps([facts, {**facts, **shown}]).encode()
    brief = json.dumps([digest(json.dumps(facts)), *inputs]).encode()
    for transport in transports:
        # Values are exchanged only if digests differ, since facts may be long and ranks many.
        briefs = [json.loads(data) for data in transport.all_gather_bytes(brief)]
        _warn_of_other_inputs(transport.rank, [(kind, data) for _, kind, data in briefs])
        if len({text for text, _, _ in briefs}) == 1:
            continue
        everyones = [json.loads(data) for data in transport.all_gather_bytes(mine)]
        for fact in facts:
            values = [values[fact] for values, _ in everyones]
            if any(value != values[0] for value in values):
                texts = [shown_values[fact] for _, shown_values in everyones]
                listed = ", ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
                raise ScheduleError(
                    f"the ranks do not agree on {fact} ({listed}); pass the same on every rank"
                )


def _warn_of_other_inputs(rank: int, inputs: Sequence[tuple[int, int]]) -> None:
    """Log that this rank's batch differs from that of the first rank with inputs."""
    kind, data = inputs[rank]
    first = next((other for other, (given, _) in enumerate(inputs) if given), rank)
    if kind and kind == inputs[first][0] and data != inputs[first][1]:
        _log.warning(
            "rank %d was given other inputs than rank %d, whose are used; give every rank of a "
            "pipeline the same batch (the same seed, and no DistributedSampler over its ranks), or "
            "no inputs where they are not needed",
            rank,
            first,
        )


def pack_header(number: int, call: str) -> Tensor:
    """Pack the header of a collective: a 127-bit integer and the current call."""
    data = number.to_bytes(INT_BYTES, "little", signed=True) + call.encode()
    data = data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpack_headers(headers: Sequence[Tensor]) -> list[int]:
    """Unpack the integers of all ranks' headers.

    Raises:
        ScheduleError: the ranks are in different calls.
    """
    data = [bytes(header.tolist()) for header in headers]
    calls = [each[INT_BYTES:].rstrip(b"\0").decode(errors="ignore") for each in data]
    if len(set(calls)) > 1:
        other = next(rank for rank, call in enumerate(calls) if call != calls[0])
        raise ScheduleError(
            f"rank 0 is in {calls[0]}, and rank {other} in {calls[other]}: call them in the same "
            "order on every rank"
        )
    return [int.from_bytes(each[:INT_BYTES], "little", signed=True) for each in data]


# The engine and the process group of each running step of this process.
_running: list[tuple[object, dist.ProcessGroup | None]] = []


@contextmanager
def exclusive_step(engine: object, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Refuse a nested step of the same engine or over the same process group.

        step of A ──► its loss function ──► eval of B        only the rank of the loss is here:
                                                             the other ranks would not join

    Args:
        engine: the engine that runs the step.
        group: its process group; None where all ranks are in this process.

    Raises:
        ScheduleError: a step of this engine or process group is running.
    """
    group = group if group is not None and group.size() > 1 else None
    for other, its_group in _running:
        if other is engine:
            _refuse("the same pipeline", "its microbatches' state is in use")
        if group is not None and its_group is group:
            _refuse("another one over the same ranks", "the others do not join")
    entry = (engine, group)
    _running.append(entry)
    try:
        yield
    finally:
        _running.remove(entry)


def _refuse(whose: str, why: str) -> None:
    raise ScheduleError(
        f"step() or eval() was called within a step of {whose} (in a loss function, a hook or a "
        f"module), where {why}: call it before, and pass its result as target= or loss_kwargs="
    )
