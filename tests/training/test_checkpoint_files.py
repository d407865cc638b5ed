"""One whole checkpoint is always there: the one before, until the next one is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from penstock.errors import PartitionError
from penstock.training.checkpoint import load, save
from tests.processes import run_ranks


class WhenWritten:
    """A setting of an optimizer that does something when it is written."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __reduce__(self) -> tuple[Any, ...]:
        self.act()
        return (int, ())


def full_disk() -> None:
    raise OSError(28, "No space left on device")


def layer(value: float, name: str = "0") -> nn.Sequential:
    made = nn.Sequential()
    made.add_module(name, nn.Linear(2, 2))
    for param in made.parameters():
        nn.init.constant_(param, value)
    return made


def sgd(model: nn.Module, **settings: Any) -> torch.optim.SGD:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.param_groups[0].update(settings)
    return optimizer


def loaded(path: Path, names: tuple[str, ...] = ("0",)) -> set[float]:
    """The values that are in a checkpoint."""
    model = nn.Sequential()
    for name in names:
        model.add_module(name, layer(7.0)[0])
    load(path, model)
    return {value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()}


def test_a_saving_that_fails_is_an_error_and_leaves_the_one_before(tmp_path: Path) -> None:
    save(tmp_path, layer(1.0))
    model = layer(2.0)
    with pytest.raises(OSError, match=r"was not written \(rank 0: OSError: .*No space left"):
        save(tmp_path, model, sgd(model, odd=WhenWritten(full_disk)))
    assert loaded(tmp_path) == {1.0}
    save(tmp_path, model)
    assert loaded(tmp_path) == {2.0}
    # Of the savings before nothing is left, be they whole or not.
    assert len(list(tmp_path.glob("*.distcp"))) == 1


def be_killed(rank: int, num_ranks: int, path: str) -> None:
    save(path, layer(1.0, str(rank)))
    model = layer(2.0, str(rank))

    def end() -> None:
        torch.distributed.barrier()  # until the other rank has written
        os._exit(3)

    def wait() -> None:
        torch.distributed.barrier()

    save(path, model, sgd(model, odd=WhenWritten(end if rank == 1 else wait)))


def test_ranks_killed_while_they_write_leave_no_mixture(tmp_path: Path) -> None:
    assert run_ranks(be_killed, 2, str(tmp_path))[1].exit_code == 3
    assert loaded(tmp_path, ("0", "1")) == {1.0}


def be_killed_at_the_end(rank: int, num_ranks: int, path: str) -> None:
    save(path, layer(1.0))

    def end(*_: object) -> None:
        os._exit(3)

    FileSystem.rename = end  # type: ignore[method-assign]  # after the new metadata are written
    save(path, layer(2.0))


def test_a_process_killed_at_the_last_moment_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    assert run_ranks(be_killed_at_the_end, 1, str(tmp_path))[0].exit_code == 3
    assert loaded(tmp_path) == {1.0}


def fail_alone(rank: int, num_ranks: int, path: str) -> str:
    model = layer(2.0, str(rank))
    settings = {"odd": WhenWritten(full_disk)} if rank == 1 else {}
    with pytest.raises(OSError) as caught:
        save(path, model, sgd(model, **settings))
    return str(caught.value)


def test_a_rank_that_can_not_write_is_named_on_all(tmp_path: Path) -> None:
    for outcome in run_ranks(fail_alone, 2, str(tmp_path)):
        assert "was not written (rank 1: OSError: [Errno 28]" in outcome.result()
    with pytest.raises(FileNotFoundError, match="was the saving interrupted"):
        load(tmp_path, layer(7.0))


@pytest.mark.parametrize("there", [True, False])
def test_missing_and_truncated_files_are_an_error(tmp_path: Path, there: bool) -> None:
    save(tmp_path, layer(1.0))
    (file,) = tmp_path.glob("*.distcp")
    if there:
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    with pytest.raises(PartitionError, match=r"can't be read \(rank 0: .*may have been loaded"):
        load(tmp_path, layer(7.0))


def test_damage_found_by_reading_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, layer(1.0))
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(
        PartitionError, match=r"can't be read \(rank 0: \w+: .*may have been loaded"
    ):
        load(tmp_path, layer(7.0))


def save_stages(rank: int, num_ranks: int, path: str) -> str:
    """Modules of one name: the same one on both ranks, and one that is a stage of its own."""
    save(path, layer(1.0))
    with pytest.raises(PartitionError) as caught:
        save(path, layer(1.0 + rank))
    return str(caught.value)


def test_modules_with_the_names_but_not_the_values_of_other_ranks_are_refused(
    tmp_path: Path,
) -> None:
    for outcome in run_ranks(save_stages, 2, str(tmp_path)):
        assert "have the names ['0.bias', '0.weight']" in outcome.result()
        assert "in a folder of its own" in outcome.result()
    assert loaded(tmp_path) == {1.0}


def save_two(rank: int, num_ranks: int, path: str) -> str:
    """Two models side by side, one per rank."""
    groups = [torch.distributed.new_group([each]) for each in range(num_ranks)]
    with pytest.raises(PartitionError) as caught:
        save(f"{path}/{rank}", layer(1.0 + rank))
    save(f"{path}/{rank}", layer(1.0 + rank), group=groups[rank])
    return str(caught.value)


def test_checkpoints_side_by_side_need_their_groups(tmp_path: Path) -> None:
    for outcome in run_ranks(save_two, 2, str(tmp_path)):
        assert f"(rank 0: {tmp_path}/0, rank 1: {tmp_path}/1)" in outcome.result()
        assert "as group=" in outcome.result()
    assert [loaded(tmp_path / "0"), loaded(tmp_path / "1")] == [{1.0}, {2.0}]
