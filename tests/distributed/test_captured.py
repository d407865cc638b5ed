"""A captured model over processes: inputs at rank 0 alone or on every rank, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import PenstockError, Pipeline, SplitPoint, pipeline
from penstock.runtime.comm.c10d import C10dTransport
from tests.agreement import ROUNDING
from tests.compare import assert_same, plain_step, snapshot
from tests.distributed.launches import results_of
from tests.processes import run_ranks

DIM, NUM = 6, 4


class Skipping(nn.Module):
    """A skip over two stages, and a mask that only the last one needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, *, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = torch.tanh(self.layers[0](x))
        y = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first))))
        y = self.layers[3](y + first) * mask
        return {"loss": nn.functional.mse_loss(y, labels), "y": y}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


def batch(rows: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(rows, DIM, generator=generator),
        "mask": torch.arange(DIM) % 2 * torch.ones(rows, 1),
        "labels": torch.randn(rows, DIM, generator=generator),
    }


def own_loss(output: dict[str, Tensor]) -> Tensor:
    return output["loss"]


def train(rank: int, num_ranks: int, schedule: str, where: str) -> dict[str, Any]:
    names = [f"layers.{i}" for i in range(1, 4)]
    cut = pipeline(model(), (), batch(2), dict.fromkeys(names, SplitPoint.BEGINNING))
    program = penstock.build(schedule, ranks=num_ranks, microbatches=NUM, virtual=4 // num_ranks)
    mine = program.placement.stages_of(rank)
    stages = [cut.build_stage(i, torch.device("cpu")) for i in mine]
    played = penstock.ScheduleProgram(stages, program, lambda output: output[0])
    given = batch(8)
    needed = {"first": given if 0 in mine else (), "all": given}
    needed["apart"] = {"x"} if 0 in mine else {"mask", "labels"}
    losses: list[Tensor] = []
    played.step(**{name: given[name] for name in needed[where]}, losses=losses)
    grads = {n: p.grad for stage in stages for n, p in stage.submod.named_parameters()}
    return {"grads": grads, "losses": losses}


CASES = (
    ("interleaved-1f1b", "first"),
    ("interleaved-1f1b", "apart"),
    ("zbv", "all"),
    ("zbv", "first"),
)


@pytest.mark.parametrize(("schedule", "where"), CASES)
def test_inputs_may_be_passed_on_any_rank_that_uses_them(schedule: str, where: str) -> None:
    plain = model()
    losses = []
    whole = batch(8)
    for i in range(NUM):
        loss = own_loss(plain(**{k: v[2 * i : 2 * i + 2] for k, v in whole.items()}))
        (loss / NUM).backward()
        losses.append(loss.detach())
    told = results_of(train, 2, CASES, (schedule, where))
    grads = {name: grad for each in told for name, grad in each["grads"].items()}
    assert set(grads) == {name for name, _ in plain.named_parameters()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-6, atol=1e-8)
    for each in told:
        torch.testing.assert_close(each["losses"], losses, rtol=0, atol=0)


# --- inputs on the rank that computes with them --------------------------------------------------


class Masked(Skipping):
    """Has an optional argument of many parts, which chooses what the last stage computes."""

    def forward(
        self, x: Tensor, *, mask: Any = None, labels: Tensor, twice: bool = False
    ) -> dict[str, Tensor]:
        y = super().forward(x, mask=1.0, labels=labels)["y"]  # type: ignore[arg-type]
        if mask is not None:
            y = y * mask["first"] * mask["then"][0]
        loss = nn.functional.mse_loss(y, labels)
        return {"loss": 2 * loss if twice else loss, "y": y}


def masked(rows: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    mask = {"first": torch.arange(rows * DIM).reshape(rows, DIM) % 2, "then": [torch.ones(rows, 1)]}
    return {"x": torch.randn(rows, DIM), "mask": mask, "labels": torch.randn(rows, DIM)}


def pass_apart(rank: int, num_ranks: int, method: str) -> list[int]:
    """Steps beside the plain model's, with arguments on the last rank alone.

    Returns the numbers of messages of metadata that this rank sent.
    """
    torch.manual_seed(0)
    plain, model = Masked(), Masked()
    model.load_state_dict(plain.state_dict())
    pipe = Pipeline(
        model, example=masked(2, 0), method=method, n_microbatches=2, timeout_s=20,
        split=["layers.2"],
    )  # fmt: skip
    sent = [0]
    send_metadata = C10dTransport.send_metadata

    def count(self: C10dTransport, peer: int, data: bytes) -> None:
        sent[-1] += 1
        send_metadata(self, peer, data)

    C10dTransport.send_metadata = count  # type: ignore[method-assign]
    for step, rows in enumerate((4, 4, 5, 4)):
        given = masked(rows, step)
        if step == 3 and method == "module":
            given["twice"] = True
        here = {"x"} if rank == 0 else given.keys() - {"x"}
        loss = pipe.step(**{name: given[name] for name in here})
        expected = plain_step(plain, lambda output, _: own_loss(output), n_microbatches=2, **given)
        torch.testing.assert_close(loss, expected.loss)
        assert_same(snapshot(pipe), snapshot(plain), tolerance=ROUNDING, partial=True)
        sent.append(0)
    # Positional on the first rank, and by name on the other, which does not need it.
    given = masked(4, 1)
    pipe.eval(given["x"], labels=given["labels"]) if rank == 0 else pipe.eval(**given)
    # Needed by the first rank, and not there.
    with pytest.raises(PenstockError, match=r"input x"):
        pipe.step(labels=given["labels"]) if rank == 0 else pipe.step(**given)
    return sent


@pytest.mark.parametrize("method", ["module", "export"])
def test_arguments_may_be_passed_where_they_are_used(method: str) -> None:
    first, last = (outcome.result() for outcome in run_ranks(pass_apart, 2, method))
    # Of the first shapes one message per boundary and direction; nothing for those before.
    assert first[1] == last[1] == 0
    assert first[0] > 0 and first[2] > 0
