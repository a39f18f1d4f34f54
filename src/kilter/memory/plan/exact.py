"""The linear programme behind the bound, and with whole choices the exact planner (HiGHS).

Variables: `x` share of each interval swapped, `r` share recomputed, and for each operation the
stall before it, the time of recomputing before it, and the bytes moved out and in by its start.
Bytes are summed over intervals instead of followed one by one, with no window on when they move:
every schedule that `simulate` accepts is a feasible point, so the relaxation is a lower bound on
all of them, and the programme stays small (eleven columns an operation, two an interval).

By the start of operation k
- bytes out <= bytes of swapped intervals whose gap has begun;  bytes in <= bytes out;
- bytes in >= bytes of swapped intervals needed by then;
- level - recomputed and away - out + in <= budget;
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
from kilter.memory.plan.spanning import spanning

TIE = 2e-3
"""Weight of the preference among choices of nearly equal time, as a share of the compute time."""


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Solution of the programme: `bound_s` is below the time of every schedule."""

    bound_s: float
    swapped: tuple[float, ...]
    recomputed: tuple[float, ...]


def exact(
    problem: Problem, *, recompute: bool = True, gap: float = 0.001, limit_s: float = 8.0
) -> Schedule:
    """The best whole choice of what to swap and what to recompute, placed in time by `place`.

    The solver stops at the relative optimality gap `gap`, or with the best that it has after
    `limit_s`. `PlanError` if no choice fits; `UsageError` without HiGHS.
    """
    if problem.peak_bytes <= problem.budget_bytes:
        return Schedule()
    heuristic = mix(problem) if recompute else spanning(problem)
    solution = _solve(problem, recompute=recompute, whole=True, gap=gap, limit_s=limit_s)
    if solution is None:
        return heuristic
    swapped = [i for i, share in enumerate(solution.swapped) if share > 0.5]
    recomputed = frozenset(i for i, share in enumerate(solution.recomputed) if share > 0.5)
    found = judged(problem, swapped, recomputed, rounds=3)
    # The programme moves parts of data and frees them at once; whole transfers come back a little
    # later. Where that costs more than a heuristic's choice, the heuristic's choice is better.
    other = simulate(problem, heuristic)
    if found is None or other.iteration_s < found[1].iteration_s:
        return heuristic
    return found[0]


def relax(problem: Problem, *, recompute: bool = True, limit_s: float = 60.0) -> Relaxed:
    """The lower bound. Same errors as `exact`, and `PlanError` if it takes longer than that."""
    found = _solve(problem, recompute=recompute, whole=False, gap=0.0, limit_s=limit_s)
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


def _solve(
    problem: Problem, *, recompute: bool, whole: bool, gap: float, limit_s: float
) -> Relaxed | None:
    """The programme's solution; None if there was none in time."""
    try:
        import highspy
    except ImportError as error:
        raise UsageError(
            "the exact planner and the bound need HiGHS: pip install 'kilter[exact]'"
        ) from error
    operations, intervals = len(problem.operation_s), problem.intervals
    count = len(intervals)
    if count == 0:
        if problem.peak_bytes > problem.budget_bytes:
            raise PlanError("nothing can leave the device, and the peak exceeds the budget")
        return Relaxed(problem.compute_s, (), ())

    # Scaled so that sizes and times are near 1: bytes in budgets, times in compute times.
    byte = 1.0 / problem.budget_bytes
    second = 1.0 / problem.compute_s if problem.compute_s > 0 else 1.0
    size = np.array([j.size_bytes for j in intervals]) * byte
    cost = np.array([(j.recompute_s or 0.0) for j in intervals]) * second
    possible = np.array([recompute and j.recompute_s is not None for j in intervals])
    dirty = np.array([not j.clean for j in intervals])
    after = np.array([j.after for j in intervals])
    before = np.array([j.before for j in intervals])
    times = np.array(problem.operation_s) * second
    level = problem.resident * byte
    rate = byte / second
    out_rate = problem.link.to_host_bytes_per_s * rate
    in_rate = problem.link.to_device_bytes_per_s * rate
    both_rate = (problem.link.to_host_bytes_per_s + problem.link.to_device_bytes_per_s) * (
        problem.link.shared * rate
    )

    k = np.arange(operations)
    each = np.arange(count)
    # Running sums are columns of their own, which keeps the rows short: bytes of swapped intervals
    # whose gap has begun (gone: with a transfer; ready: without), those needed by now, the level
    # taken away by what is recomputed, the time spent on making, what of it is owed and allowed.
    names = ["stall", "making", "out", "in"]
    names += ["gone", "ready", "needed", "dropped", "spent", "owed", "allowed"]
    block = {name: number * operations + k for number, name in enumerate(names)}
    stall, making, out, back = (block[name] for name in names[:4])
    gone, ready, needed, dropped, spent, owed, allowed = (block[name] for name in names[4:])
    x = len(names) * operations + each
    r = x + count
    columns = len(names) * operations + 2 * count

    rows = _Rows()
    one = np.ones(operations)

    def running(total: np.ndarray, parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """total[k] = total[k-1] + parts of row k."""
        entries = [(k, total, one), (k[1:], total[:-1], -one[1:])]
        entries += [(row, column, -value) for row, column, value in parts]
        rows.add(operations, entries, 0.0, 0.0)

    running(gone, [(after[dirty] + 1, x[dirty], size[dirty])])
    running(ready, [(after[~dirty] + 1, x[~dirty], size[~dirty])])
    running(needed, [(before, x, size)])
    running(dropped, [(after + 1, r, size), (before, r, -size)])
    rows.add(operations, [(k, out, one), (k, gone, -one)], -np.inf, 0.0)
    rows.add(operations, [(k, back, one), (k, out, -one), (k, ready, -one)], -np.inf, 0.0)
    rows.add(operations, [(k, back, one), (k, needed, -one)], 0.0, np.inf)
    rows.add(
        operations,
        [(k, dropped, -one), (k, out, -one), (k, ready, -one), (k, back, one)],
        -np.inf,
        1.0 - level,
    )
    # What moves between the starts of two operations; before the first nothing has moved yet.
    past = np.concatenate(([0.0], times[:-1]))
    for limit, lanes in ((out_rate, [out]), (in_rate, [back]), (both_rate, [out, back])):
        entries = [(k, stall, -limit * one), (k, making, -limit * one)]
        for lane in lanes:
            entries += [(k, lane, one), (k[1:], lane[:-1], -one[1:])]
        rows.add(operations, entries, -np.inf, limit * past)
    # Making again comes at the interval's next use, or earlier if another is made from it.
    makers = frozenset(each[possible].tolist())
    earliest = np.array(problem.deadlines(makers))
    running(spent, [(k, making, one)])
    running(owed, [(before[possible], r[possible], cost[possible])])
    running(allowed, [(earliest[possible], r[possible], cost[possible])])
    rows.add(operations, [(k, spent, one), (k, owed, -one)], 0.0, np.inf)
    rows.add(operations, [(k, spent, one), (k, allowed, -one)], -np.inf, 0.0)
    rows.add(count, [(each, x, np.ones(count)), (each, r, np.ones(count))], -np.inf, 1.0)

    lower = np.zeros(columns)
    upper = np.full(columns, np.inf)
    lower[dropped] = -np.inf
    upper[x] = np.array([j.to_host for j in intervals], dtype=float)
    upper[r] = possible.astype(float)
    objective = np.zeros(columns)
    objective[stall] = 1.0
    objective[making] = 1.0
    if whole:
        # The programme does not follow single intervals, so it cannot see that a short gap is hard
        # to cross with two transfers. Among choices of nearly equal time: swap long gaps, make
        # short ones again, and move no more than is of use.
        length = (before - after) / operations
        objective[x] = TIE * size / size.sum() * (2.0 - length)
        objective[r] = TIE * size / size.sum() * length

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = columns, rows.count
    model.col_cost_, model.col_lower_, model.col_upper_ = objective, lower, upper
    model.row_lower_, model.row_upper_ = np.concatenate(rows.lower), np.concatenate(rows.upper)
    starts, indices, values = rows.compressed()
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = starts, indices, values
    if whole:
        kinds = np.full(columns, highspy.HighsVarType.kContinuous, dtype=object)
        kinds[x] = kinds[r] = highspy.HighsVarType.kInteger
        model.integrality_ = kinds.tolist()
    found = _run(model, problem, whole=whole, gap=gap, limit_s=limit_s)
    if found is None:
        return None
    excess, value = found
    return Relaxed(
        bound_s=float((times.sum() + max(0.0, excess)) / second),
        swapped=tuple(value[x].tolist()),
        recomputed=tuple(value[r].tolist()),
    )


def _run(
    model: Any, problem: Problem, *, whole: bool, gap: float, limit_s: float
) -> tuple[float, np.ndarray] | None:
    """HiGHS on the programme of `problem`: the bound of its objective, and the values of its
    columns; None if there were none in time."""
    import highspy

    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("time_limit", limit_s)
    solver.setOptionValue("mip_rel_gap", gap)
    # The objective is the excess over compute; a gap relative to it alone would be far too fine.
    solver.setOptionValue("mip_abs_gap", gap)
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
