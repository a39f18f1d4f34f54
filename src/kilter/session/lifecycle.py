"""The session: the life of one run, from the first line of the script to the last.

The session opens the device, begins a run around the user's program, and ends it whatever happens.
What is done meanwhile, the controllers do (`session/controllers.py` lists them), fed by `LiveRun`.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import kilter
from kilter.controller import Run
from kilter.core.errors import FileError, UsageError
from kilter.core.events import Failed, Started
from kilter.core.ranks import Ranks
from kilter.core.script_end import ScriptEnd, end_of
from kilter.core.secrets import masked
from kilter.device.protocol import Device
from kilter.lease.run_lease import RunLease
from kilter.observe.imports import after_import, torch_version
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.run_files import RunFiles
from kilter.observe.sampler import Sampler
from kilter.observe.trace_source import TraceSource
from kilter.session.children import SpawnedChildren
from kilter.session.controllers import controllers_of, goal_of, mode_of, open_device
from kilter.session.destructors import Destructors
from kilter.session.fence import Fence
from kilter.session.listener import RunListener, SilentListener
from kilter.session.live import LiveRun
from kilter.session.log import Ending, RunLog
from kilter.session.messages import RunMessages
from kilter.session.options import Options
from kilter.session.recorder import Recorder
from kilter.session.run_directory import check_out, events_name, run_directory
from kilter.session.unseen import Unseen

END_S = 10.0
"""How long all that we do after the script may wait for others: our own thread, which may be inside
the driver, and the other ranks."""
LEAVE_S = 30.0
"""How long the program waits for the end of the run in all. What is not done by then, say a report
on a file system that hangs, is left to a thread that ends with the process."""
AT_ONCE_S = 30.0
"""A script that ends earlier, without an error and without an iteration (`--help`), has left
nothing worth keeping."""


class Session:
    """A context manager around the user's program. Never raises for a reason of its own, except
    `UsageError` (the user can mend it before anything runs), and never swallows the program's.

    One governs a process. A session inside another hands its marks on, and does nothing else. It
    has many attributes because it is where all parts of a run are made and ended.
    """

    _running: ClassVar[Session | None] = None

    def __init__(
        self,
        options: Options,
        ranks: Ranks,
        listener: RunListener | None = None,
        *,
        children: SpawnedChildren | None = None,
    ) -> None:
        """`children`: those that the program spawns take part in the run."""
        self._options = options
        self._children = children
        self._ranks = ranks
        speaks = listener is not None and ranks.rank == 0
        self._listener: RunListener = listener if listener and speaks else SilentListener()
        self._fence = Fence(self._step_aside)
        self._destructors = Destructors(self._fence)
        # Before torch is there we have no destructors, and a script without it sees no hook.
        self._torch_came = after_import("torch", self._destructors.start)
        self._ending = Ending()
        self._device: Device | None = None
        self._log: RunLog | None = None
        self._messages = RunMessages(ranks.world_size)
        self._live: LiveRun | None = None
        self._outcome = ScriptEnd()
        """How the script has ended, once it has."""
        self._outer: Session | None = None
        self._pid = 0
        self.iterations = IterationClock(self._iteration_ended, fence=self._fence.until_aside)
        self.run: Path | None = None
        """The directory of the run, once it has one."""

    def mark(self) -> None:
        """The program says that an iteration ends here; from then on nothing else ends one."""
        session = self._outer or self
        session._fence(session.iterations.mark)()

    @classmethod
    def is_running(cls) -> bool:
        """One governs this process."""
        return cls._running is not None and cls._running._pid == os.getpid()

    # Begin ----------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        self._pid = os.getpid()
        outer = Session._running
        if outer is not None and Session.is_running():
            self._outer = outer
            outer._fence(outer._refuse_inner)()
            return self
        check_out(self._options.out, self._ranks)
        wrong: list[UsageError | FileError] = []
        opened = self._fence.run(self._open, wrong)
        if wrong:
            raise wrong[0]
        if opened:
            self._fence(self._start)()
        self._torch_came.install()
        Session._running = self
        return self

    def _open(self, wrong: list[UsageError | FileError]) -> None:
        try:
            self._device = open_device(self._options.device, self._ranks)
        except (UsageError, FileError) as error:
            wrong.append(error)

    def _refuse_inner(self) -> None:
        if self._log is not None:
            self._log.refuse("a session inside this one", "one governs a process")

    def _start(self) -> None:
        device, options, ranks = self._device, self._options, self._ranks
        assert device is not None
        self.run, elsewhere = run_directory(options.out, ranks)
        recorder = Recorder(self.run / events_name(ranks))
        log = self._log = RunLog(recorder, self._listener, self._ending, began_s=time.monotonic())
        run = self._run_of(device, log, self.run)
        started = self._started(run)
        log(started)
        self._listener.started(started)
        if elsewhere is not None:
            log.notice(f"{elsewhere}: the files of this run are in {self.run}")
        controllers = controllers_of(run, options)
        unseen = Unseen(self.iterations, self._children)
        self._live = LiveRun(run, controllers, self._ending, unseen, trace_asked_for=options.trace)
        self._live.begin()
        if self._children is not None:
            self._children.install(self.run, lambda: self.iterations.index >= 0)

    def _run_of(self, device: Device, log: RunLog, directory: Path) -> Run:
        options, info = self._options, device.info()
        simulated = info.backend == "sim"
        command = _command(options)
        files = RunFiles(directory, command=command, writes=self._ranks.rank == 0)
        return Run(
            goal=goal_of(options),
            dry_run=options.dry_run,
            device=device,
            info=info,
            ranks=self._ranks,
            iterations=self.iterations,
            sampler=None if simulated else Sampler(device, fence=self._fence),
            trace=TraceSource(
                self.iterations,
                files,
                # A simulator and the controller of operations plan from it during the run.
                patient=not (simulated or options.operations),
                run_fenced=self._fence.run,
            ),
            files=files,
            lease=RunLease(device),
            fence=self._fence,
            log=log,
            messages=self._messages.find,
        )

    def _started(self, run: Run) -> Started:
        mode, why = mode_of(run.goal, run.info, dry_run=run.dry_run)
        return Started(
            t_s=run.log.now_s(),
            kilter=kilter.__version__,
            wall_time=datetime.now().astimezone().isoformat(timespec="seconds"),
            command=_command(self._options),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            device=run.info,
            goal=run.goal,
            found=run.lease.found,
            mode=mode,
            mode_reason=why,
            host=platform.node() or None,
            torch=torch_version(),
            config=None if self._options.config is None else str(self._options.config),
        )

    def _iteration_ended(self, index: int, t_s: float) -> None:
        if self._live is not None:
            self._live.iteration_ended(index)

    # End ------------------------------------------------------------------------------------

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._pid or self._outer is not None:
            return  # a forked child that left the script, or the outer session's to end
        Session._running = None
        self._outcome = end_of(error)
        try:
            self._torch_came.cancel()
            self._destructors.stop()
            if self._children is not None:
                self._fence.run(self._children.remove)
            if self._live is not None:
                self._fence.run(self._live.script_ended, self._outcome)
        finally:
            self._fence.run(self._end)

    def _end(self) -> None:
        """All the rest is done by a thread of ours, which no Ctrl-C and no signal handler of the
        program breaks into: it has to restore, and to write how the run has ended. Those end the
        waiting for what takes long, and then arrive; only a Ctrl-C in a rehearsal has done all that
        it was pressed for, and the script's own exit code stands."""
        self._ending.by_s = time.monotonic() + END_S
        # Not `join`: after a KeyboardInterrupt in it, Python 3.11 takes the thread for dead.
        concluded = threading.Event()

        def conclude() -> None:
            self._fence.run(self._conclude)
            concluded.set()

        try:
            try:
                threading.Thread(target=conclude, name="kilter-end", daemon=True).start()
            except RuntimeError:  # the system has no further thread for this user
                conclude()
            concluded.wait(LEAVE_S + self._options.rehearsal_s)
        except KeyboardInterrupt:
            if not self._ending.rehearses:
                raise
        finally:
            self._ending.hurry.set()
            concluded.wait(END_S)

    def _conclude(self) -> None:
        live, log = self._live, self._log
        # also after an error of ours: what was found has to come back, and the user to know
        if live is not None:
            self._fence.run(live.settle, self._outcome)
            self._fence.run(live.stop, self._outcome)
        if log is not None and self.run is not None:
            self._fence.run(self._sum_up, log, self.run)
        self._fence.run(self._close)

    def _sum_up(self, log: RunLog, run: Path) -> None:
        if self._children is not None and self._children.train:
            if self._children.left_unreported():
                self._listener.ended(run, self._options, keep=True)
            return
        events = log.recorder.path
        if not events.exists():
            raise FileError(f"{run}: deleted while the program ran; nothing is left to report")
        keep = not self._left_nothing(log)
        self._listener.ended(run, self._options, keep=keep)
        if not keep:
            events.unlink()
            if self._ranks.world_size == 1:
                shutil.rmtree(run, ignore_errors=True)

    def _left_nothing(self, log: RunLog) -> bool:
        """The script has ended at once, without an iteration: its `--help`, for example."""
        unseen = self._outcome.finished and self.iterations.index < 0
        at_once = unseen and log.now_s() < AT_ONCE_S
        return at_once and self._options.out is None and not self._fence.down

    def _close(self) -> None:
        if self._log is not None:
            self._log.recorder.close()
        self._messages.close()
        if self._device is not None:
            self._device.close()

    def _step_aside(self, where: str, error: str) -> None:
        """After the first error of ours: restore, say so once, leave the program alone."""
        if self._live is not None:
            self._live.step_aside()
        self._fence.close()
        self._fence.run(self.iterations.stop)
        if self._log is not None:
            failed = Failed(t_s=self._log.now_s(), where=where, error=error)
            self._fence.run(self._log, failed)
        self._fence.run(self._listener.failed, error)


def _command(options: Options) -> tuple[str, ...]:
    """With secrets masked. What a locale cannot decode stands in `sys.argv` as surrogates, which no
    file may hold."""
    return masked(
        argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        for argument in options.command
    )
