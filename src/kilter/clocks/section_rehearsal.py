"""A rank of a job on a simulated GPU: what low clocks in its sections do to its iterations.

The times of the iteration and of its sections are those that the rank has measured. What a clock
does to them is simulated: each switch takes a time drawn from the device's profile, computation
under a low clock takes as much longer as the clock is lower (without effect where it has slack
under communication), a rank that waits for others makes up for what it loses while it waits, and
communication keeps its pace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import numpy as np

from kilter.clocks.plan.section_job import BLOCK, SETTLING, RankOffer, key_of, own_depths
from kilter.clocks.plan.section_search import Outcomes, SearchTarget, Seen, Trials
from kilter.clocks.plan.worth import ClockCosts, LowStretch, covered_j, covered_low_s
from kilter.core.setting import Setting
from kilter.device.sim.gpu import STEADY
from kilter.device.sim.noise import NoiseSource
from kilter.device.sim.profile import Switch

T = TypeVar("T")


class SimulatedRank:
    """Iterations of one rank. Same seed, same calls, same results."""

    def __init__(
        self,
        offer: RankOffer,
        targets: Sequence[SearchTarget],
        card: ClockCosts,
        switch: Switch,
        *,
        seed: int = 0,
    ) -> None:
        self._offer = offer
        self._targets = targets
        self._card = card
        self._switch = switch
        self._wait_s = {
            t.key: t.wait[offer.rank] * t.share * offer.found.iteration_s for t in targets
        }
        self._switches, jitter = np.random.default_rng([seed, offer.rank]).spawn(2)
        self._noise = NoiseSource(STEADY, jitter)
        settings = (Setting(), *(level.setting for level in card.levels))
        self._medians = [switch.median_to_s(setting) for setting in settings]
        """One call to each depth takes this in the median."""

    def iterate(self, depths: Sequence[int]) -> Seen:
        """One iteration with the rank's stretches at these depths. Sections in the targets' order;
        those that the rank does not have take no time."""
        delay_s = saved_j = 0.0
        lengths = dict.fromkeys((t.key for t in self._targets), 0.0)
        for stretch, depth in zip(self._offer.found.stretches, depths, strict=True):
            own_s, later_s, joules = self._stretch(stretch, depth)
            lengths[key_of(stretch)] = own_s
            delay_s += later_s
            saved_j += joules
        time, power = self._noise.draw()
        found = self._offer.found
        return Seen(
            step_s=(found.iteration_s + delay_s) * time,
            section_s=tuple(length_s * time for length_s in lengths.values()),
            energy_j=(found.iteration_j - saved_j) * power,
        )

    def _stretch(self, stretch: LowStretch, depth: int) -> tuple[float, float, float]:
        """Length of a stretch, delay of the iteration, joules saved."""
        length_s = stretch.end_s - stretch.start_s
        if depth == 0:
            return length_s, 0.0, 0.0
        level = self._card.levels[depth - 1]
        calls = level.setting.calls
        low_s = stretch.down_at_s + calls * self._takes(depth)
        high_s = stretch.up_at_s + calls * self._takes(0)
        cover = stretch.cover
        begin_s = stretch.start_s + (0.0 if cover is None else cover.lead_s)
        early_s = max(0.0, stretch.start_s - low_s)
        late_s = max(0.0, high_s - stretch.end_s)
        inside_s = max(0.0, min(high_s, stretch.end_s) - max(low_s, begin_s))
        covered_s = covered_low_s(cover, begin_s - low_s)
        mistimed_s = (early_s + late_s) * (1.0 - 1.0 / level.stretch)
        slower_s = stretch.computed_s * (level.stretch - 1.0)
        if cover is not None:  # beyond its slack
            slower_s += covered_s * max(0.0, level.stretch - cover.stretch)
        if stretch.effects:
            effect, share = stretch.effects[depth - 1], inside_s / length_s
            delay_s = share * effect.delay_s + mistimed_s
            joules = share * effect.saved_j - self._card.computing_w * mistimed_s
            return length_s + delay_s, delay_s, joules
        made_up_s = min(mistimed_s + slower_s, self._wait_s.get(key_of(stretch), 0.0))
        joules = level.saved_w * max(0.0, inside_s - stretch.computed_s)
        joules += covered_j(covered_s, level, self._card)
        joules -= self._card.computing_w * mistimed_s + level.waiting_w * slower_s
        return length_s + slower_s, mistimed_s + slower_s - made_up_s, joules

    def _takes(self, depth: int) -> float:
        """Of one call of a switch to this depth."""
        spread = math.exp(self._switches.normal(0.0, self._switch.spread))
        return self._medians[depth] * spread


class SimulatedRanks:
    """All ranks of a job in one process, for a search that the script was too short for."""

    def __init__(
        self,
        offers: Sequence[RankOffer],
        targets: Sequence[SearchTarget],
        card: ClockCosts,
        switch: Switch,
        *,
        seed: int = 0,
    ) -> None:
        self._offers, self._targets = offers, targets
        self.now_s = 0.0
        """The slowest rank has come to this time."""
        self._ranks = [SimulatedRank(offer, targets, card, switch, seed=seed) for offer in offers]

    def run(self, trials: Trials) -> Outcomes:
        """The blocks of these trials, one after the other."""
        outcomes = []
        for depths in trials:
            by_rank = []
            for rank, offer in zip(self._ranks, self._offers, strict=True):
                own = own_depths(self._targets, depths, offer)
                seen = [rank.iterate(own) for _ in range(SETTLING + BLOCK)]
                by_rank.append(block_of(seen[SETTLING:]))
            outcomes.append(slowest(by_rank))
            self.now_s += (SETTLING + BLOCK) * outcomes[-1].step_s
        return tuple(outcomes)


def block_of(seen: Sequence[Seen]) -> Seen:
    """A rank's block: medians of the times, mean of the energy."""
    energies = [s.energy_j for s in seen if s.energy_j is not None]
    return Seen(
        step_s=float(np.median([s.step_s for s in seen])),
        section_s=tuple(np.median([s.section_s for s in seen], axis=0).tolist()),
        energy_j=float(np.mean(energies)) if len(energies) == len(seen) else None,
    )


def slowest(ranks: Sequence[Seen]) -> Seen:
    """The job's block: the slowest rank's times, the energy of all."""
    energies = [seen.energy_j for seen in ranks if seen.energy_j is not None]
    lengths = [seen.section_s for seen in ranks]
    return Seen(
        step_s=max(seen.step_s for seen in ranks),
        section_s=tuple(max(own) for own in zip(*lengths, strict=True)) if all(lengths) else (),
        energy_j=sum(energies) if len(energies) == len(ranks) else None,
    )


def finish(
    orders: Generator[Trials, Outcomes, T],
    trials: Trials,
    ranks: SimulatedRanks,
    goes_on: Callable[[], bool],
) -> tuple[T | None, int]:
    """Go on with a search on simulated ranks alone: its end, or None if that takes too long; and
    how many blocks were run."""
    blocks = 0
    try:
        while goes_on():
            blocks += len(trials)
            trials = orders.send(ranks.run(trials))
    except StopIteration as end:
        found: T = end.value
        return found, blocks
    return None, blocks
