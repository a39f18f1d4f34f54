"""No test is timed: a busy machine is no failure. In CI the examples are the same every time.

`KILTER_TEST_EXAMPLES` says how many examples a property is tried with where its test does not say.
"""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kilter.session import options
from kilter.testing.warm_python import WarmPython

settings.register_profile(
    "kilter",
    deadline=None,
    max_examples=int(os.environ.get("KILTER_TEST_EXAMPLES", "30")),
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("kilter")

# More than a thousand processes would compile all of kilter again, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Two workers on two cores: more threads of torch would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The stand-in for a device overwrites what was evicted, here and in each `kilter run` of a test.
os.environ["KILTER_SPOIL_EVICTED"] = "1"

# Fake cards have the same names in each test, and this machine's own locks are not for them.
os.environ.setdefault("KILTER_LOCK_DIR", tempfile.mkdtemp(prefix="kilter-test-locks-"))

# Nothing is compiled but where a test asks for it.
os.environ.setdefault("KILTER_BUILD", "off")

# Rehearsals go on after a script until the search is over; a test that needs that says so.
os.environ.setdefault("KILTER_REHEARSE", "0.5s")
options.REHEARSE_S = 0.5

# A job that comes again begins with what the last run chose: tests are not each other's last run.
os.environ.setdefault("KILTER_HISTORY", "off")

# Started in the background of a shell or by nohup: what the tests start would never hear of Ctrl-C
# or of the end of the terminal.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_collection_finish() -> None:
    """Modules and collected tests live as long as the process: neither a collection of garbage nor
    the engine, which looks for the program's norms among all objects, goes through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmPython]:
    """Runs Python programs that do not test how Python starts."""
    pytest.importorskip("torch")
    with WarmPython(os.environ) as python:
        yield python
