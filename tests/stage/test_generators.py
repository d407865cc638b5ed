"""Random numbers of devices with generators of their own, and of those that draw on the host."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import microbatch_rng
from penstock.stage.rng import preserve_rng_state, random_state, seed_random_state

CPU = torch.device("cpu")


class FakeDevices:
    """What ``torch.mps`` or ``torch.xpu`` has for generators, made of one of the CPU."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.generator.set_state(state)

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def draw(self) -> float:
        return torch.rand((), generator=self.generator).item()


class SeveralFakeDevices(FakeDevices):
    """Of which one is the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[torch.device] = []

    def device(self, device: torch.device) -> Any:
        self.entered.append(device)
        return nullcontext()


@pytest.fixture(params=[("mps", FakeDevices), ("xpu:1", SeveralFakeDevices)], ids=["mps", "xpu"])
def there(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.device, Any]:
    name, kind = request.param
    device, fake = torch.device(name), kind()
    monkeypatch.setattr(torch, "get_device_module", {device: fake}.__getitem__)
    return device, fake


def test_a_microbatchs_numbers_are_the_devices(there: tuple[torch.device, Any]) -> None:
    device, fake = there
    before, on_host = fake.generator.get_state(), torch.get_rng_state()
    drawn = []
    for microbatch in (0, 1, 0):
        with microbatch_rng(7, microbatch, device=device):
            drawn.append(fake.draw())
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(fake.generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), on_host)
    if isinstance(fake, SeveralFakeDevices):
        assert fake.entered == [device] * 3


def test_nothing_was_drawn(there: tuple[torch.device, Any]) -> None:
    device, fake = there

    def draws() -> tuple[float, float, float]:
        return fake.draw(), torch.rand(()).item(), random.random()

    with pytest.raises(KeyError), preserve_rng_state(device):
        one = draws()
        raise KeyError
    assert draws() == one


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_other_devices_draw_on_the_host(name: str) -> None:
    device = torch.device(name)
    with preserve_rng_state(device):
        seed_random_state(device, 5)
        assert torch.equal(random_state(device), torch.Generator().manual_seed(5).get_state())
