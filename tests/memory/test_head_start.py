"""While a pass is watched the device stays behind the host, at the cost of the host's time."""

from __future__ import annotations

import pytest

from kilter.memory.engine import CpuStandIn
from kilter.memory.engine.backend import CopyEvent
from kilter.memory.engine.head_start import PAUSE_S, HeadStart

HOST_S = 0.5


class Device(CpuStandIn):
    """Does what is issued one after the other, each no sooner than it was issued."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.paused_s = 0.0
        self.idle = False
        """It had nothing to do while the host issued something."""

    def keep_busy(self, seconds: float) -> None:
        self.paused_s += seconds
        self.busy_until_s = max(self.busy_until_s, self.now_s) + seconds

    def mark(self) -> CopyEvent:
        return max(self.busy_until_s, self.now_s)

    def reached(self, mark: CopyEvent) -> bool:
        return bool(self.now_s >= mark)

    def issue(self, host_s: float, work_s: float) -> None:
        """The host takes so long to issue what the device then does."""
        self.now_s += host_s
        self.idle |= self.now_s > self.busy_until_s
        self.busy_until_s = max(self.busy_until_s, self.now_s) + work_s

    def watch(self, each_s: float, work_s: float) -> None:
        """A pass with an event after each operation."""
        start = HeadStart(self)
        for _ in range(round(HOST_S / each_s)):
            start.renew()
            self.issue(each_s, work_s)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("each_s", [1e-5, 1e-4, 1e-3, 4e-3])
def test_the_device_has_something_to_do_while_the_host_issues(each_s: float, share: float) -> None:
    device = Device()
    device.watch(each_s, share * each_s)
    assert not device.idle


@pytest.mark.parametrize("each_s", [1e-5, 1e-4, 1e-3])
def test_pauses_take_the_time_that_the_device_would_wait(each_s: float) -> None:
    device = Device()
    device.watch(each_s, 0.25 * each_s)
    assert device.paused_s <= 0.75 * HOST_S + 2 * PAUSE_S


@pytest.mark.parametrize("each_s", [1e-5, 1e-4, 1e-3])
def test_a_device_that_has_more_to_do_than_the_host_hardly_pauses(each_s: float) -> None:
    device = Device()
    device.watch(each_s, 3 * each_s)
    assert device.paused_s <= 3 * HOST_S / 20


def test_after_the_host_has_waited_the_device_pauses_again() -> None:
    device = Device()
    start = HeadStart(device)
    start.renew()
    device.now_s += 5 * PAUSE_S
    start.renew()
    assert device.paused_s == 2 * PAUSE_S
