"""When a share becomes a number, and what is done where no plan keeps the budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kilter.core.errors import BudgetTooSmall
from kilter.core.plan import MemoryBudget
from kilter.core.reasons import Reason
from kilter.core.units import MIB
from kilter.memory.budget import BudgetInForce, JobBudget


class Swapper:
    """What a budget asks of the engine."""

    def __init__(self) -> None:
        self.floors: list[int] = []
        self.limits: list[int] = []

    def report(self) -> Any:
        return SimpleNamespace(plans=0, refused=(Reason(BudgetTooSmall.code, "", "too small"),))

    def records(self) -> list[Any]:
        def record(floor: int) -> Any:
            problem = (SimpleNamespace(floor_bytes=floor),)
            return SimpleNamespace(problem=lambda **_: problem)

        return [record(floor) for floor in self.floors]

    def limit(self, size_bytes: int) -> None:
        self.limits.append(size_bytes)


def test_the_least_is_asked_for_once_a_pass_is_recorded() -> None:
    """Kinds of passes that were refused may be forgotten by then (random program 3141)."""
    swapper: Any = Swapper()
    begin = BudgetInForce(size_bytes=MIB, words="")
    budget = JobBudget(
        MemoryBudget(size_bytes=MIB), begin, 8 * MIB, swapper, SimpleNamespace(), dry_run=False
    )
    link: Any = None
    budget.settle_for_least(link)
    assert swapper.limits == []
    swapper.floors = [2 * MIB, 3 * MIB]
    budget.settle_for_least(link)
    budget.settle_for_least(link)
    [limit] = swapper.limits
    assert 3 * MIB <= limit < 4 * MIB
