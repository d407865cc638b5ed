"""Trains two steps through the installed package, and compares with the plain loop."""

import copy
from importlib.metadata import version

import torch
from torch import nn

import penstock

assert "site-packages" in penstock.__file__, penstock.__file__
assert penstock.__version__ == version("penstock")
for name in penstock.__all__:
    getattr(penstock, name)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
plain, loss_fn = copy.deepcopy(model), nn.functional.mse_loss
x, y = torch.randn(8, 4), torch.randn(8, 2)
pipe = penstock.Pipeline(model, loss_fn=loss_fn, schedule="zbv", n_microbatches=4, split=[1, 2])
for _ in range(2):
    pipe.step(x, target=y)
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (loss_fn(plain(part), target) / 4).backward()
for name, param in pipe.named_parameters():
    assert torch.equal(param.grad, plain.get_parameter(name).grad), name
