"""Records the memory plans of a run: each plan that came into force, each reason against one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kilter.controller import Run
from kilter.core.errors import BudgetTooSmall
from kilter.core.reasons import Reason

if TYPE_CHECKING:
    from kilter.memory.engine.engine import PassPlan
    from kilter.memory.plan.choose import MemoryPlan
    from kilter.memory.schedule import PlannedPass


class PlanLog:
    """Plans and reasons, each told once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._refused: set[Reason] = set()
        self._latest: tuple[MemoryPlan, ...] = ()
        """They were in force when it was last asked."""
        self._plans: list[MemoryPlan] = []
        """All plans that were ever in force are in it, in this order."""
        self._schedules: deque[PlannedPass] = deque(maxlen=1)
        """Another thread than the one that plans writes them."""

    def refuse(self, reason: Reason) -> None:
        what = "the memory plan" if reason.subject == "job" else "a part of the memory plan"
        self._run.log.refuse(what, reason.text, reason.code)

    def refuse_new(self, reasons: Iterable[Reason]) -> None:
        """Each reason once; one that holds for several tensors, with their number."""
        unknown = [reason for reason in dict.fromkeys(reasons) if reason not in self._refused]
        self._refused.update(unknown)
        for reason, count in Counter(replace(reason, subject="") for reason in unknown).items():
            if reason.code != BudgetTooSmall.code:  # told with the least that is possible
                text = reason.text if count == 1 else f"{reason.text} ({count} tensors)"
                self.refuse(replace(reason, text=text))

    def notice(self, reason: Reason) -> None:
        """Told to the user at once, besides."""
        if reason not in self._refused:
            self.refuse_new((reason,))
            self._run.log.notice(reason.text)

    def tell(self, text: str) -> None:
        """Told to the user at once, and no reason against anything."""
        self._run.log.notice(text)

    def new(self, plans: tuple[MemoryPlan, ...]) -> list[MemoryPlan]:
        """Those that were not in force when this was asked before."""
        before, self._latest = self._latest, plans
        return [plan for plan in plans if plan not in before]

    def add(self, planned: PassPlan, *, device: str, reason: str) -> None:
        """This plan is in force."""
        from kilter.memory.schedule import fitted, schedule_of

        plan, schedule = planned.plan, schedule_of(planned, device=device, reason=reason)
        self._run.log(fitted(plan, t_s=self._run.log.now_s(), kept=schedule.kept))
        self._plans.append(plan)
        if plan.peak_before_bytes < max((p.peak_before_bytes for p in self._latest), default=0):
            return  # a smaller pass than the one in the files
        self._schedules.append(schedule)

    def numbers_of(self, plans: Iterable[MemoryPlan]) -> tuple[int, ...]:
        """Where they stand in the record."""
        return tuple(self._plans.index(plan) for plan in plans if plan in self._plans)

    def save_schedule(self) -> None:
        """Write the newest schedule into the files of the run."""
        if self._schedules:
            planned = self._schedules.popleft()
            self._run.files.save_memory(planned.trace, planned.plan)
