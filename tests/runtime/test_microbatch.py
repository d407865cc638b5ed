"""How a batch is split: registered classes, masks, rows that do not divide; what is not merged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils import _pytree

from penstock import Pipeline, PipelineStage, ScheduleGPipe, TensorChunkSpec
from penstock.runtime.microbatch import split_args_kwargs_into_chunks, split_tree
from tests.compare import assert_same, plain_step, snapshot

DIM = 4
CPU = torch.device("cpu")
mse = F.mse_loss


def one_stage(module: nn.Module, num_mb: int = 2, loss_fn: Any = mse, **options: Any) -> Any:
    return ScheduleGPipe(PipelineStage(module, 0, 1, CPU), num_mb, loss_fn, **options)


# --- classes that hold tensors ---------------------------------------------------------------


class Scale:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Unknown(Scale):
    """The same, of which nobody is told."""


_pytree.register_pytree_node(Scale, lambda s: ([s.value], None), lambda v, _: Scale(*v))


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Any = None) -> Tensor:
        return super().forward(x) * scale.value[: len(x)]


def test_a_registered_class_is_split_by_rows() -> None:
    plain = Scaled(DIM, DIM)
    module = copy.deepcopy(plain)
    x, target, scale = torch.randn(4, DIM), torch.randn(4, DIM), Scale(torch.rand(4, 1))
    one_stage(module).step(x, target=target, scale=scale)
    for rows in (slice(0, 2), slice(2, 4)):
        (mse(plain(x[rows], Scale(scale.value[rows])), target[rows]) / 2).backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_outputs_of_a_registered_class_are_merged() -> None:
    class Scales(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return Scale(super().forward(x))

    module = Scales(DIM, DIM)
    x = torch.randn(4, DIM)
    output = one_stage(module, loss_fn=lambda out, y: mse(out.value, y)).step(x, target=x)
    assert type(output) is Scale
    assert not output.value.requires_grad
    expected = torch.cat([module(part).value for part in x.split(2)])
    assert torch.equal(output.value, expected)


def test_an_object_of_an_unknown_class_is_replicated() -> None:
    plain = Scaled(DIM, DIM)
    module = copy.deepcopy(plain)
    x, target, scale = torch.randn(4, DIM), torch.randn(4, DIM), Unknown(torch.rand(2, 1))
    one_stage(module).step(x, target=target, scale=scale)
    for rows in (slice(0, 2), slice(2, 4)):
        (mse(plain(x[rows], scale), target[rows]) / 2).backward()
    assert torch.equal(module.weight.grad, plain.weight.grad)


def test_none_among_arguments_with_specs() -> None:
    specs = (TensorChunkSpec(1), None, None)
    args, _ = split_args_kwargs_into_chunks((torch.ones(3, 4), None, 3), {}, 2, specs)
    assert [(a.shape, b, c) for a, b, c in args] == [((3, 2), None, 3)] * 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ((0,), r"a chunk spec holds 0; use TensorChunkSpec\(dim\)"),
        ((TensorChunkSpec(1),), r"a tensor of shape \(4,\) has no dimension 1 to be split along"),
        ((None, None), r"the chunk spec \(None, None\) does not fit values in [^.]*\(\*,\)"),
    ],
)
def test_chunk_specs_that_do_not_fit(spec: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split_args_kwargs_into_chunks((torch.ones(4),), {}, 2, spec)


class Masked(nn.Linear):
    """Attention of sorts, as one causal mask and one row of positions for all rows have it."""

    def forward(self, x_BTD: Tensor, *, mask: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is not None:
            x_BTD = x_BTD + positions[..., None]
        return mask @ super().forward(x_BTD)


def test_a_pipeline_replicates_tensors_whose_spec_is_none() -> None:
    """The mask has as many rows as the batch, and the positions have one."""
    plain = Masked(DIM, DIM)
    pipe = Pipeline(
        [PipelineStage(copy.deepcopy(plain), 0, 1, CPU)],
        loss_fn=mse,
        n_microbatches=2,
        kwargs_chunk_spec={"mask": None, "positions": None},
        output_merge_spec=TensorChunkSpec(0),
    )
    x, target, mask = torch.randn(6, 6, DIM), torch.randn(6, 6, DIM), torch.ones(6, 6).tril()
    positions = torch.arange(6.0)[None]
    pipe.step(x, target=target, mask=mask, positions=positions)
    for rows in (slice(0, 3), slice(3, 6)):
        (mse(plain(x[rows], mask=mask, positions=positions), target[rows]) / 2).backward()
    assert torch.equal(next(pipe.parameters()).grad, plain.weight.grad)
    torch.testing.assert_close(pipe.eval(x, mask=mask, positions=None), plain(x, mask=mask))
    with pytest.raises(ValueError, match="has 'positions', which the call does not: it has 'mask'"):
        pipe.step(x, target=target, mask=mask)


def test_a_pipeline_splits_and_merges_other_dimensions() -> None:
    plain = nn.Linear(DIM, DIM)
    pipe = Pipeline(
        [PipelineStage(plain, 0, 1, CPU)],
        n_microbatches=2,
        args_chunk_spec=(TensorChunkSpec(1),),
        output_merge_spec=TensorChunkSpec(1),
    )
    x_TBD = torch.randn(1, 6, DIM)
    torch.testing.assert_close(pipe.eval(x_TBD), plain(x_TBD))


# --- masks of flex attention -----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        hidden = self.linear(x)[:, None]
        return flex_attention(hidden, hidden, hidden, block_mask=mask)[:, 0]


LENGTHS = torch.tensor([10, 20, 128, 60, 5])


def rows_masked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (k < LENGTHS[b])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


@pytest.mark.filterwarnings("ignore")  # that it is slow without a compiler
@pytest.mark.parametrize(("mask_mod", "rows"), [(rows_masked, 5), (causal, None)])
def test_block_masks(mask_mod: Any, rows: int | None) -> None:
    mask = create_block_mask(mask_mod, rows, None, 128, 128, device="cpu")
    module = Attention()
    x = torch.randn(5, 128, 16)
    with torch.no_grad():
        assert torch.equal(one_stage(module).eval(x, mask=mask), module(x, mask))


def test_a_block_mask_with_too_few_rows() -> None:
    mask = create_block_mask(rows_masked, 2, None, 128, 128, device="cpu")
    with pytest.raises(ValueError, match="a BlockMask of 2 rows can't be split into 3 microbatc"):
        split_tree({"mask": mask}, 3)


# --- tensors with other numbers of rows ------------------------------------------------------


def tabled(x: Tensor, table: Tensor) -> Any:
    """Given to a module that adds one to the other; broadcast, where that goes."""

    class Adds(nn.Linear):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return super().forward(x + table[: x.size(-2)])

    return one_stage(Adds(DIM, DIM)).step(x, table=table, target=x)


def test_rows_that_are_cut_at_different_places_are_refused() -> None:
    x, offsets = torch.ones(8, DIM), torch.tensor([0, 2, 4, 6, 8])[:, None]
    said = r"8 rows of .* \(8, 4\) and 5 of .* \(5, 1\) are cut at different places for 2"
    with pytest.raises(ValueError, match=said + ".* ready microbatches"):
        tabled(x, offsets)
    weighted = one_stage(nn.Linear(DIM, DIM), loss_fn=lambda out, target: out.mean())
    with pytest.raises(ValueError, match=said):
        weighted.step(x, target={"weights": offsets})


def test_targets_may_have_several_rows_for_each_of_the_inputs() -> None:
    captions = one_stage(nn.Linear(DIM, DIM), loss_fn=lambda out, target: out.mean())
    captions.step(torch.ones(4, DIM), target=torch.ones(8))


# --- outputs that can't be merged ------------------------------------------------------------


class Answer:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Answers(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Answer(super().forward(x))


def test_a_loss_without_merged_outputs() -> None:
    module = Answers(DIM, DIM)
    pipe = Pipeline([module], loss_fn=lambda out, y: mse(out.value, y), n_microbatches=2, split=[1])
    x, y = torch.randn(4, DIM), torch.randn(4, DIM)
    assert pipe.eval(x, target=y, return_outputs=False) is None
    losses = torch.stack(pipe.losses)
    with torch.no_grad():
        expected = [mse(module(x[i : i + 2]).value, y[i : i + 2]) for i in (0, 2)]
    assert torch.equal(losses, torch.stack(expected))
    with pytest.raises(ValueError, match=r"step is done, .* pass merge_outputs=False .* a list"):
        pipe.eval(x, target=y)
    assert torch.equal(torch.stack(pipe.losses), losses)
    outputs = pipe.eval(x, merge_outputs=False)
    assert [type(each) for each in outputs] == [Answer, Answer]
    pipe.step(x, target=y)


def test_outputs_of_two_lengths() -> None:
    schedule = one_stage(nn.Linear(DIM, DIM), dynamic_shapes=True)
    mbs = [torch.ones(2, length, DIM) for length in (3, 5)]
    given: dict[str, Any] = {"arg_mbs": [(mb,) for mb in mbs], "target_mbs": mbs}
    said = r"shapes \[\(2, 3, 4\), \(2, 5, 4\)\], which can't be joined along dimension 0"
    for _ in range(2):  # the schedule goes on
        with pytest.raises(ValueError, match=said):
            schedule.step(**given)
    outputs = schedule.step(**given, merge_outputs=False)
    assert [tuple(out.shape) for out in outputs] == [(2, 3, 4), (2, 5, 4)]


def test_a_model_may_write_into_its_microbatch() -> None:
    """Many are in flight: what is saved of one is not changed by what is done to the next."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3), nn.Linear(3, 3))
    plain = copy.deepcopy(model)
    x, target = torch.randn(5, 3), torch.randn(5, 3)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.mul_(2))

    plain_step(plain, loss_fn, x.clone(), target=target.clone(), n_microbatches=2)
    pipe = Pipeline(model, loss_fn=loss_fn, schedule="gpipe", n_microbatches=2, ranks=2)
    pipe.step(x, target=target)
    assert_same(snapshot(pipe), snapshot(plain))
