"""Overlapped pairs on two streams, checked with a stand-in for a device's streams.

The stand-in (``tests/streams.py``) fails where two uses of the same memory are in no order. That it
can fail is shown too: with any of the orders left out, it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from torch import nn
from torch.nn import functional as F

from penstock import Pipeline, Program, StageError, build
from penstock.runtime.executor import BoundAction
from penstock.runtime.overlap import DualStreams, assign_streams
from penstock.schedule.action import Op, Overlap
from penstock.schedule.passes import offload, recompute
from penstock.schedule.rules import COMPUTE
from penstock.schedule.text import parse_csv
from penstock.stage.offload import ActivationOffload, CopyStreams
from tests.agreement import ROUNDING, Twins
from tests.models import convnet, features, gpt, images, mlp, token_loss, tokens
from tests.programs import computed_programs
from tests.streams import Recorder, UnorderedError, recorded

PAIRED = [("dualpipev", 1, 4), ("dualpipev", 2, 5), ("dualpipev", 3, 6), ("dualpipe", 2, 4)]


def train(program: Program, patch: pytest.MonkeyPatch, **options: Any) -> tuple[Recorder, Twins]:
    """Two steps and an evaluation, on fake streams, beside the plain loop."""
    torch.manual_seed(0)
    with recorded(patch) as recorder:
        model = mlp(program.placement.num_model_stages)
        both = Twins(model, F.mse_loss, schedule=program, tolerance=ROUNDING, **options)
        for step in range(2):
            inputs, target = features(2 * program.num_microbatches, step)
            both.step(inputs, target=target)
            both.eval(inputs)
    return recorder, both


@pytest.mark.parametrize(("name", "ranks", "microbatches"), PAIRED)
def test_pairs_overlap_in_order(
    name: str, ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = build(name, ranks=ranks, microbatches=microbatches)
    recorder, _ = train(program, monkeypatch, overlap=True)
    assert recorder.met, "nothing could overlap"
    assert sum(count > 0 for count in recorder.ran.values()) == 2


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_without_pairs_or_the_option_there_is_one_stream(
    name: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overlap and name == "dualpipev":
        pytest.skip("this one overlaps")
    program = build(name, ranks=2, microbatches=4)
    recorder, _ = train(program, monkeypatch, overlap=overlap)
    assert list(recorder.ran) == [0]
    assert not recorder.met and not recorder.waits


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(program=computed_programs(backward=True, max_microbatches=5))
def test_any_program_overlaps_in_order(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of one stage as well as of two, whole backwards and split ones."""
    assume(any(isinstance(step, Overlap) for rank in program.ranks for step in rank))
    train(program, monkeypatch, overlap=True)


MODELS: dict[str, tuple[Callable[[int], nn.Sequential], Any, Any]] = {
    "gpt": (gpt, tokens, token_loss),
    "convnet": (convnet, images, F.mse_loss),
}


@pytest.mark.parametrize("way", [offload, recompute])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "dualpipe"])
def test_host_transfers_and_recomputations_are_ordered_too(
    name: str, way: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = way(build(name, ranks=2, microbatches=4))
    train(program, monkeypatch, overlap=True)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), PAIRED[:2])
def test_models_overlap_in_order(
    case: str, name: str, ranks: int, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With buffers that forwards write, and attention."""
    make, batch, loss_fn = MODELS[case]
    program = build(name, ranks=ranks, microbatches=microbatches)
    with recorded(monkeypatch) as recorder:
        model = make(max(3, program.placement.num_model_stages))
        both = Twins(model, loss_fn, schedule=program, overlap=True, tolerance=ROUNDING)
        for step in range(2):
            inputs, target = batch(2 * microbatches, step)
            both.step(inputs, target=target)
    assert recorder.met


# --- the stand-in can fail ------------------------------------------------------------------------


def without(num_waiting: int) -> Callable[..., None]:
    enter = DualStreams._enter

    def enter_without(self: DualStreams, stream: int, waiting: Sequence[int]) -> None:
        enter(self, stream, () if len(waiting) == num_waiting else waiting)

    return enter_without


@pytest.mark.parametrize("num_waiting", [1, 2])
def test_a_wait_left_out_is_found(num_waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DualStreams, "_enter", without(num_waiting))
    with pytest.raises(Exception, match="waits for nothing"):
        train(build("dualpipev", ranks=1, microbatches=4), monkeypatch, overlap=True)


def prologues(dual: DualStreams, program: Program) -> list[Callable[[], None]]:
    """The prologue of each action of one rank; that of a pair's forward has a wait before it."""
    steps = program.ranks[0]
    bound = [
        [
            [BoundAction(act, lambda: None)] * (1 + (act.op is Op.FORWARD and len(step.parts) > 1))
            for act in step.parts
        ]
        for step in steps
    ]
    found = [each.prologue for each in dual.add_prologues(steps, bound, program.placement)]
    return [each for each in found if each is not None]


def test_a_pair_forks_once_whatever_its_first_part_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the other part would wait for what this one waits for: a message, perhaps."""
    program = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    with recorded(monkeypatch) as recorder:
        dual = DualStreams(recorder)
        _, wait, run, beside, _ = prologues(dual, program)
        followed: list[tuple[Any, Any]] = []
        monkeypatch.setattr(dual._streams, "follow", lambda *pair: followed.append(pair))
        with dual:
            followed.clear()
            wait()
            assert len(followed) == 2
            run()
            beside()
            assert len(followed) == 2


def test_the_caller_continues_after_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    program = parse_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    with recorded(monkeypatch) as recorder:
        caller = recorder.current()
        dual = DualStreams(recorder)
        *_, enter_last = prologues(dual, program)
        with dual:
            enter_last()
            assert recorder.current() is not caller
            made = torch.ones(3)
        assert recorder.current() is caller
        made + 1
        with pytest.raises(UnorderedError, match="waits for nothing"), dual:
            enter_last()
            made = torch.ones(3)
            recorder.switch(caller)
            made + 1


def test_memory_of_the_other_stream_that_is_not_kept_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0B0 drops the gradient that 1B0 made, on the stream on which 1F1 then needs memory."""
    program = parse_csv("0F0,1F0,0F1,1B0,(0B0;1F1)OVERLAP_F_B,1B1,0B1\n")
    train(program, monkeypatch, overlap=True)
    monkeypatch.setattr(DualStreams, "keep_alive", lambda self, tensors: None)
    with pytest.raises(StageError, match="may be given dropped memory"):
        train(program, monkeypatch, overlap=True)


def test_a_copy_that_is_not_waited_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build("po-f", ranks=2, microbatches=4)
    recorder, _ = train(program, monkeypatch)
    assert sum(count > 0 for count in recorder.ran.values()) > 2, "nothing was copied beside"
    reload = ActivationOffload.reload

    def reload_without_events(self: ActivationOffload) -> None:
        reload(self)
        for storage in self._storages.values():
            storage.copied = None

    for owner, name, broken in (
        (ActivationOffload, "reload", reload_without_events),
        (CopyStreams, "_release", lambda self: None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(StageError, match=r"waits for nothing"):
                train(program, patch)


# --- plans ----------------------------------------------------------------------------------------


@given(program=computed_programs(backward=True, max_microbatches=5))
def test_a_microbatch_keeps_to_its_stream_and_pairs_take_both(program: Program) -> None:
    for rank in program.ranks:
        dual = assign_streams(rank, program.placement)
        for step in rank:
            if isinstance(step, Overlap):
                assert {dual[act.stage, act.microbatch] for act in step.parts} == {0, 1}
    actions = [act for act in program.actions() if act.op in COMPUTE]
    assert {(act.stage, act.microbatch) for act in actions if act.op is Op.FORWARD} >= {
        (act.stage, act.microbatch) for act in actions
    }


# --- the host ------------------------------------------------------------------------------------


def test_a_step_reads_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, so that the host may run ahead of the device."""
    for name in ("1f1b", "zbv", "dualpipev", "po-f"):
        with recorded(monkeypatch) as recorder:
            program = build(name, ranks=2, microbatches=4)
            model = gpt(max(3, program.num_stages))
            pipe = Pipeline(model, loss_fn=token_loss, schedule=program, overlap=True)
            inputs, target = tokens(8, 0)
            pipe.step(inputs, target=target)
            before = recorder.syncs
            pipe.step(inputs, target=target)
            assert recorder.syncs == before, name
            pipe.trace()
            assert recorder.syncs > before


def test_the_trace_follows_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(monkeypatch):
        program = build("dualpipev", ranks=2, microbatches=4)
        pipe = Pipeline(mlp(4), loss_fn=F.mse_loss, schedule=program, overlap=True)
        inputs, target = features(8, 0)
        pipe.step(inputs, target=target)
        trace = pipe.trace()
    assert {s.action for s in trace.spans} == set(pipe.program.actions())
    assert all(span.start <= span.end for span in trace.spans)
    assert 0 <= trace.bubble_ratio < 1


@pytest.mark.parametrize(("name", "most"), [("1f1b", 1.0), ("dualpipev", 2.0)])
def test_a_timing_event_ends_an_action_and_begins_the_next(
    name: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as recorder:
        program = build(name, ranks=1, microbatches=8)
        model = mlp(program.num_stages)
        pipe = Pipeline(model, loss_fn=F.mse_loss, schedule=program, overlap=True)
        inputs, target = features(16, 0)
        pipe.step(inputs, target=target)
        marks = []
        mark = recorder.mark
        monkeypatch.setattr(
            recorder, "mark", lambda event, stream: (marks.append(event), mark(event, stream))
        )
        pipe.step(inputs, target=target)
    num_actions = len(pipe._schedule.engine._train.executor.actions)
    timed = {id(each) for pair in pipe._schedule.engine._train.executor._events for each in pair}
    assert sum(id(event) in timed for event in marks) <= most * num_actions + 1
