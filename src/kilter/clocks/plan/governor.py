"""The governor: in what order to try settings on the running job, and what to conclude.

Pure coroutines: they yield an `Order` (run a block of iterations under this setting) and are sent
the `BlockOutcome`. Real sessions, rehearsals and benchmarks drive the very same code; there are no
clocks, devices and threads here.

    search: probe ... probe, confirm ... -> hold: candidate, with a baseline pair now and then
       ^                                      |
       +----- drift, or the contract broken --+
"""

from __future__ import annotations

import enum
import math
import random
import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from kilter.clocks.plan.guard import (
    LEAST_SAVING,
    NOTHING_KNOWN,
    Contract,
    Spread,
    Verdict,
    limits,
)
from kilter.clocks.plan.job import Forecast, Probed, Space, TestSize, forecasts
from kilter.core.label import Label
from kilter.core.plan import Effect, Goal, Plan, SetClocks
from kilter.core.setting import Setting

SEARCH_PAIRS = 70
"""A search may use so many pairs. Most searches end sooner, since nothing is left that could pay;
this many blocks of five iterations at 300 ms take five minutes."""
LEAST_TEST = 4
"""With fewer pairs left, no further test is begun: it could hardly pass."""
TEST_PART = 0.5
"""Of the pairs left, a test may use this part: others may follow, of a better setting after one
that has passed, of a safer one after one that has failed."""
LEAST_IMPROVEMENT = 0.0003
"""Settings cannot be told apart below this expected improvement (fraction of the objective)."""
LEAST_SHARE = 0.003
"""It is the same as a share of what the setting accepted so far saves: less cannot be told from the
luck of a probe, and the search would try one neighbour after the other."""
JOB_PAIRS = 1800
"""A search has to pay within so many pairs' time: an hour of blocks of a second."""
USUAL_SAVING = 0.1
"""Half of each pair runs at the default and saves nothing; this much is lost there while it is not
known what there is to save."""
NOISE_SD = 0.01
"""One pair's log ratio is assumed to have this spread until pairs show their own."""
TOLD_APART = 1.5
"""Settings that are predicted with fewer standard errors of a probe than this are not probed: they
are tested, or left alone."""
TEST_SHARE = 0.9
"""What a test may spend of the error probability that is left. It is spent only if the setting
is not taken: one that is taken has either been safe, which is no error, or is the error itself."""
REFERENCE_EVERY = 50
"""While holding, one block in this many is a baseline block: 2 % of the saving is spent on
knowing that it is still one."""
RECENT_REFERENCES = 8
"""Pairs of a hold that are also judged by themselves: what a setting costs may change, and hundreds
of good pairs from before would hide it for as long again."""
DRIFT = 0.10
DRIFT_BLOCKS = 5
"""The job has changed when this many blocks in a row differ from the level at the start of the
hold by more than this fraction, in time or in energy."""
SEARCH_AGAIN_AFTER = 200
"""Blocks to hold after a search before drift may start the next one."""


class Phase(enum.Enum):
    WARM = "warm"
    PROBE = "probe"
    CONFIRM = "confirm"
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Run one block of iterations under this setting and report back."""

    phase: Phase
    setting: Setting
    baseline: bool
    """It tells the arm: the setting as found, or a candidate."""
    pair: int | None
    """Blocks of one pair are compared with each other; None outside a comparison."""
    reason: str
    roles: Mapping[str, Setting] = field(default_factory=dict)
    """It has settings by role group, where groups differ; the setting of a group that is not named
    is the found one. Empty: all ranks get `setting`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOutcome:
    """What a block gave. `energy_j` is per iteration; None where the device cannot tell."""

    iteration_s: float
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The setting that stands, why, and what it is expected to do (log ratios to the baseline)."""

    setting: Setting
    log_time: float = 0.0
    log_energy: float = 0.0
    reason: str
    roles: Mapping[str, Setting] = field(default_factory=dict)
    """It has settings by role group, where groups differ, as in `Order`."""

    @property
    def time_ratio(self) -> float:
        return math.exp(self.log_time)

    @property
    def energy_ratio(self) -> float:
        return math.exp(self.log_energy)


@dataclass(slots=True)
class _Evidence:
    """The pairs of one candidate: log ratios of time and energy."""

    times: list[float] = field(default_factory=list)
    energies: list[float] = field(default_factory=list)

    def add(self, time: float, energy: float) -> None:
        self.times.append(time)
        self.energies.append(energy)


class Governor:
    """Searches, holds, watches for drift, searches again. `choice` is at any moment what stands.

    A probe is a block of the setting between two of the baseline, of which the one between two
    probes serves both: a probe only chooses what to test. A test has pairs of its own, in random
    order, so that nothing that happens every so many iterations can fall on one arm alone.

    `blocks` is the length of the job where it is known: then a part of it is kept for confirming.
    `expected` orders the first probes (`forecasts`); `first` are probed before them, by the first
    search (`plan/job_class`). `shares`: a block can be compared with those of other pairs, too. It
    has many attributes because its coroutine is written as methods, which share its state.
    """

    def __init__(
        self,
        space: Space,
        goal: Goal,
        *,
        seed: int = 0,
        blocks: int | None = None,
        expected: Mapping[Setting, tuple[float, float]] | None = None,
        first: Sequence[Setting] = (),
        shares: bool = True,
    ) -> None:
        self._space = space
        self._first = [space.candidates.index(setting) for setting in first]
        self._expected = expected
        self._goal = goal
        self._contract = Contract(
            max_slowdown=goal.max_slowdown or 0.0, error_probability=goal.error_probability
        )
        self._random = random.Random(seed)
        self._blocks = blocks
        self._pairs = 0
        self._blocks_run = 0
        self._blocks_before = 0
        self._shares = shares
        self._last: BlockOutcome | None = None
        """It holds the last block, where that was one of the baseline and of this search."""
        self._swings: list[float] = []
        """How much the logs of the times of the two baseline blocks of each probe differ."""
        self._error_left = goal.error_probability
        self._test_part = TEST_PART
        self._probed: dict[int, _Evidence] = {}
        self._decided: set[int] = set()
        self.choice = Choice(setting=space.found, reason="the default stands: nothing tried yet")

    def run(self) -> Generator[Order, BlockOutcome, None]:
        """Search and hold for as long as there are iterations."""
        while True:
            yield from self.search()
            drift = yield from self.hold()
            self._probed.clear()
            self._decided.clear()
            self._error_left = self._goal.error_probability
            self._blocks_before, self._last = self._blocks_run, None
            self.choice = Choice(setting=self._space.found, reason=f"the default stands: {drift}")

    def search(self) -> Generator[Order, BlockOutcome, Choice]:
        """Probe and confirm until nothing promises an improvement."""
        while self._first and self._pairs_left() >= LEAST_TEST + 1:
            yield from self._probe(self._first.pop(0), "the first action for a job of this class")
        while ranking := self._ranking():
            if ranking[0].known:
                yield from self._confirm(ranking[0])
            else:
                forecast = ranking[0]
                yield from self._probe(forecast.index, f"predicted {_effect(forecast)}")
        if self.choice.setting == self._space.found:
            tried = len(self._probed)
            reason = (
                f"the default stands: none of {tried} settings tried saves enough within the bound"
                if tried
                else "the default stands: no setting promises a saving within the bound"
            )
            self.choice = Choice(setting=self._space.found, reason=reason)
        return self.choice

    def _ranking(self) -> list[Forecast]:
        """What is worth trying, the most promising first."""
        tests = self._affordable()
        if not tests:
            return []
        spread = self._spread()
        ranking = forecasts(
            self._space,
            {
                index: Probed(
                    log_time=statistics.fmean(e.times),
                    log_energy=statistics.fmean(e.energies),
                    sd=spread / math.sqrt(len(e.times)),
                )
                for index, e in self._probed.items()
            },
            bound=self._contract.bound,
            objective=self._goal.objective,
            best=self._objective(self.choice),
            price_of_time=self._goal.price_of_time,
            least_saving=LEAST_SAVING,
            tests=tests,
            told_apart=TOLD_APART * spread,
            rejected=frozenset(self._decided),
            expected=self._expected,
        )
        if self._pairs_left() < LEAST_TEST + 1:
            ranking = [f for f in ranking if f.known]
        least = max(LEAST_IMPROVEMENT, -LEAST_SHARE * self.choice.log_energy)
        return [f for f in ranking if f.improvement >= least]

    def _pairs_left(self) -> int:
        """Pairs that this search may still use."""
        left = 2 * SEARCH_PAIRS - (self._blocks_run - self._blocks_before)
        return (left if self._blocks is None else min(left, self._blocks - self._blocks_run)) // 2

    def _affordable(self) -> list[TestSize]:
        """The tests that a setting can be put to now."""
        left, spread = self._pairs_left(), self._spread()
        most = left if left < 2 * LEAST_TEST else max(LEAST_TEST, int(left * self._test_part))
        sizes = {n for k in range(8) if (n := round(LEAST_TEST * 1.5**k)) < most} | {most}
        return [
            TestSize(
                pairs=n,
                error=spread / math.sqrt(n),
                margin=spread / math.sqrt(n) * limits(n, self._share())[-1],
                price=max(-self.choice.log_energy, USUAL_SAVING) * n / (2 * JOB_PAIRS),
            )
            for n in sorted(sizes)
            if n >= LEAST_TEST
        ]

    def _share(self) -> float:
        """What the next test may spend of the error probability."""
        return self._error_left * TEST_SHARE

    def _probe(self, index: int, reason: str) -> Generator[Order, BlockOutcome, None]:
        setting = self._space.candidates[index]
        evidence = self._probed.setdefault(index, _Evidence())
        if not self._shares:
            evidence.add(*(yield from self.pair(setting, Phase.PROBE, reason)))
            return
        before = self._last
        if before is None:
            before = yield from self._block(setting, True, Phase.PROBE, None, reason)
        self._pairs += 1
        ours = yield from self._block(setting, False, Phase.PROBE, self._pairs, reason)
        after = yield from self._block(setting, True, Phase.PROBE, self._pairs, reason)
        self._last = after
        ratios = zip(_log_ratios(ours, before), _log_ratios(ours, after), strict=True)
        evidence.add(*map(statistics.fmean, ratios))
        self._swings.append(math.log(after.iteration_s / before.iteration_s))

    def _confirm(self, forecast: Forecast) -> Generator[Order, BlockOutcome, None]:
        """Sequential tests of time and energy on fresh pairs: those that helped to select a
        setting must not help to confirm it."""
        share, spread = self._share(), self._pooled()
        setting = self._space.candidates[forecast.index]
        fresh = _Evidence()
        time, saving = Verdict.UNDECIDED, Verdict.UNDECIDED
        most = forecast.pairs
        while len(fresh.times) < most:
            pair = yield from self.pair(setting, Phase.CONFIRM, f"expected {_effect(forecast)}")
            fresh.add(*pair)
            self._probed.setdefault(forecast.index, _Evidence()).add(*pair)
            if time is Verdict.UNDECIDED:
                time = self._contract.judge(
                    fresh.times, error_probability=share, most=most, spread=spread[0]
                )
            if saving is Verdict.UNDECIDED:
                saving = self._contract.saves(
                    fresh.energies, error_probability=share, most=most, spread=spread[1]
                )
            if Verdict.DEGRADED in (time, saving) or time is saving is Verdict.SAFE:
                break
        self._decided.add(forecast.index)
        passed = time is saving is Verdict.SAFE
        candidate = Choice(
            setting=setting,
            log_time=statistics.fmean(fresh.times),
            log_energy=statistics.fmean(fresh.energies),
            reason=f"safe after {len(fresh.times)} pairs, and it saves",
        )
        price = self._goal.price_of_time * max(candidate.log_time, 0.0)
        worth = candidate.log_energy + price < 0.0
        if passed and worth and self._objective(candidate) < self._objective(self.choice):
            self.choice = candidate
        else:
            self._error_left -= share

    def hold(self) -> Generator[Order, BlockOutcome, str]:
        """Hold the choice; returns why the search has to be done again."""
        choice, baseline = self.choice, self.choice.setting == self._space.found
        references = _Evidence()
        level: list[BlockOutcome] = []
        recent: list[BlockOutcome] = []
        held = 0
        while True:
            held += 1
            if not baseline and held % REFERENCE_EVERY == 0:
                references.add(*(yield from self.pair(choice.setting, Phase.HOLD, choice.reason)))
                lately = references.times[-RECENT_REFERENCES:]
                if self._contract.broken(references.times) or self._contract.broken(lately):
                    slower = math.expm1(statistics.fmean(lately))
                    return f"the held setting became {slower * 100:.1f} % slower than the baseline"
                continue
            outcome = yield Order(
                phase=Phase.HOLD,
                setting=choice.setting,
                baseline=baseline,
                pair=None,
                reason=choice.reason,
            )
            if len(level) < DRIFT_BLOCKS:
                level.append(outcome)
                continue
            recent = [*recent, outcome][-DRIFT_BLOCKS:]
            if held > SEARCH_AGAIN_AFTER and (drift := _drift(level, recent)):
                return drift

    def pair(
        self, setting: Setting, phase: Phase, reason: str
    ) -> Generator[Order, BlockOutcome, tuple[float, float]]:
        """Two blocks in random order; the log ratios of time and energy."""
        self._pairs += 1
        arms = [True, False]
        self._random.shuffle(arms)
        outcomes: dict[bool, BlockOutcome] = {}
        for baseline in arms:
            block = self._block(setting, baseline, phase, self._pairs, reason)
            outcomes[baseline] = yield from block
        self._last = None if arms[0] else outcomes[True]
        return _log_ratios(outcomes[False], outcomes[True])

    def _block(
        self, setting: Setting, baseline: bool, phase: Phase, pair: int | None, reason: str
    ) -> Generator[Order, BlockOutcome, BlockOutcome]:
        self._blocks_run += 1
        return (
            yield Order(
                phase=phase,
                setting=self._space.found if baseline else setting,
                baseline=baseline,
                pair=pair,
                reason=reason,
            )
        )

    def _spread(self) -> float:
        """Spread of one pair, pooled over candidates, shrunk to `NOISE_SD` while there are few."""
        squares = 4 * NOISE_SD**2 + sum(swing**2 for swing in self._swings)
        freedom = 4 + len(self._swings)
        for e in self._probed.values():
            mean = statistics.fmean(e.times)
            squares += sum((t - mean) ** 2 for t in e.times)
            freedom += len(e.times) - 1
        return math.sqrt(squares / freedom)

    def _pooled(self) -> tuple[Spread, Spread]:
        """What the pairs so far say of the spread, of time and of energy."""
        time = energy = NOTHING_KNOWN
        for e in self._probed.values():
            time, energy = time.with_pairs(e.times), energy.with_pairs(e.energies)
        return time, energy

    def _objective(self, choice: Choice) -> float:
        return choice.log_energy + self._goal.objective.time_exponent * choice.log_time


def _log_ratios(ours: BlockOutcome, base: BlockOutcome) -> tuple[float, float]:
    """Of time and energy; where energy is not known, it is taken to follow time."""
    time = math.log(ours.iteration_s / base.iteration_s)
    if not (ours.energy_j and base.energy_j):
        return time, time
    return time, math.log(ours.energy_j / base.energy_j)


def _drift(level: list[BlockOutcome], recent: list[BlockOutcome]) -> str | None:
    """What has changed for good between the start of a hold and now, or None."""
    if len(recent) < DRIFT_BLOCKS:
        return None
    for name, value in (("iteration time", _time), ("energy per iteration", _energy)):
        before = statistics.median(map(value, level))
        changes = [value(o) / before - 1 for o in recent] if before else []
        if changes and (min(changes) > DRIFT or max(changes) < -DRIFT):
            return f"the job changed: {name} {statistics.median(changes) * 100:+.0f} %"
    return None


def _time(outcome: BlockOutcome) -> float:
    return outcome.iteration_s


def _energy(outcome: BlockOutcome) -> float:
    return outcome.energy_j or 0.0


def _effect(forecast: Forecast) -> str:
    energy, time = math.expm1(forecast.log_energy), math.expm1(forecast.log_time)
    return f"{energy * 100:+.1f} % energy at {time * 100:+.1f} % time"


def plan_of(choice: Choice, found: Setting, label: Label) -> Plan:
    """The choice as a plan; the default standing is an empty one."""
    effect = Effect(time_ratio=choice.time_ratio, energy_ratio=choice.energy_ratio)
    settings = choice.roles or {"": choice.setting}
    actions = tuple(
        SetClocks(setting=setting, effect=effect, reason=choice.reason, role=role)
        for role, setting in settings.items()
        if setting != found
    )
    return Plan(
        planner="job_clocks", actions=actions, effect=effect, reason=choice.reason, label=label
    )
