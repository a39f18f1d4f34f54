"""The controller of operations: has clocks set in stretches of a rank's unit operations.

    trace of an iteration -> stretches -> commands -> the conductor of sections -> lease -> device

The plan is made from the trace of one window of the profiler, for the operations' measured times
and the device's profile, and made anew when the iteration takes another time. On a device that may
be set the plans of all ranks are first held against plain iterations in pairs of blocks
(`JointSearch`, which only confirms them or gives them back step by step); otherwise the conductor
writes down what it would have set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kilter.clocks.inside_controller import InsideController
from kilter.clocks.own_gpu import why_not_this_gpu
from kilter.core.errors import DeviceError, FileError, PlanError
from kilter.core.events import Operated
from kilter.core.section_record import SectionsFound
from kilter.core.trace import IterationTrace
from kilter.device.sim.cards import names
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    from kilter.clocks.operation_plan import OperationPlan
    from kilter.clocks.plan.section_job import RankOffer

SUBJECT = "setting clocks per operation"
DEPARTED = 1.25
"""Iterations so many times as long as those of the plan, and as the bound allows, are other ones;
so are those that are shorter by this factor."""
MOST_CHANGES = 5
"""After so many changes the operations are not planned anew."""


class OperationsController(InsideController):
    """The whole job's clock takes over where stretches of operations do not pay more."""

    _plan: OperationPlan | None = None
    _planned_from: IterationTrace | None = None
    _reopened = 0
    """How often the iteration has become another one."""
    _reopening = False
    """The plan was dropped, and the trace of the new iteration is not there yet."""

    def begin(self) -> None:
        if self._profile() is None:
            known = ", ".join(f"sim:{each}" for each in names())
            name = self._run.info.name
            why = f"{name}: how fast its clocks change is not known; --device {known}"
            self._give_up(SUBJECT, why)
        else:
            self._run.trace.want()

    def _go_on(self, finished: Sequence[Iteration]) -> None:
        if self._another_gave_up():
            return
        self._notice_ended_conductor()
        trace = self._run.trace.trace
        if self._keys.failed is not None:
            self._give_up("marking iterations for the conductor", self._keys.failed)
        elif trace is not None and trace is not self._planned_from:
            self._begin(trace)
        elif self._plan is not None and not self._reopening:
            if self._search is not None:
                self._judge(self._search, finished)
            search = self._search
            again = search is not None and search.reopened
            if not self._off and (again or self._changed(self._plan)):
                self._reopen()

    def _changed(self, plan: OperationPlan) -> bool:
        """The usual iteration is not that of the plan, whatever clocks the contract allows."""
        planned_s = plan.found.iteration_s
        usual_s = self._run.iterations.usual_s or planned_s
        longest_s = (1.0 + self._max_slowdown) * DEPARTED * planned_s
        return not planned_s / DEPARTED <= usual_s <= longest_s

    def _reopen(self) -> None:
        """Drop the plan."""
        self._reopened += 1
        self._close_search()
        if self._reopened < MOST_CHANGES:
            self._reopening = True
            self._run.trace.again()
        else:
            self._give_up(SUBJECT, f"the iteration's time has changed {MOST_CHANGES} times")
        self._say()

    def _begin(self, trace: IterationTrace) -> None:
        from kilter.clocks.operation_plan import OperationPlan  # imports numpy

        run = self._run
        refused = why_not_this_gpu(run.info, run.iterations.gpu_uuid)
        if refused is not None:
            self._give_up(SUBJECT, refused)
            return
        profile = self._profile()
        assert profile is not None  # else it was given up at the beginning
        self._planned_from, self._reopening = trace, False
        try:
            plan = OperationPlan(profile, trace, self._max_slowdown, run.device)
        except (PlanError, FileError, DeviceError) as error:
            self._give_up(SUBJECT, str(error))
            return
        self._plan = plan
        if not plan.made.pays:
            self._hand_over(plan.summary, tell=True)
        elif self._conduct(plan.profile):
            if run.info.can_set and not run.dry_run:
                self._open_search(plan, self._offer(plan))
            else:
                assert self._conducting is not None
                self._conducting.follow(plan.schedule(plan.made.depths, is_set=False))
        self._say()

    def _record_end(self) -> None:
        self._say()
        if self._instead is None and (self._plan is None or self._reopening):
            subject = "planning operations anew" if self._reopening else SUBJECT
            self._run.log.refuse(subject, self._run.why_no_trace())

    def _offer(self, plan: OperationPlan) -> RankOffer:
        from kilter.clocks.plan.section_job import PlannedOperations, RankOffer

        made = plan.made
        return RankOffer(
            rank=self._run.ranks.rank,
            role=self._run.iterations.role,
            found=made.found,
            lengths=(),
            operations=PlannedOperations(
                depths=made.depths, whole_job_saving=made.whole_job_saving
            ),
        )

    def _follow(self, now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
        if self._plan is None or self._conducting is None:
            return
        from kilter.clocks.plan.timing import ScheduleArm

        plan = self._plan
        later = [ScheduleArm(first=first, schedule=plan.schedule(depths)) for first, depths in arms]
        self._conducting.follow(plan.schedule(now), later)

    def _is_for_the_whole_job(self, found: SectionsFound) -> bool:
        return not found.held

    def _give_up(self, subject: str, reason: str) -> None:
        self._run.log.refuse(subject, reason)
        self._hand_over(reason, tell=True)

    def _say(self) -> None:
        plan = self._plan
        if plan is not None:
            self._run.log(
                Operated(
                    **self._of_all_kinds(plan, plan.found),
                    operations=plan.operations,
                    whole_job_saving=plan.made.whole_job_saving,
                    reopened=self._reopened,
                )
            )
