"""The life of one watch: a job that kilter did not start, governed from outside.

The files of a run, its events and its summary are those of `kilter run`. Nothing of ours is inside
of the job, so that there is no fence: an error of ours ends the watch, and the settings come back.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

import kilter
from kilter.clocks.actuator import DeviceActuator, Sensors
from kilter.clocks.controller import SEED, mode_of
from kilter.clocks.job_telemetry import JobTelemetry
from kilter.clocks.outside import IdleGpu, Lost, Observer, OutsideConductor, PeriodLost
from kilter.clocks.plan.governor import Phase, plan_of
from kilter.clocks.plan.job import space
from kilter.clocks.plan.job_class import first_settings, job_by_readings
from kilter.clocks.plan.pauses import pause_plan
from kilter.clocks.plan.rhythm import Rhythm, would_try
from kilter.core.errors import DeviceError, FileError, NoDevice
from kilter.core.events import Decided, Started, Stopped, sampled
from kilter.core.plan import ClocksMode
from kilter.core.ranks import Ranks
from kilter.core.reasons import CLOCKS_REFUSED
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.units import show_duration
from kilter.device.protocol import Device
from kilter.lease.run_lease import RunLease
from kilter.model.period import Detection
from kilter.observe.run_files import RunFiles
from kilter.session.listener import RunListener
from kilter.session.live import RECORD_EVERY_S
from kilter.session.log import Ending, RunLog
from kilter.session.options import Options
from kilter.session.recorder import Recorder
from kilter.session.run_directory import check_out, events_name, run_directory


class WatchedJob(Protocol):
    """A job on a device, seen from outside."""

    @property
    def device(self) -> Device: ...
    @property
    def sensors(self) -> Sensors: ...
    def clock(self) -> float:
        """The device's clock."""

    def drive(self, step: Callable[[], bool]) -> str:
        """Call `step` at each new reading of the sensors, until it returns False or the watch is
        over for another reason, which is returned; empty without one."""

    def close(self) -> None:
        """End the readings, and close the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEnd:
    """What came of a watch."""

    run: Path
    """It is the directory of its files."""
    reason: str
    """It says in words why the watch ended."""
    detection: Detection | None
    """It is the last verdict on the telemetry; None if there was never enough of it."""
    rhythm: Rhythm | None
    verdict: str | None
    """Why nothing could be governed; None if there is a period."""
    tries: tuple[Setting, ...]
    """What a dry run would have tried first."""
    failed: bool
    """The lease or the device has ended the watch."""


def watch(source: WatchedJob, options: Options, listener: RunListener) -> WatchEnd:
    """Govern the job of `source` until it is over. Raises `UsageError`, `FileError` and device
    errors before anything has begun: a GPU that somebody else governs is `Held`."""
    check_out(options.out, Ranks())
    info = source.device.info()
    if info.backend == "null":
        raise NoDevice(info.refusal or "there is no GPU")
    mode, why = mode_of(options.goal, info, dry_run=options.dry_run)
    lease = RunLease(source.device)
    try:
        if mode == ClocksMode.GOVERN:
            lease.take()
        directory, elsewhere = run_directory(options.out, Ranks())
        recorder = Recorder(directory / events_name(Ranks()))
        log = RunLog(recorder, listener, Ending(), began_s=source.clock(), clock=source.clock)
        started = _started(options, info, lease.found, mode, why)
        log(started)
        listener.started(started)
        if elsewhere is not None:
            log.notice(f"{elsewhere}: the files of this watch are in {directory}")
        if mode == ClocksMode.SHADOW and not options.dry_run:
            log.refuse("setting clocks", why, CLOCKS_REFUSED)
        files = RunFiles(directory, command=options.command, writes=True)
        end = _Watch(source, options, lease, log, files).run()
        recorder.close()
    finally:
        lease.restore()
    listener.ended(directory, options, keep=True)
    return end


def _started(
    options: Options, info: DeviceInfo, found: Setting, mode: ClocksMode, why: str
) -> Started:
    return Started(
        t_s=0.0,
        kilter=kilter.__version__,
        wall_time=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=options.command,
        rank=0,
        world_size=1,
        device=info,
        goal=options.goal,
        found=found,
        mode=mode,
        mode_reason=why,
        host=platform.node() or None,
    )


class _Watch:
    """A job that kilter has not started, from the first look at it to its end. It has many
    attributes because it holds all that takes part: the device, its lease, the log, the observer
    and the search."""

    def __init__(
        self, source: WatchedJob, options: Options, lease: RunLease, log: RunLog, files: RunFiles
    ) -> None:
        self._source = source
        self._goal = options.goal
        self._info = source.device.info()
        self._lease = lease
        self._log = log
        self._files = files
        self._job = JobTelemetry(source.sensors.record)
        self._actuator = DeviceActuator(source.sensors, self._info, self, clock=source.clock)
        self._actuator.lease = lease.held
        plan = None
        if lease.held is not None:
            plan = pause_plan(
                source.device.supported(),
                sensor_period_s=source.sensors.record.period_s,
                switch_latency_s=self._info.switch_latency_s,
            )
        self._idle = IdleGpu(self._job, self._actuator, plan, options.goal)
        self._observer = Observer(self._job, self._idle, options.goal, log.notice)
        self._told_ended = False
        self._rhythm: Rhythm | None = None
        self._tries: tuple[Setting, ...] = ()
        self._case: OutsideConductor | None = None
        """It is the search that is under way."""
        self._before = (0, 0)
        """The cases before this one had so many blocks and iterations."""
        self._sampled_s = -RECORD_EVERY_S

    @property
    def usual_s(self) -> float | None:
        """How long an iteration takes: as long as they end, low settings are prolonged."""
        return None if self._case is None else self._case.usual_s

    def run(self) -> WatchEnd:
        flow = self._flow()
        refused: str | None = None
        try:
            reason = self._source.drive(lambda: self._step(flow))
        except (DeviceError, FileError, PeriodLost) as error:
            refused = reason = str(error)
            self._log.refuse("setting clocks", reason, CLOCKS_REFUSED)
        self._conclude(refused)
        after, restored, why_not = self._lease.restore()
        if why_not is not None:
            self._log.refuse("restoring", why_not)
        record, blocks = self._source.sensors.record, self._blocks
        unseen = None if self._rhythm is not None else self._observer.verdict or _TOO_EARLY
        self._log(
            Stopped(
                t_s=self._log.now_s(),
                iterations=blocks[1],
                rehearsed_iterations=0,
                outcome="finished",
                found=self._lease.found,
                after=after,
                restored=restored,
                energy_method=record.energy_method,
                sampler_cost_s=self._source.sensors.cost_s,
                hook_cost_s=0.0,
                label=self._info.label,
                energy_disagreement=record.disagreement,
                no_trace="nothing of ours is inside of the program",
                energy_j=record.total_j,
                unseen=unseen,
            )
        )
        pauses = self._idle.pauses
        if pauses is not None and pauses.returns_s:
            self._log.notice(str(pauses))
        if reason:
            self._log.notice(f"the watch has ended: {reason}")
        return WatchEnd(
            run=self._files.directory,
            reason=reason,
            detection=self._observer.detection,
            rhythm=self._rhythm,
            verdict=unseen,
            tries=self._tries,
            failed=refused is not None,
        )

    # At each reading ------------------------------------------------------------------------

    def _step(self, flow: Generator[None, None, None]) -> bool:
        """One more reading of the sensors; False once there is nothing more to do."""
        if self._log.recorder.lost is not None:
            raise FileError(self._log.recorder.lost)
        sample = self._source.sensors.record.latest
        if sample is not None and self._log.now_s() - self._sampled_s >= RECORD_EVERY_S:
            self._sampled_s = self._log.now_s()
            self._log(sampled(sample, self._sampled_s))
        self._actuator.check()
        self._idle.read(None if self._case is None else self._case.program.choice)
        pauses = self._idle.pauses
        if pauses is not None and pauses.ended is not None and not self._told_ended:
            self._told_ended = True
            self._log.refuse("lowering the clock of the idle GPU", pauses.ended)
        return next(flow, _OVER) is not _OVER

    def _flow(self) -> Generator[None, None, None]:
        """Until nothing more can be done, which is never where settings may be tried."""
        sets = self._lease.held is not None
        while True:
            yield from self._observer.wait_for_work()
            steady = yield from self._observer.observe(once=not sets)
            if steady is None and sets:
                continue
            if steady is None and self._observer.verdict is None:
                continue  # idle again, before there was a verdict
            self._rhythm = steady
            if steady is None:
                return
            self._log.notice(str(steady))
            if not sets:
                self._say_what_would_be_tried(steady)
                return
            lost = yield from self._govern(steady)
            self._log.notice(f"{lost.value}: the default is back, and the case is opened again")
            self._job.forget()

    def _govern(self, steady: Rhythm) -> Generator[None, None, Lost]:
        self._before = self._blocks
        self._case = OutsideConductor(
            self._job,
            self._actuator,
            self._idle,
            steady,
            self._goal,
            found=self._lease.found,
            supported=self._source.device.supported(),
            record=self._log,
            clock=self._log.now_s,
            seed=SEED,
            first_number=self._before[0],
        )
        lost = yield from self._case.run()
        self._before, self._case = self._blocks, None
        self._decide("reopened", self._lease.found, f"the default stands: {lost.value}")
        return lost

    @property
    def _blocks(self) -> tuple[int, int]:
        """All blocks and iterations so far."""
        if self._case is None:
            return self._before
        return self._case.number, self._before[1] + self._case.iterations

    def _say_what_would_be_tried(self, steady: Rhythm) -> None:
        supported = self._source.device.supported()
        settings = space(self._lease.found, self._source.sensors.record.sustained(), supported)
        of_class = first_settings(job_by_readings(self._actuator.recent()), settings)
        self._tries = tuple(would_try(settings, self._goal, of_class))
        if not self._tries:
            self._log.notice("nothing would be tried: no setting promises a saving")
            return
        first = "; ".join(map(str, self._tries))
        pair_s = 2 * steady.block_iterations * steady.pace.iteration_s
        self._log.notice(
            f"would try first, of {len(settings.candidates)} settings: {first}; each against the "
            f"setting as found, {show_duration(pair_s)} for a pair of blocks"
        )

    # The end --------------------------------------------------------------------------------

    def _conclude(self, refused: str | None) -> None:
        """Write down what stands at the end, if the search has come so far."""
        case, found = self._case, self._lease.found
        if refused is not None:
            self._decide("decided", found, f"the default stands: {refused}")
            return
        if case is None:
            return
        choice = case.program.choice
        if choice.setting == found and case.phase is not Phase.HOLD:
            return  # the search is not over: nothing is decided
        self._files.save_clocks(plan_of(choice, found, self._info.label))
        self._log(
            Decided(
                t_s=self._log.now_s(),
                state="decided",
                setting=choice.setting,
                reason=choice.reason,
                time_ratio=choice.time_ratio,
                energy_ratio=choice.energy_ratio,
            )
        )

    def _decide(self, state: str, setting: Setting, reason: str) -> None:
        self._log(Decided(t_s=self._log.now_s(), state=state, setting=setting, reason=reason))


_OVER = object()
_TOO_EARLY = "no iteration was seen: the watch ended before there was enough telemetry"
