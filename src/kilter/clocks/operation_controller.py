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
from kilter.core.messages import MessagesGone
from kilter.core.trace import IterationTrace
from kilter.device.sim.cards import names
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    from kilter.clocks.joint_search import JointSearch
    from kilter.clocks.operation_plan import OperationPlan

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
            self._give_up(f"{name}: how fast its clocks change is not known; --device {known}")
        else:
            self._run.trace.want()

    def _go_on(self, finished: Sequence[Iteration]) -> None:
        if self._another_gave_up():
            return
        self._look()
        trace = self._run.trace.trace
        if self._keys.failed is not None:
            self._give_up(self._keys.failed)
        elif trace is not None and trace is not self._planned_from:
            self._begin(trace)
        elif self._plan is not None and not self._reopening:
            if self._search is not None:
                self._judge(self._search, finished)
            search = self._search
            again = search is not None and search.reopened
            if not self._off and (again or self._changed(self._plan)):
                self._reopen(self._plan)

    def _changed(self, plan: OperationPlan) -> bool:
        """The usual iteration is not that of the plan, whatever clocks the contract allows."""
        planned_s = plan.made.found.iteration_s
        usual_s = self._run.iterations.usual_s or planned_s
        longest_s = (1.0 + self._max_slowdown) * DEPARTED * planned_s
        return not planned_s / DEPARTED <= usual_s <= longest_s

    def _reopen(self, plan: OperationPlan) -> None:
        """Drop the plan: the default clock stands until there is one for the new iteration."""
        self._reopened += 1
        if self._search is not None:
            self._search.close()
        if self._conducting is not None:
            self._conducting.pause()
        if self._reopened < MOST_CHANGES:
            self._reopening = True
            self._run.trace.again()
        else:
            self._give_up(f"the iteration's time has changed {MOST_CHANGES} times")
        self._say(plan)

    def _begin(self, trace: IterationTrace) -> None:
        from kilter.clocks.operation_plan import OperationPlan  # imports numpy

        run = self._run
        refused = why_not_this_gpu(run.info, run.iterations.gpu_uuid)
        if refused is not None:
            self._give_up(refused)
            return
        profile = self._profile()
        assert profile is not None  # else it was given up at the beginning
        self._planned_from, self._reopening = trace, False
        try:
            plan = OperationPlan(profile, trace, self._max_slowdown, run.device)
        except (PlanError, FileError, DeviceError) as error:
            self._give_up(str(error))
            return
        self._plan = plan
        if not plan.made.pays:
            self._hand_over(plan.made.summary, tell=True)
        elif self._begin_conducting(plan):
            if run.info.can_set and not run.dry_run:
                self._open_search(plan)
            else:
                assert self._conducting is not None
                self._conducting.follow(plan.schedule(plan.made.depths, is_set=False))
        self._say(plan)

    def _begin_conducting(self, plan: OperationPlan) -> bool:
        if self._conducting is not None:
            return True
        try:
            self._conduct(plan.profile.name)
        except DeviceError as error:
            self._give_up(str(error))
            return False
        return True

    def _record_end(self) -> None:
        if self._plan is not None:
            self._say(self._plan)
        if self._instead is None and (self._plan is None or self._reopening):
            subject = "planning operations anew" if self._reopening else SUBJECT
            self._run.log.refuse(subject, self._run.why_no_trace())

    def _open_search(self, plan: OperationPlan) -> None:
        from kilter.clocks.plan.section_job import PlannedOperations, RankOffer

        run, made = self._run, plan.made
        messages = run.messages()
        if messages is None:
            self._give_up("the ranks have no process group to agree through")
            return
        planned = PlannedOperations(depths=made.depths, whole_job_saving=made.whole_job_saving)
        self._searching(messages, plan).open(
            RankOffer(
                rank=run.ranks.rank,
                role=run.iterations.role,
                found=made.found,
                lengths=(),
                operations=planned,
            )
        )

    def _follow(self, now: Sequence[int], arms: Sequence[tuple[int, Sequence[int]]]) -> None:
        if self._plan is None or self._conducting is None:
            return
        from kilter.clocks.plan.timing import ScheduleArm

        plan = self._plan
        later = [ScheduleArm(first=first, schedule=plan.schedule(depths)) for first, depths in arms]
        self._conducting.follow(plan.schedule(now), later)

    def _judge(self, search: JointSearch, finished: Sequence[Iteration]) -> None:
        before = search.found
        try:
            search.tick(finished)
        except MessagesGone as error:
            self._give_up(str(error))
            return
        found = search.found
        if found is not None and found is not before and not found.held:
            self._hand_over(found.reason)
        if found is not before and self._plan is not None:
            self._say(self._plan)

    def _give_up(self, why: str) -> None:
        self._run.log.refuse(SUBJECT, why)
        self._hand_over(why, tell=True)

    def _say(self, plan: OperationPlan) -> None:
        made, search = plan.made, self._search
        told = {"sets": False} if self._conducting is None else self._conducting.told()
        kept = ("sets", "commands", "left_out", "restored", "conductor_cpu_s")
        self._run.log(
            Operated(
                t_s=self._run.log.now_s(),
                summary=made.summary,
                planned=bool(made.found.stretches),
                stretches=len(made.found.stretches),
                operations=plan.operations,
                longest_s=made.found.longest_s,
                break_even_s=plan.card.break_even_s,
                calibrated=plan.calibrated,
                saving=made.found.saving,
                slowdown=made.found.slowdown,
                whole_job_saving=made.whole_job_saving,
                search=None if search is None else search.found,
                instead=self._why_instead,
                blocks=0 if search is None else search.blocks,
                reopened=self._reopened,
                **{name: told[name] for name in kept if name in told},
            )
        )
