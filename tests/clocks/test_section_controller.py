"""What the conductor is told about long waits while a search goes on, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.clocks import inside_controller, section_controller, section_process
from kilter.clocks.plan.timing import Commanded, CommandSchedule, ScheduleArm
from kilter.clocks.plan.waits import WaitPlan
from kilter.clocks.section_conductor import Follow, SectionConductor
from kilter.clocks.section_controller import SectionsController
from kilter.core.messages import LocalMessages
from kilter.core.rank_trace import Collective, RankIteration, RankTrace
from kilter.observe.end_times import Iteration

T, COMPUTE_S = 1.0, 0.6
USUAL_W = 460.0


def window(exposed_s: float) -> RankTrace:
    """Five iterations of computation, then an all-reduce that is exposed for so long."""
    begins = [n * T for n in range(5)]
    return RankTrace(
        source="window",
        rank=0,
        world_size=1,
        device="NVIDIA H200",
        origin_s=0.0,
        compute=[(t, t + T - exposed_s) for t in begins],
        copies=[],
        collectives=tuple(
            Collective(op="all_reduce", begin_s=t + T - exposed_s, end_s=t + T, stream=1)
            for t in begins
        ),
        iterations=tuple(
            RankIteration(number=n, begin_s=t, end_s=t + T) for n, t in enumerate(begins)
        ),
        found_by="the test",
    )


class Windows:
    """One window, at once."""

    open, count, failures, cost_s, why_not = False, 1, 0, 0.0, ""

    def __init__(self, trace: RankTrace) -> None:
        self._traces = [trace]

    def take(self, run: Any, marked_s: Any) -> RankTrace | None:
        return self._traces.pop() if self._traces else None

    def due(self, run: Any) -> bool:
        return False


class Told:
    """In place of the conductor's process: what it is told."""

    orders: list[Follow]

    def __init__(self, *_: Any) -> None:
        type(self).orders = []

    def follow(
        self,
        schedule: CommandSchedule,
        arms: Sequence[ScheduleArm] = (),
        waits: WaitPlan | None = None,
    ) -> None:
        self.orders.append(Follow(schedule=schedule, arms=tuple(arms), waits=waits))

    def look(self) -> None:
        return None

    def told(self) -> dict[str, Any]:
        return {"sets": True}

    def told_of_sections(self) -> dict[str, Any]:
        return {}

    def stop(self) -> None:
        return None


class Job:
    """A rank on a GPU that may be set; iterations take as long as ever, at every clock."""

    def __init__(self, exposed_s: float, *, asked: bool = True, can_set: bool = True) -> None:
        self.refused: list[tuple[str, ...]] = []
        info = SimpleNamespace(
            backend="nvml",
            uuid="GPU-a",
            name="NVIDIA H200",
            can_set=can_set,
            refusal=None if can_set else "no permission",
            driver="580",
            vbios=None,
            sensor_period_s=0.1,
            switch_latency_s=None,
        )
        power = SimpleNamespace(mean_power_w=lambda begin_s, end_s: USUAL_W)
        self.iterations = SimpleNamespace(
            index=0, gpu_uuid="a", device=None, usual_s=T, role="", duration_s=T
        )

        class Log:
            now_s = staticmethod(lambda: 0.0)
            refuse = staticmethod(lambda *what: self.refused.append(what))
            __call__ = staticmethod(lambda event: self.told.append(event))

        self.messages = messages = LocalMessages()
        self.told: list[Any] = []
        self.whole_job: list[int] = []
        """The iterations that the controller of the whole job's clock was told."""
        run: Any = SimpleNamespace(
            dry_run=False,
            info=info,
            iterations=self.iterations,
            log=Log(),
            sampler=SimpleNamespace(record=power),
            ranks=SimpleNamespace(rank=0, world_size=1),
            messages=lambda: messages,
            files=SimpleNamespace(),
            tell_risks=lambda: None,
        )
        self.controller = SectionsController(
            run,
            max_slowdown=0.005,
            otherwise=never if asked else self.take_over,
            asked=asked,
            rehearse_s=0.0,
        )
        self.controller._windows = Windows(window(exposed_s))  # type: ignore[assignment]

    def take_over(self) -> Any:
        return SimpleNamespace(
            begin=lambda: None,
            tick=lambda finished, settled: self.whole_job.extend(i.index for i in finished),
        )

    def iterate(self, count: int) -> None:
        for _ in range(count):
            self.iterations.index += 1
            index = self.iterations.index
            self.controller.iteration_ended(index)
            finished = [Iteration(index=index, end_s=index * T, duration_s=T, timeline="host")]
            self.controller.tick(finished, settled=True)


def never() -> Any:
    raise AssertionError("nothing takes over")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., Job]:
    monkeypatch.setattr(section_process, "Conducting", Told)
    monkeypatch.setattr(section_controller, "write_atomically", lambda path, raw: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def begin(exposed_s: float, **more: bool) -> Job:
        job = Job(exposed_s, **more)
        job.controller._run.files.directory = tmp_path
        job.controller.begin()
        return job

    return begin


def test_long_waits_begin_when_the_search_is_over(begun: Callable[[float], Job]) -> None:
    job = begun(T - COMPUTE_S)
    job.iterate(20)
    assert job.controller._search.open_and_undecided
    assert any(order.arms for order in Told.orders)
    assert all(order.waits is None for order in Told.orders)
    tried = len(Told.orders)
    for _ in range(2000):
        job.iterate(1)
        if not job.controller._search.open_and_undecided:
            break
    assert job.refused == []
    assert job.controller._search.found.held
    held = next(order for order in Told.orders[tried:] if not order.arms)
    assert held.schedule.commands
    assert held.waits is not None
    assert Told.orders[-1].waits is not None  # also while the bound is watched


def test_long_waits_begin_on_a_rank_without_sections(begun: Callable[[float], Job]) -> None:
    job = begun(0.001)
    job.iterate(3)
    assert job.controller._search.found.taken == "default"
    (order,) = Told.orders
    assert not order.schedule.commands
    assert order.waits is not None


def test_a_rank_that_waits_again_after_the_search_has_the_low_clock(
    begun: Callable[[float], Job],
) -> None:
    """The orders of a real controller, carried out by a real conductor on a clock of the test."""
    job = begun(0.001)
    job.iterate(3)
    now_s, computes = 0.0, True
    low: list[float | None] = []

    class Setter:
        sets = True

        def down(self, sm_clock_hz: float, hold_s: float) -> None:
            low.append(sm_clock_hz)

        def up(self) -> None:
            low.append(None)

    def power_w() -> float:
        slow = bool(low) and low[-1] is not None
        return (300.0 if slow else 600.0) if computes else (80.0 if slow else 115.0)

    log: list[Commanded] = []
    conductor = SectionConductor(Setter(), log.append, lambda: now_s, power_w)
    conductor.follow(Told.orders[-1])
    iteration = 0

    def go(seconds: float, marks: bool) -> None:
        nonlocal now_s, iteration
        for step in range(round(seconds * 100)):
            now_s += 0.01
            if marks and step % 100 == 99:
                iteration += 1
                conductor.passed(iteration, now_s)
            if conductor.due_s <= now_s:
                conductor.act()

    for _ in range(2):  # the second wait as the first
        low.clear()
        go(150.0, marks=True)  # the budget of half a per cent grows
        assert low == []
        computes = False
        go(20.0, marks=False)
        assert low[0] is not None
        assert None not in low
        computes = True
        go(3.0, marks=False)
        assert low[-1] is None
    assert [c.edge for c in log] == ["down", "up"] * 2


def test_without_sections_that_pay_the_whole_job_is_governed_after_one_window(
    begun: Callable[..., Job],
) -> None:
    job = begun(0.001, asked=False)
    job.iterate(10)
    assert job.whole_job[-1] == 10
    assert job.controller._windows.count == 1
    last = job.told[-1]
    assert last.search.taken == "default"
    assert last.instead == last.search.reason
    assert "expected of the sections" in last.instead
    assert job.refused == []


def test_with_sections_that_pay_they_are_searched(begun: Callable[..., Job]) -> None:
    job = begun(T - COMPUTE_S, asked=False)
    job.iterate(10)
    assert job.whole_job == []
    assert job.controller._search.open_and_undecided


def test_where_another_rank_has_no_sections_the_whole_job_is_governed(
    begun: Callable[..., Job],
) -> None:
    job = begun(T - COMPUTE_S, asked=False)
    job.iterate(10)
    job.messages.post(inside_controller.GIVEN_UP, b"rank 1: the profiler is in use")
    job.iterate(10)
    assert job.whole_job[-1] == 20
    assert job.controller._off
    assert job.controller._why_instead == "rank 1: the profiler is in use"


def test_a_rank_that_may_set_nothing_tells_the_others_at_once(begun: Callable[..., Job]) -> None:
    job = begun(T - COMPUTE_S, asked=False, can_set=False)
    job.iterate(2)
    assert job.whole_job == [1, 2]
    assert job.messages.look(inside_controller.GIVEN_UP) == b"rank 0: no permission"
    assert job.refused == []  # the controller of the whole job refuses


def test_a_window_that_fails_again_and_again_leaves_the_whole_job(
    begun: Callable[..., Job],
) -> None:
    job = begun(T - COMPUTE_S, asked=False)
    job.controller._windows._traces.clear()
    job.controller._windows.failures = section_controller.WINDOW_FAILURES
    job.controller._windows.why_not = "the profiler is in use"
    job.iterate(3)
    assert job.whole_job == [2, 3]
    assert job.refused == [("observing sections", "the profiler is in use", None)]
    assert job.messages.look(inside_controller.GIVEN_UP) == b"rank 0: the profiler is in use"


@pytest.mark.parametrize(
    ("needed", "reason"),
    [
        (20, "too few for 20"),
        (3, "the script ended before a window of the profiler was read"),
    ],
)
def test_a_script_of_many_short_iterations_was_not_too_short(
    begun: Callable[..., Job], needed: int, reason: str
) -> None:
    job = begun(0.4)
    run: Any = job.controller._run
    run.too_few = lambda least: f"too few for {least}"
    run.fence = SimpleNamespace(down=False)
    windows: Any = job.controller._windows
    windows._traces, windows.needed = [None], needed
    job.iterate(10)
    job.controller.end([], SimpleNamespace(finished=True))  # type: ignore[arg-type]
    assert job.refused == [("looking for sections", reason)]
