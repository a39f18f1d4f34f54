"""The lowest harmless clock of each section and GPU, searched on the running job. Pure.

Coroutines that yield a `SectionTrial` (run a block of iterations at these depths) and are sent what
was `Seen`. A depth is a number of steps below the default clock, 0 for the default itself. Two
searches:

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
given back section by section until it is.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Sequence

import msgspec

from kilter.clocks.plan.guard import Contract, Verdict
from kilter.model.stats import log_evidence_above

PAIRS = 60
"""A test that is still undecided after this many pairs takes nothing."""
SECTION_CONFIRM_PAIRS = 300
"""The same for the confirmation: all sections together come closer to the bound."""
SPENT = 0.6
"""Share of the slowdown budget that is divided among the sections: a sum close to the bound cannot
be confirmed, and then sections give up steps that were harmless."""
LEAST_PAIRS = 3
"""Pairs before a section's own time may reject."""
COARSE_STEP = 3
"""Steps between the depths that are tried first."""
WAITING = 0.1
"""A rank waits if this share of the section's length passes before the others arrive."""

Depths = tuple[tuple[int, ...], ...]
"""By section, by rank."""


class SearchTarget(msgspec.Struct, frozen=True, kw_only=True):
    """A section whose clock is searched."""

    key: str
    share: float
    """Its length over the iteration's."""
    roles: tuple[tuple[int, ...], ...]
    """Ranks that do the same work in it."""
    wait: tuple[float, ...]
    """By rank: share of the section's length that it waits for others."""


class SectionTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Run one block of iterations at these depths."""

    depths: Depths
    reason: str


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a block gave: medians over its iterations, of the slowest rank."""

    step_s: float
    section_s: tuple[float, ...]


Search = Generator[SectionTrial, Seen, Depths]


def stepwise(targets: Sequence[SearchTarget], *, lowest: int, threshold: float) -> Search:
    """The patent's search. `threshold`: a block slower than the one before by this share has
    degraded."""
    ranks = sum(len(role) for role in targets[0].roles) if targets else 0
    depths = [[0] * ranks for _ in targets]
    for place, target in enumerate(targets):
        for rank in range(ranks):
            last = (
                yield SectionTrial(depths=_frozen(depths), reason=f"{target.key}: as it is")
            ).step_s
            while depths[place][rank] < lowest:
                depths[place][rank] += 1
                reason = f"{target.key}, rank {rank}: one step lower"
                step_s = (yield SectionTrial(depths=_frozen(depths), reason=reason)).step_s
                if step_s > last * (1.0 + threshold):
                    depths[place][rank] -= 1
                    break
                last = step_s
    return _frozen(depths)


def search(
    targets: Sequence[SearchTarget], *, lowest: int, contract: Contract, seed: int = 0
) -> Search:
    """Ours: interleaved, sequential, coarse to fine, by role, then by waiting, then confirmed."""
    found = yield from _Search(targets, lowest, contract, seed).run()
    return found


class _Search:
    def __init__(
        self, targets: Sequence[SearchTarget], lowest: int, contract: Contract, seed: int
    ) -> None:
        self._targets = targets
        self._lowest = lowest
        self._contract = contract
        self._random = random.Random(seed)
        ranks = sum(len(role) for role in targets[0].roles) if targets else 0
        self._default = tuple((0,) * ranks for _ in targets)

    def run(self) -> Search:
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

    def _descend(
        self, j: int, ranks: Sequence[int], good: int
    ) -> Generator[SectionTrial, Seen, int]:
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
            if not (yield from self._safe(_with(self._default, j, ranks, depth), j)):
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
            if (yield from self._safe(found, None, tests=tests)):
                break
            j = order[(tests - 1) % len(order)]
            found = (*found[:j], tuple(max(0, depth - 1) for depth in found[j]), *found[j + 1 :])
        return found

    def _safe(
        self, depths: Depths, j: int | None, *, tests: int = 1
    ) -> Generator[SectionTrial, Seen, bool]:
        """Pairs of the candidate and the default until there is evidence. With a section, its own
        time may reject early."""
        error = self._contract.share(tests) if j is None else self._contract.error_probability
        steps: list[float] = []
        lengths: list[float] = []
        while len(steps) < (SECTION_CONFIRM_PAIRS if j is None else PAIRS):
            candidate, default = yield from self._pair(depths)
            steps.append(math.log(candidate.step_s / default.step_s))
            if j is not None:
                lengths.append(math.log(candidate.section_s[j] / default.section_s[j]))
                if self._too_long(lengths, j):
                    return False
            verdict = self._contract.judge(steps, error_probability=error)
            if verdict is Verdict.DEGRADED:
                return False
            if verdict is Verdict.SAFE and not self._looks_too_long(lengths, j):
                return True
        return False

    def _pair(self, depths: Depths) -> Generator[SectionTrial, Seen, tuple[Seen, Seen]]:
        seen: dict[bool, Seen] = {}
        for default in self._random.sample([True, False], 2):
            arm = self._default if default else depths
            seen[default] = yield SectionTrial(
                depths=arm, reason="default" if default else "candidate"
            )
        return seen[False], seen[True]

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
        return j is not None and (
            len(lengths) < LEAST_PAIRS or statistics.fmean(lengths) > self._allowed(j)
        )


def _with(depths: Depths, j: int, ranks: Sequence[int], depth: int) -> Depths:
    chosen = tuple(depth if r in ranks else own for r, own in enumerate(depths[j]))
    return (*depths[:j], chosen, *depths[j + 1 :])


def _frozen(depths: Sequence[Sequence[int]]) -> Depths:
    return tuple(tuple(row) for row in depths)
