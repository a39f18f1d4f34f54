"""Each test of the memory engine begins as in a process that has compiled nothing."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Weights and segments are left alone in a process that compiles, and other tests compile."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()
