"""The thread that makes vendor calls: results, errors, time-outs, and no second wait."""

from __future__ import annotations

import threading
import time

import pytest

from kilter.core.errors import DeviceError, DeviceHung, DeviceLost
from kilter.device.worker import Worker


@pytest.fixture
def worker() -> Worker:
    return Worker(lambda: "GPU 0: nvmlThing")


def test_the_result_is_made_in_another_thread_always_the_same(worker: Worker) -> None:
    threads = {worker.do(threading.get_ident, 5.0) for _ in range(10)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_a_device_error_is_raised_here_and_the_thread_goes_on(worker: Worker) -> None:
    def lose() -> None:
        raise DeviceLost("gone")

    for _ in range(2):
        with pytest.raises(DeviceLost, match="gone"):
            worker.do(lose, 5.0)
    assert worker.do(lambda: 7, 5.0) == 7


def test_threads_take_turns(worker: Worker) -> None:
    """Nothing that two threads ask for runs at the same time."""
    inside = []
    overlaps = []

    def visit() -> None:
        inside.append(1)
        overlaps.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    threads = [threading.Thread(target=worker.do, args=(visit, 30.0)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlaps == [1] * 20


def test_after_a_time_out_nothing_more_is_asked(worker: Worker) -> None:
    release = threading.Event()
    asked = []
    with pytest.raises(DeviceHung, match=r"GPU 0: nvmlThing did not return within 0\.05 s"):
        worker.do(release.wait, 0.05)
    release.set()
    with pytest.raises(DeviceHung, match="left alone"):
        worker.do(lambda: asked.append(1), 30.0)
    assert asked == []


def test_a_mistake_of_ours_is_an_error_not_a_result(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    thread = worker.do(threading.current_thread, 5.0)
    with pytest.raises(DeviceError, match="unforeseen"):
        worker.do(lambda: [][0], 5.0)
    thread.join()
    assert shown[0].exc_type is IndexError
