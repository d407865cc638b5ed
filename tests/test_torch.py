"""The versions of torch on which the suite has passed.

What is held against torch's own pipelining is held against that of 2.13 alone. Elsewhere, look at
what goes through the ``..._private.py`` adapters, run the suite, and add the version here and in
the README.
"""

from __future__ import annotations

import torch

SEEN = ("2.11", "2.13", "2.14", "2.15")


def test_this_torch_is_one_of_those() -> None:
    assert ".".join(torch.__version__.split(".")[:2]) in SEEN
