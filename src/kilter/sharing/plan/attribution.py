"""The joules of shared GPUs, split among the jobs so that the parts sum to the meter.

Energy is counted in whole millijoules, as NVML's counter does. What a GPU draws without work is
split evenly among the jobs that have a process there; the rest in proportion to the time for which
each job's work was on the GPU. Jobs that wait for each other's time slice are both on the GPU, so
that under fair time slicing each pays for its part of the time.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from fractions import Fraction

from kilter.sharing.plan.snapshot import largest_remainder

Presence = Mapping[str, Sequence[float | None]]
"""It maps a job to the fraction of the time for which its work is on each GPU; None: no process
there."""


def split_mj(energy_mj: int, idle_mj: int, busy: Mapping[str, float]) -> dict[str, int]:
    """Each job's part of what a GPU used in an interval. `busy` names every job with a process on
    the GPU, of which there has to be one, and the fraction of the time that it worked."""
    names = sorted(busy)
    times = [Fraction(max(busy[name], 0.0)) for name in names]
    idle = min(idle_mj, energy_mj) if any(times) else energy_mj
    shared = largest_remainder([1] * len(names), idle)
    worked = largest_remainder(times, energy_mj - idle) if any(times) else [0] * len(names)
    return {name: a + b for name, a, b in zip(names, shared, worked, strict=True)}


class EnergyAccount:
    """What the meters have counted, and for whom. Pure: readings come as values."""

    def __init__(self, gpus: int) -> None:
        self._readings: list[tuple[float, int] | None] = [None] * gpus
        self._idle_w: list[float | None] = [None] * gpus
        self._metered_mj: list[int | None] = [None] * gpus
        self._jobs_mj: collections.Counter[str] = collections.Counter()
        self.unshared_mj = 0
        """It was counted while no job had a process on the GPU."""

    def read(self, now_s: float, counters_j: Sequence[float | None], presence: Presence) -> None:
        """Share out what each GPU has used since its last reading. A counter that was lost or has
        gone back begins anew; what it missed is counted for nobody."""
        for g, counter_j in enumerate(counters_j):
            before = self._readings[g]
            if counter_j is None:
                self._readings[g] = None
                continue
            self._readings[g] = now_s, (counter_mj := round(counter_j * 1000))
            self._metered_mj[g] = self._metered_mj[g] or 0
            if before is None or counter_mj < before[1] or now_s <= before[0]:
                continue
            busy = {job: part for job, parts in presence.items() if (part := parts[g]) is not None}
            self._share(g, counter_mj - before[1], now_s - before[0], busy)

    def _share(self, g: int, energy_mj: int, length_s: float, busy: Mapping[str, float]) -> None:
        self._metered_mj[g] = (self._metered_mj[g] or 0) + energy_mj
        idle_w = self._idle_w[g]
        if busy:
            # Never seen without a job, the power without work is not known: all goes by time.
            idle_mj = round((idle_w or 0.0) * length_s * 1000)
            self._jobs_mj.update(split_mj(energy_mj, idle_mj, busy))
        else:
            self.unshared_mj += energy_mj
            power_w = energy_mj / 1000 / length_s
            self._idle_w[g] = power_w if idle_w is None else min(idle_w, power_w)

    def of_job(self, name: str) -> float | None:
        """Joules of one job on all GPUs; None if none was ever counted for the job."""
        return self._jobs_mj[name] / 1000 if name in self._jobs_mj else None

    def jobs_j(self) -> dict[str, float]:
        """Joules of every job that has run, those that have ended too."""
        return {name: energy_mj / 1000 for name, energy_mj in self._jobs_mj.items()}

    def metered_j(self) -> tuple[float | None, ...]:
        """What the meter of each GPU has counted since the account was opened."""
        return tuple(None if mj is None else mj / 1000 for mj in self._metered_mj)
