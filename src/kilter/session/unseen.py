"""Why no iteration of a script is seen in its own process, and what to do about it."""

from __future__ import annotations

import resource
import sys
import threading

from kilter.core.forks import at_each_fork
from kilter.core.script_end import ScriptEnd
from kilter.core.units import show_count
from kilter.observe.inference_watch import INFERENCE_AFTER_S
from kilter.observe.iteration_clock import IterationClock
from kilter.session.children import SpawnedChildren

UNSEEN_S = 2.0
"""A script that has waited so long for other processes, without an iteration of its own, is told
that these are not observed."""
CHILDREN_S = 1.0
"""From this CPU time on, other processes may have held the iterations that were not seen here."""
_WAITS = {
    "/multiprocessing/process.py": "multiprocessing",
    "/torch/multiprocessing/spawn.py": "torch.multiprocessing.spawn",
}
"""It maps the file in whose `join` a thread stands that waits for a process to how the process was
started. `subprocess` is not in it: scripts wait for compilers and downloads before their first
iteration."""
_FORKED = (
    "if they train, start them by spawn (multiprocessing.get_context('spawn'), or "
    "torch.multiprocessing.spawn), and they are the ranks of this run; or let kilter start them "
    "(kilter run --nproc-per-node N SCRIPT, as torchrun does); or call kilter.govern() in the "
    "function that trains"
)


class Unseen:
    """Looks where the iterations of a run are as long as there is none in this process."""

    def __init__(self, iterations: IterationClock, children: SpawnedChildren | None = None) -> None:
        self._iterations = iterations
        self._children = children
        self._children_s = children_cpu_s()
        self._waits_since_s: float | None = None
        self._waited_for: str | None = None
        """How the processes were started that the script waits for."""
        self._forks = 0
        at_each_fork(self._forked)

    def look(self, now_s: float) -> str | None:
        """What the user has to know now, once: the script leaves its iterations to processes that
        it has started."""
        if self._iterations.index >= 0 or self._waited_for is not None:
            return None
        main = threading.main_thread().ident
        how = waits_for(main) if main is not None else None
        if how is None:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s > UNSEEN_S:
            self._waited_for = how
            return None if self._observes_children else self.why()
        return None

    def _forked(self) -> None:
        self._forks += 1

    @property
    def _observes_children(self) -> bool:
        return self._children is not None and self._children.started

    def why(self, outcome: ScriptEnd | None = None) -> str | None:
        """Why there was no iteration in this process, and what to do; None if there was one.
        `outcome`: how the script has ended."""
        if self._iterations.index >= 0:
            return None
        if self._waited_for is not None and self._observes_children:
            return (
                "no iteration seen: neither the script nor a process that it started with "
                f"{self._waited_for} stepped an optimizer of torch.optim; to say where an "
                "iteration ends: with kilter.govern() as job, and job.mark() after each one"
            )
        if self._forks and self._waited_for is not None:
            return (
                f"no iteration seen: the script waits for processes that it forked with "
                f"{self._waited_for}, and kilter does not observe forked processes; {_FORKED}"
            )
        if outcome is not None and outcome.raised not in (None, "KeyboardInterrupt"):
            return (
                "no iteration seen: the script ended early "
                f"({outcome}), before an optimizer of torch.optim stepped"
            )
        if self._forks:
            return (
                "no iteration seen: no optimizer of torch.optim stepped in the script's own "
                f"process, and kilter does not observe the {show_count(self._forks, 'process')} "
                f"that it forked; {_FORKED}"
            )
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
        if self._iterations.why_not is not None:
            return f"no iteration seen: {self._iterations.why_not}"
        return (
            "no iteration seen: no optimizer of torch.optim stepped, and too few calls of modules "
            f"were seen, which count from {INFERENCE_AFTER_S:.0f} s after the import of torch on; "
            "to say where an "
            "iteration ends: with kilter.govern() as job, and job.mark() after each one"
        )


def waits_for(thread: int) -> str | None:
    """How the process was started that a thread waits for; None if it waits for none."""
    frame, found = sys._current_frames().get(thread), None
    while frame is not None:
        for ending, how in _WAITS.items():
            if frame.f_code.co_filename.endswith(ending) and frame.f_code.co_name == "join":
                found = how
        frame = frame.f_back
    return found


def children_cpu_s() -> float:
    """CPU time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
