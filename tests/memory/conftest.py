"""Each test of the memory engine begins as in a process that has compiled nothing."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TIMES = float(os.environ.pop("KILTER_TEST_TIMES", "1"))


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    """Weights and segments are left alone in a process that compiles, and other tests compile."""
    compiler = sys.modules.get("torch._dynamo.utils")
    if compiler is not None:
        compiler.counters.clear()


@pytest.fixture(autouse=True)
def _device_of_another_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`KILTER_TEST_TIMES=20` makes everything take the stand-in twenty times as long. No test may
    depend on how fast the machine is."""
    if TIMES != 1:
        from kilter.memory.engine import CpuStandIn

        monkeypatch.setattr(CpuStandIn, "mark", lambda self: TIMES * time.perf_counter())


@pytest.fixture(scope="session")
def recorder_is_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled recorder is in this state directory; built once for all workers."""
    from kilter.memory.engine import compiled_recorder

    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    state = root / "a recorder"  # paths may have spaces
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state))
        patch.setenv(compiled_recorder.BUILD, "on")
        compiled_recorder.built_path.cache_clear()
        reason = compiled_recorder.build() if compiled_recorder.to_build() else None
    compiled_recorder.built_path.cache_clear()
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler was found")
    assert reason is None, reason.text
    return state


@pytest.fixture(params=["in_python", "compiled"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The operations of calls are recorded by both recorders in turn."""
    from kilter.memory.engine import compiled_recorder

    if request.param == "compiled":
        state = request.getfixturevalue("recorder_is_built")
        monkeypatch.setenv("XDG_STATE_HOME", str(state))
        monkeypatch.setenv(compiled_recorder.BUILD, "on")
    compiled_recorder.built_path.cache_clear()
    yield
    compiled_recorder.built_path.cache_clear()


@pytest.fixture
def both(recorder_is_built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """An engine with the compiled library, and one in Python."""
    from kilter.memory.engine import CpuStandIn, Swapper, compiled_recorder
    from kilter.memory.plan.problem import Link

    monkeypatch.setenv("XDG_STATE_HOME", str(recorder_is_built))
    monkeypatch.setenv(compiled_recorder.BUILD, "on")
    compiled_recorder.built_path.cache_clear()
    link = Link(to_host_bytes_per_s=1e9, to_device_bytes_per_s=1e9, both_bytes_per_s=2e9)
    found = [Swapper(CpuStandIn(), budget_bytes=10**9, link=link, min_bytes=1024) for _ in range(2)]
    found[0]._store.use_library()  # as at the begin of a pass
    assert found[0].hooks.use_library({}, [], {}, len, len) is not None
    yield found[0], found[1]
    compiled_recorder.built_path.cache_clear()
