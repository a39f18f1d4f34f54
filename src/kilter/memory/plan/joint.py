"""How much optimizer state streams beside activations, so that an iteration takes least time.

State that is offloaded while memory peaks leaves room for activations, which then need not be
recomputed. That costs a share of the link in backward, where activations are prefetched, and
waiting where the rest of the link is not enough. For each size of the room for state both are
planned, each with what the other leaves of the link to the device; the sizes are searched, and the
simulators decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kilter.core.errors import BudgetTooSmall, PlanError
from kilter.memory.plan.delay_loads import delay_loads
from kilter.memory.plan.mix import roughly
from kilter.memory.plan.problem import Link, Problem
from kilter.memory.plan.simulate import simulate
from kilter.memory.plan.state import Bucket, StatePlan, plan_state

COARSE = 8
"""The state is first divided into so many parts."""
FINE = 1
"""How often the distance between rooms is halved around the best."""
ALIKE = 0.003
"""Of rooms that differ by no more than this share of the iteration the largest is taken. Less
moves, and that is about what the rough plans behind the comparison are worth."""
JOINT_WORTH = 0.01
"""Streaming has to save this share of the iteration."""
MOST_TAKEN = 0.95
"""State or activations may take at most this share of the link to the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One room for optimizer state, and the iteration that follows. Predicted, SI units."""

    room_bytes: int
    state: StatePlan
    iteration_s: float
    """Forward and backward take this, with the updates in it and all waiting."""
    taken: float
    """State takes this share of the way to the device in backward."""
    left: Link
    """State has the link less what activations take."""
    due_s: tuple[float, ...]
    """When the buckets are visited, from the first gradient on."""


def offloaded_bytes(
    state: StatePlan, buckets: Sequence[Bucket], at: Sequence[int], count: int
) -> list[int]:
    """State on the host during each of `count` operations; bucket `i` is visited in `at[i]`."""
    change = [0] * (count + 1)
    change[0] = state.moved_bytes

    def move(numbers: Sequence[int], operation: int, sign: int) -> None:
        change[operation] += sign * sum(buckets[i].state_bytes for i in numbers)

    move(state.begin, at[0], -1)
    for visit, operation in enumerate(at):
        move(state.load[visit], operation + 1, -1)
        move(state.release[visit], operation + 1, 1)
    found, running = [], 0
    for difference in change[:count]:
        running += difference
        found.append(running)
    return found


def joint(problem: Problem, buckets: Sequence[Bucket], at: Sequence[int]) -> Joint:
    """The best room; all of the state, if that is fast enough (`JOINT_WORTH`).

    `problem` has all state on the device; `at` are the operations in which the buckets' last
    gradients arrive. `PlanError` if no room is small enough for the budget.

    Rooms shrink by `1/COARSE` of the state until the iteration takes longer; then the best is
    refined between its neighbours. Activations are planned roughly for that.
    """
    total_bytes = sum(b.state_bytes for b in buckets)
    parts = COARSE * 2**FINE
    tried: dict[int, Joint | None] = {}

    def time_at(part: int) -> float:
        if part not in tried:
            tried[part] = beside(problem, buckets, at, total_bytes * part // parts)
        found = tried[part]
        return float("inf") if found is None else found.iteration_s

    step = 2**FINE
    best = parts
    for part in range(parts - step, 0, -step):
        if time_at(part) <= time_at(best):
            best = part
        elif time_at(best) < float("inf"):
            break
    while step > 1:
        step //= 2
        best = min((best, best - step, min(parts, best + step)), key=time_at)
    alike = (1 + ALIKE) * time_at(best)
    best = max(part for part in tried if time_at(part) <= alike)
    if time_at(parts) <= (1 + JOINT_WORTH) * time_at(best):
        best = parts
    found = tried[best]
    if found is None:
        raise BudgetTooSmall(
            f"the budget of {problem.budget_bytes} bytes is out of reach even with optimizer state "
            "on the host"
        )
    return found


def beside(
    problem: Problem, buckets: Sequence[Bucket], at: Sequence[int], room_bytes: int
) -> Joint | None:
    """Both planned for one room; None if state or activations do not fit."""
    link = problem.link
    rate = link.to_device_bytes_per_s * link.shared
    count = len(problem.operation_s)
    begins = [0.0]
    for duration_s in problem.operation_s:
        begins.append(begins[-1] + duration_s)
    try:
        state = plan_state(_due(buckets, at, begins), room_bytes=room_bytes, link=link)
        span_s = max(begins[-1] - begins[at[0]], 1e-9)
        taken = min(MOST_TAKEN, state.moved_bytes / (rate * span_s))
        offloaded = offloaded_bytes(state, buckets, at, count)
        levels = [
            level - bytes_ for level, bytes_ in zip(problem.resident_bytes, offloaded, strict=True)
        ]
        rest = replace(problem, resident_bytes=tuple(levels), link=link.less(taken))
        # What is carried out is searched more thoroughly.
        schedule, outcome = roughly(rest)
        if taken:
            outcome = simulate(rest, delay_loads(rest, schedule))
        begins = [span.start_s for span in outcome.spans if span.lane == "compute"]
        begins.append(outcome.iteration_s)
        span_s = max(begins[-1] - begins[at[0]], 1e-9)
        left = link.less(min(MOST_TAKEN, outcome.in_bytes / (rate * span_s)))
        visited = _due(buckets, at, begins)
        state = plan_state(visited, room_bytes=room_bytes, link=left)
    except PlanError:
        return None
    return Joint(
        room_bytes=room_bytes,
        state=state,
        iteration_s=outcome.iteration_s + state.stall_s,
        taken=taken,
        left=left,
        due_s=tuple(bucket.due_s for bucket in visited),
    )


def _due(buckets: Sequence[Bucket], at: Sequence[int], begins: Sequence[float]) -> list[Bucket]:
    """The buckets with the times at which the operations of their gradients end, counted from the
    first one."""
    zero_s = begins[at[0] + 1]
    rows = zip(buckets, at, strict=True)
    return [replace(b, due_s=max(0.0, begins[k + 1] - zero_s)) for b, k in rows]
