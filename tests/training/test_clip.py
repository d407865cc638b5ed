"""Clipping over ranks is clipping of the plain model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from penstock.errors import StageError
from penstock.training.clip import clip_grad_norm_
from tests.processes import run_ranks

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]


def plain_model() -> list[nn.Linear]:
    """Layers with gradients, of sizes that differ, alike in every process."""
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Linear(4 + i, 5 + i) for i in range(5)]
    for layer in layers:
        layer.weight.grad = torch.randn(layer.weight.shape, generator=generator)
        layer.bias.grad = torch.randn(layer.bias.shape, generator=generator)
    # A parameter without a gradient does not count.
    layers[1].bias.grad = None
    return layers


def clipped(
    layers: list[nn.Linear], max_norm: float, norm_type: float
) -> tuple[float, list[Tensor]]:
    params = [p for layer in layers for p in layer.parameters()]
    total = clip_grad_norm_(params, max_norm, norm_type)
    return float(total), [p.grad for p in params if p.grad is not None]


def expected(max_norm: float, norm_type: float) -> tuple[float, list[list[Tensor | None]]]:
    layers = plain_model()
    params = [p for layer in layers for p in layer.parameters()]
    total = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return float(total), [[p.grad for p in layer.parameters()] for layer in layers]


def on_rank(
    rank: int, num_ranks: int, max_norm: float, norm_type: float
) -> tuple[float, list[Tensor]]:
    # The last of three ranks has nothing to clip, and takes part all the same.
    parts = {1: [plain_model()], 2: [plain_model()[:2], plain_model()[2:]]}
    parts[3] = [*parts[2], []]
    return clipped(parts[num_ranks][rank], max_norm, norm_type)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_in_one_process_it_is_torchs(max_norm: float, norm_type: float) -> None:
    total, grads = clipped(plain_model(), max_norm, norm_type)
    torch_total, torch_grads = expected(max_norm, norm_type)
    flat = [grad for layer in torch_grads for grad in layer if grad is not None]
    assert total == torch_total
    assert all(torch.equal(a, b) for a, b in zip(grads, flat, strict=True))


@pytest.mark.parametrize(("num_ranks", "norm_type"), [(2, 2.0), (3, 2.0), (3, math.inf), (2, 1.0)])
def test_over_ranks_it_is_the_plain_models(num_ranks: int, norm_type: float) -> None:
    results = [o.result() for o in run_ranks(on_rank, num_ranks, 0.5, norm_type)]
    torch_total, torch_grads = expected(0.5, norm_type)
    assert len({total for total, _ in results}) == 1
    assert results[0][0] == pytest.approx(torch_total, rel=1e-6)
    found = [grad for _, grads in results for grad in grads]
    flat = [grad for layer in torch_grads for grad in layer if grad is not None]
    for ours, theirs in zip(found, flat, strict=True):
        torch.testing.assert_close(ours, theirs)


def overflows(rank: int, num_ranks: int) -> list[str]:
    told = []
    for fault, norm_type in ((math.inf, 2.0), (math.inf, math.inf), (math.nan, math.inf)):
        param = nn.Parameter(torch.zeros(2))
        param.grad = torch.tensor([1.0, fault if rank == 1 else 1.0])
        with pytest.raises(StageError) as caught:
            clip_grad_norm_([param], 1.0, norm_type, error_if_nonfinite=True)
        told.append(str(caught.value))
    return told


def test_a_norm_that_is_not_finite_on_one_rank_is_an_error_on_all() -> None:
    for outcome in run_ranks(overflows, 2):
        for told, fault in zip(outcome.result(), ("inf", "inf", "nan"), strict=True):
            assert f"over all ranks, is {fault}" in told


# Of each rank's gradient; a rank without one has none.
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, None),
    (torch.float64, torch.float32),
    (None, torch.float16),
    (None, None),
]


def params_of(dtypes: tuple[torch.dtype | None, ...]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in dtypes]
    for param, dtype in zip(params, dtypes, strict=True):
        if dtype is not None:
            param.grad = torch.tensor([1.0, 1.75], dtype=dtype)
    return params


def norms_of(rank: int, num_ranks: int) -> list[Tensor]:
    return [clip_grad_norm_(params_of(dtypes)[rank], 1.0) for dtypes in DTYPES]


def test_the_norm_has_one_dtype_on_every_rank() -> None:
    """That of torch's in one process: no rank rounds it to its own, or knows less of it."""
    first, second = (outcome.result() for outcome in run_ranks(norms_of, 2))
    for dtypes, ours, others in zip(DTYPES, first, second, strict=True):
        expected = torch.nn.utils.clip_grad_norm_(params_of(dtypes), 1.0)
        assert ours.dtype is others.dtype is expected.dtype, dtypes
        assert torch.equal(ours, others)
        # The norm of a bfloat16 gradient is rounded so by torch, before it meets any other.
        rtol = 5e-3 if torch.bfloat16 in dtypes else 1e-3
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=0)


def partly_spread(rank: int, num_ranks: int, norm_type: float, foreach: bool) -> str:
    """Gradients spread over one mesh, over another one, and whole: as in a stage that is tensor
    parallel; what differs from the plain model's."""
    plain = plain_model()
    meshes = [init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))]
    mine = plain_model()
    for layer, mesh in zip(mine, meshes, strict=False):
        spread = distribute_tensor(layer.weight.grad, mesh, [Shard(0)] * mesh.ndim)
        layer.weight = nn.Parameter(torch.zeros_like(spread))
        layer.weight.grad = spread
    # Of one element, the second rank has none.
    scale = nn.Parameter(torch.zeros(1))
    scale.grad = torch.full((1,), 4.0)
    spread = distribute_tensor(scale.grad, meshes[0], [Shard(0)])
    scale_here = nn.Parameter(torch.zeros_like(spread))
    scale_here.grad = spread
    alone = dist.new_subgroups(1)[0]
    params = [*(p for layer in mine for p in layer.parameters()), scale_here]
    total = clip_grad_norm_(params, 0.5, norm_type, foreach=foreach, group=alone)
    expected = [*(p for layer in plain for p in layer.parameters()), scale]
    torch.testing.assert_close(total, nn.utils.clip_grad_norm_(expected, 0.5, norm_type))
    for ours, theirs in zip(params, expected, strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad)
    return ""


@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, True), (math.inf, False)])
def test_gradients_may_be_dtensors_of_several_placements(norm_type: float, foreach: bool) -> None:
    for outcome in run_ranks(partly_spread, 2, norm_type, foreach):
        assert not outcome.result()


def test_a_single_tensor_is_taken_too() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(param, 10.0) == 5.0
    assert torch.equal(param.grad, torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_that_is_none_is_refused(norm_type: float) -> None:
    with pytest.raises(ValueError, match="expected a number above 0"):
        clip_grad_norm_([], 1.0, norm_type)
