"""A resumed run ends as the run that was not stopped, on the same ranks or on others."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from penstock.errors import PartitionError
from penstock.stage.dtensor import full_tensor
from penstock.training.checkpoint import load, load_optimizer_state, optimizer_state, save
from tests.processes import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "resuming.md"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def draw() -> tuple[float, float]:
    return torch.rand(()).item(), random.random()


# --- the guide --------------------------------------------------------------------------------


def run_guide(rank: int, num_ranks: int, folder: str, until: int) -> float:
    scope: dict[str, Any] = {"__name__": "guide"}
    first_block = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.S | re.M)[0]
    exec(compile(first_block, str(GUIDE), "exec"), scope)
    loss: float = scope["run"](folder, until, ranks=num_ranks)
    return loss


def test_the_guides_run_resumes_on_other_ranks(tmp_path: Path) -> None:
    at_once = run_guide(0, 2, str(tmp_path / "at once"), 4)
    for num_ranks, until in ((2, 2), (3, 4)):
        outcomes = run_ranks(run_guide, num_ranks, str(tmp_path / "stopped"), until)
        losses = [outcome.result() for outcome in outcomes]
    assert losses == pytest.approx([at_once] * 3, rel=1e-6)


# --- extra ------------------------------------------------------------------------------------


def save_extra(rank: int, num_ranks: int, path: str) -> tuple[float, float]:
    torch.manual_seed(rank)
    random.seed(rank)
    save(path, layers()[rank : rank + 1], extra={"step": 3, "shard": [rank, {"at": rank}]})
    torch.manual_seed(rank + 10)
    save(path, layers()[rank : rank + 1], extra={"step": 4, "shard": [rank, {"at": rank}]})
    return draw()


def load_extra(rank: int, num_ranks: int, path: str) -> tuple[dict[str, Any], tuple[float, float]]:
    extra = {"step": 0, "new": True}
    load(path, layers()[:1], extra=extra, keep=lambda name: False)
    return extra, draw()


def test_each_rank_gets_its_own_and_its_random_numbers(tmp_path: Path) -> None:
    drawn = [o.result() for o in run_ranks(save_extra, 2, str(tmp_path))]
    assert drawn[0] != drawn[1]
    for rank, outcome in enumerate(run_ranks(load_extra, 3, str(tmp_path))):
        source = rank if rank < 2 else 0
        extra, numbers = outcome.result()
        assert extra == {"step": 4, "shard": [source, {"at": source}], "new": True}
        assert numbers == drawn[source]


def test_what_cannot_be_written_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    model = layers()
    save(tmp_path, model, extra={"step": 1})
    nn.init.zeros_(model[0].weight)
    with pytest.raises(OSError, match="was not written"):
        save(tmp_path, model, extra={"step": 2, "odd": lambda: None})
    extra: dict[str, Any] = {}
    load(tmp_path, model, extra=extra)
    assert extra == {"step": 1} and model[0].weight.any()


def test_without_extra_nothing_else_is_restored(tmp_path: Path) -> None:
    model = layers()
    save(tmp_path, model, extra={"step": 1})
    torch.manual_seed(5)
    load(tmp_path, model)
    numbers = draw()[0]
    torch.manual_seed(5)
    assert draw()[0] == numbers


def test_a_checkpoint_without_extra_is_named(tmp_path: Path) -> None:
    save(tmp_path, layers())
    fresh = layers()
    nn.init.zeros_(fresh[0].weight)
    with pytest.raises(PartitionError, match=r"Missing key .*extra\.0.* and extra="):
        load(tmp_path, fresh, extra={})
    assert not fresh[0].weight.any()


# --- a plain optimizer's state ----------------------------------------------------------------


def trained(named: bool = False) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = layers()
    params: Any = model.named_parameters() if named else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=0.25, betas=(0.5, 0.75))
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    model(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


NAMES = [name for name, _ in layers().named_parameters()]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
        for key, value in ours.items()
    )


@pytest.mark.parametrize("named", [False, True])
def test_each_rank_takes_its_part_by_name(tmp_path: Path, named: bool) -> None:
    model, optimizer = trained(named)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = torch.load(tmp_path / "optimizer.pt")
    expected = optimizer_state(model, optimizer)
    part = nn.Sequential()
    part.add_module("2", layers()[2])  # in another order than in the plain optimizer
    part.add_module("1", layers()[1])
    ours = torch.optim.AdamW(part.parameters())
    load_optimizer_state(part, ours, state, () if named else NAMES)
    found = optimizer_state(part, ours)
    assert len({key.split(".")[1] for key in found}) == 2
    assert same(found, expected)


def resume_sharded(rank: int, num_ranks: int) -> bool:
    plain, optimizer = trained()
    model = layers()
    model.load_state_dict(plain.state_dict())
    mesh = init_device_mesh("cpu", (num_ranks,))
    fully_shard(model, mesh=mesh)
    ours = torch.optim.AdamW(model.parameters())
    load_optimizer_state(model, ours, optimizer.state_dict(), NAMES)
    for each, its in ((plain, optimizer), (model, ours)):
        train(each, its)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return all(torch.allclose(full_tensor(a), b, rtol=1e-6) for a, b in pairs)


def test_a_sharded_stage_takes_its_shards() -> None:
    assert all(outcome.result() for outcome in run_ranks(resume_sharded, 2))


def test_states_that_do_not_fit_are_refused() -> None:
    _, optimizer = trained()
    state = optimizer.state_dict()
    model = layers()
    ours = torch.optim.AdamW(model.parameters(), lr=1.0)
    for names, told in (
        ((), "has 6 parameters, but 0 names were given; pass names="),
        ([*NAMES[:-1], "other"], "2.bias is missing"),
        (NAMES[::-1], r"exp_avg of 0.weight has shape \(2,\), expected \(6, 4\)"),
    ):
        with pytest.raises(PartitionError, match=told):
            load_optimizer_state(model, ours, state, names)
    weight, *others = model.parameters()
    state["param_groups"].append({**state["param_groups"][0], "params": [5], "lr": 0.5})
    state["param_groups"][0]["params"].remove(5)
    with pytest.raises(PartitionError, match=r"lr is 0\.25 for 0\.weight and 0\.5 for 2\.bias"):
        load_optimizer_state(model, ours, state, NAMES)
    assert ours.param_groups[0]["lr"] == 1.0 and not ours.state
    by_group = torch.optim.AdamW(
        [{"params": [weight]}, {"params": others[:-1]}, {"params": others[-1:]}]
    )
    load_optimizer_state(model, by_group, state, NAMES)
    assert [group["lr"] for group in by_group.param_groups] == [0.25, 0.25, 0.5]
