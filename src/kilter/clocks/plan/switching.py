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
"""On both sides of a change."""


class SwitchTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one clock."""

    sm_clock_hz: float
    down: bool
    """To this clock from the highest; False: from this clock back."""
    n: int
    """Switches that were seen; one whose kernels cannot be told apart does not count."""
    p50_s: float
    p95_s: float
    p99_s: float


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """The switch times of one device, which hold for its driver and VBIOS alone."""

    uuid: str
    driver: str | None
    vbios: str | None = None
    label: Label
    switches: tuple[SwitchTimes, ...]

    def latency(self, *, down: bool) -> Latency | None:
        """Of all clocks in one direction: the medians' geometric mean, and the widest spread that a
        clock's 95th percentile shows about it. None if no switch was seen."""
        of = [s for s in self.switches if s.down is down]
        if not of:
            return None
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


def switch_times(seen: Sequence[float], sm_clock_hz: float, *, down: bool) -> SwitchTimes | None:
    """Percentiles of what was seen, the next larger value; None if nothing was."""
    if not seen:
        return None
    ascending = sorted(seen)

    def quantile(share: float) -> float:
        return ascending[math.ceil(share * len(ascending)) - 1]

    return SwitchTimes(
        sm_clock_hz=sm_clock_hz,
        down=down,
        n=len(ascending),
        p50_s=quantile(0.5),
        p95_s=quantile(0.95),
        p99_s=quantile(0.99),
    )
