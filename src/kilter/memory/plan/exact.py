"""The linear programme of the bound, and with whole choices the exact planner (HiGHS).

Variables: `x` share of each interval offloaded, `r` share recomputed, and for each operation the
stall before it, the time of recomputing before it, and the bytes moved out and in by its start.
Bytes are summed over intervals, not followed one by one, and may move at any time in the gap:
every schedule that `simulate` accepts is a feasible point, so the relaxation is a lower bound on
all of them, and the programme stays small (ten columns an operation, two an interval).

By the start of operation k
- bytes out <= bytes of offloaded intervals whose gap has begun;  bytes in <= bytes out;
- bytes in >= bytes of offloaded intervals needed by then;
- level - recomputed and evicted - out + in <= budget;
- between two starts each direction moves at most its rate times (operation + recomputing +
  stall), both together at most the measured total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kilter.core.errors import PlanError, UsageError
from kilter.memory.plan.mix import mix
from kilter.memory.plan.place import judged
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Schedule, simulate
from kilter.model.quiet_solver import quiet_solver

GAP = 1e-3
"""A whole choice within this share of the best objective is good enough."""
TIE = 2e-3
"""Weight of the preference among choices of nearly equal time, as a share of the compute time."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Solution of the programme: `bound_s` is below the time of every schedule."""

    bound_s: float
    swapped: tuple[float, ...]
    recomputed: tuple[float, ...]


def exact(problem: Problem, *, limit_s: float = 8.0) -> Schedule:
    """The best whole choice of what to offload and what to recompute, placed in time by
    `place.judged`.

    The solver stops at the relative optimality gap `GAP`, or with the best that it has after
    `limit_s`. `PlanError` if no choice fits; `UsageError` without HiGHS.
    """
    if problem.peak_bytes <= problem.budget_bytes:
        return Schedule()
    heuristic = mix(problem)
    solution = _solve(problem, recompute=True, whole=True, limit_s=limit_s)
    if solution is None:
        return heuristic
    swapped = [i for i, share in enumerate(solution.swapped) if share > 0.5]
    recomputed = frozenset(i for i, share in enumerate(solution.recomputed) if share > 0.5)
    found = judged(problem, swapped, recomputed, rounds=3)
    # The programme moves parts of tensors and frees them at once; whole transfers take a little
    # longer. Where that costs more than a heuristic's choice, the heuristic's choice is better.
    other = simulate(problem, heuristic)
    if found is None or other.iteration_s < found[1].iteration_s:
        return heuristic
    return found[0]


def relax(problem: Problem, *, recompute: bool = True, limit_s: float = 60.0) -> Relaxed:
    """The lower bound. Same errors as `exact`, and `PlanError` if it takes longer than that."""
    found = _solve(problem, recompute=recompute, whole=False, limit_s=limit_s)
    if found is None:
        raise PlanError(f"the bound was not reached in {limit_s} s")
    return found


class _Rows:
    """Sparse rows, collected in blocks of equal width."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._columns: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.lower: list[np.ndarray] = []
        self.upper: list[np.ndarray] = []
        self.count = 0

    def add(
        self,
        count: int,
        entries: list[tuple[np.ndarray, np.ndarray, Any]],
        lower: Any,
        upper: Any,
    ) -> None:
        """`count` rows; each entry is (row within the block, column, value)."""
        for rows, columns, values in entries:
            rows = np.asarray(rows)
            self._rows.append(rows + self.count)
            self._columns.append(np.broadcast_to(columns, rows.shape))
            self._values.append(np.broadcast_to(np.asarray(values, dtype=float), rows.shape))
        self.lower.append(np.broadcast_to(np.asarray(lower, dtype=float), (count,)))
        self.upper.append(np.broadcast_to(np.asarray(upper, dtype=float), (count,)))
        self.count += count

    def compressed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = np.concatenate(self._rows)
        order = np.argsort(rows, kind="stable")
        starts = np.searchsorted(rows[order], np.arange(self.count + 1))
        columns = np.concatenate(self._columns)[order]
        return starts, columns, np.concatenate(self._values)[order]


def _solve(problem: Problem, *, recompute: bool, whole: bool, limit_s: float) -> Relaxed | None:
    """The programme's solution; None if there was none in time."""
    try:
        import highspy
    except ImportError as error:
        raise UsageError(
            "the exact planner and the bound need HiGHS: pip install 'kilter[exact]'"
        ) from error
    if not problem.intervals:
        if problem.peak_bytes > problem.budget_bytes:
            raise PlanError("nothing can leave the device, and the peak exceeds the budget")
        return Relaxed(problem.compute_s, (), ())
    scaled = _Scaled(problem, recompute=recompute)
    columns = _Columns(len(problem.operation_s), len(problem.intervals))
    rows = _Rows()
    _keep_bytes(rows, columns, scaled)
    _keep_rates(rows, columns, scaled)
    _recompute_in_time(rows, columns, scaled)

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns.count, rows.count
    model.col_cost_ = _objective(columns, scaled, whole=whole)
    model.col_lower_, model.col_upper_ = _bounds(columns, scaled)
    model.row_lower_, model.row_upper_ = np.concatenate(rows.lower), np.concatenate(rows.upper)
    starts, indices, values = rows.compressed()
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, indices, values
    if whole:
        kinds = np.full(columns.count, highspy.HighsVarType.kContinuous, dtype=object)
        kinds[columns.swap] = kinds[columns.recompute] = highspy.HighsVarType.kInteger
        model.integrality_ = kinds.tolist()
    found = _run(model, problem, whole=whole, limit_s=limit_s)
    if found is None:
        return None
    excess, value = found
    return Relaxed(
        bound_s=float((scaled.times.sum() + max(0.0, excess)) / scaled.second),
        swapped=tuple(value[columns.swap].tolist()),
        recomputed=tuple(value[columns.recompute].tolist()),
    )


class _Scaled:
    """The numbers of a problem, scaled so that sizes and times are near 1: bytes in budgets, times
    in compute times. Arrays of intervals, but for `times` and `level`, which are of operations."""

    def __init__(self, problem: Problem, *, recompute: bool) -> None:
        intervals, link = problem.intervals, problem.link
        byte = 1.0 / problem.budget_bytes
        self.second = 1.0 / problem.compute_s if problem.compute_s > 0 else 1.0
        self.times = np.array(problem.operation_s) * self.second
        self.level = problem.resident * byte
        self.size = np.array([j.size_bytes for j in intervals]) * byte
        self.cost = np.array([(j.recompute_s or 0.0) for j in intervals]) * self.second
        self.possible = np.array([recompute and j.recompute_s is not None for j in intervals])
        """They can be recomputed."""
        self.to_host = np.array([j.to_host for j in intervals], dtype=float)
        self.after = np.array([j.after for j in intervals])
        self.before = np.array([j.before for j in intervals])
        makers = np.flatnonzero(self.possible).tolist()
        self.earliest = np.array(problem.deadlines(frozenset(makers)))
        """When an interval is recomputed that another one is made from."""
        rate = byte / self.second
        out, back = link.to_host_bytes_per_s, link.to_device_bytes_per_s
        self.rates = out * rate, back * rate, (out + back) * (link.shared * rate)


class _Columns:
    """The variables of the programme: for each operation those of `NAMES`, then for each interval
    which share of it is offloaded, and which is recomputed.

    Running sums are columns of their own, which keeps the rows short: bytes of offloaded intervals
    whose gap has begun (gone), those needed by now, the level taken away by what is recomputed, the
    time spent on recomputing, what of it is owed and allowed.
    """

    NAMES = (
        *("stall", "making", "out", "back"),
        *("gone", "needed", "dropped", "spent", "owed", "allowed"),
    )

    def __init__(self, operations: int, intervals: int) -> None:
        self.k = np.arange(operations)
        self.one = np.ones(operations)
        self.each = np.arange(intervals)
        self._of = {name: number * operations + self.k for number, name in enumerate(self.NAMES)}
        self.swap = len(self.NAMES) * operations + self.each
        self.recompute = self.swap + intervals
        self.count = len(self.NAMES) * operations + 2 * intervals

    def __getitem__(self, name: str) -> np.ndarray:
        """The columns of one name, one for each operation."""
        return self._of[name]

    def terms(self, **factors: float) -> list[tuple[np.ndarray, np.ndarray, Any]]:
        """A row for each operation with these factors of its columns."""
        return [(self.k, self[name], factor * self.one) for name, factor in factors.items()]

    def before(self, name: str, factor: float) -> tuple[np.ndarray, np.ndarray, Any]:
        """The same of the operation before."""
        return self.k[1:], self[name][:-1], factor * self.one[1:]


def _running(
    rows: _Rows,
    columns: _Columns,
    total: str,
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
) -> None:
    """total[k] = total[k-1] + parts of row k."""
    entries = [*columns.terms(**{total: 1.0}), columns.before(total, -1.0)]
    entries += [(row, column, -value) for row, column, value in parts]
    rows.add(len(columns.k), entries, 0.0, 0.0)


def _keep_bytes(rows: _Rows, columns: _Columns, scaled: _Scaled) -> None:
    """Bytes move only once they may, needed bytes are resident, and the level keeps the budget."""
    x, r, count = columns.swap, columns.recompute, len(columns.k)
    size, after, before = scaled.size, scaled.after, scaled.before
    _running(rows, columns, "gone", [(after + 1, x, size)])
    _running(rows, columns, "needed", [(before, x, size)])
    _running(rows, columns, "dropped", [(after + 1, r, size), (before, r, -size)])
    rows.add(count, columns.terms(out=1.0, gone=-1.0), -np.inf, 0.0)
    rows.add(count, columns.terms(back=1.0, out=-1.0), -np.inf, 0.0)
    rows.add(count, columns.terms(back=1.0, needed=-1.0), 0.0, np.inf)
    level = columns.terms(dropped=-1.0, out=-1.0, back=1.0)
    rows.add(count, level, -np.inf, 1.0 - scaled.level)


def _keep_rates(rows: _Rows, columns: _Columns, scaled: _Scaled) -> None:
    """What moves between the starts of two operations; before the first nothing has moved yet."""
    past = np.concatenate(([0.0], scaled.times[:-1]))
    lanes_of = (("out",), ("back",), ("out", "back"))
    for limit, lanes in zip(scaled.rates, lanes_of, strict=True):
        entries = columns.terms(stall=-limit, making=-limit)
        for lane in lanes:
            entries += [*columns.terms(**{lane: 1.0}), columns.before(lane, -1.0)]
        rows.add(len(columns.k), entries, -np.inf, limit * past)


def _recompute_in_time(rows: _Rows, columns: _Columns, scaled: _Scaled) -> None:
    """An interval is recomputed at its next use, or earlier if another is made from it; no more
    than all of it is offloaded or recomputed."""
    x, r, each, count = columns.swap, columns.recompute, columns.each, len(columns.k)
    possible = scaled.possible
    made, cost = r[possible], scaled.cost[possible]
    _running(rows, columns, "spent", columns.terms(making=1.0))
    _running(rows, columns, "owed", [(scaled.before[possible], made, cost)])
    _running(rows, columns, "allowed", [(scaled.earliest[possible], made, cost)])
    rows.add(count, columns.terms(spent=1.0, owed=-1.0), 0.0, np.inf)
    rows.add(count, columns.terms(spent=1.0, allowed=-1.0), -np.inf, 0.0)
    whole = np.ones(len(each))
    rows.add(len(each), [(each, x, whole), (each, r, whole)], -np.inf, 1.0)


def _bounds(columns: _Columns, scaled: _Scaled) -> tuple[np.ndarray, np.ndarray]:
    lower, upper = np.zeros(columns.count), np.full(columns.count, np.inf)
    lower[columns["dropped"]] = -np.inf
    upper[columns.swap] = scaled.to_host
    upper[columns.recompute] = scaled.possible.astype(float)
    return lower, upper


def _objective(columns: _Columns, scaled: _Scaled, *, whole: bool) -> np.ndarray:
    """The time beyond compute. The programme does not follow single intervals, so it cannot see
    that a short gap is hard to cross with two transfers. Among `whole` choices of nearly equal
    time: offload long gaps, recompute short ones, and move no more than is of use."""
    objective = np.zeros(columns.count)
    objective[columns["stall"]] = objective[columns["making"]] = 1.0
    if whole:
        length = (scaled.before - scaled.after) / len(columns.k)
        share = TIE * scaled.size / scaled.size.sum()
        objective[columns.swap] = share * (2.0 - length)
        objective[columns.recompute] = share * length
    return objective


def _run(
    model: Any, problem: Problem, *, whole: bool, limit_s: float
) -> tuple[float, np.ndarray] | None:
    """HiGHS on the programme of `problem`: the bound of its objective, and the values of its
    columns; None if there were none in time."""
    import highspy

    solver = quiet_solver()
    solver.setOptionValue("time_limit", limit_s)
    solver.setOptionValue("mip_rel_gap", GAP)
    # The objective is the excess over compute; a gap relative to it alone would be far too fine.
    solver.setOptionValue("mip_abs_gap", GAP)
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise PlanError(
            f"no choice of intervals fits the budget of {problem.budget_bytes} bytes "
            f"(the least possible peak is {problem.floor_bytes})"
        )
    info = solver.getInfo()
    feasible = info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible)
    if not feasible or (not whole and status != highspy.HighsModelStatus.kOptimal):
        return None
    excess = float(info.objective_function_value) if not whole else float(info.mip_dual_bound)
    return excess, np.asarray(solver.getSolution().col_value)
