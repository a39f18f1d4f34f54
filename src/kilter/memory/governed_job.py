"""A job whose saved tensors are in the hands of the engine: its budget, its plans, their
results."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kilter.controller import Run
from kilter.core.errors import KilterError, PlanError
from kilter.core.events import Moved
from kilter.core.memory_record import MemoryCounts
from kilter.core.pace import Pace
from kilter.core.plan import MemoryBudget
from kilter.core.units import MIB, show_bytes
from kilter.memory import messages
from kilter.memory.at_peak import at_peak
from kilter.memory.budget import UNLIMITED, BudgetInForce, JobBudget, PlainIterations
from kilter.memory.compiled import CompiledRegions
from kilter.memory.host_time import HOST_EACH_S
from kilter.memory.iteration_times import IterationTimes, median_s
from kilter.memory.kept_recompute import RecomputeHistory, RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing
from kilter.memory.plan_log import PlanLog
from kilter.memory.rank_agreement import RankAgreement
from kilter.memory.recompute_choice import RecomputeChoice
from kilter.memory.state_and_weights import StateAndWeightPolicy, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.compiled_recorder import RecorderBuild
    from kilter.memory.engine.engine import SwapReport
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.plan.choose import MemoryPlan
    from kilter.memory.plan.problem import Link, Problem

SETTLED = 3
"""After so many iterations under a plan the job counts as settled; the peak is measured in them."""
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


class GovernedJob:
    """From the first large saved tensor on. All but `conclude` runs in the program's threads.
    It has many attributes because it makes and joins the parts: link, engine, policy, budget."""

    def __init__(
        self,
        run: Run,
        asked: MemoryBudget,
        backend: Backend,
        link: Link,
        times: IterationTimes,
        log: PlanLog,
        *,
        cuda: Any,
        card: tuple[int | None, str],
        recompute: str,
        history: RecomputeHistory,
    ) -> None:
        """`cuda` is `torch.cuda` where the job's device is a GPU, else None; `card` is what the
        card has for this process, in bytes and in words."""
        from kilter.memory.engine import Swapper

        self._run = run
        self._calls = recompute == "segments"
        """Calls of modules are recomputed from the begin."""
        self._backend = backend
        self._link = link
        self._times = times
        self._log = log
        self._cuda = cuda
        card_bytes, card_words = card
        on_gpu = cuda is not None
        begin = BudgetInForce.at_begin(asked, card_bytes, card_words, on_gpu=on_gpu)
        unplanned_bytes = UNLIMITED if card_bytes is None else card_bytes
        limit_bytes = unplanned_bytes if begin.size_bytes is None else begin.size_bytes
        self._swapper = Swapper(
            backend,
            budget_bytes=UNLIMITED if run.dry_run else limit_bytes,
            link=link,
            fence=run.fence,
            segments=self._calls,
            # A stand-in measures the host's time with the device's: they are the same there.
            alone_s=HOST_EACH_S if on_gpu and self._calls else 0.0,
        )
        self._choice: RecomputeChoice | None = None
        if recompute == "auto":
            own = OwnCheckpointing(run.fence)
            ranks = RankAgreement(run.messages, run.ranks, times)
            self._choice = RecomputeChoice(
                self._swapper, times, own, self._can_record, ranks, history
            )
        self._swapper.may_plan = begin.size_bytes is not None or run.dry_run
        self._plain = PlainIterations(self._swapper, backend.device, cuda, times)
        self._budget = JobBudget(
            asked, begin, unplanned_bytes, self._swapper, self._plain, dry_run=run.dry_run
        )
        self._compiled = CompiledRegions(
            self._swapper,
            log,
            run.fence,
            run.log.now_s,
            backend.device,
            within_bytes=unplanned_bytes,
        )
        self._building: RecorderBuild | None = None
        """It builds the recorder for calls, once that is wanted."""
        self._policy: StateAndWeightPolicy | None = None
        """It is None where gradients, state and weights stay."""
        self._stopped = False
        self._pace = Pace(TELL_EVERY_S)
        self._plain_seen = False
        """The job ran with everything kept, and its peak is known."""
        self._peak_bytes: int | None = None
        """As it was measured when the script ended."""
        self._said = False
        """A line has said what became of the budget."""
        self._largest_bytes = 0
        """The largest pass so far had this peak with everything kept."""
        self._at_peak = ""
        """That pass held these tensors at its peak, in words."""

    # Begin and end

    def begin(self) -> None:
        """In the thread whose tensors are governed."""
        if self._calls:
            self._build_recorder()
        self._swapper.__enter__()

    def _build_recorder(self) -> None:
        """Before the program goes on."""
        while not self._can_record():
            assert self._building is not None
            self._building.join()

    def _can_record(self) -> bool:
        """Calls of modules can be recorded. What that takes is built the first time."""
        from kilter.memory.engine import compiled_recorder

        if self._building is None:
            if not compiled_recorder.to_build():
                return True
            self._log.tell(messages.BUILDING_RECORDER)
            self._building = compiled_recorder.RecorderBuild()
            self._building.start()
        if self._building.is_alive():
            return False
        if self._building.reason is not None:
            self._log.notice(self._building.reason)
            self._building.reason = None
        return True

    def move_state_and_weights(
        self, open_backend: Callable[[], Backend], gradients: str, weights: str
    ) -> None:
        """Let gradients, optimizer state and weights make room as well, each on its own streams."""
        self._policy = StateAndWeightPolicy(
            self._swapper, open_backend, self._link, self._run.fence, gradients, weights
        )
        self._policy.begin(self._backend.used_bytes() or 0, self._swapper.budget_bytes)

    def stop(self) -> None:
        """Decide nothing any more: the script is over, or this is a forked child."""
        self._stopped = True

    def close(self) -> None:
        """Remove all hooks, in the thread whose tensors are governed or after its end. While that
        thread goes on in the background, nothing is removed."""
        self._peak_bytes = self._measured_peak_bytes()
        self._compiled.close()
        if self._plain.in_thread:
            self._plain.end()
        if self._choice is not None:
            self._choice.close()
        if self._building is not None:
            self._building.cancel()
        if self._plain.in_thread or self._swapper.hooks.thread_ended:
            if self._policy is not None:
                self._policy.close()
            self._swapper.__exit__(None, None, None)

    def conclude(self) -> None:
        """Record the result, once all times are known."""
        if self._run.dry_run:
            self._plan_only()
        else:
            self._decide_after_iteration()
        self._tell(*self._bounds())
        if self._choice is not None:
            self._choice.conclude()

    # While the program runs

    def tick(self) -> None:
        """In the session's thread."""
        if self._choice is not None:
            self._choice.tick()

    @property
    def was_planned(self) -> bool:
        """Some pass has run under a plan."""
        return self._swapper.report().planned > 0

    @property
    def settled(self) -> bool:
        """The job runs as it is going to run."""
        chosen = self._choice is None or self._choice.decided
        return self._stands and chosen and len(self._times.planned_s) >= SETTLED

    @property
    def _stands(self) -> bool:
        """What is moved and to which budget is decided."""
        return not self._compiled.searching and (self._policy is None or self._policy.settled)

    def iteration_ended(self) -> None:
        """An iteration of the program ends here, in its thread, perhaps under modes of its own."""
        from kilter.memory.engine.quiet import unseen

        unseen(self._decide_after_iteration)
        if self._pace.due(self._run.log.now_s()):
            unseen(self._tell)

    def _decide_after_iteration(self) -> None:
        """Record what is new at this iteration end; decide what follows from that."""
        if not self._stopped:
            self._budget.iteration_ended()
            if not self._run.dry_run:
                self._compiled.iteration_ended(self._budget.in_force.size_bytes, self._plain_pass)
        swapper, report = self._swapper, self._swapper.report()
        if not self._plain_seen and not report.spilled:
            self._plain_seen = self._budget.plain_peak_known()
        self._times.planned(now=swapper.planned and not self._run.dry_run)
        if not self._run.dry_run and (new := self._log.new(report.plans)):
            for record, plan, numbers in swapper.plans():
                if plan in new:
                    self._log_plan(record, plan, numbers)
            self._tell()  # a killed run has what its plans were made for
        self._log.refuse_new(report.refused)
        self._say_in_force(report)
        if report.watched_every > 1:
            self._log.notice(messages.CHANGING_SHAPES)
        if not self._stopped and not self._compiled.searching:
            self._make_room(report)
            self._choose()

    def _say_in_force(self, report: SwapReport) -> None:
        """Once, as soon as it is known: what became of the budget."""
        budget_bytes = self._budget.in_force.size_bytes
        if self._said or self._run.dry_run or budget_bytes is None or not self._stands:
            return
        if report.settled:
            largest = max(report.plans, key=lambda plan: plan.peak_before_bytes)
            stays = self._cuda is not None and not self._consumed
            text = messages.in_force(largest, budget_bytes, gradients_stay=stays)
        elif self._times.planned_s or report.passes < NO_PLAN_AFTER:
            return
        else:
            text = messages.no_plan(report.refused)
        self._said = True
        self._log.tell(f"memory: {text}")

    def _plain_pass(self) -> PassRecord | None:
        """The largest pass with everything kept, once its peak is known."""
        return self._swapper.largest_pass() if self._budget.plain_peak_known() else None

    def _make_room(self, report: SwapReport) -> None:
        """Beside activations: gradients, state and weights; then the least possible peak."""
        policy, budget_bytes = self._policy, self._budget.in_force.size_bytes
        if policy is not None and budget_bytes is not None:
            policy.iteration_ended(report, budget_bytes, self._run.log.now_s())
            if policy.streaming.taken_back is not None:
                self._log.refuse_new((policy.streaming.taken_back,))
            if policy.weights.kept:
                self._log.refuse_new((messages.WEIGHTS_KEPT,))
        if policy is None or policy.settled:
            self._budget.settle_for_least(self._link)

    def _choose(self) -> None:
        """Single operations or calls of modules."""
        choice = self._choice
        if choice is not None and not choice.decided and self._plain.in_thread:
            choice.iteration_ended(settled=self._stands and self._swapper.report().settled)
            if choice.words:
                self._log.tell(f"memory: {choice.words}")
                choice.keep()
                if choice.in_force.way is RecomputeWay.OWN and self._policy is not None:
                    self._policy.activations_are_smaller()

    def _log_plan(self, record: PassRecord, plan: MemoryPlan, numbers: tuple[int, ...]) -> None:
        problem, every = self._problem(record, plan.budget_bytes)
        budget = self._budget.in_force
        self._log.add(
            plan,
            record,
            problem,
            [every.index(number) for number in numbers],
            device="cpu" if self._cuda is None else self._run.info.name,
            reason=f"a memory budget of {show_bytes(budget.size_bytes)}: {budget.words}",
        )

    def _problem(self, record: PassRecord, budget_bytes: int) -> tuple[Problem, tuple[int, ...]]:
        return record.problem(link=self._link, budget_bytes=budget_bytes, min_bytes=MIB)

    # Results

    def _measured_peak_bytes(self) -> int | None:
        """Of passes of all kinds, as they run now. Since the newest of them was measured, the
        only the allocator shows it."""
        peak_bytes = self._swapper.report().highest_bytes
        if self._cuda is not None and (self._swapper.planned or not peak_bytes):
            allocated_bytes = int(self._cuda.max_memory_allocated(self._backend.device))
            peak_bytes = max(peak_bytes, allocated_bytes)
        return peak_bytes or None

    def _tell(self, least_bytes: int | None = None, bound_s: float | None = None) -> None:
        report = self._swapper.report()
        state = None if self._policy is None else self._policy.report
        weights = None if self._policy is None else self._policy.weights.report
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
                backend="stand-in" if self._cuda is None else "cuda",
                budget_bytes=budget.size_bytes,
                budget=budget.words,
                applied=not self._run.dry_run,
                plain_peak_bytes=self._plain_peak_bytes() or None,
                plain_peak_seen=self._plain_seen,
                peak_bytes=self._peak_bytes or self._measured_peak_bytes(),
                least_bytes=least_bytes,
                plain_iteration_s=median_s(self._times.plain_s),
                iteration_s=median_s(self._times.planned_s),
                consumed=self._consumed,
                in_force=self._log.numbers_of(report.plans),
                state="" if state is None else words(state, weights),
                compiled=self._compiled.words,
                recompute_choice="" if self._choice is None else self._choice.words,
                at_peak=self._held_at_peak(),
                own_checkpointing=self._choice is not None
                and self._choice.in_force.way is RecomputeWay.OWN,
                bound_s=bound_s,
                **counts,
            )
        )

    @property
    def _consumed(self) -> int:
        """Buckets of gradients that were used up in backward."""
        state = None if self._policy is None else self._policy.report
        return 0 if state is None else state.visits

    def _held_at_peak(self) -> str:
        """By the largest pass that was ever seen: checkpointing makes it a smaller one."""
        record = self._swapper.largest_pass()
        if record is not None and record.peak_bytes > self._largest_bytes:
            self._largest_bytes, self._at_peak = record.peak_bytes, at_peak(record)
        return self._at_peak

    def _plain_peak_bytes(self) -> int:
        """With everything kept, of all kinds of passes; 0: not known."""
        before_choice = 0 if self._choice is None else self._choice.plain.peak_bytes
        return max(self._budget.plain_peak_bytes(), self._compiled.plain_peak_bytes, before_choice)

    def _plan_only(self) -> None:
        """What would have been done."""
        from kilter.memory.plan.choose import plan

        record = self._swapper.largest_pass()
        budget_bytes = self._budget.in_force.size_bytes
        if record is None or budget_bytes is None:
            return
        problem, numbers = self._problem(record, budget_bytes)
        try:
            self._log_plan(record, plan(problem), numbers)
        except PlanError as error:
            self._log.refuse_new((messages.of_error(error),))

    def _bounds(self) -> tuple[int | None, float | None]:
        """For the largest pass that was planned, or seen: the smallest peak, and the time that no
        schedule beats."""
        planned = max(self._swapper.plans(), key=lambda p: p[1].peak_before_bytes, default=None)
        record = self._swapper.largest_pass() if planned is None else planned[0]
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
            iteration_s = planned[1].iteration_s
            # Where times have changed since, it is the bound of another plan.
            retimed = bound_s > (1 + BOUND_ROUNDING) * iteration_s
            bound_s = None if retimed else min(bound_s, iteration_s)
        return problem.floor_bytes, bound_s
