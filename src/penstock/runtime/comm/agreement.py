"""Consistency checks between ranks: same calls, same order, same program, options and batch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.cause import as_error, cause_of, decode_failure, encode_failure
from penstock.errors import InternalError, ScheduleError, StageError, Where
from penstock.runtime.comm.base import Transport
from penstock.schedule.wording import runs_of

__all__ = [
    "BatchFacts", "check_consistent", "digest", "gather_batch_facts", "INLINE_BYTES", "pack_header",
    "unpack_headers",
]  # fmt: skip

_log = logging.getLogger(__name__)

# A header consists of the length of a rank's data, its call, and the data's beginning.
LENGTH_BYTES, CALL_BYTES, INLINE_BYTES = 8, 144, 104
# Limit on the text of a fact, in characters: facts may be long, and ranks many.
MAX_SHOWN = 200


def digest(text: str) -> str:
    """A short hash of a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_consistent(
    facts: Mapping[str, Any],
    transport: Transport,
    shown: Mapping[str, str],
) -> None:
    """Compare facts over all ranks by their digests; a collective call.

    Args:
        facts: this process's JSON values, by the name that messages use. None is not compared. Of
            a mapping, messages show the first entry that differs.
        transport: this rank's connection.
        shown: by fact, a text that messages show in place of the value.

    Raises:
        ScheduleError: the ranks differ; raised on every rank.
    """
    mine = {
        fact: [digest(json.dumps(value)), str(shown.get(fact, value))[:MAX_SHOWN]]
        for fact, value in facts.items()
        if value is not None
    }
    stated = [*map(json.loads, transport.all_gather_bytes(json.dumps(mine).encode()))]
    for fact, value in facts.items():
        known = {rank: each[fact] for rank, each in enumerate(stated) if fact in each}
        if len({key for key, _ in known.values()}) < 2:
            continue
        texts = {rank: text for rank, (_, text) in known.items()}
        entries = transport.all_gather_bytes(json.dumps(value).encode())
        wholes = {rank: json.loads(entries[rank]) for rank in known}
        if all(isinstance(each, dict) for each in wholes.values()):
            texts = _different_entries(wholes)
        listed = ", ".join(f"rank {rank}: {text}" for rank, text in texts.items())
        raise ScheduleError(
            f"the ranks do not agree on {fact} ({listed}); pass the same on every rank"
        )


def _different_entries(mappings: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Of each rank's mapping the first entry in which two of them differ, with its name."""
    for name in dict.fromkeys(chain.from_iterable(mappings.values())):
        values = {rank: each.get(name, "missing") for rank, each in mappings.items()}
        if len({*map(repr, values.values())}) > 1:
            return {rank: f"{name} is {value}" for rank, value in values.items()}
    raise InternalError("mappings with different digests are equal")


class BatchFacts(NamedTuple):
    """A rank's facts about a step's batch, gathered before anything runs.

    Fields: the id of its run conditions; the number of microbatches with rows and the id of its
    inputs, 0 where it has no such arguments; whether all of its stages reduce their gradients; the
    numbers of rows, and of their shards, of the tensors that it splits; the first time, keyword
    arguments that the first stage's rank may lack; in some steps, the digest of its inputs.
    """

    conditions: int
    num_with_rows: int = 0
    inputs: int = 0
    reduces: bool = True
    rows: Sequence[tuple[int, int]] = ()
    kwargs: str = ""
    digest: tuple[int, int] = (0, 0)


def gather_batch_facts(
    facts: BatchFacts | None, mistake: Exception | None, transport: Transport
) -> tuple[list[BatchFacts], Exception | None]:
    """Gather the facts about a step's batch from all ranks; a collective call.

    Args:
        facts: this rank's; None with a mistake.
        mistake: the exception by which this rank can't run the step.
        transport: this rank's connection.

    Returns:
        The facts by rank; and the exception to raise, on every rank, if one of them has made a
        mistake or they disagree: this rank's own, or that of the first rank that has one.
    """
    mine = json.dumps(facts)
    if mistake is not None:
        mine = encode_failure("", cause_of(mistake, transport.rank, ()))
    gathered = transport.all_gather_bytes(mine.encode())
    for data in gathered:
        if isinstance(json.loads(data)[0], str):
            failure = decode_failure(data)
            assert failure is not None
            return [], mistake or as_error(failure[1], ())
    by_rank = [BatchFacts(*json.loads(data)) for data in gathered]
    rank, digests = transport.rank, [tuple(each.digest) for each in by_rank]
    first = next((other for other, (kind, _) in enumerate(digests) if kind), rank)
    is_other = digests[rank][0] == digests[first][0] and digests[rank] != digests[first]
    if is_other and not transport.has_warned:  # usually, but not always, this is a mistake
        transport.has_warned = True
        _log.warning(
            "rank %d was given other inputs than rank %d, whose are used; give every rank of a "
            "pipeline the same batch (the same seed, a generator= of its own for a loader that "
            "shuffles, no DistributedSampler over its ranks), or no inputs where none are needed",
            rank,
            first,
        )
    return by_rank, _difference(by_rank)


def _difference(by_rank: Sequence[BatchFacts]) -> StageError | None:
    counts = {rank: f.num_with_rows for rank, f in enumerate(by_rank) if f.num_with_rows}
    if len({*counts.values()}) > 1:
        shown = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
        return StageError(
            f"the ranks' batches fill different numbers of microbatches ({shown}); in a batch with "
            "fewer rows than microbatches, all tensors that are split have the same number of rows"
        )
    shards: dict[int, set[int]] = {}
    for rows, number in chain.from_iterable(f.rows for f in by_rank):
        shards.setdefault(rows, set()).add(number)
    for rows, numbers in shards.items():
        if len(numbers) > 1:
            return StageError(
                f"tensors of {rows} rows in {' and '.join(map(str, sorted(numbers)))} shards would "
                "have different rows in a microbatch; give all tensors of a batch, and its target, "
                "the same placements, or pass ready microbatches"
            )
    entries = {rank: f.inputs for rank, f in enumerate(by_rank) if f.inputs}
    if len({*entries.values()}) > 1:
        first, *others = entries
        other = next(rank for rank in others if entries[rank] != entries[first])
        return StageError(
            f"the inputs on rank {other} have other shapes than those on rank {first}; each rank "
            "where the model's inputs enter passes the whole batch"
        )
    return None


def pack_header(call: str, data: bytes) -> Tensor:
    """Pack the header of a gather of ``data`` in the current call."""
    packed = len(data).to_bytes(LENGTH_BYTES)
    packed += call.encode()[:CALL_BYTES].ljust(CALL_BYTES, b"\0")
    packed += data[:INLINE_BYTES].ljust(INLINE_BYTES, b"\0")
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack_headers(headers: Sequence[Tensor]) -> list[tuple[int, bytes]]:
    """Unpack the length and the beginning of each rank's data.

    Raises:
        ScheduleError: the ranks are in different calls.
    """
    packed = [bytes(header.tolist()) for header in headers]
    begin = LENGTH_BYTES + CALL_BYTES
    calls = [p[LENGTH_BYTES:begin].rstrip(b"\0").decode(errors="ignore") for p in packed]
    if len(set(calls)) > 1:
        ranks_in: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            ranks_in.setdefault(call, []).append(rank)
        places = (
            f"rank{'s' if len(ranks) > 1 else ''} {runs_of(ranks)} in {call}"
            for call, ranks in ranks_in.items()
        )
        error = ScheduleError(
            f"the ranks are in different calls ({'; '.join(places)}); call them in the same order "
            "on every rank"
        )
        # Of two calls, the one that a single rank is in is the mistake; of two ranks, either.
        alone = [ranks[0] for ranks in ranks_in.values() if len(ranks) == 1]
        if len(alone) == 1 and len(ranks_in) == 2:
            error.where = Where(rank=alone[0])
        raise error
    return [(int.from_bytes(p[:LENGTH_BYTES]), p[begin:]) for p in packed]
