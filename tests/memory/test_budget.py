"""What is the least that a job's passes can take, where no plan keeps the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kilter.core.plan import MemoryBudget
from kilter.core.units import MIB
from kilter.memory.budget import BudgetInForce, JobBudget


def least_of(*seen: tuple[int, int]) -> int | None:
    """Of kinds of passes with these least peaks, that came so often."""

    def record(floor_bytes: int, passes: int) -> Any:
        problem = SimpleNamespace(floor_bytes=floor_bytes)
        return SimpleNamespace(
            problem=lambda **_: (problem, ()), as_it_runs=lambda *_: problem, passes=passes
        )

    swapper: Any = SimpleNamespace(records=lambda: [record(*each) for each in seen])
    begin, nothing = BudgetInForce(size_bytes=MIB, words=""), SimpleNamespace()
    plain: Any = nothing
    link: Any = nothing
    budget = JobBudget(MemoryBudget(size_bytes=MIB), begin, 8 * MIB, swapper, plain, dry_run=False)
    return budget.least_bytes(link, MIB)


def test_the_least_is_that_of_the_largest_kind_of_pass() -> None:
    assert least_of((2 * MIB, 1), (3 * MIB, 1)) == 3 * MIB
    assert least_of((2 * MIB, 4), (3 * MIB, 2)) == 3 * MIB


def test_nothing_is_known_of_kinds_that_are_forgotten() -> None:
    """Those that were refused may be, by the end (random program 3141)."""
    assert least_of() is None


def test_a_pass_that_never_came_again_does_not_raise_the_least() -> None:
    """Such as the one in which tensors were offloaded on demand."""
    assert least_of((2 * MIB, 4), (3 * MIB, 1)) == 2 * MIB
