"""What the blocks of a run show: pairs of a candidate and the default, and estimates from them.

The blocks of a pair are neighbours in time, so that whatever else changes on the machine falls on
both alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kilter.clocks.plan.governor import Phase
from kilter.clocks.plan.guard import Contract
from kilter.core.events import Block
from kilter.core.plan import Goal
from kilter.core.setting import Setting
from kilter.model.stats import Estimate, paired_ratio

JUDGED = (Phase.CONFIRM.value, Phase.HOLD.value)
"""Pairs of these phases make the headline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One iteration in one arm: geometric mean over the blocks that count."""

    iteration_s: float | None
    energy_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the headline rests on."""

    iterations: int
    blocks: int
    pairs: int
    energy_pairs: int
    """Both blocks of so many pairs know their energy."""
    left_out: dict[str, int]
    """It counts, by reason, the blocks of any phase that did not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All pairs of one setting in one role: chosen from (`probe`), or judged by (`confirm`)."""

    setting: Setting
    phase: str
    chosen: bool
    time_ratio: float
    time_ci95: tuple[float, float] | None
    energy_ratio: float | None
    energy_ci95: tuple[float, float] | None
    pairs: int
    blocks: int


def usable(block: Block) -> bool:
    """It counts: nothing disturbed it, and it took time."""
    return block.clean and block.iteration_s > 0.0


_UNCLEAN = "no reason given"


def pair_up(blocks: Iterable[Block]) -> list[tuple[Block, Block]]:
    """(baseline, candidate) of every pair of which both blocks are clean.

    The blocks of a pair follow each other with no other pair between them; numbers of pairs may
    begin anew when a search is opened again.
    """
    pairs = []
    key: tuple[str, int] | None = None
    arms: dict[str, Block] = {}
    for block in blocks:
        if block.pair is None or block.arm not in ("baseline", "candidate"):
            continue
        if (block.phase, block.pair) != key:
            key, arms = (block.phase, block.pair), {}
        if usable(block):
            arms[block.arm] = block
            if len(arms) == 2:
                pairs.append((arms["baseline"], arms["candidate"]))
                arms = {}
    return pairs


Pairs = Sequence[tuple[Block, Block]]


def estimates(pairs: Pairs) -> tuple[Estimate | None, Estimate | None]:
    """Candidate over baseline: time and energy."""
    time = [math.log(ours.iteration_s / base.iteration_s) for base, ours in pairs]
    energy = [
        math.log(ours.energy_j / base.energy_j)
        for base, ours in pairs
        if ours.energy_j and base.energy_j
    ]
    return paired_ratio(time), paired_ratio(energy)


def _interval(estimate: Estimate | None) -> tuple[float, float] | None:
    if estimate is None or estimate.pairs < 2:
        return None
    return estimate.low, estimate.high


def change(
    estimate: Estimate | None, *, sign: int
) -> tuple[float | None, tuple[float, float] | None]:
    """A ratio as a fraction more (`sign` 1) or less (-1) than the baseline, with its interval."""
    if estimate is None:
        return None, None
    interval = _interval(estimate)
    ends = sorted(sign * (end - 1.0) for end in interval) if interval else None
    return sign * (estimate.ratio - 1.0), (ends[0], ends[1]) if ends else None


def allowed_slowdown(goal: Goal) -> float | None:
    """What a safe slowdown stays below; "none at all" is tested with a small margin."""
    if goal.max_slowdown is None:
        return None
    return math.expm1(Contract(max_slowdown=goal.max_slowdown).bound)


def within(goal: Goal, interval: tuple[float, float] | None) -> bool | None:
    """The whole interval of a slowdown is below the bound, or above it; None: neither."""
    bound = allowed_slowdown(goal)
    if bound is None or interval is None:
        return None
    if interval[1] <= bound:
        return True
    return False if interval[0] > bound else None


def arm_of(blocks: Sequence[Block]) -> Arm:
    """Geometric means, so that their ratio is exactly the ratio of the headline."""
    energies = [block.energy_j for block in blocks if block.energy_j]
    return Arm(
        iteration_s=_geometric_mean([block.iteration_s for block in blocks]),
        energy_j=_geometric_mean(energies) if len(energies) == len(blocks) else None,
    )


def _geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def evidence_of(blocks: Sequence[Block], pairs: Pairs, energy: Estimate | None) -> Evidence:
    """What `pairs` rest on, and which of all blocks were left out."""
    used = [block for pair in pairs for block in pair]
    return Evidence(
        iterations=sum(block.iterations for block in used),
        blocks=len(used),
        pairs=len(pairs),
        energy_pairs=energy.pairs if energy is not None else 0,
        left_out=dict(
            Counter(b.why_not or _UNCLEAN for b in blocks if not usable(b)).most_common()
        ),
    )


def rehearsed_share(pairs: Pairs) -> float:
    """Of the iterations in `pairs`: run on a simulated device after the script had ended."""
    used = [block for pair in pairs for block in pair]
    total = sum(block.iterations for block in used)
    return sum(block.iterations for block in used if block.rehearsed) / total if total else 0.0


def probes_of(pairs: Pairs, chosen: Setting) -> tuple[Probe, ...]:
    """All pairs by setting and role."""
    groups: dict[tuple[Setting, str], list[tuple[Block, Block]]] = {}
    for pair in pairs:
        ours = pair[1]
        role = "confirm" if ours.phase in JUDGED else ours.phase
        groups.setdefault((ours.setting, role), []).append(pair)
    result = []
    for (setting, role), group in sorted(groups.items(), key=_from_the_top):
        time, energy = estimates(group)
        if time is not None:
            result.append(
                Probe(
                    setting=setting,
                    phase=role,
                    chosen=setting == chosen,
                    time_ratio=time.ratio,
                    time_ci95=_interval(time),
                    energy_ratio=energy.ratio if energy is not None else None,
                    energy_ci95=_interval(energy),
                    pairs=len(group),
                    blocks=2 * len(group),
                )
            )
    return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The chosen setting against the default, as far as the blocks show it."""

    baseline: Arm
    governed: Arm
    saving: float | None
    saving_ci95: tuple[float, float] | None
    slowdown: float | None
    slowdown_ci95: tuple[float, float] | None
    evidence: Evidence
    rehearsed_share: float
    probes: tuple[Probe, ...]


def judge(blocks: Sequence[Block], *, found: Setting, chosen: Setting, stands: bool) -> Judgement:
    """What the blocks say about `chosen`; `stands`: it was concluded that the default stays."""
    pairs = pair_up(blocks)
    default = arm_of([block for block in blocks if _default(block)])
    energy: Estimate | None = None
    slowdown_ci95 = saving_ci95 = None
    if chosen == found:
        judged, baseline = pairs, default
        governed = default if stands else Arm(iteration_s=None, energy_j=None)
        slowdown = saving = 0.0 if stands else None
    else:
        judged = [pair for pair in pairs if pair[1].phase in JUDGED and pair[1].setting == chosen]
        baseline = arm_of([base for base, _ in judged]) if judged else default
        governed = arm_of([ours for _, ours in judged])
        time, energy = estimates(judged)
        slowdown, slowdown_ci95 = change(time, sign=1)
        saving, saving_ci95 = change(energy, sign=-1)
    return Judgement(
        baseline=baseline,
        governed=governed,
        saving=saving,
        saving_ci95=saving_ci95,
        slowdown=slowdown,
        slowdown_ci95=slowdown_ci95,
        evidence=evidence_of(blocks, judged, energy),
        rehearsed_share=rehearsed_share(judged),
        probes=probes_of(pairs, chosen),
    )


def _default(block: Block) -> bool:
    return block.arm == "baseline" and usable(block)


def _from_the_top(item: tuple[tuple[Setting, str], object]) -> tuple[float, float, float, bool]:
    """Highest setting first (a knob left alone is above any value), probes before judgements."""
    (setting, role), _ = item
    knobs = (setting.sm_clock_hz, setting.memory_clock_hz, setting.power_limit_w)
    sm, memory, limit = (-math.inf if knob is None else -knob for knob in knobs)
    return sm, memory, limit, role != "probe"
