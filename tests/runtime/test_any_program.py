"""Programs that no builder makes: any placement, any order that the rules allow."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from penstock import Program
from tests.agreement import ROUNDING, Twins
from tests.models import ConvNorm, features, images, mlp
from tests.programs import computed_programs


@given(computed_programs(backward=True), st.integers(0, 2))
def test_any_program_trains_right(program: Program, more_rows: int) -> None:
    """Microbatches' backwards may come in any order here, so sums are rounded differently."""
    both = Twins(mlp(program.num_stages), F.mse_loss, schedule=program, tolerance=ROUNDING)
    for step in range(2):
        inputs, target = features(program.num_microbatches + more_rows * step, step)
        both.step(inputs, target=target)


@given(computed_programs(backward=True, max_stages=4), st.sets(st.integers(0, 3)))
def test_any_program_with_any_stages_frozen(program: Program, frozen: set[int]) -> None:
    model = mlp(program.num_stages)
    for layer in range(program.num_stages):
        if layer in frozen and len(frozen) < program.num_stages:
            model[layer].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        model[0].requires_grad_(True)
    both = Twins(model, F.mse_loss, schedule=program, tolerance=ROUNDING)
    inputs, target = features(program.num_microbatches, 0)
    both.step(inputs, target=target)


@given(computed_programs(backward=True, max_stages=4, max_microbatches=3))
def test_any_program_with_batch_norm_agrees_on_order_independent_values(program: Program) -> None:
    """Running statistics do depend on the order of forwards; gradients and counts do not."""
    model = nn.Sequential(*(ConvNorm(3) for _ in range(program.num_stages)))
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            # A plain average over all microbatches: the same in any order, but for rounding.
            norm.momentum = None
    both = Twins(model, F.mse_loss, schedule=program, tolerance=ROUNDING)
    inputs, target = images(2 * program.num_microbatches, 0)
    both.step(inputs, target=target)
