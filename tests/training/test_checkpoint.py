"""A checkpoint is the plain model's, whoever wrote it and whoever reads it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from penstock.errors import PartitionError
from penstock.training.checkpoint import load, optimizer_state, save
from tests.processes import run_ranks

# DCP, called by itself, warns of a single process even where it is told that there is just one.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

NAMES = ("first", "norm", "second", "third")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def layers(width: int = 6) -> OrderedDict[str, nn.Module]:
    made = (nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 5), nn.Linear(5, 3))
    return OrderedDict(zip(NAMES, made, strict=True))


def plain_model(seed: int, width: int = 6) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(layers(width))


def part(model: nn.Sequential, rank: int, num_ranks: int) -> nn.Sequential:
    """What a rank holds, under the plain model's names."""
    bounds = {1: (0, 4), 2: (0, 2, 4), 3: (0, 1, 3, 4)}[num_ranks]
    names = NAMES[bounds[rank] : bounds[rank + 1]]
    return nn.Sequential(OrderedDict((name, model.get_submodule(name)) for name in names))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.0625, betas=(0.75, 0.5))


def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps with gradients that depend on nothing but the parameter and the step."""
    for step in range(steps):
        for param in model.parameters():
            param.grad = param.detach() * (step + 1) + 0.5
        optimizer.step()


def trained(seed: int = 0) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = plain_model(seed)
    optimizer = adamw(model)
    train(model, optimizer)
    model.get_buffer("norm.running_mean").fill_(0.125)
    return model, optimizer


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)

    return ours.keys() == theirs.keys() and all(equal(ours[k], theirs[k]) for k in ours)


def save_part(rank: int, num_ranks: int, path: str) -> None:
    whole, _ = trained()
    mine = part(plain_model(0), rank, num_ranks)
    optimizer = adamw(mine)
    train(mine, optimizer)
    mine.load_state_dict({k: v for k, v in whole.state_dict().items() if k in mine.state_dict()})
    save(path, mine, optimizer)


def load_part(rank: int, num_ranks: int, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    mine = part(plain_model(7), rank, num_ranks)
    optimizer = torch.optim.AdamW(mine.parameters())
    load(path, mine, optimizer)
    return dict(mine.state_dict()), optimizer_state(mine, optimizer)


def save_replica(rank: int, num_ranks: int, path: str) -> None:
    model = plain_model(0)
    model.get_buffer("norm.running_mean").fill_(rank)
    model.get_buffer("norm.running_var").fill_(rank)
    save(path, model)


def test_statistics_that_differ_from_replica_to_replica_are_the_first_ones(tmp_path: Path) -> None:
    for outcome in run_ranks(save_replica, 3, str(tmp_path)):
        outcome.result()
    model = plain_model(7)
    load(tmp_path, model)
    for name in ("norm.running_mean", "norm.running_var"):
        assert not model.get_buffer(name).any(), name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same state, written by one, two and three ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    save(folder / "1", *trained())
    for num_ranks in (2, 3):
        for outcome in run_ranks(save_part, num_ranks, str(folder / str(num_ranks))):
            outcome.result()
    return [str(folder / str(num_ranks)) for num_ranks in (1, 2, 3)]


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_the_plain_model_reads_it_by_dcp_alone(checkpoints: list[str], writers: int) -> None:
    path = checkpoints[writers - 1]
    expected, optimizer = trained()
    model = plain_model(7)
    fresh = torch.optim.AdamW(model.parameters())
    state = {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, fresh, options=FLAT),
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, fresh, state["optim"], options=FLAT)
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert same(optimizer_state(model, fresh), optimizer_state(expected, optimizer))


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 3), (3, 1)])
def test_any_number_of_ranks_reads_it(checkpoints: list[str], writers: int, readers: int) -> None:
    path = checkpoints[writers - 1]
    if readers == 1:
        parts = [load_part(0, 1, path)]
    else:
        parts = [o.result() for o in run_ranks(load_part, readers, path)]
    expected, optimizer = trained()
    assert same({k: v for p, _ in parts for k, v in p.items()}, dict(expected.state_dict()))
    assert same(
        {k: v for _, p in parts for k, v in p.items()}, optimizer_state(expected, optimizer)
    )


def test_checkpoints_of_the_plain_model_by_dcp_are_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.save({"model": model.state_dict(), "optim": theirs}, checkpoint_id=tmp_path, no_dist=True)
    params, state = load_part(0, 1, str(tmp_path))
    assert same(params, dict(model.state_dict()))
    assert same(state, optimizer_state(model, optimizer))


def test_the_flat_state_is_the_one_that_torch_makes() -> None:
    model, optimizer = trained()
    theirs = get_optimizer_state_dict(model, optimizer, options=FLAT)
    assert same(optimizer_state(model, optimizer), theirs)


def test_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    save(tmp_path, model, optimizer)
    train(model, optimizer)
    resumed = plain_model(7)
    resumed_optimizer = torch.optim.AdamW(resumed.parameters())
    load(tmp_path, resumed, resumed_optimizer)
    train(resumed, resumed_optimizer)
    assert same(dict(resumed.state_dict()), dict(model.state_dict()))


class KeepsLists(torch.optim.SGD):
    """Its state has lists, as that of LBFGS."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["past"] = [param.grad.clone()]


def test_state_in_lists_is_refused(tmp_path: Path) -> None:
    model = plain_model(0)
    optimizer = KeepsLists(model.parameters())
    train(model, optimizer)
    with pytest.raises(PartitionError, match=r"keeps 'past' of first.weight in a list, .* extra="):
        save(tmp_path, model, optimizer)
    save(tmp_path, model, extra={"optim": optimizer.state_dict()})


def test_the_optimizer_may_be_left_alone(tmp_path: Path) -> None:
    save(tmp_path, trained()[0])
    model = plain_model(7)
    load(tmp_path, model)
    assert same(dict(model.state_dict()), dict(trained()[0].state_dict()))


def test_frozen_parameters_may_be_omitted(tmp_path: Path) -> None:
    """A checkpoint of what is trained alone, read into a model that has the rest."""

    def keep(name: str) -> bool:
        return name.startswith("third.")

    model = plain_model(0)
    optimizer = adamw(model.get_submodule("third"))
    train(model, optimizer)
    save(tmp_path, model, optimizer, keep=keep)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    saved = {name for name in metadata if name.startswith("model.")}
    assert saved == {"model.third.weight", "model.third.bias"}
    resumed = plain_model(0)
    resumed_optimizer = adamw(resumed.get_submodule("third"))
    with pytest.raises(PartitionError, match=r"Missing key .*model\.first\."):
        load(tmp_path, resumed, resumed_optimizer)
    load(tmp_path, resumed, resumed_optimizer, keep=keep)
    assert same(dict(resumed.state_dict()), dict(model.state_dict()))
    assert same(optimizer_state(resumed, resumed_optimizer), optimizer_state(model, optimizer))


def test_a_name_that_is_not_there_is_named_and_nothing_is_overwritten(tmp_path: Path) -> None:
    save(tmp_path, trained()[0])
    bigger = plain_model(7)
    bigger.add_module("fourth", nn.Linear(3, 3))
    before = {k: v.clone() for k, v in bigger.state_dict().items()}
    with pytest.raises(PartitionError, match=r"Missing key .*model\.fourth\."):
        load(tmp_path, bigger)
    assert same(dict(bigger.state_dict()), before)


def test_another_shape_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, trained()[0])
    wider = plain_model(7, width=8)
    before = {k: v.clone() for k, v in wider.state_dict().items()}
    with pytest.raises(PartitionError, match=r"Size mismatch .*\[6, 4\].*\[8, 4\].*first\.weight"):
        load(tmp_path, wider)
    assert same(dict(wider.state_dict()), before)


def test_an_optimizer_that_was_not_saved_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, trained()[0])
    model = plain_model(7)
    with pytest.raises(PartitionError, match=r"it lacks first\.weight"):
        load(tmp_path, model, adamw(model))


def test_a_setting_that_was_not_saved_stays(tmp_path: Path) -> None:
    """Such as the one that a learning rate scheduler adds."""
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.125
    save(tmp_path, model, optimizer)
    fresh = adamw(again := plain_model(7))
    torch.optim.lr_scheduler.LinearLR(fresh)
    load(tmp_path, again, fresh)
    group = fresh.param_groups[0]
    assert group["lr"] == 0.125 and group["initial_lr"] != 0.125


def test_another_models_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match="8 of the optimizer's 8 parameters are none"):
        save(tmp_path / "new", plain_model(0), adamw(plain_model(0)))
    assert not (tmp_path / "new").exists()


def test_settings_that_differ_within_one_group_are_an_error(tmp_path: Path) -> None:
    model = plain_model(0)
    weights, others = ([p for p in model.parameters() if (p.ndim > 1) is is_weight]
                       for is_weight in (True, False))  # fmt: skip
    groups = [{"params": weights, "lr": 0.5}, {"params": others, "lr": 0.25}]
    save(tmp_path, model, torch.optim.SGD(groups))
    fresh = plain_model(7)
    before = {k: v.clone() for k, v in fresh.state_dict().items()}
    optimizer = torch.optim.SGD(fresh.parameters(), lr=1.0)
    told = r"lr is 0\.5 for first\.weight and 0\.25 for first\.bias, which are in one group"
    with pytest.raises(PartitionError, match=told):
        load(tmp_path, fresh, optimizer)
    assert same(dict(fresh.state_dict()), before)
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    model = plain_model(0)
    save(tmp_path, model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    load(tmp_path, model, optimizer)
    assert torch.equal(optimizer.param_groups[0]["lr"], torch.tensor(0.5))


def load_missing(rank: int, num_ranks: int, path: str) -> str:
    with pytest.raises(FileNotFoundError) as caught:
        load(path + str(rank or ""), nn.Linear(1, 1))
    return str(caught.value)


def test_a_folder_that_one_rank_does_not_reach_is_an_error_on_all(tmp_path: Path) -> None:
    save(tmp_path, nn.Linear(1, 1))
    for outcome in run_ranks(load_missing, 2, str(tmp_path), timeout_s=20):
        assert "rank 1: " in outcome.result()
        assert "is the folder not one that all ranks reach?" in outcome.result()


def load_misfit(rank: int, num_ranks: int, path: str) -> str:
    mine = part(plain_model(7), rank, num_ranks)
    if rank == 1:
        mine.add_module("fourth", nn.Linear(1, 1, bias=False))
    with pytest.raises(PartitionError) as caught:
        load(path, mine)
    return str(caught.value)


def test_an_error_of_one_rank_is_raised_on_all(checkpoints: list[str]) -> None:
    for outcome in run_ranks(load_misfit, 2, checkpoints[0]):
        assert "rank 1: " in outcome.result()
        assert "Missing key in checkpoint state_dict: model.fourth.weight" in outcome.result()


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, trained()[0])
    (tmp_path / ".metadata").write_bytes(b"123")
    with pytest.raises(PartitionError, match="its metadata can't be read, UnpicklingError"):
        load(tmp_path, plain_model(7))
