"""How much Hypothesis tries: little by default, much with HYPOTHESIS_PROFILE=nightly.

And how long the tests wait for a name server: torch asks for the name of whatever it connects to.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Instead of five seconds, twice; it is read by the processes that tests start, too.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# A deadline measures how busy the machine is; the suite has its own timeout per test.
settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile(
    "nightly", deadline=None, max_examples=3000, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
