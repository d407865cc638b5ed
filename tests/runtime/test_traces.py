"""The trace of a step: what ran is what the program says, in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

import pytest
import torch
from torch.nn import functional as F

import penstock
from penstock import Pipeline, PipelineStageInfo, StageError
from penstock.schedule.action import Op
from penstock.schedule.passes import forward_only
from penstock.schedule.registry import family
from penstock.schedule.rules import COMPUTE
from tests.agreement import TRAINING
from tests.models import features, mlp
from tests.readiness import prerequisites


def made(schedule: str, mbs: int = 3) -> Pipeline:
    virtual = family(schedule).default_virtual
    return Pipeline(
        mlp(2 * virtual),
        loss_fn=F.mse_loss,
        schedule=schedule,
        ranks=2,
        virtual=virtual,
        n_microbatches=mbs,
    )


@pytest.mark.parametrize("schedule", TRAINING)
def test_the_program_that_is_shown_is_the_one_that_runs(schedule: str) -> None:
    pipe = made(schedule)
    ran: list[int] = []
    for stage in pipe.stages:
        stage.submod.register_forward_pre_hook(lambda *_, s=stage.stage_index: ran.append(s))
    inputs, target = features(6, 0)
    pipe.step(inputs, target=target)
    trace = pipe.trace()
    assert trace.unit == "s"
    assert trace.num_ranks == 2
    for rank in range(2):
        steps = [str(a) for step in pipe.program.ranks[rank] for a in step.parts]
        assert [str(s.action) for s in trace.spans if s.rank == rank] == steps
        here = pipe.program.placement.stages_of(rank)
        forwards = [
            a.stage for step in pipe.program.ranks[rank] for a in step.parts if a.op is Op.FORWARD
        ]
        assert [stage for stage in ran if stage in here] == forwards


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_computation_has_one_span_and_waits_for_its_prerequisites(schedule: str) -> None:
    pipe = made(schedule)
    inputs, target = features(6, 0)
    for _ in range(2):
        pipe.step(inputs, target=target)
        trace = pipe.trace()
        spans = {s.action: s for s in trace.spans if s.action.op in COMPUTE}
        assert Counter(map(str, spans)) == Counter(
            str(a) for a in pipe.program.actions() if a.op in COMPUTE
        )
        assert min(s.start for s in trace.spans) == 0
        for action, span in spans.items():
            assert span.end >= span.start
            assert span.rank == pipe.program.placement.rank_of(action.stage)
            for needed in prerequisites(action, pipe.program.placement):
                before = (
                    spans.get(needed)
                    or spans[
                        penstock.Action(
                            stage=needed.stage, op=Op.FULL_BACKWARD, microbatch=needed.microbatch
                        )
                    ]
                )
                assert before.end <= span.start
        # One thread plays both ranks in turn, so half of their time is idle at least.
        assert 0.5 - 1e-6 <= trace.bubble_ratio < 1
        assert 0 < trace.span <= trace.makespan


def test_an_evaluation_is_traced_as_one() -> None:
    pipe = made("zbv")
    inputs, target = features(6, 0)
    pipe.step(inputs, target=target)
    pipe.eval(inputs)
    wanted = forward_only(pipe.program)
    spans = [s for s in pipe.trace().spans if s.action.op in COMPUTE]
    assert {s.action for s in spans} == set(wanted.actions())
    assert {s.action.op for s in spans} == {Op.FORWARD}


def test_where_nothing_has_run_the_trace_is_empty() -> None:
    pipe = made("1f1b")
    assert pipe.trace().spans == ()
    assert pipe.trace().bubble_ratio == 0
    with pytest.raises(StageError, match="no target"):
        pipe.step(features(6, 0)[0])
    assert pipe.trace().spans == ()


def test_the_profiler_sees_the_actions() -> None:
    pipe = made("1f1b", mbs=2)
    inputs, target = features(4, 0)
    pipe.step(inputs, target=target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pipe.step(inputs, target=target)
    names = Counter(e.name for e in profile.events() if e.name.startswith("penstock."))
    actions = [str(a) for a in pipe.program.actions() if a.op in COMPUTE]
    assert all(names[f"penstock.{action}"] == 1 for action in actions)


def test_a_module_may_ask_which_forward_it_runs() -> None:
    pipe, asked = made("zbv"), []
    current: ContextVar[PipelineStageInfo] = ContextVar("current")

    @contextmanager
    def context(info: PipelineStageInfo) -> Iterator[None]:
        token = current.set(info)
        yield
        current.reset(token)

    for stage in pipe.stages:
        handle = stage.register_forward_context(context)
        stage.submod.register_forward_pre_hook(lambda *_: asked.append(current.get()))
        with pytest.raises(StageError, match="it has a forward context already"):
            stage.register_forward_context(context)
    inputs, target = features(6, 0)
    pipe.step(inputs, target=target)
    forwards = [s.action for s in pipe.trace().spans if s.action.op is Op.FORWARD]
    ran = {(info.stage_index, info.microbatch_index) for info in asked}
    assert ran == {(act.stage, act.microbatch) for act in forwards}
    assert len(asked) == len(forwards) and not asked[0].is_metadata_inference
    handle.remove()
    with pytest.raises(StageError, match="LookupError"):
        pipe.step(inputs, target=target)


def test_a_context_that_suppresses_an_exception_is_an_error() -> None:
    pipe = made("1f1b")
    pipe.stages[0].register_forward_context(lambda info: suppress(RuntimeError))
    inputs, target = features(6, 0)
    with pytest.raises(StageError, match="stage 0: its forward context suppressed an exception"):
        pipe.step(inputs[:, :1], target=target)
