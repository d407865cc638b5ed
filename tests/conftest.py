"""How much Hypothesis tries: little by default, much with HYPOTHESIS_PROFILE=nightly.

And three settings of all processes of the tests, which a test may start many of.
"""

from __future__ import annotations

import gc
import os
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

# They share the machine's cores: one thread each. Torch reads it as it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch asks a name server for the name of whatever it connects to: wait for that a second, not ten.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Torch looks up each fake operation in a cache: dearer than running it for models of few layers.
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")

# A deadline measures how busy the machine is; the suite has its own timeout per test.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile(
    "nightly", deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

gc.disable()  # while modules of tests are imported, which leaves nothing to collect


def pytest_collection_finish() -> None:
    import_module("tests.frozen")
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def list_functions_that_make_tensors() -> None:
    """Torch lists them at the first use of a device as a context. In ``from_pretrained`` of
    transformers the list would hold another ``torch.linspace``, for the rest of the process."""
    import torch  # not above: the process that starts the others has no use for it

    with torch.device("meta"):
        torch.empty(0)
