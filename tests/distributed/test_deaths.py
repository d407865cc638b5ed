"""A process that dies, falls silent or is interrupted in a step: the other ranks raise, soon."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline, PipelineStage, Schedule1F1B
from penstock.errors import PenstockError
from penstock.runtime.comm.c10d import C10dTransport, break_pairs
from penstock.runtime.failure import READ_INTERVAL_S
from tests.distributed.attempts import DIM, SOON_S, At, Attempt, attempt
from tests.processes import Outcome, run_ranks

CPU = torch.device("cpu")


def make_step(
    rank: int, num_ranks: int, module: nn.Module, timeout_s: float = 60
) -> Callable[[], object]:
    stage = PipelineStage(module, rank, num_ranks, CPU)
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss, timeout_s=timeout_s)
    batch = torch.ones(8, DIM)
    return lambda: schedule.step(*((batch,) if rank == 0 else ()), target=batch)


def die(rank: int, num_ranks: int, culprit: int, after: int) -> list[tuple[object, ...]]:
    """Rank ``culprit`` is killed in a forward: no exception, no clean-up, no last words."""

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    module = At(kill, after) if rank == culprit else nn.Linear(DIM, DIM)
    step = make_step(rank, num_ranks, module)
    return [tuple(attempt(step)) for _ in range(after // 4 + 2)]


def leave(rank: int, num_ranks: int, culprit: int) -> tuple[object, ...]:
    """The script of rank ``culprit`` ends after a step, as by a condition that it alone meets."""
    step = make_step(rank, num_ranks, nn.Linear(DIM, DIM))
    step()
    if rank == culprit:
        sys.exit(0)
    return tuple(attempt(step))


# By number of ranks and culprit; who is killed, also after how many forwards. Rank 0 holds the
# store that the others learn causes from. The first step has its own exchanges; by forward 9 two
# steps have passed.
KILLED = [(2, 1, 1), (2, 0, 9), (3, 0, 1), (3, 1, 9), (3, 2, 2), (4, 1, 9)]
ENDED = [(3, 0), (3, 1), (3, 2), (2, 1)]


@functools.cache
def outcomes_by_launch() -> dict[tuple[Any, ...], list[Outcome]]:
    """The outcomes of all cases, two at a time: the ranks that are left mostly wait."""
    launches: list[tuple[Any, ...]] = [(die, *case) for case in KILLED]
    launches += [(leave, *case) for case in ENDED]
    with ThreadPoolExecutor(2) as pool:
        outcomes = pool.map(lambda launch: run_ranks(*launch), launches)
        return dict(zip(launches, outcomes, strict=True))


@pytest.mark.parametrize(("num_ranks", "culprit", "after"), KILLED)
def test_a_killed_process_is_noticed_by_all(num_ranks: int, culprit: int, after: int) -> None:
    outcomes = outcomes_by_launch()[die, num_ranks, culprit, after]
    assert outcomes[culprit].exit_code == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        if rank == culprit:
            continue
        *whole, broken, after_it = (Attempt(*told) for told in outcome.result())
        assert [a.kind for a in whole] == [None] * (after // 4)
        assert broken.kind == "PeerError", broken.message
        assert broken.elapsed_s < SOON_S
        assert "died" in broken.message
        assert (after_it.kind, after_it.elapsed_s < 0.5) == ("PeerError", True)


@pytest.mark.parametrize(("num_ranks", "culprit"), ENDED)
def test_the_rank_whose_process_has_ended_is_named(num_ranks: int, culprit: int) -> None:
    outcomes = outcomes_by_launch()[leave, num_ranks, culprit]
    assert outcomes[culprit].exit_code == 0
    for rank, outcome in enumerate(outcomes):
        if rank != culprit:
            told = Attempt(*outcome.result())
            assert (told.kind, told.where[0]) == ("PeerError", culprit), told.message
            assert f"lost its connection to rank {culprit} in step()" in told.message
            assert "a process has ended or died" in told.message
            assert told.elapsed_s < SOON_S


def trace_alone(rank: int, num_ranks: int, culprit: int, ends: bool) -> tuple[object, ...]:
    """Rank ``culprit`` alone asks for the trace; the others go on, or are at their end."""
    stage = PipelineStage(nn.Linear(DIM, DIM), rank, num_ranks, CPU)
    schedule = Schedule1F1B(stage, 4, nn.functional.mse_loss, timeout_s=60)
    batch = torch.ones(8, DIM)

    def step() -> None:
        schedule.step(*((batch,) if rank == 0 else ()), target=batch)

    step()
    if rank == culprit:
        return tuple(attempt(schedule.trace))
    if ends:
        sys.exit(0)
    return tuple(attempt(step))


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_is_alone_in_a_call_is_named(culprit: int) -> None:
    others = {0: "ranks 1 to 2", 2: "ranks 0 to 1"}[culprit]
    for outcome in run_ranks(trace_alone, 3, culprit, False):
        told = Attempt(*outcome.result())
        assert (told.kind, told.where[0]) == ("ScheduleError", culprit), told.message
        assert f"rank {culprit} in trace() of schedule 0" in told.message
        assert f"{others} in step(), after 1 others of schedule 0" in told.message
        assert "Traceback" not in told.message


def test_a_call_that_the_others_never_make_is_named() -> None:
    told = Attempt(*run_ranks(trace_alone, 3, 0, True)[0].result())
    assert told.kind == "PeerError"
    assert "lost its connection to ranks 1 to 2 in trace() of schedule 0" in told.message


def look_up_a_bad_id(rank: int, num_ranks: int, full: bool) -> list[str]:
    """What the interpreter would print."""
    if full:
        os.environ["PENSTOCK_FULL_TRACEBACK"] = "1"
    model = nn.Sequential(nn.Embedding(8, DIM), nn.Linear(DIM, 8))
    pipe = Pipeline(model, loss_fn=nn.functional.cross_entropy, n_microbatches=4, timeout_s=60)
    try:
        pipe.step(torch.full((8,), 8), target=torch.zeros(8, dtype=torch.long))
    except PenstockError:
        return traceback.format_exc().splitlines()
    return []


def test_a_bad_token_id_is_told_in_few_lines() -> None:
    told = [outcome.result() for outcome in run_ranks(look_up_a_bad_id, 2, False)]
    assert sum(map(len, told)) < 40, told
    for lines in told:
        text = "\n".join(lines)
        assert "rank 0, stage 0, microbatch 0, action 0F0: IndexError: index out of range" in text
        assert text.count("\nIndexError") == 1 and "return F.embedding(" in text
        assert f"src{os.sep}penstock" not in text
    full = [outcome.result() for outcome in run_ranks(look_up_a_bad_id, 2, True)]
    assert all("stage_runner.py" in "\n".join(lines) for lines in full)


def ask_over_a_broken_connection(rank: int, num_ranks: int) -> str | None:
    """Rank 1 asks for a note where nothing can even be asked any more."""
    group = torch.distributed.group.WORLD
    transport = C10dTransport(group, CPU, 0, 60.0)
    transport.begin("this test")
    if rank == 0:
        return None
    break_pairs(group, [0])
    try:
        transport.recv_metadata(0)
    except RuntimeError as error:
        return str(transport.fail(error))
    return "nothing was raised"


def test_an_unreachable_rank_is_a_lost_peer() -> None:
    _, second = run_ranks(ask_over_a_broken_connection, 2)
    assert second.result().startswith("rank 1 lost its connection to rank 0 in this test")


def fall_silent(rank: int, num_ranks: int, culprit: int) -> tuple[object, ...]:
    """Rank ``culprit`` takes longer than the others will wait."""
    module = At(lambda: time.sleep(1.5), 1) if rank == culprit else nn.Linear(DIM, DIM)
    return tuple(attempt(make_step(rank, num_ranks, module, timeout_s=0.5)))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_is_not_waited_for_beyond_the_deadline(culprit: int) -> None:
    outcomes = run_ranks(fall_silent, 2, culprit)
    told = [Attempt(*outcome.result()) for outcome in outcomes]
    other = told[1 - culprit]
    assert other.kind == "PeerError"
    assert f"no word from rank {culprit} within 0.5 s" in other.message
    assert "pass a longer timeout_s" in other.message
    assert 0.5 <= other.elapsed_s < 1.5
    # It learns, once awake, that nobody has waited.
    assert told[culprit].kind == "PeerError"
    assert f"no word from rank {culprit}" in told[culprit].message


def stay_away(rank: int, num_ranks: int, makes: bool) -> tuple[object, ...] | None:
    """Rank 1 never steps, and may not even make its schedule; it lives on."""
    store = torch.distributed.distributed_c10d._get_default_store()
    if rank == 0 or makes:
        step = make_step(rank, num_ranks, nn.Linear(DIM, DIM), timeout_s=0.5)
    if rank == 0:
        told = tuple(attempt(step))
        store.set("the other one has given up", "")
        return told
    store.wait(["the other one has given up"])
    return None


@pytest.mark.parametrize("makes", [True, False], ids=["never steps", "makes no schedule"])
def test_a_rank_that_stays_away_is_not_waited_for(makes: bool) -> None:
    waited = Attempt(*run_ranks(stay_away, 2, makes)[0].result())
    assert waited.kind == "PeerError"
    assert "no word from rank 1 within 0.5 s" in waited.message
    assert 0.5 <= waited.elapsed_s < SOON_S


def come_late(rank: int, num_ranks: int) -> tuple[object, ...]:
    """Rank 2 does something else between two steps, longer than the others will wait."""
    step = make_step(rank, num_ranks, nn.Linear(DIM, DIM), timeout_s=3.0)
    step()
    if rank == 2:
        time.sleep(4.0)
    return tuple(attempt(step))


def test_of_several_ranks_the_one_that_does_not_come_is_named() -> None:
    for outcome in run_ranks(come_late, 4):
        told = Attempt(*outcome.result())
        assert told.kind == "PeerError"
        assert "no word from rank 2 within 3 s" in told.message


def be_stopped(rank: int, num_ranks: int, timeout_s: float) -> list[tuple[object, ...]]:
    """Rank 0, which holds the store, is stopped for a while: it answers nothing, nothing breaks."""
    once = [lambda: os.kill(os.getpid(), signal.SIGSTOP)]
    first = _pids(rank, num_ranks)[0]
    module = At(lambda: once and once.pop()(), 5) if rank == 0 else nn.Linear(DIM, DIM)
    step = make_step(rank, num_ranks, module, timeout_s=timeout_s)
    told = [tuple(attempt(step))]
    if rank == 1:
        # So long that the other one has asked the store.
        waking = threading.Thread(target=_continue, args=(first, 4 * READ_INTERVAL_S))
        if timeout_s > 1:
            waking.start()
    told.append(tuple(attempt(step)))
    if rank == 1 and timeout_s < 1:
        waking.start()
    return told


def _continue(pid: int, after_s: float) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc who is stopped")
def test_a_store_that_keeps_silent_holds_nobody_beyond_the_deadline() -> None:
    _, second = run_ranks(be_stopped, 2, 0.5)
    whole, broken = (Attempt(*told) for told in second.result())
    assert whole.kind is None, whole.message
    assert "no word from rank 0 within 0.5 s, nor does the store" in broken.message


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc who is stopped")
def test_a_store_may_keep_silent_for_less() -> None:
    for outcome in run_ranks(be_stopped, 2, 60.0):
        assert [Attempt(*told).message for told in outcome.result()] == ["", ""]


def interrupt(rank: int, num_ranks: int, culprit: int) -> list[tuple[object, ...]]:
    """Ctrl-C reaches one rank, at work in its forward."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    module = At(lambda: signal.raise_signal(signal.SIGINT), 1)
    step = make_step(rank, num_ranks, module if rank == culprit else nn.Linear(DIM, DIM))
    return [tuple(attempt(step)) for _ in range(2)]


def interrupt_all(rank: int, num_ranks: int) -> tuple[object, ...]:
    """Ctrl-C reaches every rank, as it does from a terminal: most of them wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt_group() -> None:
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGINT)

    pids = _pids(rank, num_ranks)
    module = At(interrupt_group, 1) if rank == 1 else nn.Linear(DIM, DIM)
    return tuple(attempt(make_step(rank, num_ranks, module)))


def _pids(rank: int, num_ranks: int) -> list[int]:
    mine = torch.tensor([os.getpid()])
    everyones = [torch.empty_like(mine) for _ in range(num_ranks)]
    torch.distributed.all_gather(everyones, mine)
    return [int(pid) for pid in everyones]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_interrupted_rank_stops_the_others(culprit: int) -> None:
    for rank, outcome in enumerate(run_ranks(interrupt, 2, culprit)):
        broken, after = (Attempt(*told) for told in outcome.result())
        assert broken.elapsed_s < SOON_S
        if rank == culprit:
            assert broken.kind == "KeyboardInterrupt"
        else:
            assert broken.kind == "PeerError"
            assert broken.where == (culprit, culprit, 1, f"{culprit}F1")
            assert "KeyboardInterrupt" in broken.message
        assert after.kind == "PeerError"
        assert "KeyboardInterrupt" in after.message


def test_all_ranks_interrupted_at_once_stay_interrupted() -> None:
    for outcome in run_ranks(interrupt_all, 3):
        broken = Attempt(*outcome.result())
        assert broken.kind == "KeyboardInterrupt", broken.message
        assert broken.elapsed_s < SOON_S
