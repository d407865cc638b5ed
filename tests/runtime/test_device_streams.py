"""A step on a device with streams: what is copied beside, what is timed, what the host waits for.

The stand-in (``tests/streams.py``) fails where two uses of the same memory are in no order. That it
can fail is shown too: with any of the orders left out, it does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from penstock import Pipeline, Program, StageError, build
from penstock.schedule.passes import offload, recompute
from penstock.stage.offload import ActivationOffload, CopyStreams
from tests.agreement import ROUNDING, Twins
from tests.models import features, gpt, mlp, token_loss, tokens
from tests.streams import Recorder, recorded


def train(program: Program, patch: pytest.MonkeyPatch) -> tuple[Recorder, Twins]:
    """Two steps and an evaluation, on fake streams, beside the plain loop."""
    torch.manual_seed(0)
    with recorded(patch) as recorder:
        model = mlp(program.placement.num_model_stages)
        both = Twins(model, F.mse_loss, schedule=program, tolerance=ROUNDING)
        for step in range(2):
            inputs, target = features(2 * program.num_microbatches, step)
            both.step(inputs, target=target)
            both.eval(inputs)
    return recorder, both


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_a_step_keeps_to_the_callers_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(name, ranks=2, microbatches=4)
    recorder, _ = train(program, monkeypatch)
    assert list(recorder.ran) == [0]
    assert not recorder.met and not recorder.waits


@pytest.mark.parametrize("way", [offload, recompute])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "dualpipe"])
def test_host_transfers_and_recomputations_are_ordered_too(
    name: str, way: Callable[[Program], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = way(build(name, ranks=2, microbatches=4))
    train(program, monkeypatch)


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


# --- the host ------------------------------------------------------------------------------------


def test_a_step_reads_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step on, so that the host may run ahead of the device."""
    for name in ("1f1b", "zbv", "dualpipev", "po-f"):
        with recorded(monkeypatch) as recorder:
            program = build(name, ranks=2, microbatches=4)
            model = gpt(max(3, program.num_stages))
            pipe = Pipeline(model, loss_fn=token_loss, schedule=program)
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
        pipe = Pipeline(mlp(4), loss_fn=F.mse_loss, schedule=program)
        inputs, target = features(8, 0)
        pipe.step(inputs, target=target)
        trace = pipe.trace()
    assert {s.action for s in trace.spans} == set(pipe.program.actions())
    assert all(span.start <= span.end for span in trace.spans)
    assert 0 <= trace.bubble_ratio < 1


def test_a_timing_event_ends_an_action_and_begins_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded(monkeypatch) as recorder:
        program = build("dualpipev", ranks=1, microbatches=8)
        model = mlp(program.num_stages)
        pipe = Pipeline(model, loss_fn=F.mse_loss, schedule=program)
        inputs, target = features(16, 0)
        pipe.step(inputs, target=target)
        marks = []
        mark = recorder.mark
        monkeypatch.setattr(
            recorder, "mark", lambda event, stream: (marks.append(event), mark(event, stream))
        )
        pipe.step(inputs, target=target)
    assert len(marks) == len(pipe._schedule.engine._train.executor.actions) + 1
