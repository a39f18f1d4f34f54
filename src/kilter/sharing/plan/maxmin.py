"""The policy `maxmin`: the largest predicted slow-down as small as possible, then the next, and so
on (lexicographic), under the fitted time model.

Search: from the ratios in force, from the even split and from one GPU for each job, one job after
another gets the best of all its ratios with the others held, then the slowest exchanges tenths with
another, until nothing is better. The same from the best of all placements in coarse steps, which is
taken where it ends clearly better.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kilter.core.reasons import Reason
from kilter.sharing.model import Array, JobCost, predict
from kilter.sharing.plan.snapshot import (
    TENTHS,
    Decision,
    Ratios,
    SharedJob,
    Snapshot,
    allowed,
    at_least_one,
    compositions,
    even_ratios,
    fits,
    in_force,
    placed,
    shards,
    shown,
    usable,
)


class Caution(msgspec.Struct, frozen=True):
    """When a better prediction is worth a move."""

    gain: float = 0.05
    """The largest slow-down, or, while that does not rise, the mean slow-down has to fall by at
    least this, relatively."""
    cool_down_periods: int = 2
    """A job that was moved is left alone for so many periods."""


_ALL_RATIOS_UP_TO = 4
"""Every ratio of a job is tried on up to so many GPUs (286 for 4); beyond, moves and even
splits."""
_STEPS = (1, 2, 3, 5)
"""In an exchange each of two jobs gives so many tenths to the other's GPU."""
_GRIDS = (1, 2, 5, 10)
"""All combinations of the ratios in steps of so many tenths are tried, from the finest."""
_MOST_STATES = 5000
"""Each state of all jobs together is looked at where there are up to so many: three jobs on two
GPUs have 1331 in tenths, five have 243 in halves, and five on four GPUs 3125 in wholes and even
splits."""
_CLEARLY = 0.02
"""Another placement of all jobs is taken if the largest slow-downs differ by at least this,
relatively."""
_ROUNDS = 20
_DIGITS = 4

Key = tuple[float, ...]
SearchState = tuple[Ratios, ...]


class _Cases(msgspec.Struct, frozen=True):
    """States to choose from: the samples of all at once, and each as a state."""

    samples: Array
    at: Callable[[int], SearchState]


def policy(snapshot: Snapshot, *, caution: Caution | None = None) -> tuple[Decision, ...]:
    """New ratios where the model promises enough. Jobs without a fitted cost stay as they are."""
    caution = caution or Caution()
    problem = _Problem.of(snapshot, caution)
    if problem is None:
        return ()
    now = problem.state
    before = problem.slowdowns(now)
    best = min((problem.descend(seed) for seed in problem.seeds()), key=problem.key)
    best = problem.descend(best, exchanges=True)
    if (seed := problem.best_of_grid()) is not None:
        other = problem.descend(seed, exchanges=True)
        clearly = problem.slowdowns(best).max() * (1.0 - _CLEARLY)
        if problem.slowdowns(other).max() < clearly or not problem.possible(best):
            best = other
    best = problem.fewest_moves(best)
    after = problem.slowdowns(best)
    falls = after.max() < before.max() * (1.0 - caution.gain)
    level = after.max() <= before.max() and after.mean() < before.mean() * (1.0 - caution.gain)
    urgent = not problem.possible(now)
    if not (falls or level or urgent) or not problem.possible(best):
        return ()
    text = (
        f"largest slow-down {before.max():.2f} -> {after.max():.2f}, "
        f"mean {before.mean():.2f} -> {after.mean():.2f} predicted"
    )
    code = "not-possible-as-it-was" if urgent else "fairer" if falls else "more-work-done"
    return tuple(
        Decision(job.name, job.ratios, new, Reason(code, job.name, text))
        for job, old, new in zip(problem.jobs, now, best, strict=True)
        if new != old
    )


class _Problem:
    """The jobs that the model describes, and what their ratios would do."""

    def __init__(
        self,
        snapshot: Snapshot,
        jobs: Sequence[SharedJob],
        state: SearchState,
        fixed: Sequence[bool],
    ) -> None:
        self.snapshot, self.jobs, self.state, self._fixed = snapshot, jobs, state, fixed
        self._costs: list[JobCost] = [job.cost for job in jobs if job.cost is not None]
        lines = [job.slowdown_line() for job in jobs]
        self._offset = np.array([offset for offset, _ in lines])
        alone = np.array([job.alone_s for job in jobs], dtype=float)
        self._slope = np.array([slope for _, slope in lines]) / alone
        self._even = [even_ratios(snapshot, job) for job in jobs]
        self._known: list[dict[Ratios, bool]] = [{} for _ in jobs]
        self._moved: dict[SearchState, SearchState | None] = {}
        self._options = [self._ratios_of(i) for i in range(len(jobs))]

    @classmethod
    def of(cls, snapshot: Snapshot, caution: Caution) -> _Problem | None:
        jobs = [
            job
            for job in snapshot.jobs
            if job.cost is not None
            and job.alone_s
            and job.ratios is not None
            and usable(snapshot, job)
        ]
        if not jobs:
            return None
        state = tuple(job.ratios for job in jobs if job.ratios is not None)
        fixed = [
            job.periods_since_move is not None
            and job.periods_since_move < caution.cool_down_periods
            and allowed(snapshot, job, ratios)
            for job, ratios in zip(jobs, state, strict=True)
        ]
        return cls(snapshot, jobs, state, fixed)

    def _ratios_of(self, i: int) -> list[Ratios]:
        """The ratios that are tried for a job at any time."""
        job = self.jobs[i]
        own, count = usable(self.snapshot, job), len(self.snapshot.gpus)
        if len(own) <= _ALL_RATIOS_UP_TO:
            parts: Iterator[Sequence[int]] = iter(compositions(len(own)))
        else:
            parts = _even_over_subsets(len(own))
        found = [placed(part, own, count) for part in parts]
        return [ratios for ratios in found if self._allowed(i, ratios)]

    def slowdowns(self, state: SearchState) -> Array:
        result: Array = self._slowdowns(self._samples(state)[None])[0]
        return result

    def _samples(self, state: SearchState) -> Array:
        return np.array(
            [shards(job.global_batch, r) for job, r in zip(self.jobs, state, strict=True)],
            dtype=float,
        )

    def _slowdowns(self, samples: Array) -> Array:
        result: Array = self._offset + self._slope * predict(self._costs, samples).step_s
        return result

    def key(self, state: SearchState) -> Key:
        """Smaller is better: slow-downs from the largest down; a state that breaks a rule last."""
        if not self.possible(state):
            return (float("inf"),)
        return tuple(np.round(np.sort(self.slowdowns(state))[::-1], _DIGITS).tolist())

    def possible(self, state: SearchState) -> bool:
        ratios = in_force(self.snapshot) | {
            job.name: r for job, r in zip(self.jobs, state, strict=True)
        }
        in_order = all(self._allowed(i, r) for i, r in enumerate(state))
        return in_order and fits(self.snapshot, ratios)

    def seeds(self) -> Iterator[SearchState]:
        """In force first: on equal terms nothing moves."""
        yield self.state
        for seed in (self._even, self._one_gpu_each()):
            yield tuple(
                now if fixed else new
                for now, fixed, new in zip(self.state, self._fixed, seed, strict=True)
            )

    def _one_gpu_each(self) -> list[Ratios]:
        """The job with the longest iteration first, each on the GPU with the least work so far."""
        count = len(self.snapshot.gpus)
        busy_s = [0.0] * count
        found: list[Ratios] = [()] * len(self.jobs)
        for i in sorted(range(len(self.jobs)), key=lambda i: -(self.jobs[i].alone_s or 0.0)):
            gpu = min(usable(self.snapshot, self.jobs[i]), key=lambda g: busy_s[g])
            busy_s[gpu] += self.jobs[i].alone_s or 0.0
            alone = placed((TENTHS,), (gpu,), count)
            job = self.jobs[i]
            found[i] = alone if job.may_idle else at_least_one(alone, usable(self.snapshot, job))
        return found

    def descend(self, state: SearchState, *, exchanges: bool = False) -> SearchState:
        """Best moves of single jobs, and, if asked, of pairs, until none helps."""
        best = self.key(state)
        for _ in range(_ROUNDS):
            before = best
            for found in self._neighbours(state, exchanges):
                if found is not None and (key := self.key(found)) < best:
                    state, best = found, key
                    break
            if best == before:
                break
        return state

    def best_of_grid(self) -> SearchState | None:
        """The best of all states in the finest steps of tenths (even splits besides) in which there
        are not too many: single moves alone end where several jobs would have to move at once."""
        for step in _GRIDS:
            options = [
                [now] if fixed else [r for r in found if _in_steps(job, r, even, step)]
                for job, now, fixed, found, even in zip(
                    self.jobs, self.state, self._fixed, self._options, self._even, strict=True
                )
            ]
            if 0 < math.prod(map(len, options)) <= _MOST_STATES:
                return self._best(self._combined(options))
        return None

    def _combined(self, options: Sequence[Sequence[Ratios]]) -> _Cases:
        """Every choice of one of its ratios for each job."""
        which = np.indices([len(each) for each in options]).reshape(len(options), -1)
        rows = [[self._row(i, ratios) for ratios in each] for i, each in enumerate(options)]
        samples = np.stack(
            [np.array(r, dtype=float)[w] for r, w in zip(rows, which, strict=True)], 1
        )

        def at(index: int) -> SearchState:
            return tuple(each[k] for each, k in zip(options, which[:, index], strict=True))

        return _Cases(samples, at)

    def _neighbours(self, state: SearchState, exchanges: bool) -> Iterator[SearchState | None]:
        """The best of all ratios of the jobs one by one, which is remembered: searches from other
        states come by the same ones; then of exchanges of the slowest with another."""
        free = [i for i, fixed in enumerate(self._fixed) if not fixed]
        if free:
            if state not in self._moved:
                self._moved[state] = self._best(self._single_moves(state, free))
            yield self._moved[state]
        if not exchanges or not free:
            return
        slow = self.slowdowns(state)
        i = max(free, key=lambda k: (slow[k], -k))
        for j in free:
            if j != i:
                states = [
                    tuple(a if k == i else b if k == j else r for k, r in enumerate(state))
                    for a, b in self._exchanges(i, j, state[i], state[j])
                ]
                yield self._best(self._listed(states))

    def _single_moves(self, state: SearchState, free: Sequence[int]) -> _Cases:
        """Each free job at each of its ratios, the others as they are."""
        moves = [(i, new) for i in free for new in (*self._options[i], *self._moves(i, state[i]))]
        samples = np.repeat(self._samples(state)[None], len(moves), axis=0)
        samples[np.arange(len(moves)), [i for i, _ in moves]] = [self._row(*m) for m in moves]

        def at(index: int) -> SearchState:
            i, new = moves[index]
            return (*state[:i], new, *state[i + 1 :])

        return _Cases(samples, at)

    def _listed(self, states: Sequence[SearchState]) -> _Cases:
        samples = [[self._row(i, ratios) for i, ratios in enumerate(state)] for state in states]
        return _Cases(np.array(samples, dtype=float), states.__getitem__)

    def _moves(self, i: int, ratios: Ratios) -> list[Ratios]:
        """Tenths of one job from one GPU to another, where not all ratios are tried anyway."""
        own = usable(self.snapshot, self.jobs[i])
        if len(own) <= _ALL_RATIOS_UP_TO:
            return []
        moved = (
            _shifted(ratios, a, b, k)
            for a, b in itertools.permutations(own, 2)
            for k in range(1, ratios[a] + 1)
        )
        return [new for new in moved if self._allowed(i, new)]

    def _exchanges(
        self, i: int, j: int, mine: Ratios, theirs: Ratios
    ) -> Iterator[tuple[Ratios, Ratios]]:
        """Tenths of job i from a to b while job j moves some the other way."""
        for a, b in itertools.permutations(range(len(mine)), 2):
            for k, back in itertools.product(_STEPS, repeat=2):
                if k > mine[a] or back > theirs[b]:
                    continue
                new, other = _shifted(mine, a, b, k), _shifted(theirs, b, a, back)
                if self._allowed(i, new) and self._allowed(j, other):
                    yield new, other

    def _allowed(self, i: int, ratios: Ratios) -> bool:
        known = self._known[i]
        if ratios not in known:
            known[ratios] = allowed(self.snapshot, self.jobs[i], ratios)
        return known[ratios]

    def _best(self, cases: _Cases) -> SearchState | None:
        """The case with the smallest key that memory admits."""
        if not len(cases.samples):
            return None
        ordered = np.round(np.sort(self._slowdowns(cases.samples), axis=-1), _DIGITS)
        for index in np.lexsort(ordered.T):  # the last key, the largest slow-down, rules
            case = cases.at(int(index))
            if self.possible(case):
                return case
        return None

    def _row(self, i: int, ratios: Ratios) -> tuple[int, ...]:
        return shards(self.jobs[i].global_batch, ratios)

    def fewest_moves(self, state: SearchState) -> SearchState:
        """Take back what hardly helps: moves without which no slow-down key gets worse by 1 %."""
        for i, old in enumerate(self.state):
            kept = (*state[:i], old, *state[i + 1 :])
            if kept == state or not self.possible(kept):
                continue
            with_move, without = self.slowdowns(state), self.slowdowns(kept)
            if (
                without.max() <= with_move.max() * 1.01
                and without.mean() <= with_move.mean() * 1.01
            ):
                state = kept
        return state


def _in_steps(job: SharedJob, ratios: Ratios, even: Ratios, step: int) -> bool:
    """Whether the parts are multiples of so many tenths, or even. The tenths that ranks keep
    because none may be idle are counted where there are most."""
    parts = list(ratios)
    if not job.may_idle:
        most = parts.index(max(parts))
        parts = [0 if part == 1 else part for part in parts]
        parts[most] += ratios.count(1)
    return all(part % step == 0 for part in parts) or ratios == even


def _even_over_subsets(count: int) -> Iterator[Sequence[int]]:
    for size in range(1, min(count, TENTHS) + 1):
        each, extra = divmod(TENTHS, size)
        for subset in itertools.combinations(range(count), size):
            part = [0] * count
            for position, g in enumerate(subset):
                part[g] = each + (position < extra)
            yield part


def _shifted(ratios: Ratios, source: int, destination: int, tenths: int) -> Ratios:
    new = list(ratios)
    new[source] -= tenths
    new[destination] += tenths
    return tuple(new)


def describe(decision: Decision) -> str:
    """`resnet50: [10,0] -> [5,5]: REASON`."""
    return f"{decision.job}: {shown(decision.before)} -> {shown(decision.after)}: {decision.reason}"
