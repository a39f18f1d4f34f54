"""A plan made ready: what each event starts, in the order that the simulator counted on."""

from __future__ import annotations

from kilter.memory.engine.pass_record import PassRecord, SavedTensor, use_code
from kilter.memory.engine.ready import ready
from kilter.memory.plan.choose import described
from kilter.memory.plan.problem import Link
from kilter.memory.plan.simulate import Move, Schedule, simulate

LINK = Link(to_host_bytes_per_s=100.0, to_device_bytes_per_s=100.0, both_bytes_per_s=200.0)
LAYERS = 4


def record() -> PassRecord:
    """Saved one after the other, used in reverse; nobody but autograd holds them."""
    count = 2 * LAYERS + 1
    data = tuple(
        SavedTensor(str(n), 10, packed_at=n, free_at=n + 1, needed_at=count - 1 - n)
        for n in range(LAYERS)
    )
    codes = [10] * LAYERS + [0] + [use_code(n) for n in reversed(range(LAYERS))]
    return PassRecord(
        events=tuple(codes),
        names=("",) * count,
        backward_from=LAYERS,
        data=data,
        operation_s=[1.0] * count,
        level_bytes=[10 * min(k + 1, count - k) for k in range(count)],
    )


def test_what_is_needed_first_is_loaded_first() -> None:
    """A link serves loads one after the other: in another order the first use waits for them all,
    and no simulation would have said so."""
    seen = record()
    problem, numbers = seen.problem(link=LINK, budget_bytes=1000, min_bytes=1)
    moves = tuple(Move(i, LAYERS, LAYERS + 1) for i in range(len(problem.intervals)))
    schedule = Schedule(moves)
    value = described(problem, schedule, simulate(problem, schedule), planner="mix")
    made = ready(seen, problem, numbers, value, {})
    due = made.steps[LAYERS + 1].due
    assert due is not None
    needed = [seen.data[number].needed_at or 0 for number in due.prefetch]
    assert len(needed) >= 3
    assert needed == sorted(needed)
    gone = made.steps[LAYERS].due
    assert gone is not None
    assert sorted(gone.evict) == sorted(due.prefetch)
