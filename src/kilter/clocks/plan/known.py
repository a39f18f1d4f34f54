"""What an earlier run of the same job has found, and the test with which the next run confirms it.
Pure.

A job recurs: the same program on the same kind of GPU with as many ranks and the same goal. The
next run begins with the setting that the last one chose. Nothing of the last run is believed but
the spread of its pairs: today's pairs alone have to show that the setting keeps the bound and
saves. They are few, since three pairs with a known spread decide as well as ten with an unknown
one. A setting that is not confirmed is dropped, and the job is searched like a new one, with what
is left of the contract's error probability.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import TypeVar

from kilter.clocks.plan.governor import BlockOutcome, Choice, Governor, Order, Phase
from kilter.clocks.plan.guard import Contract
from kilter.clocks.plan.job import Space
from kilter.clocks.plan.job_class import throttled
from kilter.core.errors import DeviceError
from kilter.core.past_run import Features, KnownSetting, SeenSetting
from kilter.core.plan import Goal
from kilter.core.setting import Sample, Setting
from kilter.core.trace import IterationTrace
from kilter.model.stats import mean_of_known, t_cdf

KNOWN_PAIRS = 3
"""A known setting is confirmed with so many pairs: 30 iterations in blocks of five."""
KNOWN_SHARE = 0.5
"""Confirming may use this share of the contract's error probability; the rest is for the search
that follows a setting that is not confirmed."""
NOISIER = 3.0
"""Where today's pairs vary by this factor more than the last run's (in variance; the 95 % point of
the F distribution with 2 degrees of freedom over many), today's alone say what their spread is."""


T = TypeVar("T")


class PairBook:
    """The pairs that a governor has had run, by setting. Those of a job before it has changed are
    forgotten."""

    def __init__(self) -> None:
        self._ratios: dict[Setting, list[tuple[float, float]]] = {}
        self._open: tuple[Order, BlockOutcome] | None = None
        """It is the first block of a pair."""
        self._held = False
        self.baseline: list[BlockOutcome] = []
        self.readings: Sequence[Sample] = ()
        """The sensors showed this under the baseline."""
        self.trace: IterationTrace | None = None
        """It is one iteration, where that is on record."""

    def note(self, orders: Generator[Order, BlockOutcome, T]) -> Generator[Order, BlockOutcome, T]:
        """The same orders; their outcomes are noted on the way."""
        try:
            order = next(orders)
            while True:
                try:
                    outcome = yield order
                except DeviceError as error:
                    order = orders.throw(error)
                else:
                    self._take(order, outcome)
                    order = orders.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result

    def _take(self, order: Order, outcome: BlockOutcome) -> None:
        if order.phase is Phase.HOLD:
            self._held = True
        elif self._held:  # searched again: the job has changed
            self._held, self._ratios, self.baseline = False, {}, []
            self.readings, self.trace = (), None
        if order.baseline:
            self.baseline.append(outcome)
        if order.pair is None or order.roles:
            return
        first, self._open = self._open, (order, outcome)
        if first is None or first[0].pair != order.pair or first[0].baseline == order.baseline:
            return
        arms = {first[0].baseline: first, order.baseline: (order, outcome)}
        default, (candidate, changed) = arms[True][1], arms[False]
        if default.energy_j and changed.energy_j:
            time = math.log(changed.iteration_s / default.iteration_s)
            energy = math.log(changed.energy_j / default.energy_j)
            self._ratios.setdefault(candidate.setting, []).append((time, energy))

    @property
    def seen(self) -> tuple[SeenSetting, ...]:
        return tuple(
            SeenSetting(
                setting=setting,
                log_time=statistics.fmean(time for time, _ in pairs),
                log_energy=statistics.fmean(energy for _, energy in pairs),
                pairs=len(pairs),
            )
            for setting, pairs in self._ratios.items()
        )

    @property
    def features(self) -> Features:
        """Of the job under its baseline; nothing is known before the first block."""
        if not self.baseline:
            return Features()
        iteration_s = statistics.median(block.iteration_s for block in self.baseline)
        energies = [block.energy_j for block in self.baseline if block.energy_j is not None]
        power_w = statistics.median(energies) / iteration_s if energies else None
        trace = self.trace
        used = None if trace is None else trace.features
        return Features(
            iteration_s=iteration_s,
            power_w=power_w,
            sm_clock_hz=mean_of_known(sample.sm_clock_hz for sample in self.readings),
            memory_clock_hz=mean_of_known(sample.memory_clock_hz for sample in self.readings),
            sm_utilisation=mean_of_known(sample.sm_utilisation for sample in self.readings),
            memory_utilisation=mean_of_known(sample.memory_utilisation for sample in self.readings),
            throttled=throttled(self.readings),
            flop_per_s=None if trace is None else trace.flops / iteration_s or None,
            bytes_per_s=None if trace is None else trace.bytes_moved / iteration_s or None,
            kernels_per_s=None if used is None else used.kernels_per_s,
            host_gap=None if used is None else used.host_gap,
            exposed_communication=None if used is None else used.exposed_communication,
        )

    @property
    def spread(self) -> tuple[float, float, int]:
        """Of one pair's log time ratio and log energy ratio, and their degrees of freedom."""
        freedom = sum(len(pairs) - 1 for pairs in self._ratios.values())
        squares = [0.0, 0.0]
        for pairs in self._ratios.values():
            for column in (0, 1):
                values = [pair[column] for pair in pairs]
                mean = statistics.fmean(values)
                squares[column] += math.fsum((value - mean) ** 2 for value in values)
        if freedom == 0:
            return 0.0, 0.0, 0
        return math.sqrt(squares[0] / freedom), math.sqrt(squares[1] / freedom), freedom


class RecurringGovernor:
    """Like `Governor`, for a job with a known setting: confirms and holds it, or searches."""

    def __init__(
        self,
        space: Space,
        goal: Goal,
        known: KnownSetting,
        *,
        seed: int = 0,
    ) -> None:
        left = replace(goal, error_probability=goal.error_probability * (1.0 - KNOWN_SHARE))
        self._governor = Governor(space, left, seed=seed)
        self._space = space
        self._known = known
        self._contract = Contract(
            max_slowdown=goal.max_slowdown or 0.0, error_probability=goal.error_probability
        )
        self._why = ""
        """Why the search was done although a setting was known."""

    @property
    def choice(self) -> Choice:
        choice = self._governor.choice
        return replace(choice, reason=choice.reason + self._why)

    def run(self) -> Generator[Order, BlockOutcome, None]:
        """Confirm, or search, and hold for as long as there are iterations."""
        if (yield from self._confirm()):
            drift = yield from self._governor.hold()
            found = self._space.found
            self._governor.choice = Choice(setting=found, reason=f"the default stands: {drift}")
        yield from self._governor.run()

    def search(self) -> Generator[Order, BlockOutcome, Choice]:
        """Confirm, or search."""
        if not (yield from self._confirm()):
            yield from self._governor.search()
        return self.choice

    def _confirm(self) -> Generator[Order, BlockOutcome, bool]:
        known = self._known
        if known.setting not in self._space.candidates:
            self._why = f"; {known.setting}, which the run of {known.day} chose, is not offered now"
            return False
        times, energies = [], []
        for _ in range(KNOWN_PAIRS):
            time, energy = yield from self._governor.pair(
                known.setting, Phase.CONFIRM, f"an earlier run of this job chose it ({known.day})"
            )
            times.append(time)
            energies.append(energy)
        error = self._contract.error_probability * KNOWN_SHARE
        fast = below(times, self._contract.bound, known.time_sd, known.freedom, error)
        saves = below(energies, 0.0, known.energy_sd, known.freedom, error)
        if not (fast and saves):
            missing = "saves" if fast else "keeps the bound"
            self._why = (
                f"; {KNOWN_PAIRS} pairs gave no evidence that {known.setting}, which the run of "
                f"{known.day} chose, {missing}"
            )
            return False
        self._governor.choice = Choice(
            setting=known.setting,
            log_time=statistics.fmean(times),
            log_energy=statistics.fmean(energies),
            reason=f"the run of {known.day} chose it; confirmed by {KNOWN_PAIRS} pairs of blocks",
        )
        return True


def below(
    values: Sequence[float], bound: float, sd: float, freedom: int, error_probability: float
) -> bool:
    """Whether the mean of these is below the bound, wrong with at most this probability: Student's
    test with the spread that was known before, pooled with that of the values themselves; with
    theirs alone where they vary much more."""
    n = len(values)
    mean = math.fsum(values) / n
    own = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    variance, freedom_now = own, n - 1
    if own <= NOISIER * sd**2:
        freedom_now = freedom + n - 1
        variance = (freedom * sd**2 + (n - 1) * own) / freedom_now
    error = max(math.sqrt(variance / n), 1e-12)
    return 1.0 - t_cdf((bound - mean) / error, freedom_now) <= error_probability
