"""No test is timed: a busy machine is no failure. In CI the examples are the same every time."""

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kilter",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("kilter")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell: what the tests start would never hear of Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
