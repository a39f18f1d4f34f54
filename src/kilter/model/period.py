"""The period of a job's iterations from a GPU's telemetry alone: for jobs without iteration marks.

The method follows the outline of GPOEO (Wang et al., TPDS 2022): a composite of power and
utilisations, spectral candidates, the similarity of consecutive windows, refinement, stability.
Five things are different. Windows are compared at their lag with a paired test, so that a sub-
harmonic is taken only on evidence. What happens rarely (evaluation, checkpoint) is kept apart from
what is a part of every iteration. Iterations of unequal length are tracked one by one (the dynamic
program of beat tracking: Ellis, J. New Music Research 36(1), 2007). The resolution of the sensor is
measured, and a period below it is refused. An alias is refused too: the energy counter integrates
what the power reading only samples, so that a fluctuation which the counter does not show was
folded down from a shorter period.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from kilter.core.setting import Sample
from kilter.core.units import show_count, show_time

Array = NDArray[np.float64]

LEAST_PERIODS = 4
"""A recording must hold so many periods: three comparisons of consecutive windows."""
LEAST_SAMPLES = 2.0
"""Below so many sensor updates per period nothing can be resolved (Nyquist)."""
CERTAIN_SAMPLES = 4.0
"""From so many sensor updates per period on the counter tells an alias from a period: of a period
of four updates it passes 0.90 of the amplitude, of what is folded onto it at most 0.30."""
MOST_SWING = 4.0 / math.pi
"""Largest amplitude at the fundamental, over the mean: power that is on and off equally long."""
FINER = 0.15
"""Difference of the power reading and the mean power of the energy counter, as a share of the
reading's variation, above which the reading is no mean over the whole interval of the counter."""
SEES_ALL = 0.75
"""No update is missed while the time between two rows, over that between two updates of the
counter, is at most this."""
LEAST_LIKENESS = 0.5
"""Telemetry is aperiodic if consecutive windows are less alike (1 equal, 0 unrelated)."""
FLAT = 0.005
"""A channel that varies by less than this share of its level holds nothing but sensor noise."""
RARE = 0.15
"""What differs in at most this share of the windows interrupts the iteration (an evaluation, a
checkpoint) and is no part of it. Gradient accumulation over up to about ten micro-batches differs
in more of them."""
CLEARLY = 3.5
"""A longer candidate must be more alike by so many standard errors to displace a shorter one; many
candidates are compared."""
LEAST_DIFFERENCE = 0.03
"""It must be more alike by this share of the difference of unrelated windows, too: smaller gains
come from where the sensor's updates fall."""
FOLD_TOLERANCE = 0.03
"""The folded curve of a part of the period may be rougher than that of the whole by this."""
COHERENT = 0.3
"""Iterations are too unequal to be folded if the folded curve is rougher than this."""
MOST_LAGS = 300
"""So many of the shortest lags are compared, and so many of the most alike."""
UNEQUAL = 1.4
"""An interval longer than so many usual ones, or as much shorter, is no iteration: batches of
unequal length differ by less."""
VARIES = 0.05
"""Standard deviation of single iterations, over their mean, from which on the verdict says that
their length varies. They are tracked by what is usual, so that the true one is larger."""
MOSTLY = 0.8
"""Below this share of a recording the verdict says how much of it the iterations are."""
UNSTABLE = 0.15
"""The period is not stable if its relative range over the thirds of a recording is above this."""
FINE_FACTOR = 8
"""Each sensor update has so many points after interpolation: a lag of two updates then has
sixteen."""
QUANTUM = 0.01
"""Utilisation is reported in this step (1 %); for power, it is far below its noise."""
NOVEL = 3.0
"""How much further than the oddest known stretch (squared distance) a new one must be."""
NEAR = (0.7, 1.5)
"""Where `pace` looks for the period, as shares of the expected one: a setting slows down or, on a
throttling GPU, speeds up, but by less."""
INTERRUPTED = 1.5
"""An interval longer than so many iterations holds something else, too."""
PHASES = 32
"""Single iterations are tracked at so many points per period."""


class Telemetry(msgspec.Struct, frozen=True):
    """Readings of one GPU; `nan` marks what is unknown, an empty array a sensor that is missing."""

    t_s: Array
    power_w: Array
    sm_utilisation: Array
    memory_utilisation: Array
    energy_j: Array
    """It is the counter, not its difference."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a stretch of telemetry."""

    period_s: float | None
    """It is None if no period was detected, and `reason` says why."""
    code: str
    """It is `periodic`, `flat`, `short`, `unresolvable`, `aperiodic` or `unstable`; for programs. A
    watch says `uneven` of periodic telemetry by which no settings can be compared."""
    reason: str
    resolution_s: float | None = None
    """This telemetry can show no shorter period."""
    likeness: float | None = None
    """Consecutive periods correlate so much, at most 1."""
    spread: float | None = None
    """Single iterations have this standard deviation over the period, as far as the sensor shows
    them."""


class JobPace(msgspec.Struct, frozen=True, kw_only=True):
    """The iterations of one stretch of telemetry, of which the period is roughly known."""

    iteration_s: float
    """It is the mean over the stretch."""
    error_s: float
    """Standard error of this mean as that of the job under the same setting: what the iterations
    differ by, and what the sensor does not show."""
    iterations: int
    begin_s: float
    end_s: float
    """Whole iterations lie between the two."""
    jitter_s: float
    """Single iterations have this standard deviation."""
    edge_s: float
    """The time of one boundary between two iterations has this standard error."""
    interrupted: bool
    """The stretch holds something else than iterations, too."""


class _Grid(msgspec.Struct, frozen=True):
    """Channels on one even grid, each with mean 0 and variance 1."""

    step_s: float
    values: Array
    """It has a row for each channel and a column for each point in time."""
    weights: Array
    spans: tuple[int, ...]
    """So many points of the grid lie between two updates of each channel's sensor."""


def telemetry(samples: Sequence[Sample]) -> Telemetry:
    def channel(name: str) -> Array:
        values = [getattr(sample, name) for sample in samples]
        return np.array([math.nan if v is None else v for v in values], dtype=float)

    return Telemetry(
        t_s=channel("t_s"),
        power_w=channel("power_w"),
        sm_utilisation=channel("sm_utilisation"),
        memory_utilisation=channel("memory_utilisation"),
        energy_j=channel("energy_j"),
    )


def detect(telemetry: Telemetry) -> Detection:
    """The period of the iterations in this telemetry, or why there is none."""
    t = telemetry.t_s
    if len(t) < 16:
        return Detection(
            period_s=None, code="short", reason=f"only {show_count(len(t), 'reading')}"
        )
    channels = _channels(telemetry)
    if not channels:
        return Detection(
            period_s=None,
            code="flat",
            reason="power and utilisations do not vary: iterations leave no trace in them",
        )
    update_s = _update(telemetry)
    resolution_s = LEAST_SAMPLES * update_s
    grid = _grid(t, channels, update_s)
    lag = _best_lag(grid)
    if lag is None:
        return Detection(
            period_s=None,
            code="aperiodic",
            reason=f"no window of at least {show_time(resolution_s)} looks like the next one",
            resolution_s=resolution_s,
        )
    if _is_alias(telemetry, 1.0 / lag.period_s, update_s):
        return Detection(
            period_s=None,
            code="unresolvable",
            reason=(
                f"not resolvable from telemetry: power readings every {show_time(update_s)} seem "
                f"to repeat every {show_time(lag.period_s)}, but the energy counter does not: "
                f"it is the alias of what repeats within {show_time(resolution_s)}; use marks"
            ),
            resolution_s=resolution_s,
        )
    return _tracked(grid, lag, resolution_s)


def doubt(telemetry: Telemetry, detection: Detection) -> str | None:
    """Why a detected period may be the alias of a shorter one, and must not be judged by; None if
    it cannot be one.

    The energy counter averages over its interval u. Of what is folded onto the frequency f, 1/u - f
    or above, it passes sinc(1 - f u) at most, and no power, which is never negative, varies by
    more than `MOST_SWING` of its mean: a larger amplitude is no alias. A smaller one is kept
    apart from an alias where the power reading averages over less than the counter, so that it
    would show more of an alias (`_is_alias`); where both are the same mean, nobody can tell.
    """
    if detection.period_s is None or detection.resolution_s is None:
        return None
    at, counted = _power_of_counter(telemetry)
    if len(at) < 16:
        return (
            f"the readings repeat every {show_time(detection.period_s)}, but without a moving "
            "energy counter this may be the alias of a shorter iteration"
        )
    interval_s = float(np.median(np.diff(at)))
    share = interval_s / detection.period_s
    largest = MOST_SWING * float(counted.mean()) * float(np.sinc(1.0 - min(share, 1.0)))
    # of a Hann window's spectrum a sinusoid's line is a quarter of its amplitude
    if 4.0 * _amplitude(at, counted, 1.0 / detection.period_s) > largest:
        return None
    if share <= 1.0 / CERTAIN_SAMPLES and _finer_than_counter(telemetry):
        return None
    every, shortest = show_time(detection.period_s), show_time(detection.resolution_s)
    return (
        f"not resolvable from telemetry: the readings repeat every {every}, but this may be the "
        f"alias of an iteration shorter than {shortest}"
    )


def _finer_than_counter(telemetry: Telemetry) -> bool:
    """Whether the power reading is no mean over the whole interval of the energy counter, as seen
    at either end of it."""
    moved = np.flatnonzero(np.diff(telemetry.energy_j) > 0.0) + 1
    length_s = np.diff(telemetry.t_s[moved])
    counted = np.diff(telemetry.energy_j[moved]) / length_s
    apart = []
    for rows in (moved[:-1], moved[1:]):
        read = telemetry.power_w[rows]
        gain = float(read.mean() / counted.mean())
        apart.append(float((read - gain * counted).std() / max(float(read.std()), 1e-12)))
    return min(apart) > FINER


def pace(telemetry: Telemetry, about_s: float) -> JobPace | None:
    """The mean iteration time in this telemetry, near an expected one; None where none is seen.

    Boundaries between iterations are located one by one. Both ends of an interval are uncertain,
    so that an early boundary makes one interval longer and the next one shorter: the covariance
    of neighbours tells the sensor's part of their variance from the job's. In the mean over n
    intervals the boundaries between them cancel; those at the two ends stay.
    """
    channels = _channels(telemetry)
    if len(telemetry.t_s) < 16 or not channels:
        return None
    grid = _grid(telemetry.t_s, channels, _update(telemetry))
    a = _autocorrelation(grid.values, grid.weights)
    low, high = (int(about_s * f / grid.step_s) for f in NEAR)
    near = a[low : high + 1]
    if low < 1 or len(near) < 3 or near.max() < LEAST_LIKENESS:
        return None
    beats = _beats(grid, (low + int(np.argmax(near))) * grid.step_s)
    intervals = np.diff(beats)
    if len(intervals) < LEAST_PERIODS:
        return None
    off = np.abs(intervals - np.median(intervals))
    kept = off <= max(6.0 * float(np.median(off)), 2 * FINE_FACTOR * grid.step_s)
    n = int(kept.sum())
    mean = float(intervals[kept].mean())
    apart = np.where(kept, intervals - mean, 0.0)
    runs = 1 + int((kept[1:] & ~kept[:-1]).sum())
    edge = max(-float((apart[1:] * apart[:-1]).sum()) / max(n - runs, 1), 0.0)
    jitter = max(float((apart**2).sum()) / max(n - 1, 1) - 2 * edge, 0.0)
    return JobPace(
        iteration_s=mean,
        error_s=math.sqrt(jitter / n + 2 * runs * edge / n**2),
        iterations=n,
        begin_s=float(telemetry.t_s[0] + beats[0]),
        end_s=float(telemetry.t_s[0] + beats[-1]),
        jitter_s=math.sqrt(jitter),
        edge_s=math.sqrt(edge),
        interrupted=bool((intervals > INTERRUPTED * mean).any()),
    )


class Familiar:
    """What the iterations of some stretches of telemetry look like. Made once, it may be asked
    often. The more iterations, the fewer false alarms: sensors see the same one in many ways."""

    def __init__(self, stretches: Sequence[Telemetry], period_s: float) -> None:
        self._step_s = period_s / PHASES
        pieces = [_even(stretch, self._step_s) for stretch in stretches]
        old = np.concatenate(pieces, axis=1)
        # a channel counts by how much it varies, but sensor noise on a steady one must not
        least = np.maximum(FLAT * np.abs(old.mean(axis=1)), QUANTUM)
        self._scale = np.maximum(old.std(axis=1), least)[:, None]
        self._periods = _all_periods(old / self._scale)
        self.periods = old.shape[1] / PHASES
        ends = np.cumsum([piece.shape[1] for piece in pieces])
        own = [
            at
            for begin, end in zip([0, *ends[:-1]], ends, strict=True)
            for at in range(begin, end - PHASES + 1, PHASES // 2)
        ]
        oddest = []
        for first in range(0, len(own), 32):  # so many at a time stay in the processor's cache
            some = own[first : first + 32]
            apart = _apart(self._periods, self._periods[some])
            for column, at in enumerate(some):  # another one, and not this one or a part of it
                apart[max(at - PHASES + 1, 0) : at + PHASES, column] = np.inf
            oddest.append(float(apart.min(axis=0).max()))
        self._oddest = max(oddest, default=math.inf)

    def lacks(self, recent: Telemetry) -> bool:
        """Whether each of the last two periods of `recent` looks like nothing in the reference."""
        if recent.t_s[-1] - recent.t_s[0] < (2 * PHASES + 1) * self._step_s:
            return False
        # the stretch may fall between the points of the reference
        trials = [_even(recent, self._step_s, s) / self._scale for s in (0, 0.25, 0.5, 0.75)]
        for back in (2, 1):
            stretches = (t[:, t.shape[1] - back * PHASES :][:, :PHASES] for t in trials)
            apart = _apart(self._periods, np.array([each.ravel() for each in stretches]))
            if apart.min() <= NOVEL * self._oddest:
                return False
        return True


def changed(reference: Telemetry, recent: Telemetry, period_s: float) -> bool:
    """Whether each of the last two periods of `recent` looks like nothing in `reference`.

    To be asked again whenever a part of a period has passed: a change of the iteration is then
    noticed within three periods. What `reference` holds (a pause, a stall) is no change when it
    comes back. The distance is that of the nearest stretch of the reference, and it has to be
    `NOVEL` times the largest such distance among the reference's own stretches.
    """
    familiar = Familiar([reference], period_s)
    return familiar.periods >= LEAST_PERIODS and familiar.lacks(recent)


def _even(telemetry: Telemetry, step_s: float, shift: float = 0.0) -> Array:
    """Power and utilisations at even times, the last one `shift` steps before the last reading.
    Single readings may be unknown; a sensor that tells nothing is 0, in each stretch alike."""
    t = telemetry.t_s
    at = np.arange(t[-1] - shift * step_s, t[0], -step_s)[::-1]
    rows = np.zeros((3, len(at)))
    names = (telemetry.power_w, telemetry.sm_utilisation, telemetry.memory_utilisation)
    for row, values in zip(rows, names, strict=True):
        known = np.flatnonzero(np.isfinite(values))
        if len(known):
            row[:] = np.interp(at, t[known], values[known])
    return rows


def _all_periods(signal: Array) -> Array:
    """A row for each stretch of `PHASES` points, wherever it begins: channel after channel."""
    if signal.shape[1] < PHASES:
        return np.empty((0, signal.shape[0] * PHASES))
    stretches = np.lib.stride_tricks.sliding_window_view(signal, PHASES, axis=1)
    return stretches.swapaxes(0, 1).reshape(stretches.shape[1], -1)


def _apart(known: Array, new: Array) -> Array:
    """Squared difference per point of each row of `known` and each row of `new`."""
    apart = known @ (new.T * (-2.0 / PHASES))
    apart += np.einsum("ij,ij->i", known, known)[:, None] / PHASES
    apart += np.einsum("ij,ij->i", new, new)[None, :] / PHASES
    return apart


# -- channels and the sensor ------------------------------------------------------------------


class _Channel(NamedTuple):
    """What one sensor shows."""

    at: Array
    values: Array
    update_s: float | None
    """How often it changes, where that can be seen."""


def _channels(telemetry: Telemetry) -> list[_Channel]:
    """Every channel that varies."""
    t = telemetry.t_s
    found = []
    for values in (telemetry.power_w, telemetry.sm_utilisation, telemetry.memory_utilisation):
        if len(values) == len(t):
            known = np.isfinite(values)
            found.append(_Channel(t[known], values[known], _between_updates(t, values)))
    counted = _power_of_counter(telemetry)
    found.append(_Channel(*counted, _between_updates(t, telemetry.energy_j)))
    return [
        each
        for each in found
        if len(each.at) >= 16 and each.values.std() > FLAT * abs(each.values.mean())
    ]


def _power_of_counter(telemetry: Telemetry) -> tuple[Array, Array]:
    """Mean power between updates of the energy counter, at the middle of each interval."""
    energy, t = telemetry.energy_j, telemetry.t_s
    nothing = (np.empty(0), np.empty(0))
    if len(energy) != len(t):
        return nothing
    known = np.isfinite(energy)
    energy, t = energy[known], t[known]
    moved = np.flatnonzero(np.diff(energy) != 0) + 1
    if len(moved) < 17 or (np.diff(energy) < 0).any():
        return nothing
    at, total = t[moved], energy[moved]
    length = np.diff(at)
    usual = float(np.median(length))
    if float(np.median(np.diff(t))) < SEES_ALL * usual:
        length = _of_even_updates(at, float(length[length < 1.5 * usual].mean()))
    return (at[1:] + at[:-1]) / 2, np.diff(total) / length


def _of_even_updates(at: Array, every_s: float) -> Array:
    """The lengths between updates that come evenly, about `every_s` apart, and are each seen late
    by up to a row."""
    first_s = at[0]
    for _ in range(3):
        number = np.round((at - first_s) / every_s)
        every_s, first_s = np.polyfit(number, at, 1)
    lengths: Array = np.maximum(np.diff(number), 1.0) * every_s
    return lengths


def _update(telemetry: Telemetry) -> float:
    """How often the fastest sensor changes. Readings cannot show more than their own spacing."""
    rows = float(np.median(np.diff(telemetry.t_s)))
    sensors = (telemetry.power_w, telemetry.sm_utilisation, telemetry.energy_j)
    intervals = (_between_updates(telemetry.t_s, values) for values in sensors)
    fastest = min((each for each in intervals if each is not None), default=rows)
    return rows if fastest < 1.5 * rows else fastest


def _between_updates(t: Array, values: Array) -> float | None:
    """How often a sensor changes; None where it hardly does. A level that lasts several updates
    makes it look slower than it is, so the shorter intervals count."""
    known = np.flatnonzero(np.isfinite(values))
    changed = t[known[1:]][np.diff(values[known]) != 0]
    if len(changed) < 16:
        return None
    between = np.diff(changed)
    return float(between[between < 1.5 * np.quantile(between, 0.1)].mean())


def _grid(t: Array, channels: Sequence[_Channel], update_s: float) -> _Grid:
    """The channels, interpolated band-limited to `FINE_FACTOR` points per update."""
    begin, end = t[0], t[-1]
    n = int((end - begin) / update_s) + 1
    even = begin + update_s * np.arange(n)
    values = []
    spans = []
    for at, v, own_update_s in channels:
        if np.median(np.diff(at)) < 0.5 * update_s:  # the sensor holds its value between updates
            x = v[np.clip(np.searchsorted(at, even, side="right") - 1, 0, len(v) - 1)]
        else:
            x = np.interp(even, at, v)
        x = x - np.polyval(np.polyfit(even - begin, x, 1), even - begin)
        x = _finer(np.clip(x, *np.quantile(x, [0.002, 0.998])))
        values.append(x / max(float(x.std()), 1e-12))
        slower = max(1.0, (own_update_s or update_s) / update_s)
        spans.append(round(FINE_FACTOR * slower))
    rows = np.array(values)
    # a channel counts by how well it repeats itself
    best = np.array([_autocorrelation(x[None, :], np.ones(1)) for x in rows])
    least = int(LEAST_SAMPLES * FINE_FACTOR)
    weights = np.array([_highest_after_dip(a, least) for a in best]) ** 2 + 1e-6
    return _Grid(update_s / FINE_FACTOR, rows, weights / weights.sum(), tuple(spans))


def _finer(x: Array) -> Array:
    """`x` at `FINE_FACTOR` times as many points, by Fourier interpolation of its mirror image."""
    n = len(x)
    mirrored = np.concatenate([x, x[::-1]])
    spectrum = np.fft.rfft(mirrored)
    result: Array = (
        np.fft.irfft(spectrum, 2 * n * FINE_FACTOR)[: (n - 1) * FINE_FACTOR + 1] * FINE_FACTOR
    )
    return result


# -- candidates, and the choice among them ----------------------------------------------------


class _Lag(msgspec.Struct, frozen=True):
    period_s: float
    likeness: float


def _autocorrelation(values: Array, weights: Array) -> Array:
    """Unbiased, weighted over channels, for lags up to the part of the record that leaves
    `LEAST_PERIODS`."""
    n = values.shape[1]
    spectrum = np.fft.rfft(values, 2 * n, axis=1)
    power: Array = (weights[:, None] * np.abs(spectrum) ** 2).sum(axis=0)
    raw = np.fft.irfft(power)[: n // LEAST_PERIODS + 1]
    result: Array = raw / raw[0] * n / (n - np.arange(len(raw)))
    return result


def _highest_after_dip(autocorrelation: Array, least: int) -> float:
    """The best repetition beyond the lags at which any smooth signal resembles itself."""
    rising = np.flatnonzero(np.diff(autocorrelation) > 0)
    first = max(int(rising[0]) if len(rising) else len(autocorrelation), least)
    return max(float(autocorrelation[first:].max(initial=0.0)), 0.0)


class _Likeness:
    """How alike consecutive windows are, for any lag."""

    def __init__(self, grid: _Grid) -> None:
        self._x = grid.values * np.sqrt(grid.weights)[:, None]
        around = [
            sliding_window_view(np.pad(x, span // 2, mode="edge"), 2 * (span // 2) + 1)
            for x, span in zip(self._x, grid.spans, strict=True)
        ]
        self._low = np.array([each.min(axis=1) for each in around])
        self._high = np.array([each.max(axis=1) for each in around])
        self.length = self._x.shape[1]
        lags = np.linspace(LEAST_SAMPLES * FINE_FACTOR, self.length // LEAST_PERIODS, 32).astype(
            int
        )
        self._usual = float(np.median([np.median(self.differences(int(lag))) for lag in lags]))

    def differences(self, lag: int, other: int | None = None) -> Array:
        """Mean squared difference of every window of the length `lag` and the one `other` (else
        `lag`) later.

        The difference is to the nearest value within half an update of its sensor, in the direction
        in which it is smaller: an edge or a peak that falls differently between two updates is not
        a difference of the iterations.
        """
        shift = other or lag
        count = (self.length - max(shift, lag)) // lag
        need = lag * count
        now, then = slice(0, need), slice(shift, shift + need)
        x, later = self._x[:, now], self._x[:, then]
        forward = np.clip(x, self._low[:, then], self._high[:, then]) - x
        backward = np.clip(later, self._low[:, now], self._high[:, now]) - later
        least = np.minimum(forward**2, backward**2).sum(axis=0)
        result: Array = least.reshape(count, lag).mean(axis=1)
        return result

    def unrelated(self, lag: int) -> float:
        """The median difference of windows of the length `lag` at distances that are no multiple
        of it, shorter or longer ones, whichever is smaller: of a slow drift, windows at a shorter
        distance are more alike."""

        def largest(factors: tuple[float, ...]) -> float:
            others = [int(f * lag) for f in factors if (max(f, 1.0) + 1) * lag < self.length]
            return max((float(np.median(self.differences(lag, o))) for o in others), default=0.0)

        return min(largest((0.55, 0.71, 0.84)), largest((1.31, 1.57, 1.76, 2.38)))

    def at(self, lag: int) -> float:
        """1 for equal windows, 0 for windows as different as at any lag. The median over windows:
        blind to rare interruptions."""
        own = float(np.median(self.differences(lag)))
        if own > self._usual:  # spares the comparison with windows at other distances
            return 0.0
        usual = self.unrelated(lag)
        return 1.0 - own / usual if usual > 0.0 else 0.0

    def clearly_better(self, lag: int, rival: int) -> bool:
        """Whether windows are more alike at the longer lag `rival`, in more than rare windows, and
        in most stretches as long as it: an evaluation repeats itself, too, but in some places."""
        after = self.differences(lag, rival)
        gain = (self.differences(lag)[: len(after)] - after) / self.unrelated(rival)
        stretch = math.ceil(rival / lag)
        whole = gain[: len(gain) - len(gain) % stretch].reshape(-1, stretch).mean(axis=1)
        drop = math.floor(RARE * len(gain))
        kept = np.sort(gain)[drop : len(gain) - drop]
        if len(kept) < LEAST_PERIODS - 1 or len(whole) == 0:
            return False
        mean, error = float(kept.mean()), float(kept.std(ddof=1)) / math.sqrt(len(kept))
        least = min(mean, float(np.median(whole)))
        return least > LEAST_DIFFERENCE and mean > CLEARLY * error


def _best_lag(grid: _Grid) -> _Lag | None:
    """The shortest lag at which windows are as alike as at any longer lag."""
    a = _autocorrelation(grid.values, grid.weights)
    peaks = np.flatnonzero((a[1:-1] > a[:-2]) & (a[1:-1] >= a[2:])) + 1
    peaks = peaks[peaks >= LEAST_SAMPLES * FINE_FACTOR]
    lags = sorted({*peaks[:MOST_LAGS].tolist(), *peaks[np.argsort(-a[peaks])][:MOST_LAGS].tolist()})
    if not lags:
        return None
    alike = _Likeness(grid)
    likeness = {lag: alike.at(lag) for lag in lags}
    best = max(likeness.values())
    # windows that are few may be alike by chance
    needed = {lag: max(0.5 * best, LEAST_LIKENESS + lag / alike.length) for lag in lags}
    serious = [lag for lag in lags if likeness[lag] >= needed[lag]]
    strongest = sorted(serious, key=lambda lag: -likeness[lag])[:24]
    for lag in serious:
        rivals = [rival for rival in strongest if rival > 1.2 * lag]
        if not any(alike.clearly_better(lag, rival) for rival in rivals):
            period = (lag + _vertex(a[lag - 1], a[lag], a[lag + 1])) * grid.step_s
            return _Lag(float(_shortest_fold(grid, period)), likeness[lag])
    return None


def _shortest_fold(grid: _Grid, period_s: float) -> float:
    """The shortest of `period_s` / 6, / 5, ... / 1 whose folded readings are as smooth.

    Where a period is no whole number of updates long, consecutive windows are read at different
    places and look different, while every second or third looks the same, if the iteration has
    phases of few updates (short iterations, micro-batches). Folded, the readings of all windows
    fall between each other and show one curve. Of sensors that change at different rates the
    faster ones count: a slower one is read more than once between its updates.
    """
    fast = np.array(grid.spans) < 1.5 * min(grid.spans)
    x = (grid.values * np.sqrt(grid.weights)[:, None])[fast, ::FINE_FACTOR]
    update_s = grid.step_s * FINE_FACTOR
    length = min(max(math.ceil(3 * period_s / update_s), 24), x.shape[1])
    starts = np.unique(np.linspace(0, x.shape[1] - length, 24).astype(int))
    pieces = np.array([x[:, s : s + length] for s in starts])
    whole, period = _folded(pieces, period_s / update_s)
    folds = [(whole, period_s / update_s)]
    parts = (period / n for n in range(2, 7))
    folds += [_folded(pieces, part) for part in parts if part >= LEAST_SAMPLES]
    smoothest = min(rough for rough, _ in folds)
    if smoothest > COHERENT:
        return period_s
    return update_s * min(p for rough, p in folds if rough <= smoothest + FOLD_TOLERANCE)


def _folded(pieces: Array, period: float) -> tuple[float, float]:
    """Roughness of the pieces (count, channels, n) folded at the best period within a percent (in
    updates), and that period.

    Roughness is Lafler and Kinman's statistic (ApJS 11, 1965): the mean squared step between
    neighbours in phase, over twice the variance; 1 for noise.
    """
    spread = np.maximum(2 * pieces.var(axis=2).sum(axis=1), 1e-12)
    tried = []
    for trial in period * np.linspace(0.988, 1.012, 41):
        order = np.argsort(np.arange(pieces.shape[2]) / trial % 1.0, kind="stable")
        steps = (np.diff(pieces[:, :, order], axis=2) ** 2).mean(axis=2).sum(axis=1)
        tried.append((float(np.median(steps / spread)), float(trial)))
    return min(tried)


def _vertex(left: float, middle: float, right: float) -> float:
    """Offset of the vertex of the parabola through three points, in steps, within +-0.5."""
    bend = left - 2 * middle + right
    return 0.0 if bend >= 0 else float(np.clip(0.5 * (left - right) / bend, -0.5, 0.5))


# -- aliases ----------------------------------------------------------------------------------


def _is_alias(telemetry: Telemetry, frequency_hz: float, update_s: float) -> bool:
    """Whether the power readings show a fluctuation at this frequency that the energy counter
    lacks.

    Over an interval u the counter passes a true frequency f with the gain sinc(f u); what is
    folded onto f comes from 1/u - f or above, which it passes with sinc(1 - f u) at most. The
    readings pass both. Without a moving counter an alias cannot be told from a period.
    """
    at, counted = _power_of_counter(telemetry)
    known = np.isfinite(telemetry.power_w) if len(telemetry.power_w) else np.zeros(0, dtype=bool)
    if len(at) < 16 or known.sum() < 16:
        return False
    t, power = telemetry.t_s[known], telemetry.power_w[known]
    even = np.arange(t[0], t[-1], update_s)
    held = power[np.clip(np.searchsorted(t, even, side="right") - 1, 0, len(power) - 1)]
    interval = max(update_s, float(np.median(np.diff(at))))
    # all harmonics together, the strong ones most: noise makes a weak one look like either
    count = max(1, int(0.5 / (frequency_hz * interval)))
    harmonics = frequency_hz * np.arange(1, min(count, 64) + 1)
    read = np.array([_amplitude(even, held, f) for f in harmonics])
    in_counter = np.array([_amplitude(at, counted, f) for f in harmonics])
    share = np.minimum(harmonics * interval, 1.0)
    off_period = np.sum((in_counter - np.sinc(share) * read) ** 2)
    off_alias = np.sum((in_counter - np.sinc(1.0 - share) * read) ** 2)
    return bool(off_alias < off_period)


def _amplitude(t: Array, x: Array, frequency_hz: float) -> float:
    """Largest spectral amplitude within the resolution of the record about a frequency."""
    x = (x - x.mean()) * np.hanning(len(x))
    width = 1.0 / (t[-1] - t[0])
    scan = frequency_hz + width * np.linspace(-1.0, 1.0, 9)
    return float(np.abs(np.exp(-2j * math.pi * scan[:, None] * (t - t[0])) @ x).max() / len(x))


# -- single iterations ------------------------------------------------------------------------


def _tracked(grid: _Grid, lag: _Lag, resolution_s: float) -> Detection:
    """The period from the iterations one by one, if it is the same over the whole recording."""
    beats = _beats(grid, lag.period_s)
    intervals = np.diff(beats)
    inside = np.abs(np.log(intervals / lag.period_s)) < math.log(UNEQUAL)
    length_s = grid.step_s * grid.values.shape[1]
    if inside.sum() < LEAST_PERIODS - 1 or intervals[inside].sum() < 0.5 * length_s:
        return Detection(
            period_s=None,
            code="aperiodic",
            reason="consecutive windows are alike, but no sequence of iterations fits them",
            resolution_s=resolution_s,
            likeness=lag.likeness,
        )
    kept = intervals[inside]
    # both ends of an interval are only known to a sensor update: two usual lengths are no outliers
    off = np.abs(kept - np.median(kept))
    kept = kept[off <= max(6.0 * float(np.median(off)), 2 * FINE_FACTOR * grid.step_s)]
    spread = float(kept.std() / kept.mean())
    covered = float(kept.sum()) / length_s
    period = float(np.mean(kept))
    thirds = [float(np.mean(part)) for part in np.array_split(kept, 3) if len(part)]
    range_ = (max(thirds) - min(thirds)) / period
    if range_ > UNSTABLE:
        return Detection(
            period_s=None,
            code="unstable",
            reason=f"the period is not stable: it changes by {range_ * 100:.0f} % in the recording",
            resolution_s=resolution_s,
            likeness=lag.likeness,
            spread=spread,
        )
    return Detection(
        period_s=period,
        code="periodic",
        reason=(
            f"{len(kept)} consecutive windows of {period:.4g} s are alike "
            f"(correlation {lag.likeness:.2f}, the sensor resolves {resolution_s:.3g} s)"
            + (f"; their length varies, by {100 * spread:.0f} % or more" if spread > VARIES else "")
            + (f"; they are {100 * covered:.0f} % of the recording" if covered < MOSTLY else "")
        ),
        resolution_s=resolution_s,
        likeness=lag.likeness,
        spread=spread,
    )


def _beats(grid: _Grid, period_s: float) -> Array:
    """Times at which iterations begin (at an arbitrary phase of theirs)."""
    step = period_s / PHASES
    n = grid.values.shape[1]
    at = np.arange(0.0, (n - 1) * grid.step_s, step)
    x = np.array([np.interp(at, grid.step_s * np.arange(n), row) for row in grid.values])
    x *= np.sqrt(grid.weights)[:, None]
    template = _typical(x)
    beats = np.empty(0)
    for _ in range(2):
        score = _match(x, template)
        places = _path(score)
        windows = np.array([x[:, p : p + PHASES] for p in places])
        template = np.median(windows, axis=0)
        beats = np.array(
            [
                p + _vertex(score[p - 1], score[p], score[p + 1]) if 0 < p < len(score) - 1 else p
                for p in places
            ]
        )
    good = _match(x, template)[places] > 0.3
    result: Array = beats * step
    # an iteration that does not look like one ends the run before it
    result = np.where(good, result, np.nan)
    return result[np.isfinite(result)] if good.any() else result[:0]


def _typical(x: Array) -> Array:
    """The window most like all other windows at distances of whole periods."""
    count = x.shape[1] // PHASES
    windows = x[:, : count * PHASES].reshape(len(x), count, PHASES).transpose(1, 0, 2)
    some = windows[:: max(1, count // 64)]
    flat = some.reshape(len(some), -1)
    distance = ((flat[:, None, :] - flat[None, :, :]) ** 2).mean(axis=2)
    result: Array = some[int(np.argmin(np.median(distance, axis=1)))]
    return result


def _match(x: Array, template: Array) -> Array:
    """Normalised correlation of the template with the signal from every point on."""
    n = x.shape[1] - PHASES + 1
    centred = template - template.mean(axis=1, keepdims=True)
    own = math.sqrt(float((centred**2).sum())) or 1.0
    product, energy = np.zeros(n), np.zeros(n)
    for row, part in zip(x, centred, strict=True):
        product += np.correlate(row, part, mode="valid")
        sums = np.concatenate([[0.0], np.cumsum(row)])
        squares = np.concatenate([[0.0], np.cumsum(row**2)])
        mean = (sums[PHASES:] - sums[:-PHASES]) / PHASES
        energy += (squares[PHASES:] - squares[:-PHASES]) - PHASES * mean**2
    # quiet stretches match nothing: the denominator is at least a part of the template's own
    result: Array = product / (own * np.maximum(np.sqrt(np.maximum(energy, 0.0)), 0.3 * own))
    return result


def _path(score: Array) -> list[int]:
    """The places of iterations: high scores, at distances near one period (dynamic program)."""
    least, most = int(0.6 * PHASES), int(1.6 * PHASES)
    distance = np.arange(least, most + 1)
    cost = 8.0 * np.log(distance / PHASES) ** 2
    n = len(score)
    total = np.concatenate([np.zeros(most), score])
    before = np.full(n, -1)
    for i in range(n):
        values = total[i + most - distance] - cost
        best = int(np.argmax(values))
        if values[best] > 0:
            total[i + most] = score[i] + values[best]
            before[i] = i - distance[best]
    tail = max(n - PHASES, 0)
    place = tail + int(np.argmax(total[most + tail :]))
    path = []
    while place >= 0:
        path.append(place)
        place = int(before[place])
    return path[::-1]
