"""Which communication sections are worth a lower clock. Pure.

A low clock that is to rule a section takes two switches. The command down leaves `lead` before the
section so that it never acts early but for one time in twenty, the command up leaves so that it has
acted by the section's end but for one in twenty. What remains between the two effects is low:

    low = length(p5) - (down(p50) - down(p5)) - (up(p95) - up(p50))

A section shorter than the break-even length, down(p95) + up(p95), is refused. Neighbouring sections
may share one stretch of a low clock: what is computed between them then runs slower, out of a time
budget. Stretches are chosen by dynamic programming over the ordered sections with all
non-dominated pairs of delay and saving (the constrained shortest path again; exact for the model).

Before its first section a stretch may take in computation that has slack under communication
(`cover`): that runs slower without effect, and what is left of the section is shorter by as much.
What is computed between the sections of a stretch saves nothing in this model, and the
communication itself is taken not to slow down: the running job has the last word on both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import NormalDist

import msgspec

from kilter.clocks.plan.cover import Cover
from kilter.clocks.plan.sections import RankSections, Section
from kilter.core.reasons import Reason
from kilter.core.setting import CLOCKS, Setting
from kilter.core.units import show_fraction, show_time

PRESENT = 0.9
"""A section has to be in this share of the iterations to be predicted."""
CALLS_PER_S = 10.0
"""One GPU gets at most so many clock calls per second. At 20 per second they were seen to delay
NCCL (NVIDIA/nccl issue 1551)."""
MOST_LABELS = 256
"""So many non-dominated pairs are kept per section."""
_NORMAL = NormalDist()


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long a switch takes to act: log-normal."""

    median_s: float
    spread: float
    """It is the standard deviation of the logarithm."""

    def quantile(self, share: float) -> float:
        return self.median_s * math.exp(self.spread * _NORMAL.inv_cdf(share))

    @property
    def late_s(self) -> float:
        """Mean time beyond the 95th percentile, over all switches."""
        return self._beyond(0.95) - self.quantile(0.95) * 0.05

    @property
    def early_s(self) -> float:
        """Mean time short of the 5th percentile, over all switches."""
        mean_s = self.median_s * math.exp(self.spread**2 / 2)
        return self.quantile(0.05) * 0.05 - (mean_s - self._beyond(0.05))

    def _beyond(self, share: float) -> float:
        """Part of the mean that lies above a quantile."""
        mean_s = self.median_s * math.exp(self.spread**2 / 2)
        return mean_s * _NORMAL.cdf(self.spread - _NORMAL.inv_cdf(share))


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Clocks that may rule a section, relative to the default. None: as found."""

    sm_clock_hz: float | None
    memory_clock_hz: float | None = None
    saved_w: float
    """It is the power in communication by default, less the power here."""
    waiting_w: float
    computing_w: float
    stretch: float
    """Computation takes at most so many times as long as by default: as if no kernel waited for
    memory."""
    down: Latency | None = None
    """The switch to this clock takes this; None: as all clocks do."""
    up: Latency | None = None
    """The switch back from it takes this; None: as all clocks do."""

    @property
    def setting(self) -> Setting:
        return Setting(sm_clock_hz=self.sm_clock_hz, memory_clock_hz=self.memory_clock_hz)


class ClockCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a device's clocks do, as far as sections are concerned."""

    levels: tuple[Level, ...]
    """They are ordered by falling memory clock, and with each by falling SM clock."""
    down: Latency
    """The switch to a clock that has no times of its own takes this."""
    up: Latency
    computing_w: float
    waiting_w: float
    """The device draws this in communication, at the default clock."""
    calls_per_s: float = CALLS_PER_S

    def level_of(self, stretch: LowStretch) -> Level:
        """Its clocks."""
        clocks = stretch.sm_clock_hz, stretch.memory_clock_hz
        return next(x for x in self.levels if (x.sm_clock_hz, x.memory_clock_hz) == clocks)

    def back(self, depth: int) -> int:
        """One step back from a depth, which lowers neither clock: to the next SM clock at the same
        memory clock, since the steps of memory clocks are larger, and where there is none to the
        next memory clock."""
        earlier = range(depth - 1, 0, -1)
        return next((n for n in earlier if not self._lowers(n, depth)), 0)

    def _lowers(self, depth: int, other: int) -> bool:
        """One of the clocks at a depth is lower than at the other one."""
        one, two = self.levels[depth - 1].setting, self.levels[other - 1].setting
        both = ((getattr(one, knob), getattr(two, knob)) for knob in CLOCKS)
        return any((a or math.inf) < (b or math.inf) for a, b in both)

    def switches(self, level: Level) -> tuple[Latency, Latency]:
        """To this clock, and back."""
        return level.down or self.down, level.up or self.up

    def break_even_of_s(self, level: Level) -> float:
        """The shortest section in which both switches fit."""
        down, up = self.switches(level)
        return down.quantile(0.95) + up.quantile(0.95)

    @property
    def break_even_s(self) -> float:
        """Of the clock that changes fastest."""
        of_all = self.down.quantile(0.95) + self.up.quantile(0.95)
        return min(map(self.break_even_of_s, self.levels), default=of_all)


class LevelEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What one clock does to the work of a stretch, if it rules it from end to end."""

    delay_s: float
    saved_j: float


class LowStretch(msgspec.Struct, frozen=True, kw_only=True):
    """A low clock from the beginning of one section to the end of one, per iteration."""

    first: str
    last: str
    """Both are keys of sections."""
    sections: int
    sm_clock_hz: float | None
    memory_clock_hz: float | None = None
    """None stands for the clock as found."""
    start_s: float
    end_s: float
    down_at_s: float
    """When the commands leave, from the beginning of the iteration; may be in the one before."""
    up_at_s: float
    computed_s: float
    """Computation between its sections takes this."""
    saved_j: float
    delay_s: float
    cover: Cover | None = None
    """It is computation before its first section that it takes in: `start_s` is where that
    begins."""
    effects: tuple[LevelEffect, ...] = ()
    """A stretch of operations, whose names stand in place of keys, says here what each level does
    to them. It is empty for sections, of which the model of this file says so."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The answer for one rank."""

    rank: int
    exposed_share: float
    longest_s: float
    iteration_s: float
    compute_s: float
    iteration_j: float
    """It is assumed: computing draws `Card.computing_w`, everything else `Card.waiting_w`."""
    stretches: tuple[LowStretch, ...]
    refused: tuple[Reason, ...]

    @property
    def saving(self) -> float:
        return sum(s.saved_j for s in self.stretches) / self.iteration_j

    @property
    def slowdown(self) -> float:
        return sum(s.delay_s for s in self.stretches) / self.iteration_s


def worth(rank: RankSections, card: ClockCosts, *, max_slowdown: float) -> Worth:
    """The stretches of one rank that save most within the slowdown."""
    mean = rank.mean
    rare = [s for s in rank.sections if s.presence < PRESENT]
    sections = [s for s in rank.sections if s.presence >= PRESENT]
    most = most_stretches(card, mean.iteration_s)
    budget_s = max_slowdown * mean.iteration_s
    chosen = choose(sections, card, budget_s=budget_s, most=most)
    return Worth(
        rank=rank.rank,
        exposed_share=rank.exposed_share,
        longest_s=max((s.length_s for s in rank.sections), default=0.0),
        iteration_s=mean.iteration_s,
        compute_s=mean.compute_s,
        iteration_j=mean.compute_s * card.computing_w
        + (mean.iteration_s - mean.compute_s) * card.waiting_w,
        stretches=chosen,
        refused=(*_rare(rare, card), *_refused(sections, chosen, card, most)),
    )


def retimed(
    stretches: Sequence[LowStretch], rank: RankSections, card: ClockCosts
) -> tuple[LowStretch, ...] | None:
    """The same stretches by the times of a newer window; None where one of them is not there."""
    places = {section.key: n for n, section in enumerate(rank.sections)}
    newer = []
    for stretch in stretches:
        a, b = places.get(stretch.first), places.get(stretch.last)
        if a is None or b is None or a > b:
            return None
        inside = rank.sections[a : b + 1]
        computed_s = sum(section.gap_compute_s for section in inside[:-1])
        level = card.level_of(stretch)
        cover = None
        if stretch.cover is not None:
            after = stretch.cover.after
            cover = next((c for c in inside[0].covers if c.after == after), None)
            if cover is None:
                return None
        again = _stretch(inside, level, card, computed_s, cover)
        if again.end_s - again.start_s < card.break_even_of_s(level):
            return None
        newer.append(again)
    return tuple(newer)


def whole_job(found: Sequence[Worth], card: ClockCosts, *, max_slowdown: float) -> float:
    """Share of the energy that one clock for the whole iteration would save within the slowdown, by
    the same assumptions: computation takes as much longer as the clock is lower, communication
    keeps its pace. What lies between two levels is linear."""
    share = max(w.compute_s / w.iteration_s for w in found)
    lowest = card.levels[-1].stretch if card.levels else 1.0
    stretch = lowest if share == 0.0 else min(lowest, 1.0 + max_slowdown / share)
    steps = [(1.0, card.computing_w, card.waiting_w)]
    steps += [(level.stretch, level.computing_w, level.waiting_w) for level in card.levels]
    computing_w, waiting_w = steps[0][1:]
    for (a, *low), (b, *high) in pairwise(steps):
        if a <= stretch <= b and b > a:
            part = (stretch - a) / (b - a)
            computing_w, waiting_w = (x + part * (y - x) for x, y in zip(low, high, strict=True))
    default_j = sum(w.iteration_j for w in found)
    low_j = sum(
        w.compute_s * stretch * computing_w + (w.iteration_s - w.compute_s) * waiting_w
        for w in found
    )
    return max(0.0, 1.0 - low_j / default_j)


def most_stretches(card: ClockCosts, iteration_s: float) -> int | None:
    """How many pairs of calls an iteration may have; None for any number."""
    pairs = card.calls_per_s * iteration_s / 2
    return None if math.isinf(pairs) else int(pairs)


def summary(found: Sequence[Worth], card: ClockCosts) -> str:
    """One sentence for the whole job."""
    saving, slowdown = job(found)
    worst = max(found, key=lambda w: w.exposed_share)
    if not any(w.stretches for w in found):
        exposed = f"Nothing to gain: {show_fraction(worst.exposed_share)} exposed"
        longest_s = max(w.longest_s for w in found)
        if longest_s < card.break_even_s:
            longest = f"the longest section takes {show_time(longest_s)}, " if longest_s else ""
            return f"{exposed}, {longest}below the break-even of {show_time(card.break_even_s)}."
        if all(most_stretches(card, w.iteration_s) == 0 for w in found):
            return (
                f"{exposed}, but an iteration of {show_time(worst.iteration_s)} is too short for "
                f"two clock calls at {card.calls_per_s:g} per second."
            )
        return f"{exposed}, but no section saves more than its switches and its delay cost."
    count = sum(len(w.stretches) for w in found)
    return (
        f"A lower clock in {count} stretch{'es' if count > 1 else ''} of communication would save "
        f"{show_fraction(saving)} of the energy at {show_fraction(slowdown)} slowdown."
    )


def job(found: Sequence[Worth]) -> tuple[float, float]:
    """Saving and slowdown of all ranks together: energies add up, the slowest rank rules."""
    energy_j = sum(w.iteration_j for w in found)
    saved_j = sum(s.saved_j for w in found for s in w.stretches)
    return saved_j / energy_j, max(w.slowdown for w in found)


class _Label(msgspec.Struct, frozen=True):
    """A way to treat the sections so far."""

    delay_s: float
    saved_j: float
    count: int
    last: LowStretch | None
    before: _Label | None


def choose(
    sections: Sequence[Section], card: ClockCosts, *, budget_s: float, most: int | None = None
) -> tuple[LowStretch, ...]:
    """Disjoint stretches over ordered sections, at most so many: most energy saved within the
    budget of delay. The command down of a stretch leaves when the one before is over."""
    ends: list[list[_Label]] = [[] for _ in range(len(sections) + 1)]
    ends[0] = [_Label(0.0, 0.0, 0, None, None)]
    overs = [_end_s(section) for section in sections]
    for a in range(len(sections)):
        ends[a + 1] += ends[a]
        for b, stretch in candidates(sections, a, card, budget_s=budget_s):
            for label in ends[bisect_right(overs, stretch.down_at_s, hi=a)]:
                count = label.count + (most is not None)
                delay_s = label.delay_s + stretch.delay_s
                if delay_s <= budget_s and (most is None or count <= most):
                    saved_j = label.saved_j + stretch.saved_j
                    ends[b + 1].append(_Label(delay_s, saved_j, count, stretch, label))
        ends[a + 1] = _undominated(ends[a + 1], budget_s)
    best: _Label | None = max(ends[-1], key=lambda label: label.saved_j)
    chosen = []
    while best is not None and best.last is not None:
        chosen.append(best.last)
        best = best.before
    return tuple(reversed(chosen))


def _end_s(section: Section) -> float:
    return section.start_s + section.length_p5_s


def _undominated(labels: list[_Label], budget_s: float) -> list[_Label]:
    """Those of which no other saves as much with as little delay and as few stretches; if there are
    too many, the one that saves most of each part of the budget."""
    labels.sort(key=lambda label: (label.delay_s, label.count, -label.saved_j))
    kept: list[_Label] = []
    best: dict[int, float] = {}
    for label in labels:
        if all(label.saved_j > saved_j for n, saved_j in best.items() if n <= label.count):
            kept.append(label)
            best[label.count] = label.saved_j
    if len(kept) <= MOST_LABELS:
        return kept
    kept.sort(key=lambda label: label.saved_j)
    parts = {(int(label.delay_s / budget_s * MOST_LABELS), label.count): label for label in kept}
    return list(parts.values())


def candidates(
    sections: Sequence[Section], a: int, card: ClockCosts, *, budget_s: float
) -> Iterator[tuple[int, LowStretch]]:
    """Every stretch that begins with section `a`, with the section that it ends with."""
    gentlest = min((level.stretch for level in card.levels), default=math.inf)
    computed_s = 0.0
    for b in range(a, len(sections)):
        if computed_s * (gentlest - 1.0) > budget_s:
            return
        for level in card.levels:
            for cover in (None, *_usable(sections[a], level)):
                stretch = _stretch(sections[a : b + 1], level, card, computed_s, cover)
                if stretch.end_s - stretch.start_s < card.break_even_of_s(level):
                    continue
                if stretch.saved_j > 0.0 and stretch.delay_s <= budget_s:
                    yield b, stretch
        computed_s += sections[b].gap_compute_s


def _usable(section: Section, level: Level) -> list[Cover]:
    """The computation before a section that may run at this clock."""
    return [cover for cover in section.covers if cover.stretch >= level.stretch]


def _stretch(
    sections: Sequence[Section],
    level: Level,
    card: ClockCosts,
    computed_s: float,
    cover: Cover | None,
) -> LowStretch:
    down, up = card.switches(level)
    lead_s = 0.0 if cover is None else cover.lead_s
    start_s, end_s = sections[0].start_s - lead_s, _end_s(sections[-1])
    lost_s = down.median_s - down.quantile(0.05)
    covered_s = covered_low_s(cover, lead_s - lost_s)
    lost_s = max(0.0, lost_s - lead_s) + up.quantile(0.95) - up.median_s
    low_s = max(0.0, end_s - sections[0].start_s - lost_s - computed_s)
    slower_s = computed_s * (level.stretch - 1.0)
    mistimed_s = (up.late_s + down.early_s) * (1.0 - 1.0 / level.stretch)
    return LowStretch(
        first=sections[0].key,
        last=sections[-1].key,
        sections=len(sections),
        sm_clock_hz=level.sm_clock_hz,
        start_s=start_s,
        end_s=end_s,
        down_at_s=start_s - down.quantile(0.05),
        up_at_s=end_s - up.quantile(0.95),
        computed_s=computed_s,
        saved_j=level.saved_w * low_s
        + covered_j(covered_s, level, card)
        - card.computing_w * mistimed_s
        - level.waiting_w * slower_s,
        delay_s=slower_s + mistimed_s,
        cover=cover,
    )


def at_level(stretch: LowStretch, level: Level, card: ClockCosts) -> LowStretch:
    """The same stretch at another clock: only its commands change."""
    down, up = card.switches(level)
    return msgspec.structs.replace(
        stretch,
        sm_clock_hz=level.sm_clock_hz,
        memory_clock_hz=level.memory_clock_hz,
        down_at_s=stretch.start_s - down.quantile(0.05),
        up_at_s=stretch.end_s - up.quantile(0.95),
    )


def covered_low_s(cover: Cover | None, low_s: float) -> float:
    """Computation of a cover of whose time so much, at its end, is at the low clock."""
    if cover is None:
        return 0.0
    return cover.compute_s * min(1.0, max(0.0, low_s / cover.lead_s))


def covered_j(covered_s: float, level: Level, card: ClockCosts) -> float:
    """What computation with slack saves at a clock: it takes longer at less power, and the waiting
    after it is shorter by as much."""
    longer_s = covered_s * (level.stretch - 1.0)
    default_j = covered_s * card.computing_w + longer_s * level.waiting_w
    return default_j - covered_s * level.stretch * level.computing_w


def _rare(sections: Sequence[Section], card: ClockCosts) -> Iterator[Reason]:
    for section in sections:
        share = show_fraction(section.presence)
        if section.length_s > 2 * card.break_even_s:
            text = f"in {share} of the iterations only: left to the watch for long waits"
            yield Reason("reactive", section.key, text)
        else:
            yield Reason("rare", section.key, f"in {share} of the iterations only")


def _refused(
    sections: Sequence[Section], chosen: Sequence[LowStretch], card: ClockCosts, most: int | None
) -> Iterator[Reason]:
    for section in sections:
        if any(s.start_s <= section.start_s < s.end_s for s in chosen):
            continue
        length, even = show_time(section.length_p5_s), show_time(card.break_even_s)
        if section.length_p5_s < card.break_even_s:
            yield Reason("below_break_even", section.key, f"{length} < break-even {even}")
        elif most is not None and len(chosen) >= most:
            text = f"at most {card.calls_per_s:g} clock calls per second"
            yield Reason("rate", section.key, text)
        else:
            yield Reason("no_saving", section.key, "saves less than its switches and delay cost")
