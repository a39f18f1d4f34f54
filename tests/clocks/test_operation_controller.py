"""What the controller of operations does when the job's iteration becomes another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kilter.clocks import section_process
from kilter.clocks.operation_controller import DEPARTED, MOST_CHANGES, OperationsController
from kilter.clocks.plan.timing import NOTHING, CommandSchedule, ScheduleArm
from kilter.core.label import Label
from kilter.core.messages import LocalMessages
from kilter.core.setting import Supported
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.observe.end_times import Iteration

BOUND = 0.02


def trace(iteration_s: float) -> IterationTrace:
    """A third computes, a third moves memory, a third computes."""
    flops_and_bytes = [(1e12, 5e7), (1e9, 5e9), (1e12, 5e7)]
    operations = tuple(
        Operation(
            name=f"layer{n}",
            kind=Kind.FORWARD,
            start_s=n * iteration_s / 3,
            duration_s=iteration_s / 3,
            flops=flops,
            bytes_moved=moved,
        )
        for n, (flops, moved) in enumerate(flops_and_bytes)
    )
    return IterationTrace(
        iteration_s=iteration_s,
        operations=operations,
        timeline="host",
        device="cpu",
        label=Label.MEASURED,
    )


class Told:
    """In place of the conductor's process: the commands that it was told last."""

    now: CommandSchedule
    arms: Sequence[ScheduleArm]
    started = 0

    def __init__(self, *_: Any) -> None:
        type(self).started += 1

    def follow(self, schedule: CommandSchedule, arms: Sequence[ScheduleArm] = ()) -> None:
        type(self).now, type(self).arms = schedule, arms

    def pause(self) -> None:
        self.follow(NOTHING)

    def look(self) -> None:
        return None

    def told(self) -> dict[str, Any]:
        return {"sets": True}

    def stop(self) -> None:
        self.follow(NOTHING)


class Job:
    """One rank on a GPU that may be set, which takes no notice of its clocks."""

    def __init__(self, *, name: str = "NVIDIA H200", **run: Any) -> None:
        self.noticed: list[str] = []
        self.refused: list[tuple[str, ...]] = []
        self.told: list[Any] = []
        self.whole_job: list[int] = []
        """The iterations that the controller of the whole job's clock was told."""
        self.iterations = SimpleNamespace(
            index=0, gpu_uuid="a", device=None, usual_s=1.0, role="worker"
        )
        self.source = SimpleNamespace(trace=None, wanted=0, want=self._want, again=self._want)
        messages = LocalMessages()
        log = SimpleNamespace(
            now_s=lambda: 0.0,
            refuse=lambda *what: self.refused.append(what),
            notice=self.noticed.append,
        )

        class Log(SimpleNamespace):
            __call__ = staticmethod(lambda event: self.told.append(event))

        info = SimpleNamespace(
            backend="nvml",
            uuid="GPU-a",
            name=name,
            can_set=True,
            driver="580",
            vbios=None,
            sensor_period_s=0.1,
            switch_latency_s=None,
        )
        found: Any = SimpleNamespace(
            dry_run=False,
            info=info,
            device=SimpleNamespace(info=lambda: info, supported=Supported),
            iterations=self.iterations,
            log=Log(**vars(log)),
            sampler=SimpleNamespace(record=SimpleNamespace(mean_power_w=lambda *_: 460.0)),
            ranks=SimpleNamespace(rank=0, world_size=1),
            messages=lambda: messages,
            trace=self.source,
            tell_risks=lambda: None,
            fence=SimpleNamespace(down=False),
            why_no_trace=lambda: "the program ended too early",
        )
        vars(found).update(run)
        self.controller = OperationsController(
            found, max_slowdown=BOUND, otherwise=self._take_over, rehearse_s=0.0
        )
        self.controller.begin()

    def _want(self) -> None:
        self.source.wanted += 1

    def _take_over(self) -> Any:
        return SimpleNamespace(
            begin=lambda: None,
            tick=lambda finished, settled: self.whole_job.extend(i.index for i in finished),
            script_ended=lambda: None,
            end=lambda finished, outcome: None,
        )

    def iterate(self, count: int = 1) -> None:
        for _ in range(count):
            self.iterations.index += 1
            index, length_s = self.iterations.index, self.iterations.usual_s
            self.controller.iteration_ended(index)
            finished = [
                Iteration(index=index, end_s=index * length_s, duration_s=length_s, timeline="host")
            ]
            self.controller.tick(finished, settled=True)

    def observed(self) -> None:
        """A window of the profiler has been read."""
        self.source.trace = trace(self.iterations.usual_s)

    @property
    def tries(self) -> bool:
        """Lower clocks are being tried out."""
        return any(arm.schedule.commands for arm in Told.arms)


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Job]:
    monkeypatch.setattr(section_process, "Conducting", Told)
    monkeypatch.setattr(Told, "started", 0)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def made(**run: Any) -> Job:
        job = Job(**run)
        job.observed()
        job.iterate(3)
        return job

    return made


def test_a_card_without_a_profile_is_planned_with_that_of_its_chip_and_says_so(
    begin: Callable[..., Job],
) -> None:
    job = begin(name="NVIDIA H100 80GB HBM3")
    assert Told.started == 1
    assert job.noticed == ["NVIDIA H100 80GB HBM3 has no profile: planned with that of sim:h200"]
    other = begin(name="NVIDIA L40S")
    assert "how fast its clocks change is not known" in str(other.refused)


@pytest.mark.parametrize("factor", [2.0, 0.6])
def test_another_iteration_drops_the_plan_and_is_planned_anew(
    begin: Callable[..., Job], factor: float
) -> None:
    job = begin()
    assert job.tries
    job.iterations.usual_s = factor
    job.iterate(5)
    assert (Told.now, Told.arms) == (NOTHING, ())  # the default clock
    assert job.source.wanted == 2
    assert job.told[-1].reopened == 1
    assert job.told[-1].search is None
    job.observed()
    job.iterate(3)
    assert job.tries
    first = next(arm.schedule for arm in Told.arms if arm.schedule.commands)
    assert first.iteration_s == pytest.approx(factor)
    assert Told.started == 1  # one conductor
    assert job.refused == []
    assert job.whole_job == []


def test_a_clock_that_is_held_comes_back_as_well(begin: Callable[..., Job]) -> None:
    job = begin(
        sampler=SimpleNamespace(
            record=SimpleNamespace(mean_power_w=lambda *_: 400.0 if job.tries else 460.0)
        )
    )
    for _ in range(500):
        job.iterate()
        if job.told[-1].search is not None:
            break
    assert job.told[-1].search.held
    assert Told.now.commands
    job.iterations.usual_s = 2.0
    job.iterate()
    assert (Told.now, Told.arms) == (NOTHING, ())


def test_what_the_contract_allows_is_no_change(begin: Callable[..., Job]) -> None:
    job = begin()
    for usual_s in (0.99 * (1.0 + BOUND) * DEPARTED, 1.01 / DEPARTED):
        job.iterations.usual_s = usual_s
        job.iterate()
    assert job.source.wanted == 1
    assert job.tries


def test_in_a_dry_run_the_commands_are_written_down_at_their_new_times(
    begin: Callable[..., Job],
) -> None:
    job = begin(dry_run=True)
    assert Told.now.commands
    job.iterations.usual_s = 2.0
    job.iterate()
    assert Told.now == NOTHING
    job.observed()
    job.iterate()
    assert Told.now.iteration_s == pytest.approx(2.0)
    assert Told.now.commands


def test_a_script_that_ends_before_it_was_planned_anew_says_so(begin: Callable[..., Job]) -> None:
    job = begin()
    job.iterations.usual_s = 2.0
    job.iterate()
    job.controller.script_ended()
    job.controller.end([], SimpleNamespace(finished=True))  # type: ignore[arg-type]
    assert job.refused == [("planning operations anew", "the program ended too early")]


def test_iterations_that_change_again_and_again_leave_the_whole_job(
    begin: Callable[..., Job],
) -> None:
    job = begin()
    for n in range(MOST_CHANGES):
        job.iterations.usual_s = 1.0 if n % 2 else 2.0
        job.iterate()
        job.observed()
        job.iterate()
    assert job.whole_job
    assert Told.now == NOTHING
    assert job.told[-1].instead == f"the iteration's time has changed {MOST_CHANGES} times"


def two_ranks(begin: Callable[..., Job], *, name: str = "NVIDIA H200") -> list[Job]:
    """Of which the second one is on a card of that name."""
    messages = LocalMessages()

    def rank(number: int, card: str) -> Job:
        return begin(
            name=card,
            ranks=SimpleNamespace(rank=number, world_size=2),
            messages=lambda: messages,
            sampler=SimpleNamespace(
                record=SimpleNamespace(
                    mean_power_w=lambda *_: 400.0 if Told.now.commands or job.tries else 460.0
                )
            ),
        )

    job = rank(0, "NVIDIA H200")
    return [job, rank(1, name)]


def test_the_plans_of_several_ranks_are_confirmed_together(begin: Callable[..., Job]) -> None:
    ranks = two_ranks(begin)
    for _ in range(500):
        for rank in ranks:
            rank.iterate()
        if all(rank.told[-1].search for rank in ranks):
            break
    first, second = (rank.told[-1].search for rank in ranks)
    assert first == second
    assert first.held
    assert [len(row) for row in first.depths] == [2]
    assert all(rank.refused == [] for rank in ranks)


def test_another_iteration_on_one_rank_has_all_plan_anew(begin: Callable[..., Job]) -> None:
    ranks = two_ranks(begin)
    ranks[1].iterations.usual_s = 2.0
    for rank in reversed(ranks):
        rank.iterate()
    assert [rank.told[-1].reopened for rank in ranks] == [1, 1]
    assert [rank.source.wanted for rank in ranks] == [2, 2]


def test_where_one_rank_has_no_plan_all_have_the_clock_of_the_whole_job(
    begin: Callable[..., Job],
) -> None:
    ranks = two_ranks(begin, name="NVIDIA L40S")
    for rank in (*reversed(ranks), *ranks):
        rank.iterate()
    assert all(rank.whole_job for rank in ranks)
    ranks[0].controller.end([], SimpleNamespace(finished=True))  # type: ignore[arg-type]
    assert ranks[0].told[-1].instead.startswith("rank 1: NVIDIA L40S: how fast its clocks change")
