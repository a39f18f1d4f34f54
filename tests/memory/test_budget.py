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
        self.passes: list[int] = []
        self.limits: list[int] = []
        self.hopeless = True

    def report(self) -> Any:
        refused = (Reason(BudgetTooSmall.code, "", "too small"),)
        return SimpleNamespace(plans=0, refused=refused, hopeless=self.hopeless)

    def records(self) -> list[Any]:
        def record(floor: int, passes: int) -> Any:
            problem = SimpleNamespace(floor_bytes=floor)
            return SimpleNamespace(
                problem=lambda **_: (problem, ()), as_it_runs=lambda *_: problem, passes=passes
            )

        return [record(*each) for each in zip(self.floors, self.passes, strict=True)]

    def limit(self, size_bytes: int) -> None:
        self.limits.append(size_bytes)


def budget_of(swapper: Any) -> JobBudget:
    begin = BudgetInForce(size_bytes=MIB, words="")
    plain: Any = SimpleNamespace()
    return JobBudget(MemoryBudget(size_bytes=MIB), begin, 8 * MIB, swapper, plain, dry_run=False)


def test_the_least_is_asked_for_once_a_pass_is_recorded() -> None:
    """Kinds of passes that were refused may be forgotten by then (random program 3141)."""
    swapper = Swapper()
    budget = budget_of(swapper)
    link: Any = None
    budget.settle_for_least(link)
    assert swapper.limits == []
    swapper.floors, swapper.passes = [2 * MIB, 3 * MIB], [1, 1]
    budget.settle_for_least(link)
    budget.settle_for_least(link)
    [limit] = swapper.limits
    assert 3 * MIB <= limit < 4 * MIB


def test_a_pass_that_never_came_again_does_not_raise_the_least() -> None:
    """Such as the one in which tensors were offloaded on demand."""
    swapper = Swapper()
    swapper.floors, swapper.passes = [2 * MIB, 3 * MIB], [4, 1]
    link: Any = None
    budget_of(swapper).settle_for_least(link)
    [limit] = swapper.limits
    assert 2 * MIB <= limit < 3 * MIB


def test_a_plan_that_was_refused_before_there_was_room_is_no_reason_for_the_least() -> None:
    """State has moved since, and no pass has a plan while calls of modules are tried: GPT 1.64B was
    kept to 20.0 GiB, its least, under a budget of 23.3."""
    swapper = Swapper()
    swapper.floors, swapper.passes = [2 * MIB], [4]
    swapper.hopeless = False
    link: Any = None
    budget_of(swapper).settle_for_least(link)
    assert swapper.limits == []
