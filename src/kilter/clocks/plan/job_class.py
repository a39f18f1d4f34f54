"""The classes of jobs: what the readings at the default tell of one, and what its search tries
first. Pure.

A class orders the first probe and decides nothing: the setting that it names is probed like any
other one, and has to pass the same tests.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kilter.clocks.plan.job import STEP, Space
from kilter.core.setting import Sample, Setting, Throttle

IDLE_TOLD = 0.3
"""From this share of idle time on, feeding the GPU is worth more than any clock."""
HELD_DOWN = 0.5
"""A job is held down if this share of readings at the default names a limit."""
LIMITS = (Throttle.POWER_CAP, Throttle.THERMAL, Throttle.HARDWARE)
"""These reasons for a low clock make a job a throttled one."""
FEWEST_READINGS = 5
FOLLOWS, IGNORES = 0.5, 0.25
"""How much of a change of the SM clock the iteration time follows: compute-bound from the first on,
memory-bound up to the second."""


class Bound(enum.Enum):
    """The classes of jobs."""

    OFFLOADING = "offloading"
    THROTTLED = "throttled"
    INPUT = "input-bound"
    IDLE = "idle"
    COMMUNICATION = "communication-bound"
    COMPUTE = "compute-bound"
    MEMORY = "memory-bound"
    UNKNOWN = "unknown"


GPU_WAITS = (Bound.INPUT, Bound.IDLE, Bound.COMMUNICATION)
"""The GPU waits in jobs of these classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReadings:
    """A job by its readings at the default."""

    name: Bound
    busy: float = 1.0
    """The GPU runs something in this share of the time."""


def job_by_readings(samples: Sequence[Sample]) -> JobReadings:
    """The class that readings at the default show; `UNKNOWN` where only a trace or a lower clock
    could tell. Readings do not say what an idle GPU waits for."""
    used = [sample.sm_utilisation for sample in samples if sample.sm_utilisation is not None]
    held = throttled(samples)
    busy = statistics.fmean(used) if len(used) >= FEWEST_READINGS else 1.0
    name = Bound.UNKNOWN
    if held is not None and held >= HELD_DOWN:
        name = Bound.THROTTLED
    elif 1.0 - busy >= IDLE_TOLD:
        name = Bound.IDLE
    return JobReadings(name=name, busy=busy)


def throttled(samples: Sequence[Sample]) -> float | None:
    """Share of the readings that name a limit; None where too few name any reason."""
    known = [sample.throttle for sample in samples if sample.throttle is not None]
    if len(known) < FEWEST_READINGS:
        return None
    return statistics.fmean(any(limit in reasons for limit in LIMITS) for reasons in known)


def first_settings(job: JobReadings, space: Space) -> tuple[Setting, ...]:
    """What the search of such a job probes before anything else: candidates, and never one above
    the setting as found.

    Where the GPU waits (input-bound, idle, communication-bound) a low SM clock is nearly free: the
    lowest one that cannot make the iteration longer than one step of a busy GPU may, since the busy
    part alone becomes longer. The other classes have no action of their own, since the search does
    what would be theirs (docs/measurements/clocks.md): its clocks begin just below the one that a
    throttled GPU holds, and its first probe of a memory-bound job is the SM clock one step down.
    Compute-bound jobs begin with what promises most, and the waits of offloading ones are planned
    by its engine.
    """
    top_hz = space.reference.sm_clock_hz
    if top_hz is None or job.name not in GPU_WAITS:
        return ()
    gentle = [
        (hz, setting)
        for setting in space.candidates
        if (hz := setting.sm_clock_hz) is not None
        and setting == space.found.with_(sm_clock_hz=hz)
        and hz < top_hz
        and 1.0 + job.busy * (top_hz / hz - 1.0) <= 1.0 / STEP
    ]
    return (min(gentle)[1],) if gentle else ()
