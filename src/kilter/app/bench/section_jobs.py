"""Simulated distributed jobs whose lowest harmless clocks are known. Nothing here is measured.

A section keeps its length down to a clock that is drawn for it, and grows with a power of the
clock's period below. Neither lies on the grid of the search, so costs of every size occur. The
slowest rank rules, so a rank that waits may go lower. Iterations carry noise of their own, and
sections more of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kilter.clocks.plan.section_search import Depths, SearchTarget, Seen
from kilter.clocks.plan.worth import ClockCosts
from kilter.device.sim.noise import Noise, NoiseSource

BLOCK = 5
"""A block has so many iterations."""
SECTION_NOISE = 0.03
"""A section's own length has this standard deviation, relative."""
DEEPER = 0.7
"""A waiting rank keeps its section's length down to this share of the others' clock."""
SENSITIVITY = (0.3, 1.0)
"""The exponent is in this range; at 1 a section takes the same number of cycles at every lower
clock."""


class SectionScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of job; the harmless clocks are drawn by the seed."""

    what: str
    iteration_s: float
    shares: tuple[float, ...]
    """Each section has this exposed length over the iteration."""
    roles: tuple[tuple[int, ...], ...]
    """The ranks are listed by role; they are the same in every section."""
    waiting: tuple[int, ...] = ()
    """These ranks wait for a straggler in every section."""

    @property
    def ranks(self) -> int:
        return sum(len(role) for role in self.roles)


def _role(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


SECTION_SCENARIOS: dict[str, SectionScenario] = {
    "ddp_sockets_2": SectionScenario(
        what="GPT, DDP over a 5 GB/s network: 271 of 352 ms exposed, as measured on two H200s",
        iteration_s=0.352,
        shares=(0.77,),
        roles=(_role(0, 2),),
    ),
    "ddp_nvlink_2": SectionScenario(
        what="GPT, DDP over NVLink: 0.86 of 78.5 ms exposed in one piece, as measured",
        iteration_s=0.0785,
        shares=(0.011,),
        roles=(_role(0, 2),),
    ),
    "fsdp_8": SectionScenario(
        what="FSDP of 8 GPUs over a slow network, 3 s per step",
        iteration_s=3.0,
        shares=(0.09, 0.08, 0.06, 0.05),
        roles=(_role(0, 8),),
    ),
    "tp_pp_16": SectionScenario(
        what="4 pipeline stages of 4 tensor-parallel GPUs, 4 s per step",
        iteration_s=4.0,
        shares=(0.12, 0.05),
        roles=tuple(_role(4 * stage, 4) for stage in range(4)),
    ),
    "straggler_16": SectionScenario(
        what="DDP of 16 GPUs, of which one is late and 15 wait",
        iteration_s=2.0,
        shares=(0.25, 0.1),
        roles=(_role(0, 16),),
        waiting=_role(1, 15),
    ),
    "fsdp_tp_32": SectionScenario(
        what="FSDP of 4 nodes of 8 tensor-parallel GPUs, of which one node is late, 2.5 s per step",
        iteration_s=2.5,
        shares=(0.18, 0.11, 0.05),
        roles=(_role(0, 32),),
        waiting=_role(8, 24),
    ),
    "pp_uneven_6": SectionScenario(
        what="6 pipeline stages of one GPU each, of which 4 wait, 1.6 s per step",
        iteration_s=1.6,
        shares=(0.3, 0.09),
        roles=tuple(_role(stage, 1) for stage in range(6)),
        waiting=(1, 2, 4, 5),
    ),
    "dp_pp_12": SectionScenario(
        what="3 stages of 4 data-parallel GPUs over a slow network, 6 s per step",
        iteration_s=6.0,
        shares=(0.22, 0.07, 0.03),
        roles=tuple(_role(4 * stage, 4) for stage in range(3)),
    ),
    "mix_64": SectionScenario(
        what="64 GPUs: DDP of 4 stages with a late node, 5 s per step",
        iteration_s=5.0,
        shares=(0.15, 0.06, 0.04),
        roles=tuple(_role(16 * stage, 16) for stage in range(4)),
        waiting=_role(8, 56),
    ),
}


class SectionJob:
    """One run of a scenario on simulated cards. Same seed, same calls, same results."""

    def __init__(
        self, scenario: SectionScenario, card: ClockCosts, *, seed: int, noise: float
    ) -> None:
        self.scenario = scenario
        self.card = card
        self.iterations = 0
        self.lowest = len(card.levels)
        draws, jitter, self._lengths = np.random.default_rng([seed, 13]).spawn(3)
        kind = Noise(white=noise, drift=noise / 5, outlier_probability=0.005)
        self._noise = NoiseSource(kind, jitter)
        self._clock = np.array([1.0, *(1.0 / level.stretch for level in card.levels)])
        self._harmless = self._draw(draws)
        self._sensitivity = draws.uniform(*SENSITIVITY, (len(scenario.shares), 1))
        self._mistimed_s = card.up.late_s + card.down.early_s
        self._saved_w = np.array([0.0, *(level.saved_w for level in card.levels)])

    def _draw(self, random: np.random.Generator) -> np.ndarray:
        """(sections, ranks): the lowest clock that changes nothing, over the highest clock."""
        scenario = self.scenario
        clock = np.ones((len(scenario.shares), scenario.ranks))
        for j in range(len(scenario.shares)):
            for role in scenario.roles:
                clock[j, list(role)] = math.exp(random.uniform(math.log(self._clock[-1]), 0.0))
        clock[:, list(scenario.waiting)] *= DEEPER
        return clock

    def targets(self) -> tuple[SearchTarget, ...]:
        """The sections that are long enough for two switches: the others are left alone."""
        scenario = self.scenario
        wait = tuple(0.5 if r in scenario.waiting else 0.0 for r in range(scenario.ranks))
        return tuple(
            SearchTarget(key=f"section{j}", share=share, roles=scenario.roles, wait=wait)
            for j, share in enumerate(scenario.shares)
            if share * scenario.iteration_s >= self.card.break_even_s
        )

    def run(self, depths: Depths) -> Seen:
        """A block of iterations."""
        self.iterations += BLOCK
        scenario, stretch = self.scenario, self._stretches(depths)
        shares = np.array(scenario.shares[: len(stretch)])
        factors = np.array([self._noise.draw()[0] for _ in range(BLOCK)])
        own = 1.0 + self._lengths.normal(0.0, SECTION_NOISE, (BLOCK, len(stretch)))
        step = scenario.iteration_s * (1.0 + self.slowdown(depths)) * factors
        sections = scenario.iteration_s * shares * stretch * own * factors[:, None]
        return Seen(
            step_s=float(np.median(step)), section_s=tuple(np.median(sections, axis=0).tolist())
        )

    # The truth.

    def _stretches(self, depths: Depths) -> np.ndarray:
        """Length of each section over its length by default; the slowest rank rules."""
        chosen = self._clock[np.array(depths, dtype=int)]
        ratio = np.maximum(1.0, self._harmless[: len(chosen)] / chosen)
        result: np.ndarray = (ratio ** self._sensitivity[: len(chosen)]).max(axis=1)
        return result

    def slowdown(self, depths: Depths) -> float:
        """True slowdown of the iteration: longer sections, and switches that act too early or too
        late for computation at full clock."""
        if not depths:
            return 0.0
        shares = np.array(self.scenario.shares[: len(depths)])
        longer = float((shares * (self._stretches(depths) - 1.0)).sum())
        lowest = np.array(depths, dtype=int).max(axis=1)
        mistimed_s = self._mistimed_s * (1.0 - self._clock[lowest])
        return longer + float(mistimed_s.sum()) / self.scenario.iteration_s

    def saving(self, depths: Depths) -> float:
        """True saving of energy, after what the two switches of every section take away."""
        card, scenario = self.card, self.scenario
        exposed = sum(scenario.shares)
        default_w = (1 - exposed) * card.computing_w + exposed * card.waiting_w
        saved_w = 0.0
        lost_s = card.down.median_s - card.down.quantile(0.05)
        lost_s += card.up.quantile(0.95) - card.up.median_s
        for j, row in enumerate(depths):
            low = max(0.0, scenario.shares[j] - lost_s / scenario.iteration_s)
            saved_w += low * float(self._saved_w[list(row)].mean())
        slower_w = self.slowdown(depths) * card.waiting_w
        return (saved_w - slower_w) / default_w

    def lowest_harmless(self, bound: float) -> Depths:
        """By section and rank, the deepest step that costs no more than the section's share of the
        bound."""
        count = max(1, len(self.targets()))
        rows = []
        for j in range(len(self.targets())):
            allowed = 1.0 + bound / count / self.scenario.shares[j]
            deepest = []
            for harmless in self._harmless[j]:
                ratio = np.maximum(1.0, harmless / self._clock) ** self._sensitivity[j]
                deepest.append(int(np.flatnonzero(ratio <= allowed * (1 + 1e-12)).max()))
            rows.append(tuple(deepest))
        return tuple(rows)


def step_error(found: Depths, truth: Depths) -> int:
    """Largest distance of a found depth from the true one, over sections and ranks."""
    pairs = zip(found, truth, strict=True)
    return max(
        (abs(a - b) for row, true in pairs for a, b in zip(row, true, strict=True)), default=0
    )


def names(wanted: str) -> Sequence[str]:
    """`all`, or one scenario."""
    return tuple(SECTION_SCENARIOS) if wanted == "all" else (wanted,)
