"""One parameter in several stages: the whole gradient in each place, whichever ranks hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.agreement import BIDIRECTIONAL
from tests.compare import plain_step
from tests.distributed import sharing
from tests.distributed.launches import results_of
from tests.distributed.sharing import bitwise_equal, train_shared
from tests.processes import run_ranks

# In one launch for each number of ranks: the case, the schedule, rows and microbatches.
PLANS = {
    2: (
        *(("tied", name, 4, 3) for name in ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb")),
        ("tied", "zbv", 4, 4),
        *((case, name, 4, 6) for name in BIDIRECTIONAL for case in ("gpt", "tied")),
    ),
    4: (("tied", "1f1b", 6, 4), ("tied", "dualpipe", 8, 8), ("tied", "chimera", 8, 7)),
}


def train(num_ranks: int, *plan: Any) -> list[dict[str, Any]]:
    return results_of(train_shared, num_ranks, PLANS[num_ranks], plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "interleaved-zb"])
def test_a_tie_across_ranks_gets_the_gradients_of_both_uses(schedule: str) -> None:
    first, second = train(2, "tied", schedule, 4, 3)
    # The plain model has the weight once, under its first name; so have both ranks.
    name = "0.tokens.weight"
    assert bitwise_equal(first["grads"][name], second["grads"][name])
    assert "3.weight" not in second["grads"]


def test_a_tie_over_four_ranks_leaves_those_between_alone() -> None:
    every = train(4, "tied", "1f1b", 6, 4)
    name = "0.tokens.weight"
    assert bitwise_equal(every[0]["grads"][name], every[3]["grads"][name])
    assert all(name not in rank["grads"] for rank in every[1:3])


def test_a_tie_on_one_rank_is_placed_together() -> None:
    first, second = train(2, "tied", "zbv", 4, 4)
    assert "0.tokens.weight" in first["grads"]
    assert "0.tokens.weight" not in second["grads"]


@pytest.mark.parametrize("case", ["gpt", "tied"])
@pytest.mark.parametrize("schedule", BIDIRECTIONAL)
def test_two_copies_on_two_ranks_stay_equal(schedule: str, case: str) -> None:
    first, second = train(2, case, schedule, 4, 6)
    # Either rank holds every stage, in one direction or the other.
    assert first["grads"].keys() == second["grads"].keys()
    for name, grad in first["grads"].items():
        assert bitwise_equal(grad, second["grads"][name]), name


@pytest.mark.parametrize(("schedule", "microbatches"), [("dualpipe", 8), ("chimera", 7)])
def test_two_copies_on_four_ranks(schedule: str, microbatches: int) -> None:
    every = train(4, "tied", schedule, 8, microbatches)
    for rank in (0, 1):
        mirrored = every[3 - rank]["grads"]
        assert every[rank]["grads"].keys() == mirrored.keys()
        for name, grad in every[rank]["grads"].items():
            assert bitwise_equal(grad, mirrored[name]), name


def test_a_layer_in_three_stages_is_summed_in_one_order() -> None:
    layer = torch.nn.Linear(6, 6)
    with torch.no_grad():
        for param in layer.parameters():
            param.fill_(0.1)
    torch.manual_seed(0)
    batch, target = torch.randn(4, 6), torch.randn(4, 6)
    model = torch.nn.Sequential(layer, layer, layer)
    plain_step(model, torch.nn.functional.mse_loss, batch, target=target, n_microbatches=2)
    grads = [outcome.result() for outcome in run_ranks(sharing.three_ways, 3)]
    for name, param in layer.named_parameters():
        torch.testing.assert_close(grads[0][name], param.grad)
        assert all(bitwise_equal(each[name], grads[0][name]) for each in grads[1:])


GIVEN = tuple((way,) for way in sharing.WAYS)


@pytest.mark.parametrize("way", sharing.WAYS)
def test_ties_between_stages_that_are_given_to_a_schedule(way: str) -> None:
    """Named for stages cut by hand, by their modules' names; known to modules that a cut made, and
    to stages of another schedule."""
    whole = sharing.tied_gpt(4)
    batch, target = sharing.TIED.batch(6, 0)
    plain_step(whole, sharing.TIED.loss_fn, batch, target=target, n_microbatches=3)
    expected = {name: param.grad for name, param in whole.named_parameters()}
    first, second = results_of(sharing.given, 2, GIVEN, (way,))
    torch.testing.assert_close(first["0.tokens.weight"], expected["0.tokens.weight"])
    assert bitwise_equal(first["0.tokens.weight"], second["3.weight"])
    for name, grad in {**first, **second}.items():
        if name != "3.weight":
            torch.testing.assert_close(grad, expected[name], msg=name)


def test_clipping_counts_a_shared_parameter_once() -> None:
    cases = (("tied", "1f1b"), ("tied", "dualpipe"), ("gpt", "chimera"))
    for case in cases:
        for clipped, plain in results_of(sharing.clip, 2, cases, case):
            torch.testing.assert_close(clipped, plain)


def test_a_checkpoint_of_shared_parameters_is_the_plain_models(tmp_path: Any) -> None:
    for number, schedule in enumerate(("1f1b", "dualpipe")):
        folder = tmp_path / str(number)
        outcomes = run_ranks(sharing.save_and_load, 2, schedule, str(folder))
        assert [outcome.result() for outcome in outcomes] == ["", ""]
        assert sharing.load_plain(str(folder)) == ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("shape", "can't be shared: shapes, dtypes or shards differ"),
        ("name", "has neither a parameter nor a module 'nothing'"),
        ("stage", "names stage 7; there are stages 0 to 1"),
        ("one rank", "the ranks do not agree on what stages share"),
        ("hook", "has a post-accumulate-grad hook"),
    ],
)
def test_invalid_ties_are_an_error_on_every_rank(fault: str, told: str) -> None:
    for outcome in run_ranks(sharing.faulty, 2, fault):
        assert told in outcome.result()


def test_an_error_before_the_sum_is_raised_on_the_other_ranks() -> None:
    outcomes = [outcome.result() for outcome in run_ranks(sharing.fail_in_backward, 2)]
    assert [error_type for error_type, _, _ in outcomes] == ["StageError", "PeerError"]
    for _, message, grad_is_kept in outcomes:
        assert "a fault in the backward" in message
        # Gradients that had piled up before the broken step are those of a whole one.
        assert grad_is_kept


def test_a_write_to_a_shared_buffer_is_an_error_on_ranks_without_the_layer() -> None:
    for outcome in run_ranks(sharing.write_shared_buffer, 2):
        kind, message = outcome.result()
        assert kind == "PartitionError"
        assert "the buffer calls of stage 0 is that of stage 2 too, and is written" in message
