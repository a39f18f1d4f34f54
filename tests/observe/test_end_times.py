"""Ends of iterations on a GPU, read from events that `torch.cuda` is imitated to record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kilter.observe.end_times import EndTimes

DEVICE = "cuda:0"


class FakeGpu:
    """Each iteration takes a second of its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.captures = False
        gpu = self

        class Event:
            def __init__(self, **_: Any) -> None:
                self.at_s = -1.0

            def record(self, _stream: Any) -> None:
                assert not gpu.captures
                self.at_s = gpu.now_s

            def query(self) -> bool:
                assert not gpu.captures, "this ends the capture"
                return True

            def elapsed_time(self, other: Event) -> float:
                return 1e3 * (other.at_s - self.at_s)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.captures)


def test_an_iteration_that_is_captured_is_not_timed_and_asks_after_no_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, times = FakeGpu(monkeypatch), EndTimes()
    for index in range(10):
        gpu.now_s, gpu.captures = float(index), index in (4, 5)
        times.end(index, gpu.now_s, times.record(DEVICE), 0)
    found = times.finished()
    assert [one.index for one in found] == [1, 2, 3, 7, 8, 9]
    assert all(one.duration_s == 1.0 and one.timeline == "gpu" for one in found)
