"""The marker: written by the host or by a GPU's stream, read by another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.fake_cuda import FakeCuda

from kilter.core.errors import DeviceError
from kilter.observe.cuda_driver import CudaDriver
from kilter.observe.marker import NONE, Marker, MarkerReader
from kilter.observe.stream_marker import StreamMarker

TIMEOUT_S = 60


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Marking:
    """One way to mark, and what the other process sees."""

    def __init__(self, way: str) -> None:
        self.page = Marker()
        self.cuda = FakeCuda(writes_values=way != "fill")
        self.on_gpu = StreamMarker(self.page, self.cuda.driver(), self.cuda)
        self.clock = Clock()
        assert self.page.file.number is not None
        self.reader = MarkerReader(self.page.file.number, self.clock)
        self._way = way

    def mark(self, index: int) -> None:
        if self._way == "host":
            self.page.mark(index)
        else:
            self.on_gpu.mark(index, "cuda:0")

    def seen(self) -> int | None:
        """After the GPU has done what it was given."""
        self.cuda.run()
        passed = self.reader.look()
        return None if passed is None else passed.iteration


@pytest.fixture(params=["host", "write", "fill"])
def marking(request: pytest.FixtureRequest) -> Marking:
    return Marking(request.param)


# What all ways have in common


def test_nothing_is_seen_before_the_first_mark(marking: Marking) -> None:
    assert marking.seen() is None
    assert marking.page.last == NONE


def test_each_mark_is_seen_once(marking: Marking) -> None:
    for index in (0, 1, 2, 7, 2**31 - 2):
        marking.mark(index)
        assert marking.seen() == index
        assert marking.seen() is None
        assert marking.page.last == index


def test_of_several_marks_the_last_one_is_seen(marking: Marking) -> None:
    for index in range(5):
        marking.mark(index)
    assert marking.seen() == 4


def test_the_descriptor_may_be_closed(marking: Marking) -> None:
    marking.page.close()
    marking.mark(3)
    assert marking.seen() == 3


# Times


def test_the_host_tells_the_time_itself() -> None:
    marking = Marking("host")
    marking.mark(0)
    marking.clock.now_s += 5.0
    passed = marking.reader.look()
    assert passed is not None
    assert passed.within_s == 0.0
    assert marking.reader.tells_time


@pytest.mark.parametrize("way", ["write", "fill"])
def test_the_time_of_a_stream_is_between_two_looks(way: str) -> None:
    marking = Marking(way)
    assert marking.reader.look() is None
    marking.mark(0)
    marking.cuda.run()
    marking.clock.now_s += 0.25
    passed = marking.reader.look()
    assert passed is not None
    assert not marking.reader.tells_time
    assert (passed.t_s, passed.within_s) == (100.125, 0.125)


def test_a_program_that_goes_from_the_host_to_a_gpu_tells_no_times_any_more() -> None:
    marking = Marking("write")
    marking.page.mark(0)
    assert marking.reader.tells_time
    marking.mark(1)
    assert marking.seen() == 1
    assert not marking.reader.tells_time


# In the order of the stream


@given(st.lists(st.sampled_from(["work", "mark", "run"]), max_size=60))
def test_a_mark_is_seen_when_all_work_before_it_is_done_and_never_earlier(steps: list[str]) -> None:
    marking = Marking("write")
    cuda = marking.cuda
    done: list[int] = []
    given_before: dict[int, int] = {}
    works = marks = 0
    for step in steps:
        if step == "work":
            cuda.work(lambda: done.append(1))
            works += 1
        elif step == "mark":
            marking.mark(marks)
            given_before[marks] = works
            marks += 1
        else:
            cuda.run(1)
        passed = marking.reader.look()
        if passed is not None:
            assert len(done) >= given_before[passed.iteration]
    cuda.run()
    assert marking.page.last == marks - 1
    assert not cuda.faults


def test_the_current_stream_is_the_one_that_marks() -> None:
    marking = Marking("write")
    marking.cuda.stream = 11
    marking.mark(0)
    assert marking.cuda.waiting(11) == 1
    assert marking.cuda.waiting() == 0


def test_nothing_is_given_to_a_stream_that_is_captured() -> None:
    marking = Marking("write")
    marking.cuda.capturing = True
    marking.mark(0)
    assert marking.cuda.calls == []
    marking.cuda.capturing = False
    marking.mark(1)
    assert marking.seen() == 1


def test_only_the_first_mark_registers() -> None:
    marking = Marking("write")
    marking.mark(0)
    before = len(marking.cuda.calls)
    marking.mark(1)
    assert marking.cuda.calls[before:] == ["cuStreamWriteValue64_v2"]


# The end


def test_the_page_is_unregistered_when_the_last_write_is_done() -> None:
    marking = Marking("write")
    marking.mark(0)
    marking.cuda.run()
    marking.on_gpu.close()
    marking.on_gpu.close()
    assert marking.cuda.registered == set()
    assert marking.cuda.calls.count("cuMemHostUnregister") == 1


def test_a_page_that_the_gpu_may_still_write_to_stays_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kilter.observe.stream_marker.LAST_WRITE_S", 0.01)
    marking = Marking("write")
    marking.mark(0)
    marking.on_gpu.close()
    assert marking.cuda.registered
    marking.cuda.run()
    assert not marking.cuda.faults


def test_a_marker_that_never_marked_has_nothing_to_unregister() -> None:
    marking = Marking("write")
    marking.on_gpu.close()
    assert marking.cuda.calls == []


# Failures


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("write", "cuCtxGetDevice"),
        ("write", "cuDeviceGetAttribute"),
        ("write", "cuMemHostRegister_v2"),
        ("write", "cuMemHostGetDevicePointer_v2"),
        ("write", "cuStreamWriteValue64_v2"),
        ("fill", "cuMemsetD32Async"),
    ],
)
def test_a_call_that_fails_is_named_and_leaves_nothing_behind(way: str, call: str) -> None:
    marking = Marking(way)
    marking.cuda.failing = {call, "cuGetErrorName"}
    with pytest.raises(DeviceError, match=f"{call}: CUDA error 801"):
        marking.mark(0)
    marking.on_gpu.close()
    assert marking.cuda.registered == set()
    assert marking.cuda.waiting() == 0
    assert marking.seen() is None


def test_a_failed_end_is_told() -> None:
    marking = Marking("write")
    marking.mark(0)
    marking.cuda.run()
    marking.cuda.failing = {"cuMemHostUnregister"}
    with pytest.raises(DeviceError, match="cuMemHostUnregister"):
        marking.on_gpu.close()
    marking.on_gpu.close()


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kilter.observe.cuda_driver._LIBRARY", "libcuda-is-not-here.so.1")
    with pytest.raises(DeviceError, match="there is no CUDA driver"):
        CudaDriver()


def test_a_driver_without_stream_writes_fills_instead() -> None:
    marking = Marking("fill")
    marking.mark(4)
    assert marking.seen() == 4
    assert "cuStreamWriteValue64_v2" not in marking.cuda.calls


# A real process that is really killed

PROGRAM = """
import os, sys, time
from kilter.observe.marker import Marker
from kilter.observe.stream_marker import StreamMarker
from fake_cuda import FakeCuda

page, cuda = Marker(), FakeCuda()
on_gpu = StreamMarker(page, cuda.driver(), cuda)
print(page.file.number, flush=True)
index = 0
while True:
    on_gpu.mark(index, "cuda:0")
    cuda.run()
    index += 1
    if index == 100:
        print("marked", flush=True)
    time.sleep(0.0001)
"""


def test_a_reader_outlives_a_program_that_is_killed_with_a_registered_page() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    ) as program:
        assert program.stdout is not None
        number = int(program.stdout.readline())
        handle = os.open(f"/proc/{program.pid}/fd/{number}", os.O_RDONLY)
        reader = MarkerReader(handle)
        os.close(handle)
        assert program.stdout.readline() == "marked\n"
        assert reader.look() is not None
        program.send_signal(signal.SIGKILL)
        program.wait(TIMEOUT_S)
    reader.look()
    assert reader.look() is None
