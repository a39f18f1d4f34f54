"""The default planner: keep, recompute, or offload, each where it costs least.

Recomputing costs a known time per byte, the same wherever it happens; offloading is free while it
hides behind compute and expensive beyond. So intervals are recomputed in the order of their price
(seconds per byte, short gaps first: they cannot be offloaded anyway), and what is still missing is
offloaded by `spanning`. How far to go along the prices is one number; it is searched, and the
simulator decides.

The host has to issue what is recomputed, and may have little time for that. So each recomputed
tensor counts with a little time besides: of plans that take the device as long, the one with fewer
and larger ones is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from kilter.core.errors import BudgetTooSmall, PlanError
from kilter.memory.plan.problem import Problem
from kilter.memory.plan.simulate import Schedule, SimulatedPass, simulate
from kilter.memory.plan.spanning import TOO_FEW, swap_rest

REACHES = (0.01, 0.04)
"""Something may be recomputed before its own use by these shares of the iteration."""
WIDER_REACHES = (0.16, 0.64)
"""These are tried where `REACHES` give no plan: with little host memory, intervals may have to be
recomputed from sources that are recomputed as well."""
EACH_S = 1e-5
"""So much is counted for each interval recomputed. One takes about 0.1 ms of the host's time, but
plans that count so much are slower even where the host is late (measured,
docs/measurements/memory.md)."""
ROUGHLY = 32
"""`roughly` goes along the prices in so many steps."""
MANY = 1024
"""More intervals than this are searched in one order and reach, to within one part in `FINE_STEPS`:
one interval more or less does not matter there, and planning takes seconds."""
FINE_STEPS = 256


def mix(problem: Problem) -> Schedule:
    """Offload, recompute and keep. `PlanError` if the budget is not met even with everything
    evicted, or, where not everything may be offloaded, if no plan is found."""
    if problem.peak_bytes <= problem.budget_bytes:
        return Schedule()
    problem.check_floor()
    prices = by_price(problem)
    many = len(problem.intervals) > MANY

    def found_with(reach: float, below_s: float) -> tuple[Schedule, SimulatedPass] | None:
        order = within_reach(problem, prices, reach)
        return _search(problem, order, len(order) // FINE_STEPS if many else 1, below_s)

    best: tuple[Schedule, SimulatedPass] | None = None
    for reach in REACHES[:1] if many else REACHES:
        best = found_with(reach, inf if best is None else cost_s(problem, *best)) or best
    for reach in WIDER_REACHES:
        best = best or found_with(reach, inf)
    if best is None:
        raise PlanError(TOO_FEW)
    return best[0]


def roughly(problem: Problem, below_s: float = inf) -> tuple[Schedule, SimulatedPass]:
    """`mix` with a tenth of the work, to compare one problem with another: one order, and the
    number of intervals to recompute to within one part in `ROUGHLY`. `PlanError` as in `mix`, or if
    nothing is found that takes less than `below_s`."""
    if problem.peak_bytes <= problem.budget_bytes:
        return Schedule(), simulate(problem, Schedule())
    if problem.floor_bytes > problem.budget_bytes:
        raise BudgetTooSmall(f"the budget of {problem.budget_bytes} bytes is out of reach")
    order = within_reach(problem, by_price(problem), REACHES[0])
    found = _search(problem, order, len(order) // ROUGHLY, below_s, rounds=1)
    if found is None:
        raise PlanError(TOO_FEW)
    return found


def _search(
    problem: Problem, order: list[int], finest: int, below_s: float, rounds: int = 2
) -> tuple[Schedule, SimulatedPass] | None:
    """The best number of intervals to recompute, taken from the front of `order`; to within
    `finest`: roughly at first, then in `rounds`. None if the budget is met, at a cost below
    `below_s`, with none of them. What could not cost less even if it never waited for a transfer is
    not simulated."""
    tried: dict[tuple[int, int], float] = {}
    best: tuple[Schedule, SimulatedPass] | None = None
    best_s = below_s

    def time_at(count: int, rounds: int) -> float:
        nonlocal best, best_s
        if (count, rounds) not in tried:
            recomputed = _needed(problem, order[:count])
            again_s = sum(problem.intervals[i].recompute_s or 0.0 for i in recomputed)
            left_s = best_s - problem.compute_s - again_s - _host_s(problem, recomputed)
            found = swap_rest(problem, recomputed, left_s, rounds) if left_s > 0 else None
            tried[count, rounds] = inf if found is None else cost_s(problem, *found)
            if tried[count, rounds] < best_s:
                best, best_s = found, tried[count, rounds]
        return tried[count, rounds]

    low, high = 0, len(order)
    step = max(1, len(order) // 8)
    while True:
        last = step <= max(1, finest)
        counts = [*range(low, high, step), high]
        thorough = rounds if last else 1
        around = min(counts, key=lambda count: (time_at(count, thorough), count))
        if last:
            return best
        low, high = max(0, around - step), min(len(order), around + step)
        step = max(1, finest, step // 4)


def cost_s(problem: Problem, schedule: Schedule, outcome: SimulatedPass) -> float:
    """What a schedule takes, with what counts of the host's time."""
    moved_s = problem.moved_s * len(schedule.moves)
    return outcome.iteration_s + _host_s(problem, schedule.recomputed) + moved_s


def _host_s(problem: Problem, recomputed: Collection[int]) -> float:
    alone = sum(not problem.intervals[index].together for index in recomputed)
    return EACH_S * len(recomputed) + problem.alone_s * alone


def by_price(problem: Problem) -> list[int]:
    """Intervals that can be recomputed, cheapest per byte first, then the shortest gap.

    Before them those that stand for several data: they are in the problem because they are to be
    recomputed, and what is made from their tensors would otherwise force them back too early."""

    def price(index: int) -> tuple[bool, float, int, int]:
        interval = problem.intervals[index]
        assert interval.recompute_s is not None
        host_s = EACH_S if interval.together else EACH_S + problem.alone_s
        price = (interval.recompute_s + host_s) / interval.size_bytes
        return not interval.together, price, interval.gap, index

    possible = [i for i, j in enumerate(problem.intervals) if j.recompute_s is not None]
    return sorted(possible, key=price)


def within_reach(problem: Problem, order: list[int], reach: float) -> list[int]:
    """`order` without those that would need others too early when they are recomputed.

    An interval that is recomputed from another recomputed one needs that one first, and so on back:
    a chain through the whole model would hold everything at once. An interval is accepted only if
    nothing is recomputed earlier than its own use by more than `reach` of the iteration, and if
    there is memory for what it needs earlier while all else is evicted.
    """
    intervals = problem.intervals
    limit = max(1, int(reach * len(problem.operation_s)))
    due = [interval.before for interval in intervals]
    room = problem.budget_bytes - problem.floor
    chosen: set[int] = set()

    def moved(index: int, at: int, changes: dict[int, int]) -> bool:
        for other in intervals[index].needs:
            if intervals[other].after < at < changes.get(other, due[other]):
                if other in chosen and intervals[other].before - at > limit:
                    return False
                changes[other] = at
                if other in chosen and not moved(other, at, changes):
                    return False
        return True

    accepted = []
    for index in order:
        changes: dict[int, int] = {}
        at = due[index]
        if intervals[index].before - at > limit or not moved(index, at, changes):
            continue
        earlier = [(slice(to, due[other]), other) for other, to in changes.items()]
        for span, other in earlier:
            room[span] -= intervals[other].size_bytes
        if any(room[span].min() < 0 for span, _ in earlier):
            for span, other in earlier:
                room[span] += intervals[other].size_bytes
            continue
        for other, to in changes.items():
            due[other] = to
        chosen.add(index)
        accepted.append(index)
    return accepted


def _needed(problem: Problem, chosen: list[int]) -> frozenset[int]:
    """`chosen` without those that fit on the device even if nothing else is offloaded, the
    dearest first."""
    recomputed = frozenset(chosen)
    due = problem.deadlines(recomputed)
    out = (*recomputed, *problem.streaming)
    evicted = {i: (problem.intervals[i].after + 1, due[i]) for i in out}
    slack = problem.budget_bytes - problem.profile(evicted)
    if int(slack.min()) <= 0:
        return recomputed
    kept: set[int] = set()
    for index in reversed(chosen):
        interval = problem.intervals[index]
        window = slack[interval.after + 1 : due[index]]
        if window.size and int(window.min()) >= interval.size_bytes:
            window -= interval.size_bytes
            kept.add(index)
    return recomputed - kept
