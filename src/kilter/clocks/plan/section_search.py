"""The lowest harmless clock of each section and GPU, searched on the running job. Pure.

Coroutines that yield `Trials` (run a block of iterations at each of these depths, one after the
other) and are sent what was `Seen` of each. A depth is a number of steps below the default
clock, 0 for the default itself. Two searches:

`stepwise` is the patent's (US 2025/0264922, S221 to S227), taken literally: for each section of
each GPU lower the clock by one step, run, compare with the run before, and stop at the minimum or
when performance degrades. The patent does not say when it does; here, when a block is slower by
more than the bound. Losses below the bound add up over the steps, and noise looks like a loss.

`search` is ours. The default is the reference of every comparison, in pairs of blocks in random
order; the pairs are judged by a sequential test of the step time. A section's own time is a second
sensor, sharper for short sections, which may only reject: each section has its share of the
slowdown budget. Ranks of one role move together while all others stay at the default, so that the
losses of one search do not hide in another; then those of them that wait for the rest go deeper
alone. Depths are tried coarsely first. What was found is confirmed as a whole on fresh pairs, or
given back section by section until it is. Depths that an earlier run has found are only confirmed.

`bench/sections` plays these coroutines against simulated jobs; `clocks/section_agreement` runs them
on the ranks of a job.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Generator, Sequence

import msgspec

from kilter.clocks.plan.guard import Contract, Verdict
from kilter.model.stats import log_evidence_above

PAIRS = 60
"""A test that is still undecided after this many pairs takes nothing."""
SECTION_CONFIRM_PAIRS = 300
"""A confirmation that is still undecided after this many pairs takes nothing: all sections together
come closer to the bound."""
SPENT = 0.6
"""This share of the slowdown budget is divided among the sections: a sum close to the bound cannot
be confirmed, and then sections give up steps that were harmless."""
LEAST_PAIRS = 3
"""So many pairs are needed before a section's own time may reject."""
PAIRS_AT_ONCE = 3
"""So many pairs run between two judgements: on a running job each judgement takes messages between
the ranks."""
COARSE_STEP = 3
"""The depths that are tried first are so many steps apart."""
WAITING = 0.1
"""A rank waits if this share of the section's length passes before the others arrive."""

Depths = tuple[tuple[int, ...], ...]
"""Each section has one for each rank."""


class SearchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A section whose clock is searched."""

    key: str
    share: float
    """It is the section's length over the iteration's."""
    roles: tuple[tuple[int, ...], ...]
    """Ranks of one role do the same work in it; a rank without this section is in none."""
    wait: tuple[float, ...]
    """Each rank of the job waits this share of the section's length for others."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a block gave: medians over its iterations, of the slowest rank."""

    step_s: float
    section_s: tuple[float, ...] = ()
    """It has a time for each section; it is empty where nobody sees the sections' own times."""
    energy_j: float | None = None
    """All ranks use this per iteration; None: not known."""


class FoundDepths(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a search."""

    depths: Depths
    log_time: tuple[float, ...] = ()
    """Each pair that confirmed the whole has the log of its step time over the default's."""
    log_energy: tuple[float, ...] = ()
    """It holds the same of the energy, where that is known."""


Trials = tuple[Depths, ...]
Outcomes = tuple[Seen, ...]
Search = Generator[Trials, Outcomes, FoundDepths]


def stepwise(targets: Sequence[SearchTarget], *, lowest: int, threshold: float) -> Search:
    """The patent's search. `threshold`: a block slower than the one before by this share has
    degraded."""
    depths = [list(row) for row in default_depths(targets)]
    for place, target in enumerate(targets):
        for rank in sorted(rank for role in target.roles for rank in role):
            (seen,) = yield (_frozen(depths),)
            last = seen.step_s
            while depths[place][rank] < lowest:
                depths[place][rank] += 1
                (seen,) = yield (_frozen(depths),)
                if seen.step_s > last * (1.0 + threshold):
                    depths[place][rank] -= 1
                    break
                last = seen.step_s
    return FoundDepths(depths=_frozen(depths))


def _shallower(depth: int) -> int:
    return max(0, depth - 1)


def search(
    targets: Sequence[SearchTarget],
    *,
    lowest: int,
    contract: Contract,
    seed: int = 0,
    known: Depths | None = None,
    back: Callable[[int], int] = _shallower,
) -> Search:
    """Ours: interleaved, sequential, coarse to fine, by role, then by waiting, then confirmed.
    `known`: what an earlier run of the same job has found, which is only confirmed. `back`: the
    depth one step back from another."""
    return (yield from _Search(targets, lowest, contract, seed, back).run(known))


def watch(
    found: Depths, targets: Sequence[SearchTarget], *, contract: Contract, seed: int = 0
) -> Generator[Trials, Outcomes, str]:
    """Pairs of what is held and the default for as long as the job runs; returns why the default
    has to stand again, once there is evidence that the bound is broken."""
    pairs = _Search(targets, 0, contract, seed)
    log_time: list[float] = []
    while not contract.broken(log_time):
        seen = yield from pairs.pairs(found, 1)
        log_time += [math.log(candidate.step_s / default.step_s) for candidate, default in seen]
    return f"slower than allowed in {len(log_time)} comparisons while it was held"


def default_depths(targets: Sequence[SearchTarget]) -> Depths:
    """No section is slowed down."""
    return tuple((0,) * len(target.wait) for target in targets)


class _Search:
    def __init__(
        self,
        targets: Sequence[SearchTarget],
        lowest: int,
        contract: Contract,
        seed: int,
        back: Callable[[int], int] = _shallower,
    ) -> None:
        self._targets = targets
        self._lowest = lowest
        self._contract = contract
        self._back = back
        self._random = random.Random(seed)
        self._default = default_depths(targets)

    def run(self, known: Depths | None) -> Search:
        if known is not None:
            return (yield from self._confirmed(known))
        found = self._default
        for j, target in enumerate(self._targets):
            for role in target.roles:
                depth = yield from self._descend(j, role, 0)
                found = _with(found, j, role, depth)
                waiting = [r for r in role if target.wait[r] >= WAITING]
                if waiting and len(waiting) < len(role):
                    depth = yield from self._descend(j, waiting, depth)
                    found = _with(found, j, waiting, depth)
        return (yield from self._confirmed(found))

    def _descend(self, j: int, ranks: Sequence[int], good: int) -> Generator[Trials, Outcomes, int]:
        """The lowest safe depth of these ranks in section `j` from a safe one on: coarse steps down
        to the first that is not safe, then halving between the last safe depth and that one. What
        ends the descent is tested once more, since a single wrong "no" early on would cost many
        steps."""
        bad = self._lowest + 1
        doubted: set[int] = set()
        while good < self._lowest and (bad - good > 1 or bad not in doubted):
            depth = (good + bad) // 2
            if bad > self._lowest:
                depth = min(good + COARSE_STEP, self._lowest)
            elif bad - good == 1:
                depth = bad
                doubted.add(depth)
            if (yield from self._safe(_with(self._default, j, ranks, depth), j)) is None:
                bad = depth
                continue
            good = depth
            if depth in doubted:
                bad = self._lowest + 1
        return good

    def _confirmed(self, found: Depths) -> Search:
        """Everything together on fresh pairs; while that fails, one section after the other gives
        up a step, the shortest first, for it saves least."""
        order = sorted(range(len(self._targets)), key=lambda j: self._targets[j].share)
        tests = 0
        while found != self._default:
            tests += 1
            evidence = yield from self._safe(found, None, tests=tests)
            if evidence is not None:
                return msgspec.structs.replace(evidence, depths=found)
            j = order[(tests - 1) % len(order)]
            found = (*found[:j], tuple(map(self._back, found[j])), *found[j + 1 :])
        return FoundDepths(depths=found)

    def _safe(
        self, depths: Depths, j: int | None, *, tests: int = 1
    ) -> Generator[Trials, Outcomes, FoundDepths | None]:
        """Pairs of the candidate and the default until there is evidence; None: not safe. With a
        section, its own time may reject early."""
        error = self._contract.share(tests) if j is None else self._contract.error_probability
        steps: list[float] = []
        energies: list[float] = []
        lengths: list[float] = []
        while len(steps) < (SECTION_CONFIRM_PAIRS if j is None else PAIRS):
            for candidate, default in (yield from self.pairs(depths, PAIRS_AT_ONCE)):
                steps.append(math.log(candidate.step_s / default.step_s))
                if candidate.energy_j and default.energy_j:
                    energies.append(math.log(candidate.energy_j / default.energy_j))
                if j is not None and candidate.section_s:
                    lengths.append(math.log(candidate.section_s[j] / default.section_s[j]))
            if j is not None and self._too_long(lengths, j):
                return None
            verdict = self._contract.judge_at_any_time(steps, error_probability=error)
            if verdict is Verdict.DEGRADED:
                return None
            if verdict is Verdict.SAFE and not self._looks_too_long(lengths, j):
                return FoundDepths(depths=depths, log_time=tuple(steps), log_energy=tuple(energies))
        return None

    def pairs(
        self, depths: Depths, count: int
    ) -> Generator[Trials, Outcomes, list[tuple[Seen, Seen]]]:
        """(candidate, default) of so many pairs, each in random order."""
        orders = [self._random.sample([True, False], 2) for _ in range(count)]
        seen = yield tuple(
            self._default if default else depths for order in orders for default in order
        )
        both = zip(seen[::2], seen[1::2], orders, strict=True)
        return [(b, a) if order[0] else (a, b) for a, b, order in both]

    def _allowed(self, j: int) -> float:
        """Log ratio of the section's time that uses up its share of the budget."""
        share = SPENT * math.expm1(self._contract.bound) / len(self._targets)
        return math.log1p(share / self._targets[j].share)

    def _too_long(self, lengths: Sequence[float], j: int) -> bool:
        if len(lengths) < LEAST_PAIRS:
            return False
        evidence = log_evidence_above(lengths, self._allowed(j))
        return evidence >= math.log(1.0 / self._contract.error_probability)

    def _looks_too_long(self, lengths: Sequence[float], j: int | None) -> bool:
        """A section whose own time nobody sees is judged by the step alone."""
        return j is not None and bool(lengths) and statistics.fmean(lengths) > self._allowed(j)


def _with(depths: Depths, j: int, ranks: Sequence[int], depth: int) -> Depths:
    chosen = tuple(depth if r in ranks else own for r, own in enumerate(depths[j]))
    return (*depths[:j], chosen, *depths[j + 1 :])


def _frozen(depths: Sequence[Sequence[int]]) -> Depths:
    return tuple(tuple(row) for row in depths)
