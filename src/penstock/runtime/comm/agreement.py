"""Consistency checks between ranks: same calls, same order, same program and options.

An error names the ranks that differ and the values that differ.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.errors import ScheduleError
from penstock.runtime.comm.base import Transport

__all__ = ["check_consistent", "digest", "exclusive_step", "pack_header", "unpack_headers"]

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


def check_consistent(
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
    values = json.dumps([facts, {**facts, **shown}]).encode()
    brief = json.dumps([digest(json.dumps(facts)), *inputs]).encode()
    for transport in transports:
        # Values are exchanged only if digests differ, since facts may be long and ranks many.
        digests, kinds, batches = zip(
            *map(json.loads, transport.all_gather_bytes(brief)), strict=True
        )
        rank = transport.rank
        first = next((other for other, kind in enumerate(kinds) if kind), rank)
        if kinds[rank] and kinds[rank] == kinds[first] and batches[rank] != batches[first]:
            _log.warning(
                "rank %d was given other inputs than rank %d, whose are used; give every rank of a "
                "pipeline the same batch (the same seed, and no DistributedSampler over its ranks),"
                " or no inputs where they are not needed",
                rank,
                first,
            )
        if len(set(digests)) == 1:
            continue
        gathered = [json.loads(data) for data in transport.all_gather_bytes(values)]
        for fact in facts:
            if any(compared[fact] != gathered[0][0][fact] for compared, _ in gathered):
                texts = (f"rank {rank}: {texts[fact]}" for rank, (_, texts) in enumerate(gathered))
                raise ScheduleError(
                    f"the ranks do not agree on {fact} ({', '.join(texts)}); pass the same on "
                    "every rank"
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
    """Refuse a step of ``engine``, over ``group`` if any, within a step of the same engine or over
    the same process group, such as in a loss function, where the other ranks would not join.

    Raises:
        ScheduleError: a step of this engine or process group is running.
    """
    group = group if group is not None and group.size() > 1 else None
    reason = None
    if any(engine is running for running, _ in _running):
        reason = "the same pipeline", "its microbatches' state is in use"
    elif group is not None and any(group is other for _, other in _running):
        reason = "another one over the same ranks", "the others do not join"
    if reason is not None:
        raise ScheduleError(
            f"step() or eval() was called within a step of {reason[0]} (in a loss function, a hook "
            f"or a module), where {reason[1]}: call it before, and pass its result as target= or "
            "loss_kwargs="
        )
    entry = (engine, group)
    _running.append(entry)
    try:
        yield
    finally:
        _running.remove(entry)
