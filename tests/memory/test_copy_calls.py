"""The calls of the driver that start a copy: the compiled library and Python make the same ones."""

from __future__ import annotations

import ctypes
import threading
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kilter.core.errors import DeviceError  # noqa: E402
from kilter.memory.engine import compiled_recorder  # noqa: E402
from kilter.memory.engine.cuda import _Lane  # noqa: E402

STREAM, OTHER, READY, OVER, DONE, COMPUTE = 11, 12, 13, 14, 15, 16
TURN = 64


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
    state = {"_driver": driver, "_streams": [STREAM, OTHER], "_ready": READY, "_over": OVER}
    state |= {"_done": [DONE] * _Lane.RING, "TURN": TURN, "_in_turn": 0}
    found.__dict__.update(state, _issued=0, _waited={}, _calls=None, _turns=threading.RLock())
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


class Copied(NamedTuple):
    """What reaches the copy engine."""

    stream: int
    begin: int
    size_bytes: int


def check_order(asked: list[tuple[Any, ...]], sizes_bytes: list[int]) -> list[Copied]:
    """Play the driver: whatever comes later on either stream begins when all before it is over, and
    after what was issued to the computing stream. Gives the copies."""
    after: dict[int, set[int]] = {STREAM: set(), OTHER: set(), COMPUTE: set()}
    """By stream, and below by event: what has come before its end."""
    events: dict[int, set[int]] = {}
    copies: list[Copied] = []
    sizes = iter(sizes_bytes)
    for number, (name, *arguments) in enumerate(asked):
        if name == "record":
            event, stream = arguments
            if stream == COMPUTE:
                issued = -1 - number  # of the computing stream; copies have the other numbers
                after[COMPUTE] = {issued}
            events[event] = set(after[stream])
            if event == DONE:
                assert events[event] >= set(range(len(copies)))
                size_bytes = next(sizes)
                parts = copies[size_bytes // -TURN :]
                assert sum(part.size_bytes for part in parts) == size_bytes
                assert [part.begin for part in parts] == [*range(0, size_bytes, TURN)]
        elif name == "hold":
            stream, event, _ = arguments
            after[stream] |= events[event]
        else:
            begin, size_bytes, stream = arguments
            assert after[stream] >= {*range(len(copies)), issued}
            after[stream].add(len(copies))
            copies.append(Copied(stream, begin, size_bytes))
    return copies


@given(
    st.lists(st.integers(1, 5 * TURN), min_size=1, max_size=12),
    st.integers(0, 12),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_copies_end_in_order_and_streams_take_turns(
    library: Any, sizes_bytes: list[int], by_python: int
) -> None:
    """The first copies are started by Python, and the others by the library."""
    driver, alone = Driver(), Driver()
    ours, python = lane(driver), lane(alone)
    asked: list[tuple[Any, ...]] = []
    for number, size_bytes in enumerate(sizes_bytes):
        if number == by_python:
            ours.use_library(library)
        target, source = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))
        before = len(driver.asked)
        for each in (ours, python):
            each.copy(target, source, COMPUTE)
        for name, *arguments in driver.asked[before:]:
            if name == "copy":
                begin = arguments[0] - target.data_ptr()
                assert arguments[1] - source.data_ptr() == begin
                arguments = [begin, *arguments[2:]]
            asked.append((name, *arguments))
    copies = check_order(asked, sizes_bytes)
    turns = [list(turn) for _, turn in groupby(copies, key=lambda copied: copied.stream)]
    assert all(sum(copied.size_bytes for copied in turn) <= TURN for turn in turns)
    for turn, following in pairwise(turns):  # no sooner than it has to
        assert sum(copied.size_bytes for copied in turn) + following[0].size_bytes > TURN
    assert driver.asked == alone.asked


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
