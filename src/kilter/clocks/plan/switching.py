"""How long a device's clock takes to change, from the times of short kernels. Pure.

A switch is seen where the length of equal kernels changes: the change point of the least sum of
squares for two constant levels of the logarithm. Clock readings are of no use for this, since
sensors show the past on a grid of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import NormalDist

import msgspec

from kilter.clocks.plan.worth import Latency
from kilter.core.label import Label

DISTINCT = 5.0
"""Two clocks can be told apart if their kernels differ by so many standard deviations."""
LEAST_KERNELS = 3
"""Both sides of a change have at least so many."""


class CallTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the calls that set the clock, seen or not."""

    p50_s: float
    p95_s: float
    p99_s: float


class SwitchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one clock."""

    sm_clock_hz: float
    down: bool
    """The switch is to this clock from the highest; False: from this clock back."""
    n: int
    """So many switches were seen; one whose kernels cannot be told apart does not count."""
    p50_s: float
    p95_s: float
    p99_s: float
    call: CallTimes | None = None
    """How long the calls took to return; None: in virtual time, or not kept."""
    reasons: tuple[str, ...] = ()
    """What kept the clock below what was asked, after any of the switches: `Throttle`'s words."""

    @property
    def latency(self) -> Latency:
        spread = math.log(self.p95_s / self.p50_s) / NormalDist().inv_cdf(0.95)
        return Latency(median_s=self.p50_s, spread=spread)


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The switch times of one device, which hold for its driver and VBIOS alone."""

    uuid: str
    driver: str | None
    vbios: str | None = None
    label: Label
    switches: tuple[SwitchTimes, ...]

    def latency(self, *, down: bool, sm_clock_hz: float | None = None) -> Latency | None:
        """Of one clock (of the nearest one that was measured), or of all clocks in one direction:
        the medians' geometric mean, and the widest spread that a clock's 95th percentile shows
        about it. None if no switch was seen."""
        of = [s for s in self.switches if s.down is down]
        if not of:
            return None
        if sm_clock_hz is not None:
            wanted = math.log(sm_clock_hz)
            return min(of, key=lambda s: abs(math.log(s.sm_clock_hz) - wanted)).latency
        median_s = math.exp(sum(math.log(s.p50_s) for s in of) / len(of))
        widest = max(s.p95_s for s in of)
        spread = max(0.0, math.log(widest / median_s) / NormalDist().inv_cdf(0.95))
        return Latency(median_s=median_s, spread=spread)


def effect_s(kernels: Sequence[tuple[float, float]], commanded_s: float) -> float | None:
    """Seconds from a command to the beginning of the first kernel at the new clock.

    `kernels`: begin and end of equal kernels in order, on the device's timeline, from before the
    command on. None if there is no change that the noise of the kernels does not explain.
    """
    logs = [math.log(end - begin) for begin, end in kernels]
    sums = [0.0, *accumulate(logs)]
    squares = [0.0, *accumulate(x * x for x in logs)]
    count = len(logs)

    def scatter(a: int, b: int) -> float:
        return max(0.0, squares[b] - squares[a] - (sums[b] - sums[a]) ** 2 / (b - a))

    first = next((k for k, (begin, _) in enumerate(kernels) if begin >= commanded_s), count)
    places = range(max(LEAST_KERNELS, first), count - LEAST_KERNELS + 1)
    if not places:
        return None
    at = min(places, key=lambda k: scatter(0, k) + scatter(k, count))
    step = abs((sums[count] - sums[at]) / (count - at) - sums[at] / at)
    noise = math.sqrt((scatter(0, at) + scatter(at, count)) / max(1, count - 2))
    if step <= DISTINCT * noise or step < 1e-6:
        return None
    return kernels[at][0] - commanded_s


class SeenSwitch(msgspec.Struct, frozen=True, kw_only=True):
    """One switch."""

    effect_s: float | None
    """It is None if the kernels before and after it cannot be told apart."""
    call_s: float | None = None
    reasons: tuple[str, ...] = ()


def switch_times(
    seen: Sequence[SeenSwitch], sm_clock_hz: float, *, down: bool
) -> SwitchTimes | None:
    """Percentiles of what was seen, the next larger value; None if nothing was."""
    effects = [s.effect_s for s in seen if s.effect_s is not None]
    calls = [s.call_s for s in seen if s.call_s is not None]
    if not effects:
        return None
    p50_s, p95_s, p99_s = _percentiles(effects)
    return SwitchTimes(
        sm_clock_hz=sm_clock_hz,
        down=down,
        n=len(effects),
        p50_s=p50_s,
        p95_s=p95_s,
        p99_s=p99_s,
        call=_calls(calls),
        reasons=tuple(sorted({reason for s in seen for reason in s.reasons})),
    )


def _calls(calls: Sequence[float]) -> CallTimes | None:
    if not calls:
        return None
    p50_s, p95_s, p99_s = _percentiles(calls)
    return CallTimes(p50_s=p50_s, p95_s=p95_s, p99_s=p99_s)


def _percentiles(seen: Sequence[float]) -> tuple[float, float, float]:
    ascending = sorted(seen)
    p50, p95, p99 = (ascending[math.ceil(q * len(ascending)) - 1] for q in (0.5, 0.95, 0.99))
    return p50, p95, p99
