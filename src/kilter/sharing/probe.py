"""A job's GPUs for itself, for a short while: the run-alone time of its step, measured.

Only for a job that asks for it, once, and never for long: the other jobs pause at their next agreed
iteration, resume by themselves after `PROBE_S` whatever the daemon does, and are not paused again
before `REST` times as long has passed. Pure: the time and the reports come as values.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kilter.sharing.messages import JobStatus
from kilter.sharing.plan.snapshot import Ratios

PROBE_S = 20.0
"""The other jobs pause for at most this."""
REST = 20.0
"""Probes take at most a twentieth of the machine's time."""
STILL_S = 1.0
"""Jobs without a further iteration for so long have paused."""
_STEPS = 10
_LEAST_S = 2.0
"""What is measured: so many steps, and so long."""


class _Under(msgspec.Struct):
    """The probe of the moment."""

    slot: int
    begun_s: float
    before: Ratios | None
    """It is the job's ratio, by rank."""
    still: dict[int, tuple[int, float]] = {}
    """It maps another job to its iteration, and since when."""
    mark: tuple[int, float] | None = None
    """The job was alone from this iteration on, which ended at this time."""


class Probes:
    """At most one at a time. `alone_s` are the times found, by slot."""

    def __init__(self) -> None:
        self.alone_s: dict[int, float] = {}
        self.notes: list[str] = []
        """What to tell, in order."""
        self._tried: set[int] = set()
        self._under: _Under | None = None
        self._free_s = 0.0

    @property
    def running(self) -> bool:
        """Whether ratios have to stay as they are."""
        return self._under is not None

    def tick(
        self, now_s: float, jobs: Mapping[int, JobStatus], even: Mapping[int, Ratios]
    ) -> dict[int, tuple[Ratios, float]]:
        """Ratios (by rank) and pauses that are wanted from now on, by slot. `even` are the even
        ratios of all jobs."""
        if self._under is None:
            return self._begin(now_s, jobs, even)
        under = self._under
        job = jobs.get(under.slot)
        if job is None or now_s - under.begun_s > PROBE_S:
            why = "it has ended" if job is None else f"not alone within {PROBE_S:.0f} s"
            return self._finish(now_s, jobs, f"no run-alone time was measured: {why}")
        others = {slot: status for slot, status in jobs.items() if slot != under.slot}
        if not self._still(now_s, others) or job.ratios != even[under.slot]:
            under.mark = None
            return {}
        rank = max(job.ranks, key=lambda r: r.iteration)
        if rank.ended_s is None:
            return {}
        if under.mark is None:
            under.mark = rank.iteration, rank.ended_s
            return {}
        steps, length_s = rank.iteration - under.mark[0], rank.ended_s - under.mark[1]
        if steps < _STEPS or length_s < _LEAST_S:
            return {}
        self.alone_s[under.slot] = length_s / steps
        return self._finish(now_s, jobs, f"a step alone takes {1e3 * length_s / steps:.4g} ms")

    def _begin(
        self, now_s: float, jobs: Mapping[int, JobStatus], even: Mapping[int, Ratios]
    ) -> dict[int, tuple[Ratios, float]]:
        waiting = [
            slot
            for slot, status in jobs.items()
            if status.probe and slot not in self._tried and all(r.steps for r in status.ranks)
        ]
        if not waiting or now_s < self._free_s:
            return {}
        slot = waiting[0]
        self._tried.add(slot)
        self._under = _Under(slot, now_s, jobs[slot].ratios)
        others = len(jobs) - 1
        pause = f"; {others} other jobs pause for at most {PROBE_S:.0f} s" if others else ""
        self.notes.append(f"{jobs[slot].name}: its run-alone time is measured{pause}")
        pauses = {s: (status.ratios or even[s], PROBE_S) for s, status in jobs.items() if s != slot}
        return pauses | {slot: (even[slot], 0.0)}

    def _still(self, now_s: float, others: Mapping[int, JobStatus]) -> bool:
        assert self._under is not None
        still = self._under.still
        for slot, status in others.items():
            if slot not in still or still[slot][0] != status.iteration:
                still[slot] = status.iteration, now_s
        return all(now_s - still[slot][1] >= STILL_S for slot in others)

    def _finish(
        self, now_s: float, jobs: Mapping[int, JobStatus], said: str
    ) -> dict[int, tuple[Ratios, float]]:
        under = self._under
        assert under is not None
        self._under = None
        self._free_s = now_s + REST * (now_s - under.begun_s)
        self.notes.append(f"{said}; the other jobs go on")
        back = {slot: (s.ratios, 0.0) for slot, s in jobs.items() if s.ratios is not None}
        if under.slot in back and under.before is not None:
            back[under.slot] = under.before, 0.0
        return back
