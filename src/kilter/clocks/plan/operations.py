"""Clocks per unit operation: least energy within a time bound, with what switching costs. Pure.

Operations i in their order, settings k, and a switch between neighbours that takes `switch_s` and
the power of waiting (half of the time at the old setting, half at the new one). With a price on
time, lambda,

    V_i(k) = e_i(k) + lambda t_i(k) + min(V_{i-1}(k), min_j V_{i-1}(j) + switch(j, k))

where the cost of a switch is a sum over its two ends, so that one step is linear in the number of
settings. The iteration repeats, so its last setting is followed by its first. The price is the one
that maximises the dual function (V - lambda bound), found on grids that are evaluated together.
(Lagrangian relaxation of a constrained shortest path: G. Handler and I. Zang, Networks 10, 1980.)

The relaxation finds points of the convex hull only. Two neighbours, one too slow and one fast
enough, are therefore spliced at the best place, and the result is improved stretch by stretch. The
dual function is a lower bound of the energy, so every result carries the gap to the best possible
one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from kilter.core.errors import PlanError

Array = NDArray[np.float64]
Path = NDArray[np.intp]

_PRICES = 16
"""So many prices are evaluated together."""
_REFINEMENTS = 3
_FINAL = 4
"""The paths of so many prices around the best one are looked at."""
_ROUNDS = 8
"""A path is improved so many times, by one stretch each."""
_EDGES = 64
"""A stretch may begin or end at so many operations, besides those at which the path changes."""
_TRIED = 48
"""So many stretches are evaluated exactly in one round."""


class OperationsProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Operations in order, and settings of which the first is the default."""

    time_s: Array
    """It has a row for each operation and a column for each setting."""
    energy_j: Array
    """It is laid out alike."""
    waiting_w: Array
    """It has, for each setting, the power while a switch is under way."""
    switch_s: float
    """One switch takes this; it is infinite if settings cannot be changed in an iteration."""
    bound_s: float
    """The iteration may take this long."""

    @property
    def limit_s(self) -> float:
        """The bound, with room for the rounding of sums."""
        return self.bound_s * (1.0 + 1e-9)

    def check(self) -> None:
        """`PlanError` for tables that are no tables, and for a bound that the default breaks."""
        n, k = self.time_s.shape
        if n == 0 or self.energy_j.shape != (n, k) or self.waiting_w.shape != (k,):
            raise PlanError("operations need a time and an energy for every setting")
        for values in (self.time_s, self.energy_j, self.waiting_w):
            if not (np.isfinite(values).all() and (values >= 0.0).all()):
                raise PlanError("times, energies and powers must be finite and not negative")
        if not self.switch_s >= 0.0:
            raise PlanError(f"a switch cannot take {self.switch_s} s")
        if self.limit_s < float(self.time_s[:, 0].sum()):
            raise PlanError("the default itself takes longer than the bound")


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A setting for every operation."""

    path: Path
    time_s: float
    energy_j: float
    switches: int


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and how far from the best possible it can be."""

    best: Assignment
    static: Assignment
    """It is the best single setting within the bound."""
    lower_bound_j: float
    """No assignment within the bound takes less energy."""

    @property
    def gap(self) -> float:
        """Share of the energy that a better assignment could still save, at most."""
        return max(0.0, 1.0 - self.lower_bound_j / self.best.energy_j)


def assignment(problem: OperationsProblem, path: Path) -> Assignment:
    """Time and energy of a path, with its switches, including the one back to its beginning."""
    rows = np.arange(len(path))
    before = np.roll(path, 1)
    changed = before != path
    switches = int(changed.sum())
    time_s = float(problem.time_s[rows, path].sum())
    energy_j = float(problem.energy_j[rows, path].sum())
    if switches:
        waiting_w = (problem.waiting_w[before] + problem.waiting_w[path])[changed]
        time_s += switches * problem.switch_s
        energy_j += float(waiting_w.sum()) * problem.switch_s / 2
    return Assignment(path=path, time_s=time_s, energy_j=energy_j, switches=switches)


def best_static(problem: OperationsProblem) -> Assignment:
    """The single setting of least energy within the bound."""
    time_s, energy_j = problem.time_s.sum(axis=0), problem.energy_j.sum(axis=0)
    legal = np.flatnonzero(time_s <= problem.limit_s)
    k = int(legal[np.argmin(energy_j[legal])])
    return assignment(problem, np.full(len(problem.time_s), k))


def by_operation(problem: OperationsProblem, max_slowdown: float) -> Assignment:
    """Exhaustive search per operation: its setting of least energy that slows it down by at most
    this share, as if switching were free (a strategy of M. Blade and O. Kontola, Chalmers 2025)."""
    legal = problem.time_s <= (1.0 + max_slowdown) * problem.time_s[:, :1] * (1.0 + 1e-12)
    return assignment(problem, np.where(legal, problem.energy_j, np.inf).argmin(axis=1))


def plan(problem: OperationsProblem) -> Planned:
    """The assignment of least energy that keeps the bound. Never worse than the best static one."""
    problem.check()
    static = best_static(problem)
    if math.isinf(problem.switch_s):
        return Planned(best=static, static=static, lower_bound_j=static.energy_j)
    prices, lower_j = _prices(problem)
    paths = [assignment(problem, path) for path in _closed(problem, prices, static)]
    paths += [s for a, b in pairwise(paths) for s in _spliced(problem, a, b)]
    legal = [a for a in (*paths, static) if a.time_s <= problem.limit_s]
    ranked = sorted(legal, key=lambda a: (a.energy_j, a.switches))
    improved = [_improved(problem, a) for a in (*ranked[:2], static)]
    best = min(improved, key=lambda a: (a.energy_j, a.switches))
    return Planned(best=best, static=static, lower_bound_j=min(lower_j, best.energy_j))


def _prices(problem: OperationsProblem) -> tuple[Array, float]:
    """Prices of time (W) around the one that maximises the dual function; its maximum."""
    scale_w = float(problem.energy_j.sum() / max(problem.time_s.sum(), 1e-300)) or 1.0
    prices = np.concatenate([[0.0], scale_w * np.logspace(-3, 3, _PRICES - 1)])
    lower_j = 0.0
    for _ in range(_REFINEMENTS):
        dual = _chain(problem, prices) - prices * problem.bound_s
        i = int(dual.argmax())
        lower_j = max(lower_j, float(dual[i]))
        low, high = prices[max(0, i - 1)], prices[min(len(prices) - 1, i + 1)]
        prices = np.linspace(low, high, _PRICES)
    middle = int((_chain(problem, prices) - prices * problem.bound_s).argmax())
    first = min(max(0, middle - _FINAL // 2), _PRICES - _FINAL)
    return np.concatenate([[low], prices[first : first + _FINAL], [high]]), lower_j


def _chain(problem: OperationsProblem, prices: Array) -> Array:
    """Least priced energy of the operations in a row, without the way back: at most the ring's."""
    leave, arrive = _switching(problem, prices)
    value = np.zeros_like(arrive)
    work, least = np.empty_like(value), np.empty((len(prices), 1))
    for i, cost in enumerate(_costs(problem, prices)):
        if i:
            np.add(value, leave, out=work)
            np.minimum.reduce(work, axis=1, keepdims=True, out=least)
            np.add(least, arrive, out=work)
            np.minimum(value, work, out=value)
        value += cost
    result: Array = value.min(axis=1)
    return result


def _switching(problem: OperationsProblem, prices: Array) -> tuple[Array, Array]:
    """What a switch costs, divided into leaving a setting and arriving at one at each price."""
    leave = problem.switch_s * problem.waiting_w / 2
    return leave, leave + prices[:, None] * problem.switch_s


def _costs(problem: OperationsProblem, prices: Array) -> Iterator[Array]:
    """(prices, settings) of one operation after the other, computed in blocks."""
    for i in range(0, len(problem.time_s), 256):
        energy_j, time_s = problem.energy_j[i : i + 256], problem.time_s[i : i + 256]
        yield from energy_j[:, None] + prices[:, None] * time_s[:, None]


def _closed(problem: OperationsProblem, prices: Array, static: Assignment) -> list[Path]:
    """At each price the best paths with some first settings: those with which the best path without
    a way back begins and ends, and the best static one."""
    free = _traced(problem, prices, None)
    firsts = [np.full(len(prices), static.path[0]), free[0], free[-1]]
    every = _traced(problem, np.tile(prices, len(firsts)), np.concatenate(firsts))
    return list(every.T)


def _traced(problem: OperationsProblem, prices: Array, first: Path | None) -> Path:
    """(operations, prices): the best path at each price. With `first`, the first setting of each,
    which the last one has to return to; without, as if nothing followed."""
    n, k = problem.time_s.shape
    rows = np.arange(len(prices))
    leave, arrive = _switching(problem, prices)
    value = np.zeros((len(prices), k))
    if first is not None:
        value[:] = np.inf
        value[rows, first] = 0.0
    source = np.zeros((n, len(prices)), dtype=np.intp)
    moved = np.zeros((n, len(prices), k), dtype=bool)
    work = np.empty_like(value)
    for i, cost in enumerate(_costs(problem, prices)):
        if i:
            np.add(value, leave, out=work)
            work.argmin(axis=1, out=source[i])
            np.add(work[rows, source[i]][:, None], arrive, out=work)
            np.less(work, value, out=moved[i])
            np.minimum(value, work, out=value)
        value += cost
    if first is not None:
        back = leave + arrive[rows, first][:, None]
        back[rows, first] = 0.0
        value += back
    path = np.empty((n, len(prices)), dtype=np.intp)
    path[-1] = value.argmin(axis=1)
    for i in range(n - 1, 0, -1):
        path[i - 1] = np.where(moved[i, rows, path[i]], source[i], path[i])
    return path


def _spliced(problem: OperationsProblem, a: Assignment, b: Assignment) -> Iterator[Assignment]:
    """The beginning of one path and the end of the other, where that is within the bound and best,
    both ways round."""
    n = len(a.path)
    for one, other in ((a, b), (b, a)):
        if np.array_equal(one.path, other.path):
            return
        time_one, energy_one = _running(problem, one.path)
        time_other, energy_other = _running(problem, other.path)
        # The first i operations by `one`, the rest by `other`, without the switches at the seams.
        time_s = time_one[: n + 1] + time_other[n] - time_other
        energy_j = energy_one + energy_other[n] - energy_other
        seams_s = 2 * problem.switch_s
        legal = np.flatnonzero(time_s + seams_s <= problem.limit_s)
        cheapest = legal[np.argsort(energy_j[legal])[:4]]
        for i in cheapest:
            yield assignment(problem, np.concatenate([one.path[:i], other.path[i:]]))


def _improved(problem: OperationsProblem, found: Assignment) -> Assignment:
    """Set stretches of operations to one setting for as long as that saves energy within the bound.

    Stretches begin and end where the path changes, and at further operations if there are few.
    """
    for _ in range(_ROUNDS):
        better = _best_stretch(problem, found)
        if better is None or better.energy_j >= found.energy_j * (1.0 - 1e-12):
            break
        found = better
    return found


def _best_stretch(problem: OperationsProblem, found: Assignment) -> Assignment | None:
    path, n = found.path, len(found.path)
    changes = np.flatnonzero(path != np.roll(path, 1))
    further = np.unique(np.linspace(0, n - 1, _EDGES).astype(np.intp))
    edges = np.union1d(further, changes if len(changes) <= _EDGES else changes[:0])
    zero = np.zeros((1, problem.time_s.shape[1]))
    rows = np.arange(n)
    tables = []
    for table in (problem.time_s, problem.energy_j):
        excess = table - table[rows, path][:, None]
        tables.append(np.vstack([zero, excess.cumsum(axis=0)])[np.append(edges, n)])
    time_s, energy_j = tables
    begin, end = np.triu_indices(len(edges) + 1, 1)
    # Without what the switches cost, which can only be less energy and time by those inside.
    change_j = energy_j[end] - energy_j[begin]
    change_s = time_s[end] - time_s[begin]
    spare_s = problem.limit_s - found.time_s + found.switches * problem.switch_s
    order = np.argsort(np.where(change_s <= spare_s, change_j, np.inf), axis=None)[:_TRIED]
    best = None
    places = np.append(edges, n)
    for index in order:
        pair, k = divmod(int(index), problem.time_s.shape[1])
        changed = path.copy()
        changed[places[begin[pair]] : places[end[pair]]] = k
        other = assignment(problem, changed)
        if other.time_s <= problem.limit_s and (best is None or other.energy_j < best.energy_j):
            best = other
    return best


def _running(problem: OperationsProblem, path: Path) -> tuple[Array, Array]:
    """Time and energy of the first 0, 1, ... operations of a path, with the switches between."""
    rows = np.arange(len(path))
    changed = np.concatenate([[False], path[1:] != path[:-1]])
    before = np.concatenate([path[:1], path[:-1]])
    waiting_w = (problem.waiting_w[before] + problem.waiting_w[path]) / 2
    time_s = problem.time_s[rows, path] + changed * problem.switch_s
    energy_j = problem.energy_j[rows, path] + changed * problem.switch_s * waiting_w
    zero = np.zeros(1)
    return np.concatenate([zero, time_s.cumsum()]), np.concatenate([zero, energy_j.cumsum()])
