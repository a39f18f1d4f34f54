"""No test is timed: a busy machine is no failure. In CI the examples are the same every time."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kilter",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("kilter")
