"""The session: joins the loop for one process, from the first line of the script to the last.

    marks (the program's thread) -> iterations -> pulse (our thread) -> conductor -> lease -> device

The program's own thread only ever notes that an iteration has ended. Everything else, from reading
sensors to setting clocks, happens in one thread of ours, a few times a second.

What needs numpy (planning, simulation) is imported when it is needed: a script may still choose
how numpy and its libraries are to be loaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import kilter
from kilter.act.board import Board, LocalBoard, StoreBoard
from kilter.act.fence import Fence
from kilter.act.lease import Lease
from kilter.act.recorder import Recorder
from kilter.core import codec
from kilter.core.errors import DeviceError, FileError, KilterError, UsageError
from kilter.core.events import Decided, Failed, Refused, Sampled, Started, Stopped
from kilter.core.label import Label
from kilter.core.plan import Goal
from kilter.core.ranks import Ranks
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace
from kilter.device.base import Device
from kilter.device.find import find
from kilter.observe.chrome import save_chrome
from kilter.observe.marks import Iteration, Marks
from kilter.observe.sampler import Sampler
from kilter.observe.window import Window
from kilter.sim.cards import names

if TYPE_CHECKING:
    from kilter.act.conductor import Conductor, Program
    from kilter.act.rehearsal import Rehearsal
    from kilter.plan.governor import Order, Outcome

PULSE_S = 0.1
"""How often our thread looks: the sensors of today's cards change ten times a second."""
RECORD_EVERY_S = 0.5
"""Readings of the sensors that go into the events."""
WINDOW_AFTER = 10
"""Border at which the observation window opens: by then caches and tuners have settled."""
FIRST_BLOCK = 20
"""Iterations before the first block: warm-up, and the observation window, are over by then."""
HOLD_S = 60.0
"""Deadline of a low setting, renewed as long as iterations end."""
REHEARSE_S = 60.0
SHADOW_S = 5.0
"""Real seconds that a rehearsal may take after the script: as the user asked for, and for the
prediction of a run that was not allowed to set."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for."""

    goal: Goal
    device: str = "auto"
    dry_run: bool = False
    out: Path | None = None
    command: tuple[str, ...] = ()
    json_summary: bool = False


class Voice(Protocol):
    """Who tells the user. Only rank 0's session has one that speaks."""

    def started(self, started: Started) -> None:
        """The one line at the start."""

    def refused(self, what: str, reason: str) -> None:
        """Something is not going to be done; said at the end."""

    def failed(self, error: str) -> None:
        """An error of ours, told once, when it happens."""

    def rehearsing(self, seconds: float | None) -> None:
        """Progress of a rehearsal after the script: virtual seconds; None when it is over."""

    def ended(self, run: Path, options: Options) -> None:
        """The summary; writes the report."""


class Silent:
    """A voice that says nothing."""

    def started(self, started: Started) -> None: ...
    def refused(self, what: str, reason: str) -> None: ...
    def failed(self, error: str) -> None: ...
    def rehearsing(self, seconds: float | None) -> None: ...
    def ended(self, run: Path, options: Options) -> None: ...


class Session:
    """A context manager around the user's program. Never raises for a reason of its own, except
    `UsageError` (the user can mend it before anything runs), and never swallows the program's."""

    def __init__(self, options: Options, ranks: Ranks, voice: Voice | None = None) -> None:
        self._options = options
        self._ranks = ranks
        self._voice: Voice = voice if voice is not None and ranks.rank == 0 else Silent()
        self._fence = Fence(self._step_aside)
        self._begin_s = time.monotonic()
        self._recorder: Recorder | None = None
        self._device: Device | None = None
        self._info: DeviceInfo | None = None
        self._found = Setting()
        self._mode = "observe"
        self._lease: Lease | None = None
        self._sampler: Sampler | None = None
        self._window: Window | None = None
        self._trace: IterationTrace | None = None
        self._rehearsal: Rehearsal | None = None
        self._conductor: Conductor | None = None
        self._program: Program | None = None
        self._recorded_s = 0.0
        self._renewed_s = 0.0
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self.marks = Marks(self._border, fence=self._fence)
        self.run: Path | None = None
        """The directory of the run, once it has one."""

    def mark(self) -> None:
        """The program says that an iteration ends here; from then on nothing else ends one."""
        self._fence(self.marks.mark)()

    # Begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._pid = os.getpid()
        try:
            self._device = open_device(self._options.device, self._ranks)
        except UsageError:
            raise
        except KilterError as error:
            self._step_aside("opening the device", str(error))
            return self
        self._fence(self._start)()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid:
            return  # a forked child that left the script: not ours to end
        self.marks.stop()
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._recorder is not None:
            # also after an error of ours: what was found has to come back, and the user to know
            self._fence.run(self._finish, how_it_ended(error))
        self._fence.run(self._close)

    def _start(self) -> None:
        device = self._device
        assert device is not None
        info = self._info = device.info()
        self._found = device.settings()
        self.run = self._options.out or _run_directory(self._ranks)
        self._recorder = Recorder(self.run / f"events-rank{self._ranks.rank}.jsonl")
        self._mode, why = self._choose_mode(info)
        started = Started(
            t_s=self._now(),
            kilter=kilter.__version__,
            wall_time=datetime.now().astimezone().isoformat(timespec="seconds"),
            command=self._options.command,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            device=info,
            goal=self._options.goal,
            found=self._found,
            mode=self._mode,
            mode_reason=why,
        )
        self._recorder(started)
        self._voice.started(started)
        if self._mode == "shadow":
            self._refuse("setting clocks", why)
        if not self._simulated:
            self._sampler = Sampler(device)
            self._sampler.start()
        self._window = Window(self.marks, after=WINDOW_AFTER)
        self.marks.start()
        self._thread = threading.Thread(target=self._loop, name="kilter", daemon=True)
        self._thread.start()

    def _choose_mode(self, info: DeviceInfo) -> tuple[str, str]:
        if self._options.goal.max_slowdown is None:
            return "observe", "no clocks were asked for"
        if info.backend == "null":
            return "observe", info.refusal or "there is no GPU"
        if self._options.dry_run:
            return "shadow", "--dry-run: nothing is set"
        if not info.can_set:
            return "shadow", info.refusal or "this device cannot be set"
        return "govern", f"at most {self._options.goal.max_slowdown:.1%} slower"

    def _finish(self, outcome: str) -> None:
        """Everything after the script: rehearse, restore, write, tell."""
        assert self._info is not None
        assert self._recorder is not None
        assert self.run is not None
        if self._window is not None:
            self._window.close()
        if not self._fence.down:
            self._pulse()
            if self._rehearsal is not None:
                self._rehearse()
            elif self._simulated:
                self._refuse("rehearsing", self._why_no_trace())
            elif self._mode == "shadow":
                self._predict()
            self._write_plan()
        after, restored = self._restore()
        if self._sampler is not None:
            self._sampler.stop()
        rehearsal = self._rehearsal
        self._recorder(
            Stopped(
                t_s=self._now(),
                iterations=max(0, self.marks.index),
                rehearsed_iterations=rehearsal.iterations_alone if rehearsal else 0,
                outcome=outcome,
                found=self._found,
                after=after,
                restored=restored,
                energy_method=self._energy_method(),
                sampler_cost_s=self._sampler.cost_s if self._sampler else 0.0,
                hook_cost_s=self.marks.cost_s,
                label=self._info.label,
            )
        )
        self._voice.ended(self.run, self._options)

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if self._device is not None:
            self._device.close()

    def _step_aside(self, where: str, error: str) -> None:
        """After the first error of ours: restore, say so once, leave the program alone."""
        self.marks.stop()
        self._over.set()
        if self._recorder is not None:
            self._recorder(Failed(t_s=self._now(), where=where, error=error))
        self._voice.failed(error)
        self._restore()

    def _restore(self) -> tuple[Setting, bool]:
        """The settings afterwards, and whether they are as found."""
        if self._lease is not None:
            outcome = self._lease.restore()
            if not outcome.restored or outcome.left:
                self._refuse("restoring", outcome.reason)
            return outcome.after or self._found, outcome.restored
        return self._found, True

    # While the script runs ------------------------------------------------------------------

    def _border(self, index: int, t_s: float) -> None:
        """In the program's thread, at the end of an iteration: as little as possible."""
        if self._window is not None:
            self._window.border(index)

    def _loop(self) -> None:
        pulse = self._fence(self._pulse)
        while not self._over.wait(PULSE_S):
            pulse()

    def _pulse(self) -> None:
        """In our thread, a few times a second."""
        finished = [i for i in self.marks.finished() if not i.skipped]
        if self._trace is None and self._window is not None:
            self._take_trace(self._window.trace())
        if self._sampler is not None:
            self._record_sample(self._sampler)
        if self._simulated:
            if self._rehearsal is not None:
                for _ in finished:
                    self._rehearsal.iterate()
            return
        if self._conductor is None and self.marks.index >= FIRST_BLOCK:
            self._begin_conducting()
        if self._conductor is not None:
            self._conduct(self._conductor, finished)

    def _conduct(self, conductor: Conductor, finished: list[Iteration]) -> None:
        try:
            for iteration in finished:
                conductor.iteration(iteration)
            conductor.step()
            if self._lease is not None and self._lease.outcome is None:
                self._keep_lease(self._lease, progress=bool(finished))
        except DeviceError as error:
            # The lease has ended and has put back what was found. Go on looking, set nothing.
            self._refuse("setting clocks", str(error))
            self._mode = "shadow"
            self._lease_over()

    def _keep_lease(self, lease: Lease, *, progress: bool) -> None:
        assert self._sampler is not None
        if (sample := self._sampler.latest) is not None:
            lease.verify(sample)
        if progress and self._now() - self._renewed_s > HOLD_S / 6:
            self._renewed_s = self._now()
            lease.renew(hold_s=HOLD_S)

    def _lease_over(self) -> None:
        if self._lease is not None:
            self._lease.restore()
        self._conductor = None
        self._begin_conducting()

    def _begin_conducting(self) -> None:
        assert self._device is not None
        assert self._info is not None
        assert self._sampler is not None
        board = self._find_board()
        if board is None:
            return
        from kilter.act.conductor import Conductor, Program, watching

        hands = _Hands(self._sampler, self._info)
        orders: Generator[Order, Outcome, None] | None = None
        if self._mode == "govern":
            self._lease = Lease(self._device)
            self._lease.__enter__()
            hands.lease = self._lease
        if self._ranks.rank == 0:
            if self._mode == "govern":
                self._program = Program(
                    self._options.goal, self._found, self._device.supported(), hands, seed=SEED
                )
                orders = self._program.orders()
            else:
                orders = watching(self._found)
        assert self._recorder is not None
        self._conductor = Conductor(
            hands,
            board,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            sensor_period_s=self._info.sensor_period_s or PULSE_S,
            orders=orders,
            record=self._recorder,
            clock=self._now,
        )

    def _find_board(self) -> Board | None:
        """Alone: our own; with others: the store that the process group met at, once it has."""
        return LocalBoard() if self._ranks.world_size == 1 else StoreBoard.find()

    def _record_sample(self, sampler: Sampler) -> None:
        sample = sampler.latest
        if sample is None or self._now() - self._recorded_s < RECORD_EVERY_S:
            return
        self._recorded_s = self._now()
        assert self._recorder is not None
        self._recorder(
            Sampled(
                t_s=self._now(),
                device_t_s=sample.t_s,
                power_w=sample.power_w,
                sm_clock_hz=sample.sm_clock_hz,
                memory_clock_hz=sample.memory_clock_hz,
                sm_utilisation=sample.sm_utilisation,
                temperature_c=sample.temperature_c,
                throttle=None
                if sample.throttle is None
                else tuple(reason.value for reason in sample.throttle),
            )
        )

    # The trace, and what is made of it ------------------------------------------------------

    def _take_trace(self, trace: IterationTrace | None) -> None:
        if trace is None:
            return
        assert self.run is not None
        assert self._recorder is not None
        trace = self._trace = replace(trace, source=" ".join(self._options.command))
        if self._ranks.rank == 0:
            codec.save(self.run / "trace.json", trace)
            save_chrome(self.run / "trace.chrome.json", trace)
        if self._simulated and self._mode != "observe" and self._ranks.rank == 0:
            from kilter.act.rehearsal import Rehearsal
            from kilter.sim.gpu import SimGpu

            assert isinstance(self._device, SimGpu)
            self._lease = Lease(self._device)
            self._lease.__enter__()
            self._rehearsal = Rehearsal(
                self._device,
                trace,
                self._options.goal,
                apply=self._lease.set,
                record=self._recorder,
                clock=self._now,
                seed=SEED,
            )

    def _why_no_trace(self) -> str:
        if self._ranks.rank != 0:
            return "rank 0 rehearses for all"
        if self._window is not None and self._window.why_not:
            return self._window.why_not
        if self.marks.why_not:
            return self.marks.why_not
        return f"the script ended after {max(0, self.marks.index)} iterations: too few to observe"

    def _rehearse(self) -> None:
        """Go on with the trace until the evidence is in."""
        assert self._rehearsal is not None
        over, why_not = False, f"stopped after {REHEARSE_S:.0f} s"
        try:
            over = self._rehearsal.finish(seconds=REHEARSE_S, progress=self._voice.rehearsing)
        except KeyboardInterrupt:  # the script is over: its exit code stands
            why_not = "interrupted"
        self._voice.rehearsing(None)
        if not over:
            self._refuse("a complete rehearsal", why_not)

    def _predict(self) -> None:
        """What would have been set: the loop on a simulated card of this kind."""
        assert self._info is not None
        if self._trace is None or self._ranks.rank != 0:
            return
        from kilter.act.rehearsal import Rehearsal
        from kilter.sim.gpu import SimGpu
        from kilter.sim.profile import load_profile, profile_of

        name = profile_of(self._info.name)
        if name is None:
            known = ", ".join(names())
            self._refuse("predicting a plan", f"no profile of {self._info.name} (have {known})")
            return
        gpu = SimGpu(load_profile(name), seed=SEED)
        rehearsal = Rehearsal(
            gpu,
            self._trace,
            self._options.goal,
            apply=gpu.set,
            record=lambda event: None,
            seed=SEED,
        )
        rehearsal.finish(seconds=SHADOW_S)
        self._program = rehearsal.program

    def _write_plan(self) -> None:
        program = self._rehearsal.program if self._rehearsal else self._program
        if program is None or self._info is None or self._recorder is None:
            return
        predicted = self._mode == "shadow"
        from kilter.plan.governor import plan_of

        label = Label.SIMULATED if predicted else self._info.label
        choice = program.choice
        assert self.run is not None
        codec.save(self.run / "plan.json", plan_of(choice, self._found, label))
        self._recorder(
            Decided(
                t_s=self._now(),
                state="predicted" if predicted else "decided",
                setting=choice.setting,
                reason=choice.reason,
                time_ratio=choice.time_ratio,
                energy_ratio=choice.energy_ratio,
            )
        )

    @property
    def _simulated(self) -> bool:
        return self._info is not None and self._info.backend == "sim"

    # Small things ---------------------------------------------------------------------------

    def _now(self) -> float:
        return time.monotonic() - self._begin_s

    def _refuse(self, what: str, reason: str) -> None:
        if self._recorder is not None:
            self._recorder(Refused(t_s=self._now(), what=what, reason=reason))
        self._voice.refused(what, reason)

    def _energy_method(self) -> str:
        if self._simulated:
            return "model"
        return self._sampler.energy_method if self._sampler else "none"


class _Hands:
    """A real device as the conductor sees it. Without a lease it only looks."""

    def __init__(self, sampler: Sampler, info: DeviceInfo) -> None:
        self._sampler = sampler
        self._latency_s = info.switch_latency_s or info.sensor_period_s or PULSE_S
        self._set_s = 0.0
        self.lease: Lease | None = None

    def apply(self, setting: Setting) -> None:
        if self.lease is not None and setting != self.lease.setting:
            self.lease.set(setting, hold_s=HOLD_S)
            self._set_s = time.monotonic()

    def settled(self) -> bool:
        return time.monotonic() >= self._set_s + self._latency_s

    def mean_power_w(self, begin_s: float, end_s: float) -> float | None:
        return self._sampler.mean_power_w(begin_s, end_s)

    def sustained(self) -> Setting:
        return self._sampler.sustained()


def open_device(spec: str, ranks: Ranks) -> Device:
    """`sim:NAME`, or what `kilter.device.find` knows. Raises `UsageError` and device errors."""
    kind, _, name = spec.partition(":")
    if kind != "sim":
        return find(spec, local_rank=ranks.local_rank, environ=os.environ)
    if name not in names():
        raise UsageError(f"--device {spec}: choose sim:{', sim:'.join(names())}")
    from kilter.sim.gpu import SimGpu
    from kilter.sim.profile import load_profile

    return SimGpu(load_profile(name), seed=ranks.local_rank, index=ranks.local_rank)


_JOB_NAMES = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
)


def how_it_ended(error: BaseException | None) -> str:
    """`finished`, `exit 3`, or `raised ValueError`."""
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        code = error.code
        return "finished" if code in (None, 0) else f"exit {code if isinstance(code, int) else 1}"
    return f"raised {type(error).__name__}"


def _run_directory(ranks: Ranks) -> Path:
    """`runs/<time>-<pid>`; for several ranks the name of their job, which they have in common."""
    if ranks.world_size == 1:
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    else:
        name = "-".join(value for key in _JOB_NAMES if (value := os.environ.get(key)))
    path = Path("runs", name or "job").absolute()  # the script may change its directory
    try:
        path.mkdir(parents=True, exist_ok=ranks.world_size > 1)
    except OSError as error:
        raise FileError(
            f"{path}: cannot be made ({error.strerror}); choose a place with --out DIR"
        ) from error
    return path
