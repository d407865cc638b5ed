"""Weight gradients deferred by operation: the same gradients as an ordinary backward's."""

from __future__ import annotations

import pytest

from tests.stage.deferral_cases import (
    Case,
    assert_same,
    function_cases,
    in_i,
    module_cases,
    plain,
    split,
)

CASES = module_cases() | function_cases()
# torch itself warns of these, on first use of its forward mode and of such a padding.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gradients_of_plain_autograd(case: Case, steps: int) -> None:
    module, inputs = case.make()
    expected = plain(module, inputs, steps)
    assert any(grad is not None for grad in expected.values())
    assert_same(split(module, inputs, steps), expected, exact=case.exact)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_only_the_named_gradients_come_before_w(case: Case) -> None:
    assert in_i(*case.make()) == case.in_i
