"""The seam between a session and its capabilities: what each side may expect of the other.

A capability is a `Controller`. What the session shares with all of them is a `Run`: the device and
its lease, the clock of iterations, the sensors, the files, and the ways to record, to refuse and to
reach the other ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kilter.core.messages import RankMessages
from kilter.core.plan import Goal
from kilter.core.ranks import Ranks
from kilter.core.script_end import ScriptEnd
from kilter.core.setting import DeviceInfo, Setting
from kilter.core.units import show_count
from kilter.device.protocol import Device
from kilter.lease.risks import risks
from kilter.lease.run_lease import RunLease
from kilter.observe.end_times import Iteration
from kilter.observe.iteration_clock import IterationClock
from kilter.observe.run_files import RunFiles
from kilter.observe.sampler import Sampler
from kilter.observe.trace_source import TraceSource

if TYPE_CHECKING:
    from kilter.session.fence import Fence
    from kilter.session.log import RunLog


class Hurried(Exception):
    """Nobody waits any longer for what comes after the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Each thing that several capabilities need, once. All of it belongs to the session."""

    goal: Goal
    dry_run: bool
    device: Device
    info: DeviceInfo
    ranks: Ranks
    iterations: IterationClock
    sampler: Sampler | None
    """It is None where the device lives in virtual time."""
    trace: TraceSource
    files: RunFiles
    lease: RunLease
    fence: Fence
    log: RunLog
    messages: Callable[[], RankMessages | None]
    """The messages between ranks, once the job has a process group."""

    def restore(self) -> tuple[Setting, bool]:
        """Put back what was found: the settings afterwards, and whether they are as found."""
        after, restored, why_not = self.lease.restore()
        if why_not is not None:
            self.log.refuse("restoring", why_not)
        return after, restored

    def tell_risks(self) -> None:
        """Say what could keep a GPU from being put back, once it is about to be set from here."""
        if self.info.persistent and not self.dry_run:
            for risk in risks(os.environ):
                self.log.notice(risk)

    def too_few(self, needed: int) -> str:
        """Why nothing was done in a script of fewer iterations than that."""
        if self.iterations.index < 0:
            return "no iteration was seen"
        seen = show_count(self.iterations.index + 1, "iteration")
        return f"the script ended after {seen}: at least {needed} are needed"

    def why_no_trace(self) -> str:
        """Why there is no trace of an iteration."""
        if self.ranks.rank != 0:
            return "rank 0 rehearses for all"
        return self.trace.why_not(self.too_few)


class Controller(Protocol):
    """One capability in one run. The session calls its controllers in order, and knows no more of
    them than this."""

    @property
    def settled(self) -> bool:
        """The job runs as this controller wants it to run, so later ones may measure it."""

    def begin(self) -> None:
        """The script is about to begin. In the program's thread."""

    def iteration_ended(self, index: int) -> None:
        """An iteration of the program has ended. In the program's thread: as little as possible."""

    def tick(self, finished: Sequence[Iteration], *, settled: bool) -> None:
        """A few times a second, in the session's thread. `finished` are the iterations whose times
        have become known; `settled` says whether all controllers before this one have settled."""

    def script_ended(self) -> None:
        """The script is over: take every hook out. In the program's thread."""

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        """After the last tick: take the last iterations, and record what came of it. `outcome` says
        how the script has ended. Also after an error of ours (`run.fence.down`). The session
        restores the settings afterwards."""
