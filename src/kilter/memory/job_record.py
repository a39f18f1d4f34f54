"""What is recorded and told of a job under a memory budget: its plans, what became of the budget,
and the record that the report reads."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kilter.controller import Run
from kilter.core.errors import KilterError, PlanError
from kilter.core.events import Moved
from kilter.core.memory_record import MemoryCounts
from kilter.core.pace import Pace
from kilter.core.units import MIB, show_bytes
from kilter.memory import messages
from kilter.memory.at_peak import JobPeak
from kilter.memory.budget import JobBudget
from kilter.memory.compiled import CompiledRegions
from kilter.memory.iteration_times import IterationTimes, median_s
from kilter.memory.kept_recompute import RecomputeWay
from kilter.memory.plan_log import PlanLog
from kilter.memory.recompute_choice import RecomputeChoice
from kilter.memory.state_and_weights import StateAndWeightPolicy, words

if TYPE_CHECKING:
    from kilter.memory.engine.engine import PassPlan, Swapper, SwapReport
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.plan.problem import Link, Problem

NO_PLAN_AFTER = 40
"""After so many passes without a plan a line says why there is none."""
TELL_EVERY_S = 5.0
"""How old the report of a killed run may be."""
MOST_BOUND = 3000
BOUND_S = 5.0
"""At the end of the script the bound is computed for at most so many operations, and for so
long."""
BOUND_ROUNDING = 1e-6
"""A bound may exceed the time that it bounds by this fraction: both are rounded."""


class JobRecord:
    """Reads the parts of a job, and changes none."""

    def __init__(
        self,
        run: Run,
        log: PlanLog,
        times: IterationTimes,
        link: Link,
        swapper: Swapper,
        peak: JobPeak,
        budget: JobBudget,
        compiled: CompiledRegions,
        choice: RecomputeChoice | None,
    ) -> None:
        self._run = run
        self._log = log
        self._times = times
        self._link = link
        self._swapper = swapper
        self._peak = peak
        self._budget = budget
        self._compiled = compiled
        self._choice = choice
        self.policy: StateAndWeightPolicy | None = None
        """It is None where gradients, state and weights stay."""
        self._pace = Pace(TELL_EVERY_S)
        self._plain_seen = False
        """The job ran with everything kept, and its peak is known."""
        self._said = False
        """A line has said what became of the budget."""

    def due(self) -> bool:
        """It is time for another record, for the case that the run is killed."""
        return self._pace.due(self._run.log.now_s())

    def iteration_ended(self, report: SwapReport, *, stands: bool) -> None:
        """Record what is new. `stands` says that what is moved, to which budget, is decided."""
        if not self._plain_seen and not report.spilled:
            self._plain_seen = self._budget.plain_peak_known()
        if not self._run.dry_run and (new := self._log.new(report.plans)):
            for planned in self._swapper.plans():
                if planned.plan in new:
                    self._log_plan(planned)
            self.tell()  # a killed run has what its plans were made for
        self._log.refuse_new(report.refused)
        if stands and not self._said and not self._run.dry_run:
            self._say_in_force(report)
        if report.watched_every > 1:
            self._log.notice(messages.CHANGING_SHAPES)

    def _say_in_force(self, report: SwapReport) -> None:
        """Once, as soon as it is known: what became of the budget."""
        budget_bytes = self._budget.in_force.size_bytes
        if budget_bytes is None:
            return
        if report.settled:
            largest = max(report.plans, key=lambda plan: plan.peak_before_bytes)
            stays = self._peak.on_gpu and not self._consumed
            text = messages.in_force(largest, budget_bytes, gradients_stay=stays)
        elif self._times.planned_s or report.passes < NO_PLAN_AFTER:
            return
        else:
            text = messages.no_plan(report.refused)
        self._said = True
        self._log.tell(f"memory: {text}")

    def _log_plan(self, planned: PassPlan) -> None:
        budget = self._budget.in_force
        self._log.add(
            planned,
            device=self._run.info.name if self._peak.on_gpu else "cpu",
            reason=f"a memory budget of {show_bytes(budget.size_bytes)}: {budget.words}",
        )

    def _problem(self, record: PassRecord, budget_bytes: int) -> tuple[Problem, tuple[int, ...]]:
        return record.problem(link=self._link, budget_bytes=budget_bytes, min_bytes=MIB)

    def tell(self, least_bytes: int | None = None, bound_s: float | None = None) -> None:
        """Record how the job stands."""
        report, choice, policy = self._swapper.report(), self._choice, self.policy
        state = None if policy is None else policy.report
        weights = None if policy is None else policy.weights.report
        movers = [moved for moved in (report, weights, state) if moved is not None]
        if len(movers) > 1:
            self._log.refuse_new(reason for moved in movers for reason in moved.refused)
        counts = {name: getattr(report, name) for name in MemoryCounts.__struct_fields__}
        for name in ("out_bytes", "in_bytes", "host_bytes"):
            counts[name] = sum(getattr(moved, name) for moved in movers)
        budget = self._budget.in_force
        self._run.log(
            Moved(
                t_s=self._run.log.now_s(),
                backend="cuda" if self._peak.on_gpu else "stand-in",
                budget_bytes=budget.size_bytes,
                budget=budget.words,
                applied=not self._run.dry_run,
                plain_peak_bytes=self._plain_peak_bytes() or None,
                plain_peak_seen=self._plain_seen,
                peak_bytes=self._peak.measured_bytes(),
                least_bytes=least_bytes,
                plain_iteration_s=median_s(self._times.plain_s),
                iteration_s=median_s(self._times.planned_s),
                iteration_passes=self._times.passes_each(report.passes),
                planned_iterations=self._times.counts["planned"],
                other_iterations=self._times.counts["others"],
                other_iteration_s=median_s(self._times.others_s),
                consumed=self._consumed,
                in_force=self._log.numbers_of(report.plans),
                state="" if state is None else words(state, weights),
                step_wait_s=self.step_wait_s,
                compiled=self._compiled.words,
                recompute_choice="" if choice is None else choice.words,
                at_peak=self._peak.words(),
                own_checkpointing=choice is not None and choice.in_force.way is RecomputeWay.OWN,
                bound_s=bound_s,
                **counts,
            )
        )

    @property
    def step_wait_s(self) -> float:
        """Predicted: the optimizer's step waits so long for its state, where gradients are kept."""
        state = None if self.policy is None else self.policy.report
        return 0.0 if state is None else state.step_wait_s

    @property
    def _consumed(self) -> int:
        """Buckets of gradients that were used up in backward."""
        state = None if self.policy is None else self.policy.report
        return 0 if state is None else state.visits

    def _plain_peak_bytes(self) -> int:
        """With everything kept, of all kinds of passes; 0: not known."""
        before_choice = 0 if self._choice is None else self._choice.plain.peak_bytes
        return max(self._budget.plain_peak_bytes(), self._compiled.plain_peak_bytes, before_choice)

    def conclude(self) -> None:
        """The last record, once all times are known."""
        if self._run.dry_run:
            self._plan_only()
        self.tell(*self._bounds())

    def _plan_only(self) -> None:
        """What would have been done."""
        from kilter.memory.engine.engine import PassPlan
        from kilter.memory.plan.choose import plan

        record = self._swapper.largest_pass()
        budget_bytes = self._budget.in_force.size_bytes
        if record is None or budget_bytes is None:
            return
        problem, numbers = self._problem(record, budget_bytes)
        try:
            self._log_plan(PassPlan(record, plan(problem), problem, numbers, ()))
        except PlanError as error:
            self._log.refuse_new((messages.of_error(error),))

    def _bounds(self) -> tuple[int | None, float | None]:
        """The smallest peak of all kinds of passes; and, for the largest pass that was planned, or
        seen, the time that no schedule beats."""
        planned = max(self._swapper.plans(), key=lambda p: p.plan.peak_before_bytes, default=None)
        record = self._swapper.largest_pass() if planned is None else planned.record
        budget_bytes = self._budget.in_force.size_bytes
        if record is None or budget_bytes is None:
            return None, None
        problem, _ = self._problem(record, budget_bytes)
        bound_s = None
        if len(record.operation_s) <= MOST_BOUND and problem.floor_bytes <= problem.budget_bytes:
            from kilter.memory.plan.exact import relax

            # No solver installed, or not in time: the bound stays unknown.
            with suppress(KilterError):
                bound_s = relax(problem, limit_s=BOUND_S).bound_s
        if bound_s is not None and planned is not None:
            iteration_s = planned.plan.iteration_s
            # Where times have changed since, it is the bound of another plan.
            retimed = bound_s > (1 + BOUND_ROUNDING) * iteration_s
            bound_s = None if retimed else min(bound_s, iteration_s)
        return self._budget.least_bytes(self._link, budget_bytes), bound_s
