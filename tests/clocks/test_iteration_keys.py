"""What the program's thread leaves at iteration ends for the conductor of sections, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.observe.fake_cuda import FakeCuda

from kilter.clocks import iteration_keys
from kilter.clocks.iteration_keys import IterationKeys
from kilter.clocks.section_controller import SectionsController
from kilter.observe.marker import NONE


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(iteration_keys.sys.modules, "torch", SimpleNamespace(cuda=fake))
    monkeypatch.setattr(iteration_keys, "CudaDriver", fake.driver)
    return fake


def iterate(keys: IterationKeys, *indices: int, device: Any = "cuda:0") -> None:
    for index in indices:
        keys.iteration_ended(index, device)


def test_without_a_conductor_the_streams_of_the_program_are_left_alone(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    iterate(keys, 0, 1, 2)
    assert cuda.calls == []
    assert set(keys.marked_s) == {0, 1, 2}


def test_the_stream_moves_the_marker_for_a_conductor(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    iterate(keys, 0)
    keys.marking = True
    iterate(keys, 1, 2)
    assert keys.marker.last == NONE
    cuda.run(1)
    assert keys.marker.last == 1
    cuda.run()
    assert keys.marker.last == 2


def test_a_program_on_a_cpu_moves_it_itself(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    keys.marking = True
    iterate(keys, 4, device=None)
    assert keys.marker.last == 4
    assert cuda.calls == []


def test_the_times_of_old_ends_are_forgotten(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    iterate(keys, *range(iteration_keys.MARKS_KEPT + 10))
    assert len(keys.marked_s) == iteration_keys.MARKS_KEPT
    assert min(keys.marked_s) == 10


@pytest.mark.parametrize(
    "call",
    [
        "cuCtxGetDevice",
        "cuDeviceGetAttribute",
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
        "cuStreamWriteValue64_v2",
    ],
)
def test_after_a_failed_call_the_program_goes_on_and_nothing_is_tried_again(
    call: str, cuda: FakeCuda
) -> None:
    keys = IterationKeys()
    keys.marking = True
    cuda.failing = {call}
    iterate(keys, 0)
    assert keys.failed is not None
    assert call in keys.failed
    before = list(cuda.calls)
    iterate(keys, 1, 2)
    assert cuda.calls == before
    keys.script_ended()
    assert not cuda.registered


def test_a_write_that_fails_later_ends_the_marks(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    keys.marking = True
    iterate(keys, 0, 1)
    cuda.failing = {"cuStreamWriteValue64_v2"}
    iterate(keys, 2)
    cuda.failing = set()
    iterate(keys, 3)
    cuda.run()
    assert keys.marker.last == 1
    keys.script_ended()
    assert not cuda.registered


def test_without_a_driver_the_reason_says_so(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("kilter.observe.cuda_driver._LIBRARY", "libcuda-is-not-here.so.1")
    monkeypatch.setitem(iteration_keys.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    keys = IterationKeys()
    keys.marking = True
    iterate(keys, 0)
    assert keys.failed is not None
    assert "there is no CUDA driver" in keys.failed


def test_the_page_is_given_back_when_the_script_ends(cuda: FakeCuda) -> None:
    keys = IterationKeys()
    keys.marking = True
    iterate(keys, 0, 1)
    cuda.run()
    keys.script_ended()
    keys.script_ended()
    assert not cuda.registered
    assert cuda.calls.count("cuMemHostUnregister") == 1


# The controller


class Log:
    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []

    def refuse(self, subject: str, reason: str, code: str | None = None) -> None:
        self.refused.append((subject, reason))

    def __call__(self, event: Any) -> None:
        pass


def run_on(uuid: str | None, *, info: Any) -> tuple[Any, Log]:
    log = Log()
    iterations = SimpleNamespace(index=5, gpu_uuid=uuid, device=uuid and "cuda:0", usual_s=0.1)
    observed = SimpleNamespace(observe=lambda iterations: None)
    run = SimpleNamespace(dry_run=True, info=info, iterations=iterations, log=log, trace=observed)
    return run, log


def gpu(uuid: str = "GPU-aaaa") -> Any:
    return SimpleNamespace(
        backend="nvml", uuid=uuid, name="NVIDIA H200", can_set=True, driver="580", vbios=None
    )


def never() -> Any:
    raise AssertionError("nothing takes over")


@pytest.fixture
def begun() -> Callable[..., tuple[SectionsController, Log]]:
    def begin(uuid: str | None, **info: Any) -> tuple[SectionsController, Log]:
        run, log = run_on(uuid, info=gpu(**info))
        controller = SectionsController(
            run, max_slowdown=0.02, otherwise=never, asked=True, rehearse_s=0.0
        )
        controller.begin()
        controller.tick([], settled=True)
        return controller, log

    return begin


def test_a_program_on_the_watched_gpu_is_planned_for(begun: Callable[..., Any]) -> None:
    controller, log = begun("aaaa")
    assert controller._plan is not None
    assert log.refused == []


def test_a_program_on_another_gpu_is_refused(begun: Callable[..., Any]) -> None:
    controller, log = begun("bbbb")
    assert controller._plan is None
    ((subject, reason),) = log.refused
    assert subject == "setting clocks"
    assert "GPU-bbbb" in reason
    assert "CUDA_VISIBLE_DEVICES" in reason


def test_a_marker_that_fails_gives_sections_up_with_the_reason(
    begun: Callable[..., Any], cuda: FakeCuda
) -> None:
    controller, log = begun("aaaa")
    controller._keys.marking = True
    cuda.failing = {"cuMemHostRegister_v2"}
    controller.iteration_ended(6)
    controller.tick([], settled=True)
    controller.tick([], settled=True)
    ((subject, reason),) = log.refused
    assert subject == "marking iterations for the conductor"
    assert "cuMemHostRegister_v2" in reason
    controller.iteration_ended(7)
