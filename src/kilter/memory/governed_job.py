"""A job whose saved tensors are in the hands of the engine: its budget, and what makes room for
it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kilter.controller import Run
from kilter.core.plan import MemoryBudget
from kilter.memory import messages
from kilter.memory.at_peak import JobPeak
from kilter.memory.budget import UNLIMITED, BudgetInForce, JobBudget, PlainIterations
from kilter.memory.compiled import CompiledRegions
from kilter.memory.engine_thread import EngineThread
from kilter.memory.host_time import HOST_EACH_S
from kilter.memory.iteration_times import IterationTimes
from kilter.memory.job_record import JobRecord
from kilter.memory.kept_recompute import RecomputeHistory, RecomputeWay
from kilter.memory.own_checkpointing import OwnCheckpointing
from kilter.memory.plan_log import PlanLog
from kilter.memory.rank_agreement import RankAgreement
from kilter.memory.recompute_choice import RecomputeChoice
from kilter.memory.state_and_weights import StateAndWeightPolicy
from kilter.observe.iteration_clock import in_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.compiled_recorder import RecorderBuild
    from kilter.memory.engine.engine import SwapReport
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.plan.problem import Link

SETTLED = 3
"""After so many iterations under a plan the job counts as settled; the peak is measured in them."""


class GovernedJob:
    """From the first large saved tensor on: makes the parts, and has each do its part at the ends
    of iterations. All but `tick` and `conclude` runs in the program's threads."""

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
        self._link = link
        self._times = times
        self._log = log
        card_bytes, card_words = card
        on_gpu = cuda is not None
        begin = BudgetInForce.at_begin(asked, card_bytes, card_words, on_gpu=on_gpu)
        unplanned_bytes = UNLIMITED if card_bytes is None else card_bytes
        limit_bytes = unplanned_bytes if begin.size_bytes is None else begin.size_bytes
        swapper = self._swapper = Swapper(
            backend,
            budget_bytes=UNLIMITED if run.dry_run else limit_bytes,
            link=link,
            fence=run.fence,
            segments=self._calls,
            # A stand-in measures the host's time with the device's: they are the same there.
            alone_s=HOST_EACH_S if on_gpu and self._calls else 0.0,
        )
        swapper.may_plan = begin.size_bytes is not None or run.dry_run
        self._choice: RecomputeChoice | None = None
        if recompute == "auto":
            own = OwnCheckpointing(run.fence)
            ranks = RankAgreement(run.messages, run.ranks, times)
            self._choice = RecomputeChoice(swapper, times, own, self._can_record, ranks, history)
        plain = PlainIterations(swapper, backend.device, cuda, times)
        self._budget = JobBudget(asked, begin, unplanned_bytes, swapper, plain, dry_run=run.dry_run)
        self._thread = EngineThread(swapper.hooks, self._end_iteration)
        self._compiled = CompiledRegions(
            swapper, log, run.fence, run.log.now_s, backend.device, within_bytes=unplanned_bytes
        )
        self._peak = JobPeak(swapper, backend.device, cuda)
        self._record = JobRecord(
            run, log, times, link, swapper, self._peak, self._budget, self._compiled, self._choice
        )
        self._building: RecorderBuild | None = None
        """It builds the recorder for calls, once that is wanted."""
        self._policy: StateAndWeightPolicy | None = None
        """It is None where gradients, state and weights stay."""
        self._stopped = False

    # Begin and end

    def begin(self) -> None:
        """In the thread whose tensors are governed."""
        if self._calls:
            self._build_recorder()
        self._swapper.__enter__()
        self._thread.begin(self._run.fence)

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
        self, open_backend: Callable[[], Backend], used_bytes: int, gradients: str, weights: str
    ) -> None:
        """Let gradients, optimizer state and weights make room as well, each on its own streams.
        So much of the device is used."""
        self._policy = self._record.policy = StateAndWeightPolicy(
            self._swapper, open_backend, self._link, self._run.fence, gradients, weights
        )
        self._policy.begin(used_bytes, self._swapper.budget_bytes)

    def stop(self) -> None:
        """Decide nothing any more: the script is over, or this is a forked child."""
        self._stopped = True

    def close(self) -> None:
        """Remove all hooks, in the thread whose tensors are governed or after its end. While that
        thread goes on in the background, nothing is removed."""
        self._peak.script_ended()
        self._compiled.close()
        self._thread.end()
        self._budget.script_ended()
        if self._choice is not None:
            self._choice.close()
        if self._building is not None:
            self._building.cancel()
        if self._swapper.hooks.in_thread or self._swapper.hooks.thread_ended:
            if self._policy is not None:
                self._policy.close()
            self._swapper.__exit__(None, None, None)

    def conclude(self) -> None:
        """Record the result, once all times are known."""
        if not self._run.dry_run:
            self._decide_after_iteration()
        self._record.conclude()
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
        if self._swapper.hooks.thread_ended and not self._stopped:
            self._go_on_here()
        if self._thread.has_ended_an_iteration():
            self._end_iteration()

    def _go_on_here(self) -> None:
        """The thread whose tensors were governed has ended, and this one trains: govern this one.
        What the other has shown says nothing of it."""
        from kilter.memory.engine.saved_hooks import only_ours

        if in_backward() or self._swapper.captured or not only_ours():
            return
        self._swapper.__exit__(None, None, None)
        self._swapper.__enter__()
        if self._policy is not None:
            self._policy.activations_are_smaller()

    def _end_iteration(self) -> None:
        from kilter.memory.engine.quiet import unseen

        if self._swapper.captured:  # what is decided may wait for the device, which would end that
            return
        unseen(self._decide_after_iteration)
        if self._record.due():
            unseen(self._record.tell)

    def _decide_after_iteration(self) -> None:
        """Record what is new at this iteration end; decide what follows from that."""
        if not self._stopped:
            self._budget.iteration_ended()
            if not self._run.dry_run:
                self._compiled.iteration_ended(self._budget.in_force.size_bytes, self._plain_pass)
        report = self._swapper.report()
        planned = self._swapper.planned and not self._run.dry_run
        self._times.planned(now=planned, watched=self._swapper.watching)
        self._record.iteration_ended(report, stands=self._stands)
        if not self._stopped and not self._compiled.searching:
            self._make_room(report)
            self._choose()

    def _plain_pass(self) -> PassRecord | None:
        """The largest pass with everything kept, once its peak is known."""
        return self._swapper.largest_pass() if self._budget.plain_peak_known() else None

    def _make_room(self, report: SwapReport) -> None:
        """Beside activations: gradients, state and weights; then the least possible peak."""
        policy, budget_bytes = self._policy, self._budget.in_force.size_bytes
        if policy is not None and budget_bytes is not None:
            policy.iteration_ended(report, budget_bytes, self._run.log.now_s())
            self._log.refuse_new(policy.refused)
        if policy is None or policy.settled:
            self._budget.settle_for_least(self._link)

    def _changing(self, report: SwapReport) -> bool:
        """Shapes keep changing under a budget, most iterations have no plan or that of a larger
        one, and nothing else is being decided."""
        counts, policy = self._times.counts, self._policy
        unplanned = counts["others"] >= counts["planned"] or report.serves_sizes
        mostly = report.watched_every > 1 and unplanned and not report.tries_sizes
        decided = not self._compiled.searching and (policy is None or policy.mover is None)
        return mostly and decided and self._budget.in_force.size_bytes is not None

    @property
    def _met(self) -> bool:
        """The budget is in force, and a pass was watched."""
        return self._budget.in_force.size_bytes is not None and bool(self._swapper.records())

    def _choose(self) -> None:
        """Single operations or calls of modules."""
        choice = self._choice
        if choice is not None and not choice.decided and self._swapper.hooks.in_thread:
            report = self._swapper.report()
            choice.iteration_ended(
                met=self._met,
                settled=self._stands and report.settled,
                changing=self._changing(report),
                step_wait_s=self._record.step_wait_s,
            )
            if choice.words:
                self._log.tell(f"memory: {choice.words}")
                choice.keep()
                if choice.in_force.way is RecomputeWay.OWN and self._policy is not None:
                    self._policy.activations_are_smaller()
