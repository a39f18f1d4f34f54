"""The conductor of a job that kilter did not start: iterations and energy from telemetry alone.

    wait for work -> observe (a period?) -> govern by blocks -> the iteration changes -> observe
                                               ^         v
                                               +- pause -+

It runs the governor's orders (`search_leader`, `plan/governor`) as `conductor` does; only what it
knows of an iteration is the period of the telemetry. Blocks are therefore stretches of time, long
enough for the error of the period to be small against the contract (`plan/rhythm`).

Written as coroutines, which are resumed at each new reading of the sensors, on whatever clock the
device lives by.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum

import msgspec

from kilter.clocks.actuator import DeviceActuator
from kilter.clocks.block_messages import RankResult
from kilter.clocks.conductor import STALLED, GovernorProgram
from kilter.clocks.job_telemetry import JobTelemetry
from kilter.clocks.plan.governor import Choice, Phase
from kilter.clocks.plan.pauses import PausePlan, PauseWatch, slack
from kilter.clocks.plan.rhythm import Rhythm, nothing_to_govern, rhythm
from kilter.clocks.search_leader import SearchLeader
from kilter.core.events import AnyEvent
from kilter.core.plan import Goal
from kilter.core.setting import Setting, Supported
from kilter.core.units import show_time
from kilter.model.period import Detection, JobPace

FIRST_LOOK_S = 10.0
LOOK_FACTOR = 1.4
"""How much longer the recording is at each further look for a period."""
MOST_OBSERVED_S = 1200.0
"""So much of the past is looked at: enough for iterations of most of a minute."""
TELL_SHORT_S = 30.0
TELL_APERIODIC_S = 120.0
"""When to say that no period is seen so far: an iteration that is too short shows soon."""
OBSERVED_PERIODS = 24
"""Before anything is set: their spread decides how long blocks are."""
LOOKS_PER_PERIOD = 3
"""How often the last iterations are compared with the reference."""
RECHECK_PERIODS = 10
SAME_PERIOD = 0.02
SAME_POWER = 0.05
"""After an alarm, iterations that take as long, and as much power, are the same ones."""
WATCHED_WARM_BLOCKS = 1
"""So many blocks run before the first probe: the observation has told what there is to learn."""
LOST_BLOCKS = 3
"""After so many blocks in a row without recognisable iterations nothing more is tried."""

Readings = Generator[None, None, None]
"""What waits for further readings of the sensors."""


class Lost(Enum):
    """What may happen in a block instead of its end."""

    IDLE = "the GPU has become idle"
    CHANGED = "the iteration has changed"
    UNSEEN = "the iterations cannot be recognised any more"


class PeriodLost(Exception):
    """Under some setting the telemetry does not show the iterations: nothing more is tried."""


class IdleGpu:
    """Waits until the GPU has work, at its lowest clock where that pays (`plan/pauses`). `plan` is
    None where nothing may be set."""

    def __init__(
        self, job: JobTelemetry, actuator: DeviceActuator, plan: PausePlan | None, goal: Goal
    ) -> None:
        self._job = job
        self._actuator = actuator
        self._bound = goal.max_slowdown or 0.0
        self._resting = False
        """Somebody waits for work: the clock is free."""
        self.pauses = None if plan is None else PauseWatch(plan)

    def read(self, choice: Choice | None) -> None:
        """At each reading of the sensors: lower the clock, or raise it. `choice` is what stands;
        returns may lose what it leaves of the contract."""
        if self.pauses is None or self._job.latest is None:
            return
        left = slack(self._bound, 1.0 if choice is None else choice.time_ratio)
        self.pauses.budget.fill(self._job.latest.t_s, left)
        act = self.pauses.read(self._job.latest, resting=self._resting)
        if act == "down":
            self._actuator.apply(Setting(sm_clock_hz=self.pauses.plan.sm_clock_hz))
        elif act == "up":
            self._actuator.apply(Setting())

    def wait(self) -> Readings:
        """Until there is work, and the clock is back. The setting is as found before and after."""
        self._resting = True
        while not (self._job.busy() if self.pauses is None else self.pauses.works):
            yield
        self._resting = False


class Observer:
    """Waits for work, and looks for the period of the iterations. `tell` takes what the user should
    read at once."""

    def __init__(
        self, job: JobTelemetry, idle: IdleGpu, goal: Goal, tell: Callable[[str], None]
    ) -> None:
        self._job = job
        self._idle = idle
        self._goal = goal
        self._tell = tell
        self.detection: Detection | None = None
        """It is the last verdict."""
        self.verdict: str | None = None
        """Why nothing can be governed, as told; None: there is a period, or it is too early."""

    def wait_for_work(self) -> Readings:
        told = False
        for _ in self._idle.wait():
            if not told and self._job.idle():
                self._tell("the GPU is idle: waiting for work")
                told = True
            yield

    def observe(self, *, once: bool) -> Generator[None, None, Rhythm | None]:
        """Look, again and again, until there is a period; `once`: or until it is said that there is
        none. None also when the GPU becomes idle."""
        job = self._job
        begin_s, look_s = job.now_s, FIRST_LOOK_S
        while not job.idle():
            yield
            seen_s = job.now_s - begin_s
            if seen_s < look_s:
                continue
            look_s = seen_s * LOOK_FACTOR
            # the beginning of a job (reading data, compiling) is no part of its rhythm
            for part_s in (min(seen_s, MOST_OBSERVED_S), seen_s / 4):
                found = self._find_rhythm(job.now_s - part_s)
                if isinstance(found, Rhythm):
                    self.verdict = None
                    return found
                if found is not None:  # the period is known: wait for enough of them
                    look_s = min(look_s, max(seen_s + found, FIRST_LOOK_S))
                    break
            if self._say(seen_s) and once:
                return None
        return None

    def _find_rhythm(self, since_s: float) -> Rhythm | float | None:
        """The rhythm; or for how many seconds more to observe; or None without a period."""
        job = self._job
        if job.now_s - since_s < FIRST_LOOK_S / 2:
            return None
        self.detection = job.detect(since_s)
        period_s = self.detection.period_s
        if period_s is None:
            return None
        lacking_s = OBSERVED_PERIODS * period_s - (job.now_s - since_s)
        if lacking_s > 0.0:
            return 1.1 * lacking_s
        seen = job.pace(since_s, period_s)
        power_w = None if seen is None else job.mean_power_w(seen)
        if seen is None or power_w is None:
            why = "length varies too much" if seen is None else "power is known too little"
            reason = f"iterations take about {show_time(period_s)}; their {why} to compare settings"
            self.detection = msgspec.structs.replace(
                self.detection, period_s=None, code="uneven", reason=reason
            )
            return None
        job.learn(Setting(), since_s, period_s)
        return rhythm(seen, power_w, self._goal)

    def _say(self, seen_s: float) -> bool:
        """Say the verdict when its time has come, and again if it is another one. Whether there is
        one."""
        if self.detection is None or self.detection.period_s is not None:
            return False
        short = self.detection.code in ("unresolvable", "flat")
        if seen_s < (TELL_SHORT_S if short else TELL_APERIODIC_S):
            return False
        verdict = nothing_to_govern(self.detection)
        if self.verdict is None:
            self._tell(verdict)
        self.verdict = verdict
        return True


class OutsideConductor:
    """One search, block after block, on iterations of the rhythm `steady`. `found` is the setting
    as found; `record` takes the events, and `first_number` is that of the first block."""

    def __init__(
        self,
        job: JobTelemetry,
        actuator: DeviceActuator,
        idle: IdleGpu,
        steady: Rhythm,
        goal: Goal,
        *,
        found: Setting,
        supported: Supported,
        record: Callable[[AnyEvent], None],
        clock: Callable[[], float],
        seed: int,
        first_number: int = 0,
    ) -> None:
        self.program = GovernorProgram(
            goal, found, supported, actuator, seed=seed, warm_blocks=WATCHED_WARM_BLOCKS
        )
        self._leader = SearchLeader(
            self.program.orders(),
            found=found,
            sensor_period_s=job.sensor_period_s,
            record=record,
            clock=clock,
            given_up=False,
        )
        self._job = job
        self._actuator = actuator
        self._idle = idle
        self._rhythm = steady
        self._setting: Setting | None = None
        """It was asked for last; its open knobs are as found."""
        self._since_s = 0.0
        """From here on all readings belong to it."""
        self._begin_s = 0.0
        """The present block began then."""
        self._usual_s: dict[Setting, float] = {}
        """An iteration takes this under a setting, as far as seen."""
        self.number = first_number
        """The present block has this number."""
        self.iterations = 0

    @property
    def phase(self) -> Phase | None:
        """Of the order that is being executed; None before the first."""
        return None if self._leader.order is None else self._leader.order.phase

    @property
    def usual_s(self) -> float:
        """Iteration time under the present setting, for the deadline of a lease as well."""
        steady_s = self._rhythm.pace.iteration_s
        return steady_s if self._setting is None else self._usual_s.get(self._setting, steady_s)

    def run(self) -> Generator[None, None, Lost]:
        """Until the job is another one; the setting as found is then back. After a pause of the
        same job the search or the hold goes on. Raises `PeriodLost`, and what the lease raises."""
        note = self._leader.first()
        lost = 0
        while True:
            seen = yield from self._block(note.setting)
            if isinstance(seen, JobPace):
                lost = 0
                self.iterations += seen.iterations
                note = self._leader.conclude(
                    self._result(seen),
                    number=self.number,
                    iterations=seen.iterations,
                    device_begin_s=seen.begin_s,
                    device_end_s=seen.end_s,
                    rehearsed=False,
                )
                self.number += 1
                continue
            begin_s, usual_s, alarm_s = self._begin_s, self.usual_s, self._job.now_s
            yield from self._apply(Setting())  # whatever it is: the default comes first
            if not (yield from self._is_the_same()):
                return Lost.CHANGED
            if seen is not Lost.IDLE:  # no other job: what was not known belongs to this one
                self._job.learn(note.setting, begin_s, usual_s, alarm_s)
            lost += seen is Lost.UNSEEN
            if lost >= LOST_BLOCKS:
                raise PeriodLost(f"at {note.setting} the telemetry does not show the iterations")

    def _result(self, seen: JobPace) -> RankResult:
        power_w = self._job.mean_power_w(seen)
        return RankResult(
            iteration_s=seen.iteration_s,
            energy_j=None if power_w is None else power_w * seen.iteration_s,
            why_not=STALLED if seen.interrupted else None,
            refused=None,
        )

    def _apply(self, setting: Setting) -> Readings:
        """Until the setting acts, and the iteration that it found under way is over."""
        if setting == self._setting:
            return
        self._actuator.apply(setting)
        self._setting = setting
        while not self._actuator.settled():
            yield
        yield from self._pass(self.usual_s)
        self._since_s = self._job.now_s

    def _pass(self, seconds: float) -> Readings:
        end_s = self._job.now_s + seconds
        while self._job.now_s < end_s:
            yield

    def _block(self, setting: Setting) -> Generator[None, None, JobPace | Lost]:
        job = self._job
        yield from self._apply(setting)
        self._begin_s = begin_s = job.now_s
        usual_s = self.usual_s
        end_s = begin_s + (self._rhythm.block_iterations + 1) * usual_s
        look_s = begin_s
        while job.now_s < end_s:
            yield
            if job.now_s >= look_s:
                look_s = job.now_s + usual_s / LOOKS_PER_PERIOD
                if job.idle(usual_s):
                    return Lost.IDLE
                if job.changed(setting, self._since_s, usual_s):
                    return Lost.CHANGED
        seen = job.pace(begin_s, usual_s)
        if seen is None or 2 * seen.iterations < self._rhythm.block_iterations:
            return Lost.UNSEEN
        self._usual_s[setting] = seen.iteration_s
        job.learn(setting, begin_s, seen.iteration_s)
        return seen

    def _is_the_same(self) -> Generator[None, None, bool]:
        """Whether the job, under the setting as found, still is what it was: not every alarm is
        right, and pauses are none."""
        steady = self._rhythm
        begin_s = self._job.now_s
        while self._job.now_s < begin_s + RECHECK_PERIODS * steady.pace.iteration_s:
            yield
            if self._job.idle(steady.pace.iteration_s):
                yield from self._idle.wait()
                begin_s = self._job.now_s
        seen = self._job.pace(begin_s, steady.pace.iteration_s)
        power_w = None if seen is None else self._job.mean_power_w(seen)
        if seen is None or power_w is None:
            return False
        apart_s = abs(seen.iteration_s - steady.pace.iteration_s)
        near = max(SAME_PERIOD * steady.pace.iteration_s, 3.0 * seen.error_s)
        return apart_s <= near and abs(power_w / steady.power_w - 1.0) <= SAME_POWER
