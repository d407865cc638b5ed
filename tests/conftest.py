"""How much Hypothesis tries: little by default, much with HYPOTHESIS_PROFILE=nightly."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A deadline measures how busy the machine is; the suite has its own timeout per test.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile(
    "nightly", deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
