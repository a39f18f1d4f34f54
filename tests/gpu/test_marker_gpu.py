"""The marker that a real GPU's stream writes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kilter.observe import torch_internals
from kilter.observe.cuda_driver import CudaDriver
from kilter.observe.marker import Marker, MarkerReader
from kilter.observe.stream_marker import StreamMarker

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

BUSY_CYCLES = 100_000_000
"""Tens of milliseconds."""


class Marking:
    def __init__(self, way: str) -> None:
        self.device = torch.device("cuda", 0)
        torch.ones(1, device=self.device)
        driver = CudaDriver()
        if way == "fill":
            driver.writes_values = lambda: False  # type: ignore[method-assign]
        self.page = Marker()
        self.on_gpu = StreamMarker(self.page, driver, torch.cuda)
        self.mark(0)  # registers, which may wait
        torch.cuda.synchronize()
        assert self.page.file.number is not None
        self.reader = MarkerReader(self.page.file.number)

    def mark(self, index: int) -> None:
        self.on_gpu.mark(index, self.device)


@pytest.fixture(params=["write", "fill"])
def marking(request: Any) -> Iterator[Marking]:
    marking = Marking(request.param)
    yield marking
    torch.cuda.synchronize()
    marking.on_gpu.close()
    assert (torch.ones(8, device="cuda") * 2).sum().item() == 16.0


def test_a_mark_is_seen_after_the_work_before_it(marking: Marking) -> None:
    done = torch.cuda.Event()
    torch_internals.cuda_sleep(BUSY_CYCLES)
    done.record()
    marking.mark(1)
    assert not done.query()  # nobody has waited
    assert marking.page.last == 0
    torch.cuda.synchronize()
    assert marking.page.last == 1


def test_marks_are_as_far_apart_as_events(marking: Marking) -> None:
    events = []
    for index in range(1, 6):
        torch_internals.cuda_sleep(BUSY_CYCLES)
        marking.mark(index)
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    seen = []
    by_s = time.monotonic() + 60
    while marking.page.last < 5 or len(seen) < 5:
        assert time.monotonic() < by_s
        passed = marking.reader.look()
        if passed is not None:
            seen.append(passed)
    torch.cuda.synchronize()
    assert [passed.iteration for passed in seen] == [1, 2, 3, 4, 5]
    by_marker = [passed.t_s - seen[0].t_s for passed in seen]
    by_event = [events[0].elapsed_time(event) * 1e-3 for event in events]
    assert by_marker == pytest.approx(by_event, abs=2e-3)


def test_another_stream_marks_in_its_own_order(marking: Marking) -> None:
    torch_internals.cuda_sleep(BUSY_CYCLES)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        marking.mark(1)
    side.synchronize()
    assert marking.page.last == 1


def test_a_captured_graph_is_without_marks(marking: Marking) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        marking.mark(1)
    before = x.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert marking.page.last == 0
    assert torch.equal(x, before + 1)


def test_closing_unregisters(marking: Marking) -> None:
    marking.mark(1)
    torch.cuda.synchronize()
    marking.on_gpu.close()
    again = StreamMarker(marking.page, CudaDriver(), torch.cuda)
    again.mark(2, marking.device)  # the page can be registered once more
    torch.cuda.synchronize()
    assert marking.page.last == 2
    again.close()
