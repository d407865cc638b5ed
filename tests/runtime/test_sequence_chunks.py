"""Sequences in pieces: the gradients of the plain model on whole sequences."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline, build
from penstock.compat.stage import PipelineStage
from penstock.errors import PartitionError, ScheduleError, StageError
from penstock.schedule.action import Op, Step, action
from penstock.schedule.placement import looped
from penstock.schedule.program import Program
from tests.models import VOCABULARY, token_loss
from tests.sequences import DIM, Block, Embed, causal, compare_steps, token_batch

CPU = torch.device("cpu")


def halved(program: Program) -> Program:
    """Each backward in two, all weight gradients at the end."""
    ranks: list[tuple[Step, ...]] = []
    for steps in program.ranks:
        late: list[Step] = []
        split: list[Step] = []
        for act in (a for step in steps for a in step.parts):
            if act.op is Op.FULL_BACKWARD:
                split.append(action(act.stage, Op.INPUT_GRAD, act.microbatch))
                late.append(action(act.stage, Op.WEIGHT_GRAD, act.microbatch))
            else:
                split.append(act)
        ranks.append((*split, *late))
    return program.with_ranks(tuple(ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_gradients_equal_those_of_unsplit_sequences(
    ranks: int, splits: int, microbatches: int
) -> None:
    program = build("seq1f1b", ranks=ranks, microbatches=microbatches, splits=splits)
    compare_steps(causal(max(4, ranks)), program, length=6, rows=2)


def test_a_schedule_that_is_named_splits_in_two() -> None:
    pipe = Pipeline(causal(4), loss_fn=token_loss, schedule="seq1f1b", ranks=2, n_microbatches=3)
    assert (pipe.program.num_splits, pipe.program.num_microbatches) == (2, 6)
    inputs, target = token_batch(3, 4, 0)
    pipe.step(inputs, target=target)
    assert len(pipe.losses) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_gradients_may_come_later(ranks: int) -> None:
    program = halved(build("seq1f1b", ranks=ranks, microbatches=2, splits=3))
    compare_steps(causal(4), program, length=9)


def test_any_placement_and_any_order_will_do() -> None:
    """All forwards, then all backwards, over a loop of two stages per rank."""
    placement = looped(2, 2)
    pieces = range(6)
    backwards = [3, 2, 5, 4, 1, 0]
    steps = [
        [*(action(s, Op.FORWARD, u) for s in mine for u in pieces)]
        + [action(s, Op.FULL_BACKWARD, u) for s in reversed(mine) for u in backwards]
        for mine in ((0, 2), (1, 3))
    ]
    program = Program(
        name="by hand",
        placement=placement,
        num_microbatches=6,
        num_splits=2,
        ranks=tuple(map(tuple, steps)),
    )
    compare_steps(causal(6), program, length=4)


def test_uneven_sequence_chunks_need_summed_losses() -> None:
    program = build("seq1f1b", ranks=2, microbatches=2, splits=2)
    inputs, target = token_batch(2, 5, 0)
    pipe = Pipeline(causal(4), loss_fn=token_loss, schedule=program)
    with pytest.raises(
        ValueError, match=r"shape \(1, 5\) can't be split evenly into 2 sequence chunks"
    ):
        pipe.step(inputs, target=target)

    def total(logits: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")

    summed = Pipeline(causal(4), loss_fn=total, schedule=program, scale_grads=False)
    summed.step(inputs, target=target)
    one = Pipeline(
        causal(4),
        loss_fn=total,
        schedule=build("seq1f1b", ranks=1, microbatches=2, splits=5),
        scale_grads=False,
    )
    one.step(inputs, target=target)
    torch.testing.assert_close(summed.losses, one.losses)
    for a, b in zip(summed.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-13)
    with pytest.raises(ValueError, match="into 5 sequence chunks along dimension 1; pad it"):
        one.step(*[t[:, :4] for t in (inputs,)], target=target[:, :4])


def test_sequences_may_run_along_another_dimension() -> None:
    class TimeFirst(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x_TB: Tensor, state: Any = None) -> Any:
            y_BT, state = self.inner(x_TB.transpose(0, 1), state=state)
            return y_BT.transpose(0, 1), state

    torch.manual_seed(0)
    layers = nn.Sequential(TimeFirst(Embed()), TimeFirst(Block()), nn.Linear(DIM, VOCABULARY))
    inputs, target = token_batch(3, 4, 0)
    pipe = Pipeline(
        layers,
        loss_fn=token_loss,
        schedule=build("seq1f1b", ranks=1, microbatches=1, splits=4),
        sequence_dim=0,
    )
    loss = pipe.step(inputs.T, target=target.T)
    whole = layers[2](layers[1](layers[0](inputs.T)[0])[0])
    assert loss is not None
    torch.testing.assert_close(loss, token_loss(whole, target.T).detach())
    torch.testing.assert_close(pipe.eval(inputs.T), whole.detach())


class Mixing(nn.Module):
    """Hands on a state that is its own input, one that nobody uses, and one without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_BT: Tensor, *, shift: Tensor, state: Any = None) -> Any:
        first = x_BT[:, :1] if state is None else state["first"]
        count = torch.zeros(()) if state is None else state["count"]
        out = self.scale * (x_BT + first) + shift + count
        return out, {"first": first, "unused": out * 2, "count": count + 1}


def test_state_may_be_passed_through_unused_or_without_a_gradient() -> None:
    modules = [Mixing(), Mixing()]
    stages = [PipelineStage(m, i, 2, CPU) for i, m in enumerate(modules)]
    pipe = Pipeline(
        stages,
        loss_fn=lambda out: out.square().mean(),
        schedule=build("seq1f1b", ranks=2, microbatches=1, splits=2),
    )
    x, shift = torch.randn(2, 4), torch.randn(2, 4)
    loss = pipe.step(x, shift=shift)
    plain = [Mixing(), Mixing()]
    out = x
    for module in plain:
        count = torch.tensor([0.0, 0, 1, 1])
        out = module.scale * (out + out[:, :1]) + shift + count
    expected = out.square().mean()
    expected.backward()
    assert loss is not None
    torch.testing.assert_close(loss, expected.detach())
    for mine, theirs in zip(modules, plain, strict=True):
        torch.testing.assert_close(mine.scale.grad, theirs.scale.grad)


def test_states_are_freed() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watched(Block):
        def forward(self, x_BTD: Tensor, state: Any = None) -> Any:
            output, new = super().forward(x_BTD, state)
            seen.append(weakref.ref(new["k"]))
            if state is not None:
                seen.append(weakref.ref(state["k"]))
            return output, new

    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(Embed(), Watched(), nn.Linear(DIM, VOCABULARY)),
        loss_fn=token_loss,
        schedule=build("seq1f1b", ranks=1, microbatches=2, splits=2),
    )
    inputs, target = token_batch(2, 4, 0)
    pipe.step(inputs, target=target)
    pipe.eval(inputs)
    gc.collect()
    assert len(seen) == 12
    assert all(ref() is None for ref in seen)


# --- what is refused ---------------------------------------------------------------------------


def two(*modules: nn.Module, **options: Any) -> Pipeline:
    return Pipeline(
        list(modules), loss_fn=token_loss, schedule="seq1f1b", n_microbatches=1, **options
    )


def test_layers_that_need_whole_sequences_are_refused() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(PartitionError, match="layer '1', a Plain, takes no state"):
        two(Embed(), Plain(), ranks=2)
    with pytest.raises(PartitionError, match="layer '1', a Sequential, takes no state"):
        two(Embed(), nn.Sequential(nn.ReLU(), Plain()), ranks=2)
    Plain.positionwise = True  # type: ignore[attr-defined]
    two(Embed(), Plain(), ranks=2)
    two(Embed(), nn.Sequential(nn.ReLU(), Plain()), ranks=2)


def test_stages_without_a_state_are_refused() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, CPU)
    with pytest.raises(ScheduleError, match="the forward of Linear takes no state; let it take"):
        Pipeline([stage], schedule="seq1f1b", n_microbatches=1)


def test_models_with_a_forward_of_their_own_are_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with pytest.raises(PartitionError, match=r"list of layers or an nn\.Sequential"):
        Pipeline(Model(), schedule="seq1f1b", ranks=2, n_microbatches=1)


@pytest.mark.parametrize(("returned", "told"), [("x", "Tensor"), ("(x, x, x)", "3 values")])
def test_a_module_that_returns_no_state_is_an_error(returned: str, told: str) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            return eval(returned)

    pipe = Pipeline(
        [PipelineStage(Odd(), 0, 1, CPU)],
        loss_fn=lambda out: out.sum(),
        schedule="seq1f1b",
        n_microbatches=1,
    )
    with pytest.raises(StageError, match=rf"0F0: the module returned {told}, expected \(output, s"):
        pipe.step(torch.ones(1, 2))


def test_a_state_whose_tensors_can_not_be_seen_is_refused() -> None:
    class Cache:
        """Keeps tensors to itself."""

    class Hiding(nn.Module):
        def forward(self, x: Tensor, state: Any = None) -> Any:
            return x, {"keys": [Cache()]}

    pipe = Pipeline(
        [PipelineStage(Hiding(), 0, 1, CPU)],
        loss_fn=lambda out: out.sum(),
        schedule="seq1f1b",
        n_microbatches=1,
    )
    with pytest.raises(StageError, match=r"0F0: the state holds a .*Cache, expected tensors"):
        pipe.step(torch.ones(1, 2))


def test_recomputation_is_refused() -> None:
    program = build("seq1f1b", ranks=1, microbatches=1)
    (steps,) = program.ranks
    again = program.with_ranks(((*steps[:2], action(0, Op.RECOMPUTE, 1), *steps[2:]),))
    with pytest.raises(ScheduleError, match="0RECOMPUTE1: forwards of sequence chunks can't"):
        Pipeline([Embed()], loss_fn=token_loss, schedule=again)
