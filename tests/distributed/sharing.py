"""What each rank's process runs to train models whose stages share parameters.

Every rank holds the whole plain model too, and compares its own stages with it. Ranks
begin with other values in all places but the first, so that nothing is right unless these are sent.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock import (
    Pipeline,
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
    split_by_module,
)
from penstock.errors import PenstockError
from penstock.parallel import shared_params as shared
from penstock.stage.wrappers import plain_name
from penstock.training.checkpoint import load, save
from penstock.training.clip import clip_grad_norm_
from tests.agreement import BIDIRECTIONAL, ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.models import CASES, Case, token_loss, tokens

__all__ = [
    "TIED",
    "bitwise_equal",
    "by_hand",
    "captured",
    "clip",
    "cut",
    "fail_in_backward",
    "faulty",
    "load_plain",
    "save_and_load",
    "taken_over",
    "three_ways",
    "tied_gpt",
    "train_shared",
    "write_shared_buffer",
]

TIMEOUT_S = 20.0


def tied_gpt(num_layers: int, seed: int = 0) -> nn.Sequential:
    """A transformer whose head is its token embedding."""
    model = CASES["gpt"].make(num_layers, seed)
    model[-1].weight = model[0].tokens.weight
    return model


TIED = Case(model=tied_gpt, batch=tokens, loss_fn=token_loss)


def spoil_copies(model: nn.Sequential, rank: int, num_ranks: int) -> None:
    """The model as a rank has it that drew other numbers, but for its stage of the first copy."""
    size = len(model) // num_ranks
    kept = {id(p) for p in model[rank * size : (rank + 1) * size].parameters()}
    with torch.no_grad():
        for param in model.parameters():
            if id(param) not in kept:
                param.add_(rank + 1)


def spoil_tie(model: nn.Sequential, rank: int) -> None:
    """The model as a rank has it whose tied weight is another one, but for the first rank."""
    with torch.no_grad():
        model[0].tokens.weight.add_(rank)


def train_shared(
    rank: int, num_ranks: int, case: str, schedule: str, num_layers: int, microbatches: int
) -> dict[str, Any]:
    """Train in a pipeline and in one piece: gradients pile up over steps, then parameters move.

    Returns:
        The names of the pipeline's parameters, its gradients at the end, and what was logged.
    """
    made = TIED if case == "tied" else CASES[case]
    torch.manual_seed(0)
    plain: Any = made.model(num_layers)
    model = copy.deepcopy(plain)
    if schedule in BIDIRECTIONAL:
        spoil_copies(model, rank, num_ranks)
    else:
        spoil_tie(model, rank)
    pipe = Pipeline(
        model,
        loss_fn=made.loss_fn,
        schedule=schedule,
        n_microbatches=microbatches,
        timeout_s=TIMEOUT_S,
    )
    for step in range(4):
        batch, target = made.batch(2 * microbatches + step, step)
        expected = plain_step(
            plain, made.loss_fn, batch, target=target, n_microbatches=microbatches
        )
        loss = pipe.step(batch, target=target)
        torch.testing.assert_close(loss, expected.loss)
        torch.testing.assert_close(pipe.losses, list(expected.losses))
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING, partial=True)
        if step == 2:
            _descend(pipe)
            _descend(plain)
        out = pipe.eval(batch)
        if out is not None:
            with torch.no_grad():
                whole = [plain(mb) for mb in torch.tensor_split(batch, microbatches)]
            torch.testing.assert_close(out, torch.cat(whole))
    return {"grads": {name: param.grad for name, param in pipe.named_parameters()}}


def by_hand(rank: int, num_ranks: int) -> dict[str, Tensor | None]:
    """A step over stages that each process has made for itself, tied by name."""
    model: Any = tied_gpt(4)
    model = copy.deepcopy(model)
    if rank == 1:  # as if made from other numbers, and without the other's embedding
        model[3].weight = nn.Parameter(torch.zeros_like(model[3].weight))
    names = ["0", "1"] if rank == 0 else ["2", "3"]
    part = Part(OrderedDict((name, model.get_submodule(name)) for name in names))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleInterleavedZeroBubble(
        [stage],
        3,
        token_loss,
        timeout_s=TIMEOUT_S,
        shared=[{0: "0.tokens", 1: "3"}],
    )
    batch, target = TIED.batch(6, 0)
    schedule.step(*([batch] if rank == 0 else []), target=target)
    return {name: param.grad for name, param in part.named_parameters()}


def captured(rank: int, num_ranks: int) -> dict[str, Tensor | None]:
    """A step over the stages of a captured model, which know themselves what is tied."""
    model = tied_gpt(4)
    batch, target = TIED.batch(6, 0)
    cut = pipeline(model, (batch[:2],), split_spec={"2": SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, token_loss, timeout_s=TIMEOUT_S)
    schedule.step(*([batch] if rank == 0 else []), target=target)
    return {name: param.grad for name, param in stage.submod.named_parameters()}


def cut(rank: int, num_ranks: int, way: str) -> dict[str, Tensor | None]:
    """A step over a stage that each process makes of a module that Penstock has cut."""
    model = tied_gpt(4)
    batch, target = TIED.batch(6, 0)
    cuts = {"2": SplitPoint.BEGINNING}
    if way == "by module":
        module: nn.Module = split_by_module(model, ["2"], (batch[:2],)).stages[rank]
    else:
        module = pipeline(model, (batch[:2],), split_spec=cuts).get_stage_module(rank)
    if way == "wrapped":
        module = torch.compile(module, backend="eager")
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 3, token_loss, timeout_s=TIMEOUT_S)
    schedule.step(*([batch] if rank == 0 else []), target=target)
    return {plain_name(module, name): param.grad for name, param in module.named_parameters()}


def taken_over(rank: int, num_ranks: int) -> dict[str, Tensor | None]:
    """A step of a schedule that is made of a pipeline's stages."""
    pipe = Pipeline(tied_gpt(4), loss_fn=token_loss, schedule="gpipe", n_microbatches=2)
    (stage,) = pipe.stages
    batch, target = TIED.batch(6, 0)
    schedule = Schedule1F1B(stage, 3, token_loss, timeout_s=TIMEOUT_S)
    schedule.step(*([batch] if rank == 0 else []), target=target)
    return {name: param.grad for name, param in stage.submod.named_parameters()}


class Part(nn.Sequential):
    """Consecutive layers under the names that they have in the whole."""


def clip(rank: int, num_ranks: int, case: str, schedule: str) -> tuple[Tensor, Tensor]:
    """The total norm of a pipeline's gradients, and of the plain model's."""
    made = TIED if case == "tied" else CASES[case]
    torch.manual_seed(0)
    plain: Any = made.model(4)
    pipe = Pipeline(
        copy.deepcopy(plain),
        loss_fn=made.loss_fn,
        schedule=schedule,
        n_microbatches=4,
        timeout_s=TIMEOUT_S,
    )
    batch, target = made.batch(8, 0)
    plain_step(plain, made.loss_fn, batch, target=target, n_microbatches=4)
    pipe.step(batch, target=target)
    norm = clip_grad_norm_(pipe.parameters(), 0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING, partial=True)
    return norm, expected


def _trained(pipe: Pipeline, steps: int, first: int = 0) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.5)
    _train(pipe, optimizer, steps, first)
    return optimizer


def _train(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: int, first: int) -> None:
    for step in range(first, first + steps):
        batch, target = TIED.batch(8, step)
        pipe.step(batch, target=target)
        optimizer.step()
        optimizer.zero_grad()


def save_and_load(rank: int, num_ranks: int, schedule: str, folder: str) -> str:
    """Save in the middle of a run, go on from the checkpoint in a fresh pipeline."""

    def made(seed: int) -> Pipeline:
        return Pipeline(
            tied_gpt(4, seed),
            loss_fn=token_loss,
            schedule=schedule,
            n_microbatches=4,
            timeout_s=TIMEOUT_S,
        )

    pipe = made(0)
    optimizer = _trained(pipe, 2)
    save(folder, pipe, optimizer)
    _train(pipe, optimizer, 2, first=2)
    again = made(1)
    other = torch.optim.SGD(again.parameters(), lr=9.0, momentum=0.25)
    load(folder, again, other)
    _train(again, other, 2, first=2)
    for (name, param), (_, resumed) in zip(
        pipe.named_parameters(), again.named_parameters(), strict=True
    ):
        if not torch.equal(param, resumed):
            return f"{name} differs by {(param - resumed).abs().max()}"
    return ""


def load_plain(folder: str) -> str:
    """Load the checkpoint into the plain model, in this process; what is not as in a plain run."""
    model, expected = tied_gpt(4, seed=1), tied_gpt(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.25)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(folder, model, optimizer)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.5)
    for step in range(2):
        batch, target = TIED.batch(8, step)
        plain_step(expected, token_loss, batch, target=target, n_microbatches=4)
        reference.step()
        reference.zero_grad()
    for (name, param), (_, wanted) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        torch.testing.assert_close(param, wanted, msg=name)
        torch.testing.assert_close(
            optimizer.state[param]["momentum_buffer"],
            reference.state[wanted]["momentum_buffer"],
            msg=f"momentum of {name}",
        )
    return "" if optimizer.param_groups[0]["lr"] == 0.1 else "the learning rate was not loaded"


def faulty(rank: int, num_ranks: int, fault: str) -> str:
    """The message of what goes wrong with a tie."""
    width = 5 if fault == "shape" and rank else 4
    layer = nn.Linear(4, width, bias=False)
    ties: list[dict[int, str]] = [{0: "weight", 1: "weight"}]
    if fault == "name":
        ties = [{0: "weight", 1: "nothing"}]
    elif fault == "stage":
        ties = [{0: "weight", 7: "weight"}]
    elif fault == "one rank" and rank:
        ties = []
    elif fault == "hook":
        layer.weight.register_post_accumulate_grad_hook(lambda _: None)
    try:
        stage = PipelineStage(layer, rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, F.mse_loss, timeout_s=TIMEOUT_S, shared=ties)
        schedule.step(*([] if rank else [torch.ones(2, 4)]), target=torch.ones(2, width))
    except PenstockError as error:
        return str(error)
    return "nothing was raised"


def fail_in_backward(rank: int, num_ranks: int) -> tuple[str, str, bool]:
    """A step that is whole, then one in which the first stage's backward raises."""
    model: Any = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    pipe = Pipeline(
        model, loss_fn=F.mse_loss, schedule="1f1b", n_microbatches=2, timeout_s=TIMEOUT_S
    )
    batch = torch.ones(2, 4)
    pipe.step(batch, target=batch)
    (param,) = pipe.parameters()
    assert param.grad is not None
    before = param.grad.clone()

    def fault(*_: object) -> None:
        raise RuntimeError("a fault in the backward")

    if rank == 0:
        pipe.stages[0].submod.register_full_backward_pre_hook(fault)
    try:
        pipe.step(batch, target=batch)
    except PenstockError as error:
        return type(error).__name__, str(error), bitwise_equal(param.grad, before)
    return "", "nothing was raised", False


class Counting(nn.Module):
    """A layer that writes a buffer in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        out: Tensor = self.linear(x)
        return out


def write_shared_buffer(rank: int, num_ranks: int) -> tuple[str, str]:
    """A step in which two stages of rank 0 call one layer that writes a buffer."""
    shared_layer = Counting()
    modules = [shared_layer, shared_layer] if rank == 0 else [nn.Linear(4, 4), nn.Linear(4, 4)]
    stages = [
        PipelineStage(module, rank + 2 * place, 4, torch.device("cpu"))
        for place, module in enumerate(modules)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, F.mse_loss, timeout_s=TIMEOUT_S)
    batch = torch.ones(4, 4)
    try:
        schedule.step(*([] if rank else [batch]), target=batch)
    except PenstockError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def three_ways(rank: int, num_ranks: int) -> dict[str, Tensor | None]:
    """A step of three stages that share all they have, sent in several messages."""
    shared.BUCKET_BYTES = 16
    layer = nn.Linear(6, 6)
    pipe = Pipeline(
        [layer] * 3, loss_fn=F.mse_loss, schedule="gpipe", n_microbatches=2, timeout_s=TIMEOUT_S
    )
    torch.manual_seed(0)
    batch, target = torch.randn(4, 6), torch.randn(4, 6)
    with torch.no_grad():  # only rank 0 has the right values
        for param in layer.parameters():
            param.fill_(0.1 if rank == 0 else 7.0)
    pipe.step(batch, target=target)
    return {name: param.grad for name, param in layer.named_parameters()}


def _descend(model: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.1 * param.grad
                param.grad = None


def bitwise_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are None, or alike to the last bit."""
    return (one is None and other is None) or (
        one is not None and other is not None and torch.equal(one, other)
    )


WAYS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "by hand": (by_hand, ()),
    "captured": (captured, ()),
    "of a pipeline": (taken_over, ()),
    **{way: (cut, (way,)) for way in ("by module", "a captured module", "wrapped")},
}


def given(rank: int, num_ranks: int, way: str) -> Any:
    """The gradients of stages that are given to a schedule in one of these ways."""
    work, more = WAYS[way]
    return work(rank, num_ranks, *more)
