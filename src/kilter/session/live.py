"""A run while it is under way: feeds its controllers from a thread of ours, and sums up at the end.

    iteration clock (the program's thread) -> iterations -> tick (our thread) -> controllers

What is done about the job, the controllers do; this thread only looks, a few times a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kilter.controller import Controller, Run
from kilter.core.errors import FileError
from kilter.core.events import Stopped, sampled
from kilter.core.messages import MessagesGone
from kilter.core.pace import Pace
from kilter.core.script_end import ScriptEnd
from kilter.core.setting import Setting
from kilter.observe.end_times import Iteration
from kilter.session.log import Ending
from kilter.session.unseen import Unseen

TICK_S = 0.1
"""How often our thread looks: the sensors of today's GPUs change ten times a second."""
RECORD_EVERY_S = 0.5
"""Readings of the sensors go into the events at most this often."""
OTHERS_S = 5.0
"""How long rank 0 waits for the ends of the other ranks before it sums up."""


class LiveRun:
    """`begin`, then `iteration_ended` from the program's thread, `script_ended`, `settle`, `stop`.

    After an error of ours: `step_aside`, and then the rest in the same order.
    """

    def __init__(
        self,
        run: Run,
        controllers: Sequence[Controller],
        ending: Ending,
        unseen: Unseen,
        *,
        trace_asked_for: bool,
    ) -> None:
        self._run = run
        self._controllers = controllers
        self._ending = ending
        self._trace_asked_for = trace_asked_for
        self._unseen = unseen
        self._pace = Pace(RECORD_EVERY_S)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start sensors, controllers and the thread that ticks."""
        run = self._run
        if run.sampler is not None:
            run.sampler.start()
        if self._trace_asked_for and run.ranks.rank == 0:
            run.trace.want()
        for controller in self._controllers:
            controller.begin()
        run.iterations.start()
        self._thread = threading.Thread(
            target=run.fence(self._tick_until_over), name="kilter", daemon=True
        )
        self._thread.start()

    def iteration_ended(self, index: int) -> None:
        """In the program's thread, at the end of an iteration: as little as possible."""
        self._run.trace.iteration_ended(index)
        if not self._run.fence.down:
            for controller in self._controllers:
                controller.iteration_ended(index)

    def script_ended(self, outcome: ScriptEnd) -> None:
        """The program is over: nothing more is noticed, and our thread ends."""
        for controller in self._controllers:
            self._run.fence.run(controller.script_ended)
        self._run.iterations.stop()
        self._over.set()
        self._run.trace.script_ended(outcome)

    def settle(self, outcome: ScriptEnd) -> None:
        """What is left to do before the end is written: the last iterations, the plans."""
        run = self._run
        finished: list[Iteration] = []
        if self._thread is not None:
            self._thread.join(max(0.0, self._ending.by_s - time.monotonic()))
        if self._thread is not None and self._thread.is_alive():
            doing = "still reads the trace" if run.trace.reading else "waits for a driver"
            run.log.refuse("the last iterations", f"our own thread does not end: it {doing}")
        elif not run.fence.down:
            finished = [each for found in run.fence.ask(self._collect) for each in found]
        for controller in self._controllers:
            run.fence.run(controller.end, finished, outcome)
        if self._trace_asked_for and run.trace.trace is None and run.ranks.rank == 0:
            run.log.refuse("recording a trace", run.why_no_trace())
        if run.iterations.threads > 1:
            run.log.refuse(
                "telling the iterations of several threads apart",
                f"{run.iterations.threads} threads trained; an iteration is counted where the"
                " optimizer that steps least often has stepped, in whichever thread",
            )

    def stop(self, outcome: ScriptEnd) -> None:
        """Restore, and write how the run has ended; then wait a little for the other ranks."""
        run = self._run
        after, restored = run.restore()
        if run.sampler is not None:
            run.sampler.stop()
        run.log(self._stopped(outcome, after, restored))
        self._wait_for_others()

    def _stopped(self, outcome: ScriptEnd, after: Setting, restored: bool) -> Stopped:
        run, sampler = self._run, self._run.sampler
        return Stopped(
            t_s=run.log.now_s(),
            iterations=max(0, run.iterations.index),
            rehearsed_iterations=run.log.rehearsed_iterations,
            outcome=str(outcome),
            found=run.lease.found,
            after=after,
            restored=restored,
            energy_method="model" if sampler is None else sampler.record.energy_method,
            sampler_cost_s=sampler.cost_s if sampler else 0.0,
            hook_cost_s=run.iterations.cost_s,
            label=run.info.label,
            energy_disagreement=sampler.record.disagreement if sampler else None,
            no_trace=None if run.trace.trace is not None else run.why_no_trace(),
            energy_j=sampler.record.total_j if sampler else None,
            unseen=self._unseen.why(outcome),
        )

    def step_aside(self) -> None:
        """After the first error of ours: restore, and leave the program alone."""
        run = self._run
        for step in (
            run.restore,
            lambda: run.trace.abandon(self._over),
            run.iterations.stop,
            self._over.set,
        ):
            run.fence.run(step)
        if run.sampler is not None:
            run.fence.run(run.sampler.stop, timeout_s=0.0)
        run.fence.close()

    # While the script runs ------------------------------------------------------------------

    def _tick_until_over(self) -> None:
        while not self._over.wait(TICK_S):
            if self._run.fence.broken_into is not None:
                self.step_aside()
                self._run.log.refuse(
                    "going on", f"the program raised {self._run.fence.broken_into}"
                )
            else:
                self._tick()

    def _tick(self) -> None:
        finished = self._collect()
        notice = self._unseen.look(self._run.log.now_s())
        if notice is not None:
            self._run.log.notice(notice)
        settled = True
        for controller in self._controllers:
            controller.tick(finished, settled=settled)
            settled = settled and controller.settled

    def _collect(self) -> list[Iteration]:
        """Take what has come in: iterations, the trace, a reading of the sensors. Raises
        `FileError` once nothing can be recorded any more: nothing is done without a record."""
        run = self._run
        if run.log.recorder.lost is not None:
            raise FileError(run.log.recorder.lost)
        finished = [iteration for iteration in run.iterations.finished() if not iteration.skipped]
        run.trace.look()
        self._record_sample()
        return finished

    def _record_sample(self) -> None:
        run = self._run
        sample = None if run.sampler is None else run.sampler.record.latest
        now_s = run.log.now_s()
        if sample is not None and self._pace.due(now_s):
            run.log(sampled(sample, now_s))

    def _wait_for_others(self) -> None:
        """The summary is about all ranks: rank 0 waits a little for the last lines of the rest."""
        ranks = self._run.ranks
        if ranks.world_size == 1:
            return
        others = set(range(1, ranks.world_size))
        by_s = min(self._ending.by_s, time.monotonic() + OTHERS_S)
        try:
            messages = self._run.messages()
            if messages is None:
                return
            messages.post(f"ended/{ranks.rank}", b"")
            while ranks.rank == 0 and others and time.monotonic() < by_s:
                waiting = (rank for rank in others if time.monotonic() < by_s)
                others -= {rank for rank in waiting if messages.look(f"ended/{rank}") is not None}
                if self._ending.hurry.wait(TICK_S / 10):
                    return
        except MessagesGone:  # the others have ended
            return
