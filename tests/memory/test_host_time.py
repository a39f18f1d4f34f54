"""What iterations take beyond their plan is shared out to the tensors that are recomputed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kilter.memory.host_time import HostTime
from kilter.memory.iteration_times import IterationTimes


class Engine:
    """Has one plan, and iterations of so many passes."""

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.counted_s: list[float] = []

    def report(self) -> Any:
        plan = SimpleNamespace(peak_before_bytes=9, recomputed=30, swapped=10)
        plan.compute_s, plan.iteration_s, plan.stall_s = 0.010, 0.012, 0.0
        return SimpleNamespace(plans=(plan,), passes=self.passes)

    def recompute(self, *, calls: bool, each_s: float) -> None:
        assert not calls
        self.counted_s.append(each_s)


def measured(passes: int, iteration_s: float) -> HostTime:
    times = IterationTimes()
    times.index = 20
    times.plain_s.append(0.1)
    host = HostTime(Engine(passes * times.index), times)  # type: ignore[arg-type]
    host.shorter_s(iteration_s)
    return host


@pytest.mark.parametrize("passes", [1, 4])
def test_it_is_shared_out_to_the_tensors_of_all_passes(passes: int) -> None:
    host = measured(passes, 0.1 + passes * (0.002 + 40 * 0.0005))
    assert host.each_s == pytest.approx(0.0005)
    assert host.counted_s == host.each_s


def test_what_the_plan_accounts_for_is_not_the_hosts() -> None:
    host = measured(4, 0.1 + 4 * 0.002)
    assert host.each_s == pytest.approx(0.0, abs=1e-12)
    assert host.counted_s == 0.0
    assert host.keeps_up
