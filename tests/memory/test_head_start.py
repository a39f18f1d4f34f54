"""While a pass is watched the device stays behind the host, at the cost of the host's time."""

from __future__ import annotations

import pytest

from kilter.memory.engine import CpuStandIn, head_start
from kilter.memory.engine.head_start import PAUSE_S, SPARE_S, HeadStart


class Device(CpuStandIn):
    """Ends its pauses one after the other, each no sooner than it was issued."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pauses_until_s = 0.0
        self.pauses = 0

    def keep_busy(self, seconds: float) -> None:
        self.pauses += 1
        self.pauses_until_s = max(self.pauses_until_s, self.now_s) + seconds


@pytest.mark.parametrize("each_s", [1e-5, 1e-4, 1e-3, 2e-3])
def test_the_device_pauses_while_the_host_issues_an_operation(
    each_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(head_start.time, "perf_counter", lambda: device.now_s)
    start = HeadStart(device)
    host_s = 0.5
    for _ in range(round(host_s / each_s)):
        start.renew()
        device.now_s += each_s  # the host issues what lies between two events
        assert device.now_s <= device.pauses_until_s
    paused_s = device.pauses * PAUSE_S
    assert paused_s <= 1.1 * host_s * PAUSE_S / (PAUSE_S - SPARE_S - each_s) + PAUSE_S


def test_after_the_host_has_waited_the_device_pauses_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    monkeypatch.setattr(head_start.time, "perf_counter", lambda: device.now_s)
    start = HeadStart(device)
    start.renew()
    device.now_s += 5 * PAUSE_S
    start.renew()
    assert device.pauses == 2
