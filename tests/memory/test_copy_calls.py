"""The calls of the driver that start a copy: the compiled library and Python make the same ones."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kilter.core.errors import DeviceError  # noqa: E402
from kilter.memory.engine import compiled_recorder  # noqa: E402
from kilter.memory.engine.cuda import _Lane  # noqa: E402

STREAM, READY, DONE, COMPUTE = 11, 12, 13, 14


class Driver:
    """It notes what it is asked, and answers one of the calls with an error."""

    def __init__(self, fails: str | None = None) -> None:
        handle, address, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
        self.asked: list[tuple[Any, ...]] = []

        def function(name: str, *kinds: Any) -> Any:
            def call(*arguments: Any) -> int:
                self.asked.append((name, *arguments))
                return 7 if fails == name else 0

            return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(call)

        self.copy = function("copy", address, address, size, handle)
        self.record = function("record", handle, handle)
        self.hold = function("hold", handle, handle, ctypes.c_uint)


def lane(driver: Driver) -> _Lane:
    """As on a GPU, but for its streams and events."""
    found = _Lane.__new__(_Lane)
    state = {"_driver": driver, "_stream": STREAM, "_ready": READY, "_done": [DONE] * _Lane.RING}
    found.__dict__.update(state, _issued=0, _waited={}, _calls=None)
    return found


@pytest.fixture
def library(recorder_is_built: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("XDG_STATE_HOME", str(recorder_is_built))
    monkeypatch.setenv(compiled_recorder.BUILD, "on")
    compiled_recorder.built_path.cache_clear()
    yield compiled_recorder.library()
    compiled_recorder.built_path.cache_clear()


def started(library: Any, fails: str | None = None) -> list[tuple[Any, ...]]:
    """What the driver is asked for a copy."""
    driver = Driver(fails)
    ours = lane(driver)
    if library is not None:
        ours.use_library(library)
    target, source = torch.zeros(8), torch.ones(8)
    if fails is None:
        assert ours.copy(target, source, COMPUTE) == (ours, 1)
    else:
        with pytest.raises(DeviceError, match=r"failed \(CUDA: 7\)"):
            ours.copy(target, source, COMPUTE)
    names = {target.data_ptr(): "target", source.data_ptr(): "source"}
    return [tuple(names.get(one, one) for one in asked) for asked in driver.asked]


CALLS = [
    ("record", READY, COMPUTE),
    ("hold", STREAM, READY, 0),
    ("copy", "target", "source", 32, STREAM),
    ("record", DONE, STREAM),
]


def test_a_copy_is_started_by_the_same_calls(library: Any) -> None:
    assert [started(which) for which in (None, library)] == [CALLS, CALLS]


@pytest.mark.parametrize(("fails", "calls"), [("record", 1), ("hold", 2), ("copy", 3)])
def test_nothing_is_asked_after_an_error(library: Any, fails: str, calls: int) -> None:
    assert [len(started(which, fails)) for which in (None, library)] == [calls, calls]


@pytest.mark.parametrize("fails", [None, "hold"])
def test_whoever_waits_asks_once_for_each_copy(library: Any, fails: str | None) -> None:
    def asked(which: Any) -> list[tuple[Any, ...]]:
        driver = Driver(fails)
        ours = lane(driver)
        if which is not None:
            ours.use_library(which)
        for number in (2, 1, 2, 3):
            if fails is None:
                ours.wait(number, COMPUTE)
            else:
                with pytest.raises(DeviceError, match=r"failed \(CUDA: 7\)"):
                    ours.wait(number, COMPUTE)
        return driver.asked

    assert asked(library) == asked(None) == [("hold", COMPUTE, DONE, 0)] * (4 if fails else 2)


def test_the_kernel_of_a_norm_is_launched_with_what_it_reads(library: Any) -> None:
    """Scratch memory that some versions of Triton pass comes behind its arguments."""
    asked: list[tuple[Any, ...]] = []
    whole, small = ctypes.c_void_p, ctypes.c_uint

    @ctypes.CFUNCTYPE(
        ctypes.c_int, whole, *[small] * 7, whole, ctypes.POINTER(ctypes.c_void_p), whole
    )
    def launch(function: int, *arguments: Any) -> int:
        *shape, stream, parameters, extra = arguments
        words = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(9)]
        asked.append((function, shape, stream, words, extra))
        return 7

    kernel = library.NormKernel(
        ctypes.cast(launch, ctypes.c_void_p).value, 21, 64, 128, {3: STREAM}.__getitem__
    )
    addresses = [16, 32, 48, 64, 80, 96]
    assert kernel.launch(5, addresses, 1600, 3) == 7
    assert asked == [(21, [5, 1, 1, 64, 1, 1, 128], STREAM, [*addresses, 1600, 0, 0], None)]
