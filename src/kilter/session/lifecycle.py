"""The session: joins the loop for one process, from the first line of the script to the last.

    marks (the program's thread) -> iterations -> pulse (our thread) -> conductor -> lease -> device

The program's own thread only ever notes that an iteration has ended. Everything else, from reading
sensors to setting clocks, happens in one thread of ours, a few times a second.

What needs numpy (planning, simulation) is imported when it is needed: a script may still choose
how numpy and its libraries are to be loaded.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Protocol

import kilter
from kilter.clocks.actuator import DeviceActuator
from kilter.core import codec
from kilter.core.errors import DeviceError, FileError, UsageError
from kilter.core.events import Decided, Failed, Refused, Started, Stopped, sampled
from kilter.core.label import Label
from kilter.core.messages import LocalMessages, MessagesGone, RankMessages
from kilter.core.plan import Goal
from kilter.core.ranks import Ranks
from kilter.core.secrets import masked
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.trace import IterationTrace
from kilter.core.units import show_count
from kilter.device.find import find
from kilter.device.protocol import Device
from kilter.device.sim.cards import names
from kilter.lease.lease import Lease
from kilter.memory.controller import MemoryController
from kilter.memory.host_memory import HostLimit, default_limit_bytes
from kilter.observe.chrome import save_chrome
from kilter.observe.iteration_clock import Iteration, IterationClock
from kilter.observe.profiler_window import Window
from kilter.observe.sampler import Sampler
from kilter.session.destructors import Destructors
from kilter.session.fence import Fence
from kilter.session.messages import StoreMessages
from kilter.session.recorder import Recorder
from kilter.session.run_directory import check_out, events_name, run_directory
from kilter.session.waiting import children_cpu_s, waits_for

if TYPE_CHECKING:
    from kilter.clocks.conductor import Conductor, GovernorProgram
    from kilter.clocks.plan.governor import BlockOutcome, Order
    from kilter.clocks.rehearsal import Rehearsal
    from kilter.memory.schedule import PlannedPass

PULSE_S = 0.1
"""How often our thread looks: the sensors of today's cards change ten times a second."""
RECORD_EVERY_S = 0.5
"""Readings of the sensors that go into the events."""
WINDOW_AFTER = 10
"""Border at which the observation window opens: by then caches and tuners have settled."""
WINDOW_ITERATION_ENDS = 3
"""From the border at which it opens to the last one that is slow because of it."""
WINDOW_PASSES_S = 30.0
"""After an error of ours, for an observation that is under way."""
FIRST_BLOCK = 20
"""Iterations before the first block: warm-up, and the observation window, are over by then."""
END_S = 10.0
"""How long all that we do after the script may wait for others: our own thread, which may be inside
the driver, and the other ranks."""
LEAVE_S = 30.0
"""How long the program waits for the end of the run in all. What is not done by then, say a report
on a file system that hangs, is left to a thread that ends with the process."""
OTHERS_S = 5.0
"""How long rank 0 waits for the ends of the other ranks before it sums up."""
REHEARSE_S = 5.0
"""Real seconds that a rehearsal may take after the script, unless the user asks for more."""
UNSEEN_S = 2.0
"""A script that has waited so long for other processes, without an iteration of its own, is told
that these are not observed."""
CHILDREN_S = 1.0
"""CPU time from which other processes may have held the iterations that were not seen here."""
AT_ONCE_S = 30.0
"""A script that ends earlier, without an error and without an iteration (`--help`), has left
nothing worth keeping."""
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
    gradients: str = "auto"
    """One of `GRADIENTS`."""
    trace: bool = False
    """Record the operations of an iteration also where nothing but the report needs them."""
    rehearse_s: float | None = None
    """Real seconds for a rehearsal after the script; None: `REHEARSE_S`."""


class RunListener(Protocol):
    """Who tells the user. Only rank 0's session has one that speaks."""

    def started(self, started: Started) -> None:
        """The one line at the start."""

    def refused(self, what: str, reason: str) -> None:
        """Something is not going to be done; said at the end."""

    def failed(self, error: str) -> None:
        """An error of ours, told once, when it happens."""

    def noticed(self, text: str) -> None:
        """Something that the user can mend at once, or has to expect from here on."""

    def rehearsing(self, seconds: float | None) -> None:
        """Progress of a rehearsal after the script: virtual seconds; None when it is over."""

    def ended(self, run: Path, options: Options, *, keep: bool) -> None:
        """The summary; writes the report, unless the run is not worth keeping."""


class SilentListener:
    """A voice that says nothing."""

    def started(self, started: Started) -> None: ...
    def refused(self, what: str, reason: str) -> None: ...
    def failed(self, error: str) -> None: ...
    def noticed(self, text: str) -> None: ...
    def rehearsing(self, seconds: float | None) -> None: ...
    def ended(self, run: Path, options: Options, *, keep: bool) -> None: ...


class Session:
    """A context manager around the user's program. Never raises for a reason of its own, except
    `UsageError` (the user can mend it before anything runs), and never swallows the program's.

    One governs a process. A session inside another hands its marks on, and does nothing else.
    """

    _running: ClassVar[Session | None] = None

    def __init__(self, options: Options, ranks: Ranks, voice: RunListener | None = None) -> None:
        self._options = options
        # What a locale cannot decode stands in `sys.argv` as surrogates, which no file may hold.
        self._command = masked(
            argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            for argument in options.command
        )
        self._ranks = ranks
        self._voice: RunListener = (
            voice if voice is not None and ranks.rank == 0 else SilentListener()
        )
        self._fence = Fence(self._step_aside)
        self._destructors = Destructors(self._fence)
        self._begin_s = time.monotonic()
        self._recorder: Recorder | None = None
        self._device: Device | None = None
        self._info: DeviceInfo | None = None
        self._found = Setting()
        self._mode = "observe"
        self._mode_reason = ""
        self._messages: RankMessages | None = None
        self._alone = False
        self._lease: Lease | None = None
        self._sampler: Sampler | None = None
        self._window: Window | None = None
        self._trace: IterationTrace | None = None
        self._fitter: MemoryController | None = None
        self._schedule: PlannedPass | None = None
        self._rehearsal: Rehearsal | None = None
        self._predicted: Rehearsal | None = None
        self._conductor: Conductor | None = None
        self._program: GovernorProgram | None = None
        self._recorded_s = 0.0
        self._children_s = children_cpu_s()
        self._waits_since_s: float | None = None
        self._waited_for: str | None = None
        """How the processes were started that the script waits for, with no iteration here."""
        self._outcome = "finished"
        """How the script has ended, once it has."""
        self._rehearses = False
        self._over = threading.Event()
        self._hurry = threading.Event()
        self._end_s = math.inf
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._outer: Session | None = None
        self._wrong: UsageError | FileError | None = None
        self.marks = IterationClock(self._iteration_ended, fence=self._fence.until_aside)
        self.run: Path | None = None
        """The directory of the run, once it has one."""

    def mark(self) -> None:
        """The program says that an iteration ends here; from then on nothing else ends one."""
        session = self._outer or self
        session._fence(session.marks.mark)()

    # Begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._pid = os.getpid()
        outer = Session._running
        if outer is not None and outer._pid == self._pid:
            self._outer = outer
            outer._fence(outer._refuse)("a session inside this one", "one governs a process")
            return self
        check_out(self._options.out, self._ranks)
        opened = self._fence.run(self._open)
        if self._wrong is not None:
            raise self._wrong
        if opened:
            self._fence(self._start)()
        self._destructors.start()
        Session._running = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid or self._outer is not None:
            return  # a forked child that left the script, or the outer session's to end
        Session._running = None
        self._outcome = how_it_ended(error)
        try:
            self._destructors.stop()
            if self._fitter is not None:
                self._fence.run(self._fitter.stop)
            self._fence.run(self._quiet)
        finally:
            self._fence.run(self._end)

    def _end(self) -> None:
        """All the rest is done by a thread of ours, which no Ctrl-C and no signal handler of the
        program breaks into: it has to restore, and to write how the run has ended. Those end the
        waiting for what takes long, and then arrive; only a Ctrl-C in a rehearsal has done all that
        it was pressed for, and the script's own exit code stands."""
        self._end_s = time.monotonic() + END_S
        # Not `join`: after a KeyboardInterrupt in it, Python 3.11 takes the thread for dead.
        concluded = threading.Event()

        def conclude() -> None:
            self._fence.run(self._conclude)
            concluded.set()

        try:
            threading.Thread(target=conclude, name="kilter-end", daemon=True).start()
            concluded.wait(LEAVE_S + self._rehearse_s)
        except KeyboardInterrupt:
            if not self._rehearses:
                raise
        finally:
            self._hurry.set()
            concluded.wait(END_S)

    def _conclude(self) -> None:
        if self._recorder is not None:
            # also after an error of ours: what was found has to come back, and the user to know
            self._fence.run(self._finish)
        self._fence.run(self._close)

    def _open(self) -> None:
        try:
            self._device = open_device(self._options.device, self._ranks)
        except (UsageError, FileError) as error:
            self._wrong = error

    def _quiet(self) -> None:
        """The program is over: nothing more is noticed, and our thread ends."""
        self.marks.stop()
        self._over.set()
        if self._window is not None and self._failed:
            self._window.abandon(f"the script ended early ({self._outcome})")
        elif self._window is not None:
            self._window.close()

    def _start(self) -> None:
        device = self._device
        assert device is not None
        info = self._info = device.info()
        self._found = device.settings()
        self.run, elsewhere = run_directory(self._options.out, self._ranks)
        self._recorder = Recorder(self.run / events_name(self._ranks))
        self._mode, why = self._choose_mode(info)
        self._mode_reason = why
        goal = self._options.goal
        if goal.memory_budget is not None and goal.host_memory_bytes is None:
            goal = replace(goal, host_memory_bytes=default_limit_bytes(os.environ))
        started = Started(
            t_s=self._now(),
            kilter=kilter.__version__,
            wall_time=datetime.now().astimezone().isoformat(timespec="seconds"),
            command=self._command,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            device=info,
            goal=goal,
            found=self._found,
            mode=self._mode,
            mode_reason=why,
            host=platform.node() or None,
            torch=_torch_version(),
        )
        self._recorder(started)
        self._voice.started(started)
        if elsewhere is not None:
            self._voice.noticed(f"{elsewhere}: the files of this run are in {self.run}")
        if self._mode == "shadow" and not self._options.dry_run:
            self._refuse("setting clocks", why)
        if not self._simulated:
            self._sampler = Sampler(device, fence=self._fence)
            self._sampler.start()
        if self._trace_needed:
            self._open_window()
        if goal.memory_budget is not None:
            self._fitter = MemoryController(
                goal.memory_budget,
                info,
                host=HostLimit(goal.host_memory_bytes),
                fence=self._fence,
                record=self._recorder,
                say=self._voice.noticed,
                clock=self._now,
                gradients=self._options.gradients,
                dry_run=self._options.dry_run,
            )
            self._fitter.start()
        self.marks.start()
        self._thread = threading.Thread(target=self._fence(self._loop), name="kilter", daemon=True)
        self._thread.start()

    def _choose_mode(self, info: DeviceInfo) -> tuple[str, str]:
        if self._options.goal.max_slowdown is None:
            return "observe", "no clocks were asked for"
        if info.backend == "null":
            return "observe", info.refusal or "there is no GPU"
        if self._options.dry_run:
            return "shadow", "--dry-run"
        if not info.can_set:
            return "shadow", info.refusal or "this device cannot be set"
        return "govern", f"at most {self._options.goal.max_slowdown:.1%} slower"

    @property
    def _trace_needed(self) -> bool:
        """A trace is what the simulated device runs, in a rehearsal or to predict what would have
        been set; or it was asked for. Only rank 0 does either."""
        predicts = self._mode == "shadow" and self._lease is None
        rehearses = self._simulated and self._mode != "observe"
        return self._ranks.rank == 0 and (self._options.trace or predicts or rehearses)

    def _open_window(self) -> None:
        window = Window(
            self.marks, after=WINDOW_AFTER, patient=not self._simulated, run=self._fence.run
        )
        window.start()
        self._window = window

    def _finish(self) -> None:
        """Everything after the script: rehearse, restore, write, tell."""
        assert self._info is not None
        assert self._recorder is not None
        assert self.run is not None
        if self._thread is not None:
            self._thread.join(max(0.0, self._end_s - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            self._refuse(
                "the last iterations", "our own thread does not end: it waits for a driver"
            )
        else:
            self._fence(self._settle)()
        if self._fitter is not None:
            self._fence.run(self._fitter.conclude, self._outcome)
            self._fence(self._take_schedule)(self._fitter.schedule())
        after, restored = self._restore()
        if self._sampler is not None:
            self._sampler.stop()
        rehearsal = self._rehearsal
        self._recorder(
            Stopped(
                t_s=self._now(),
                iterations=max(0, self.marks.index),
                rehearsed_iterations=rehearsal.iterations_alone if rehearsal else 0,
                outcome=self._outcome,
                found=self._found,
                after=after,
                restored=restored,
                energy_method=self._energy_method(),
                sampler_cost_s=self._sampler.cost_s if self._sampler else 0.0,
                hook_cost_s=self.marks.cost_s,
                label=self._info.label,
                energy_disagreement=self._sampler.disagreement if self._sampler else None,
                no_trace=None if self._trace is not None else self._why_no_trace(),
                energy_j=self._sampler.total_j if self._sampler else None,
                unseen=self._why_unseen() if self.marks.index < 0 else None,
            )
        )
        self._wait_for_others()
        if not self._recorder.path.exists():
            raise FileError(f"{self.run}: deleted while the program ran; nothing is left to report")
        keep = not self._left_nothing
        self._voice.ended(self.run, self._options, keep=keep)
        if not keep:
            self._recorder.path.unlink()
            if self._ranks.world_size == 1:
                shutil.rmtree(self.run, ignore_errors=True)

    @property
    def _failed(self) -> bool:
        """The script has ended with an error, an exit code or an interrupt: a traceback, or
        whoever has pressed Ctrl-C, waits for us, so that nothing that takes long is begun."""
        return self._outcome != "finished"

    @property
    def _left_nothing(self) -> bool:
        """The script has ended at once, without an iteration: its `--help`, for example."""
        at_once = not self._failed and self._now() < AT_ONCE_S and self.marks.index < 0
        return at_once and self._options.out is None and not self._fence.down

    def _settle(self) -> None:
        """What is left to do before the end is written: the last iterations, the plan."""
        self._look()
        simulates = self._simulated and self._mode != "observe"
        if self._failed and (simulates or self._mode == "shadow"):
            self._refuse("rehearsing", f"the script ended early ({self._outcome})")
        elif self._rehearsal is not None:
            self._rehearse(self._rehearsal)
        elif simulates:
            if self._ranks.rank == 0:  # rank 0 rehearses for all
                self._refuse("rehearsing", self._why_no_trace())
        elif self._mode == "shadow" and self._lease is None:
            self._predict()
        elif self._mode == "govern" and self._conductor is None:
            self._refuse("governing", self._why_not_begun())
        elif self._options.trace and self._trace is None and self._ranks.rank == 0:
            self._refuse("recording a trace", self._why_no_trace())
        if self.marks.threads > 1:
            self._refuse(
                "telling the iterations of several threads apart",
                f"{self.marks.threads} threads trained; an iteration is counted where the optimizer"
                " that steps least often has stepped, in whichever thread",
            )
        self._write_plan()

    def _wait_for_others(self) -> None:
        """The summary is about all ranks: rank 0 waits a little for the last lines of the rest."""
        if self._ranks.world_size == 1 or self._alone:
            return
        others = set(range(1, self._ranks.world_size))
        end_s = min(self._end_s, time.monotonic() + OTHERS_S)
        try:
            messages = self._messages = self._messages or self._find_messages()
            if messages is None:
                return
            messages.post(f"ended/{self._ranks.rank}", b"")
            while self._ranks.rank == 0 and others and time.monotonic() < end_s:
                waiting = (rank for rank in others if time.monotonic() < end_s)
                others -= {rank for rank in waiting if messages.look(f"ended/{rank}") is not None}
                if self._hurry.wait(PULSE_S / 10):
                    return
        except MessagesGone:  # the others have ended
            return

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        if self._messages is not None:
            self._messages.close()
        if self._device is not None:
            self._device.close()

    def _step_aside(self, where: str, error: str) -> None:
        """After the first error of ours: restore, say so once, leave the program alone."""
        self._leave_alone()
        if self._recorder is not None:
            self._fence.run(self._recorder, Failed(t_s=self._now(), where=where, error=error))
        self._fence.run(self._voice.failed, error)

    def _leave_alone(self) -> None:
        for step in (self._restore, self._let_window_pass, self.marks.stop, self._over.set):
            self._fence.run(step)
        if self._sampler is not None:
            self._fence.run(self._sampler.stop, timeout_s=0.0)
        self._fence.close()

    def _let_window_pass(self) -> None:
        """A profiler can only be switched off in the thread that it was switched on in; left on,
        it would fill the memory. In a thread of ours: wait for the program to get there."""
        window = self._window
        if window is None:
            return
        if threading.current_thread().name.startswith("kilter"):
            end_s = time.monotonic() + WINDOW_PASSES_S
            while window.busy and time.monotonic() < end_s and not self._over.is_set():
                time.sleep(PULSE_S / 10)
        window.abandon("kilter stepped aside after an error")

    def _restore(self) -> tuple[Setting, bool]:
        """The settings afterwards, and whether they are as found."""
        if self._lease is not None:
            outcome = self._lease.restore()
            if not outcome.restored or outcome.left:
                self._refuse("restoring", outcome.reason)
            return outcome.after or self._found, outcome.restored
        return self._found, True

    # While the script runs ------------------------------------------------------------------

    def _iteration_ended(self, index: int, t_s: float) -> None:
        """In the program's thread, at the end of an iteration: as little as possible."""
        if self._window is not None:
            self._window.iteration_ended(index)
        if self._fitter is not None and not self._fence.down:
            self._fitter.iteration_ended(index)

    def _loop(self) -> None:
        while not self._over.wait(PULSE_S):
            self._pulse()

    def _pulse(self) -> None:
        """In our thread, a few times a second."""
        if self._fence.broken_into is not None:
            self._leave_alone()
            self._refuse("going on", f"the program raised {self._fence.broken_into}")
            return
        finished = self._look()
        if self.marks.index < 0 and self._waited_for is None:
            self._look_elsewhere()
        if self._simulated or self._alone:
            return
        memory_settled = self._fitter is None or self._fitter.settled
        if self._conductor is None and self.marks.index >= FIRST_BLOCK and memory_settled:
            self._begin_conducting()
        if self._conductor is not None:
            self._conduct(self._conductor, finished)

    def _look_elsewhere(self) -> None:
        """Does the script leave its iterations to processes that it has started?"""
        main = threading.main_thread().ident
        how = waits_for(main) if main is not None else None
        if how is None:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = self._now()
        elif self._now() - self._waits_since_s > UNSEEN_S:
            self._waited_for = how
            self._voice.noticed(self._why_unseen())

    def _look(self) -> list[Iteration]:
        """Take what has come in: iterations, the trace, a reading of the sensors. Raises
        `FileError` once nothing can be recorded any more: nothing is done without a record."""
        if self._recorder is not None and self._recorder.lost is not None:
            raise FileError(self._recorder.lost)
        finished = [i for i in self.marks.finished() if not i.skipped]
        if self._trace is None and self._window is not None and not self._failed:
            self._take_trace(self._window.trace())
        if self._fitter is not None:
            for iteration in finished:
                self._fitter.time(iteration, counts=not self._observed(iteration))
            self._take_schedule(self._fitter.schedule())
        if self._sampler is not None:
            self._record_sample(self._sampler)
        if self._rehearsal is not None:
            for _ in finished:
                self._rehearsal.iterate()
        return finished

    def _observed(self, iteration: Iteration) -> bool:
        """The profiler was switched on, off or open in it."""
        begin = self._window.opened_at if self._window is not None else 0
        return begin > 0 and begin <= iteration.index <= begin + WINDOW_ITERATION_ENDS

    def _conduct(self, conductor: Conductor, finished: list[Iteration]) -> None:
        try:
            for iteration in finished:
                conductor.iteration(iteration)
            conductor.step()
        except MessagesGone as error:
            self._alone = True
            self._refuse("going on with the other ranks", str(error))
            self._restore()
            return
        if self._mode == "govern" and conductor.refused is not None:
            self._only_look(conductor.refused)

    def _only_look(self, reason: str) -> None:
        """Set nothing from now on; what was found comes back now."""
        self._mode = "shadow"
        self._voice.refused("setting clocks", reason)
        self._restore()

    def _begin_conducting(self) -> None:
        assert self._device is not None
        assert self._info is not None
        assert self._sampler is not None
        if self._messages is None:
            self._messages = self._find_messages()
        if self._messages is None:
            return
        from kilter.clocks.conductor import Conductor, GovernorProgram, roles_on, watching

        actuator = DeviceActuator(self._sampler, self._info, self.marks)
        refused: str | None = self._mode_reason
        if (elsewhere := self._elsewhere()) is not None:
            refused, self._mode = elsewhere, "shadow"
            self._refuse("watching the program's GPU", elsewhere)
        elif self._mode == "govern":
            refused = self._take_lease(actuator)
        if self._window is None and self._trace_needed:
            self._open_window()
        orders: Generator[Order, BlockOutcome, None] | None = None
        if self._ranks.rank == 0:
            if refused is None:
                self._program = GovernorProgram(
                    self._options.goal,
                    self._found,
                    self._device.supported(),
                    actuator,
                    seed=SEED,
                    roles=partial(roles_on, self._messages, self._ranks.world_size),
                )
                orders = self._program.orders()
            else:
                orders = watching(self._found, f"the default stands: {refused}")
        assert self._recorder is not None
        self._conductor = Conductor(
            actuator,
            self._messages,
            found=self._found,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            sensor_period_s=self._info.sensor_period_s or PULSE_S,
            orders=orders,
            record=self._recorder,
            clock=self._now,
            role=self.marks.role,
            refused=refused,
        )

    def _take_lease(self, actuator: DeviceActuator) -> str | None:
        """Why the device cannot be had, or None. What it was found at is known only now: a dead
        job may have left something, which the lease puts back first."""
        assert self._device is not None
        lease = Lease(self._device)
        try:
            lease.__enter__()
        except (DeviceError, FileError) as error:
            self._mode = "shadow"
            self._refuse("setting clocks", str(error))
            return str(error)
        self._lease = actuator.lease = lease
        self._found = lease.found
        return None

    def _elsewhere(self) -> str | None:
        """Which GPU the program uses was guessed before it began; by now torch knows. If it is
        another one, or none, ours may be somebody else's: nothing is set on it."""
        assert self._info is not None
        watched = self._info.uuid
        if self._info.backend != "nvml":
            return None
        uuid = self.marks.gpu_uuid
        used = gpus_in_use() if uuid is None else [uuid]
        if any(uuid.lower() in watched.lower() for uuid in used):
            return None
        if not used:
            return f"the program computes on no GPU, and {watched} may be somebody else's"
        return (
            f"the program computes on {', '.join(f'GPU-{uuid}' for uuid in used)}, and {watched} "
            "is watched: let it see its own GPU alone, with CUDA_VISIBLE_DEVICES"
        )

    def _find_messages(self) -> RankMessages | None:
        """Alone: our own; with others: the store that the process group met at, once it has."""
        return LocalMessages() if self._ranks.world_size == 1 else StoreMessages.find()

    def _record_sample(self, sampler: Sampler) -> None:
        sample = sampler.latest
        if sample is None or self._now() - self._recorded_s < RECORD_EVERY_S:
            return
        self._recorded_s = self._now()
        assert self._recorder is not None
        self._recorder(sampled(sample, self._now()))

    # The trace, and what is made of it ------------------------------------------------------

    def _take_trace(self, trace: IterationTrace | None) -> None:
        if trace is None:
            return
        assert self.run is not None
        assert self._recorder is not None
        trace = self._trace = replace(trace, source=" ".join(self._command))
        if self._ranks.rank == 0:
            self._save_trace()
            save_chrome(self.run / "trace.chrome.json", trace)
        if self._simulated and self._mode != "observe" and self._ranks.rank == 0:
            from kilter.clocks.rehearsal import Rehearsal
            from kilter.device.sim.gpu import SimGpu

            assert isinstance(self._device, SimGpu)
            self._lease = Lease(self._device)
            self._lease.__enter__()
            self._rehearsal = Rehearsal(
                self._device,
                trace,
                self._options.goal,
                apply=self._lease.set,
                verify=self._lease.verify,
                record=self._recorder,
                clock=self._now,
                seed=SEED,
            )

    def _take_schedule(self, schedule: PlannedPass | None) -> None:
        """A memory plan came into force: it can be looked at, and planned anew, from the files."""
        if schedule is None:
            return
        self._schedule = schedule
        if self._ranks.rank == 0:
            self._save_trace()
            assert self.run is not None
            codec.save(self.run / "plan.json", schedule.plan)

    def _save_trace(self) -> None:
        """The operations with their kernels, the required data, or one inside the other."""
        memory = None if self._schedule is None else self._schedule.trace
        if memory is not None:
            memory = replace(memory, source=" ".join(self._command))
        trace = memory if self._trace is None else replace(self._trace, memory=memory)
        assert self.run is not None
        codec.save(self.run / "trace.json", trace)

    def _why_unseen(self) -> str:
        """Why there was no iteration in this process, and what to do about it."""
        if self._waited_for is not None:
            return (
                "no iteration seen: the script waits for processes that it started with "
                f"{self._waited_for}, and kilter observes the process of the script alone; let "
                "kilter start them (kilter run --nproc-per-node N SCRIPT, as torchrun does), or "
                "call kilter.govern() in the function that trains"
            )
        if (children_s := children_cpu_s() - self._children_s) > CHILDREN_S:
            return (
                "no iteration seen in the script's own process; processes that it started "
                f"computed for {children_s:.0f} s: put kilter run before the command that trains"
            )
        if "torch" not in sys.modules:
            return "no iteration seen: the script did not import torch"
        if self.marks.why_not is not None:
            return f"no iteration seen: {self.marks.why_not}"
        return (
            "no iteration seen: no optimizer of torch.optim stepped; to say where an iteration "
            "ends: with kilter.govern() as job, and job.mark() after each one"
        )

    def _why_no_trace(self) -> str:
        if self._ranks.rank != 0:
            return "rank 0 rehearses for all"
        if self._window is None:
            return "nothing needed one; --trace records one"
        if self._failed:
            return f"the script ended early ({self._outcome})"
        seen = self.marks.index + 1
        if seen <= WINDOW_AFTER + WINDOW_ITERATION_ENDS:
            return self._too_few(WINDOW_AFTER + WINDOW_ITERATION_ENDS + 1)
        if self._window.why_not:
            return self._window.why_not
        return "the observation gave no trace"

    def _why_not_begun(self) -> str:
        if self.marks.index < FIRST_BLOCK:
            return self._too_few(FIRST_BLOCK + 1)
        if self._messages is None and self._ranks.world_size > 1:
            return "the ranks have no process group to agree through"
        return "the script ended at once"

    def _too_few(self, needed: int) -> str:
        if self.marks.index < 0:
            return "no iteration was seen"
        seen = show_count(max(0, self.marks.index), "iteration")
        return f"the script ended after {seen}: at least {needed} are needed"

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        """Go on with the trace until the evidence is in, or the time for it is over."""
        over = False
        why_not = f"stopped after {self._rehearse_s:g} s; for more time: --rehearse 60s"
        self._rehearses = True
        try:
            over = rehearsal.finish(seconds=self._rehearse_s, progress=self._rehearsing)
        except _Hurried:
            why_not = "ended by Ctrl-C"
        self._rehearses = False
        self._voice.rehearsing(None)
        if not over:
            self._refuse("a complete rehearsal", why_not)

    @property
    def _rehearse_s(self) -> float:
        asked_s = self._options.rehearse_s
        return REHEARSE_S if asked_s is None else asked_s

    def _rehearsing(self, seconds: float) -> None:
        if self._hurry.is_set():
            raise _Hurried
        self._voice.rehearsing(seconds)

    def _predict(self) -> None:
        """What would have been set: the loop on a simulated card of this kind."""
        assert self._info is not None
        if self._ranks.rank != 0:
            return
        if self._trace is None:
            self._refuse("predicting a plan", self._why_no_trace())
            return
        from kilter.clocks.rehearsal import Rehearsal
        from kilter.device.sim.gpu import SimGpu
        from kilter.device.sim.profile import load_profile, profile_of

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
        self._rehearse(rehearsal)
        self._predicted = rehearsal

    def _write_plan(self) -> None:
        rehearsal, conductor = self._rehearsal or self._predicted, self._conductor
        program = rehearsal.program if rehearsal else self._program
        if program is None or self._info is None or self._recorder is None:
            return
        from kilter.clocks.plan.governor import Phase, plan_of

        choice = program.choice
        phase = rehearsal.phase if rehearsal else conductor.phase if conductor else None
        if choice.setting == self._found and phase is not Phase.HOLD:
            return  # the search is not over: nothing is decided
        predicted = self._predicted is not None
        label = Label.SIMULATED if predicted else self._info.label
        assert self.run is not None
        plan = plan_of(choice, self._found, label)
        if self._schedule is not None:
            plan = replace(plan, memory=self._schedule.plan.memory)
        codec.save(self.run / "plan.json", plan)
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


class _Hurried(Exception):
    """The program, or its user, waits no longer for what comes after the script."""


def gpus_in_use() -> list[str]:
    """UUIDs of the GPUs that torch has a context on in this process; none is made here."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    gpus = range(torch.cuda.device_count())
    used = [gpu for gpu in gpus if torch._C._cuda_hasPrimaryContext(gpu)]
    return [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in used]


def open_device(spec: str, ranks: Ranks) -> Device:
    """`sim:NAME`, `replay:PATH`, or what `kilter.device.find` knows. Raises `UsageError`,
    `FileError` and device errors."""
    kind, _, name = spec.partition(":")
    if kind == "replay":
        from kilter.device.sim.replay import RecordedDevice, load_recording

        now_s = time.monotonic
        return RecordedDevice(load_recording(name), now_s, Path(name).name, begin_s=now_s())
    if kind != "sim":
        return find(spec, local_rank=ranks.local_rank, environ=os.environ)
    if name not in names():
        raise UsageError(f"--device {spec}: choose sim:{', sim:'.join(names())}")
    from kilter.device.sim.gpu import SimGpu
    from kilter.device.sim.profile import load_profile

    return SimGpu(load_profile(name), seed=ranks.local_rank, index=ranks.local_rank)


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def how_it_ended(error: BaseException | None) -> str:
    """`finished`, `exit 3`, or `raised ValueError`."""
    if error is None:
        return "finished"
    if isinstance(error, SystemExit):
        code = error.code
        return "finished" if code in (None, 0) else f"exit {code if isinstance(code, int) else 1}"
    return f"raised {type(error).__name__}"
