"""The controller of clocks: governs a real device, rehearses on a simulated one, or predicts.

    iterations -> conductor -> lease -> device          (a GPU that may be set)
    iterations -> rehearsal -> lease -> simulated GPU   (--device sim:NAME)
    trace      -> rehearsal on a simulated GPU          (nothing may be set: what would have been)

What needs numpy is imported when it is needed: a script may still choose how numpy is to be loaded.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from kilter.clocks.job_history import JobHistory
from kilter.clocks.own_gpu import why_not_this_gpu
from kilter.clocks.pausing import PauseAccount, PausingActuator
from kilter.clocks.plan.pauses import PausePlan, pause_plan
from kilter.controller import Hurried, Run
from kilter.core.errors import DeviceError, FileError
from kilter.core.events import Decided
from kilter.core.label import Label
from kilter.core.messages import MessagesGone, RankMessages
from kilter.core.plan import ClocksMode, Goal
from kilter.core.reasons import CLOCKS_REFUSED, REHEARSAL_CUT
from kilter.core.script_end import ScriptEnd
from kilter.core.setting import DeviceInfo
from kilter.device.sim.cards import names
from kilter.observe.end_times import Iteration

if TYPE_CHECKING:
    from kilter.clocks.conductor import Conductor, GovernorProgram
    from kilter.clocks.plan.governor import BlockOutcome, Order
    from kilter.clocks.rehearsal import Rehearsal

FIRST_BLOCK = 20
"""So many iterations run before the first block: warm-up, and the profiler window, are over by
then."""
FALLBACK_SENSOR_PERIOD_S = 0.1
"""It is taken for a device that does not say how often its sensors change."""
SEED = 0


def mode_of(goal: Goal, info: DeviceInfo, *, dry_run: bool) -> tuple[ClocksMode, str]:
    """What is done about clocks, and why."""
    if goal.max_slowdown is None:
        return ClocksMode.OBSERVE, "no clocks were asked for"
    if info.backend == "null":
        return ClocksMode.OBSERVE, info.refusal or "there is no GPU"
    if dry_run:
        return ClocksMode.SHADOW, "--dry-run"
    if not info.can_set:
        return ClocksMode.SHADOW, info.refusal or "this device cannot be set"
    return ClocksMode.GOVERN, f"at most {goal.max_slowdown:.1%} slower"


class ClocksController:
    """The clocks of one rank's device. `rehearse_s` is the real time that a rehearsal may take
    after the script."""

    settled = True
    """Clocks are the last to be judged."""

    def __init__(self, run: Run, *, rehearse_s: float, history: JobHistory) -> None:
        self._run = run
        self._history = history
        self._rehearse_s = rehearse_s
        self._mode, self._why = mode_of(run.goal, run.info, dry_run=run.dry_run)
        self._alone = False
        """The other ranks cannot be reached any more."""
        self._actuator: PausingActuator | None = None
        self._told_pauses_end = False
        self._conductor: Conductor | None = None
        self._program: GovernorProgram | None = None
        self._rehearsal: Rehearsal | None = None
        self._predicted: Rehearsal | None = None

    def begin(self) -> None:
        if self._mode == ClocksMode.SHADOW and not self._run.dry_run:
            self._run.log.refuse("setting clocks", self._why, CLOCKS_REFUSED)
        if self._simulates or self._mode == ClocksMode.SHADOW or self._history.predicts:
            self._want_trace()

    def iteration_ended(self, index: int) -> None:
        """Nothing is done in the program's thread."""

    def tick(self, finished: Sequence[Iteration], *, settled: bool) -> None:
        if self._run.info.backend == "sim":
            self._rehearse_along(finished)
            return
        if self._alone:
            return
        if self._conductor is None and settled and self._run.iterations.index >= FIRST_BLOCK:
            messages = self._run.messages()
            if messages is not None:
                self._begin_conducting(messages)
        if self._conductor is not None:
            self._conduct(self._conductor, finished)

    def script_ended(self) -> None:
        """There are no hooks of this controller in the program."""

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        """Finish what the script was too short for, and write the plan. The traceback of a script
        that failed, and whoever has pressed Ctrl-C, wait for this: nothing takes long then."""
        if self._run.fence.down:
            return
        self._rehearse_along(finished)
        shadows = self._mode == ClocksMode.SHADOW and self._run.lease.held is None
        if not outcome.finished and (self._simulates or shadows):
            self._run.log.refuse("rehearsing", f"the script ended early ({outcome})")
        elif self._simulates:
            self._finish_rehearsal()
        elif shadows:
            self._predict()
        elif self._mode == ClocksMode.GOVERN and self._conductor is None:
            self._run.log.refuse("governing", self._why_not_begun())
        watch = None if self._actuator is None else self._actuator.watch
        if watch is not None and watch.returns_s:
            self._run.log.notice(str(watch))
        self._write_plan()

    # On a real device -----------------------------------------------------------------------

    def _begin_conducting(self, messages: RankMessages) -> None:
        from kilter.clocks.conductor import Conductor, GovernorProgram, watching

        run = self._run
        assert run.sampler is not None
        actuator = self._actuator = PausingActuator(run.sampler, run.info, run.iterations)
        refused = why_not_this_gpu(self._run.info, self._run.iterations.gpu_uuid)
        if refused is not None:
            self._only_watch("watching the program's GPU", refused)
        elif self._mode == ClocksMode.GOVERN:
            refused = self._take_lease(actuator)
        else:
            refused = self._why
        orders: Generator[Order, BlockOutcome, None] | None = None
        account: PauseAccount | None = None
        if run.ranks.rank == 0 and refused is None:
            self._program = GovernorProgram(
                run.goal,
                run.lease.found,
                run.device.supported(),
                actuator,
                seed=SEED,
                roles=self._roles,
                known=self._history.known(),
                predictor=self._history.predictor(),
                trace=lambda: run.trace.trace,
            )
            orders = self._program.orders()
            if actuator.watch is not None:
                account = self._pause_account(actuator.watch.plan, self._program)
        elif run.ranks.rank == 0:
            orders = watching(run.lease.found, f"the default stands: {refused}")
        self._conductor = Conductor(
            actuator,
            messages,
            found=run.lease.found,
            rank=run.ranks.rank,
            world_size=run.ranks.world_size,
            sensor_period_s=run.info.sensor_period_s or FALLBACK_SENSOR_PERIOD_S,
            orders=orders,
            record=run.log,
            clock=run.log.now_s,
            role=run.iterations.role,
            refused=refused,
            pauses=actuator,
            pauses_left_s=None if account is None else account.left_s,
        )

    def _pause_account(self, plan: PausePlan, program: GovernorProgram) -> PauseAccount:
        max_slowdown = self._run.goal.max_slowdown or 0.0
        return PauseAccount(plan, max_slowdown, lambda: program.choice.time_ratio)

    def _roles(self) -> Sequence[str]:
        return ("",) if self._conductor is None else self._conductor.roles

    def _take_lease(self, actuator: PausingActuator) -> str | None:
        """Why the device cannot be had, or None."""
        run = self._run
        plan = pause_plan(
            run.device.supported(),
            sensor_period_s=run.info.sensor_period_s or FALLBACK_SENSOR_PERIOD_S,
            switch_latency_s=run.info.switch_latency_s,
        )
        try:
            actuator.govern(run.lease.take(), plan)
        except (DeviceError, FileError) as error:
            self._only_watch("setting clocks", str(error), CLOCKS_REFUSED)
            return str(error)
        run.tell_risks()
        return None

    def _conduct(self, conductor: Conductor, finished: Sequence[Iteration]) -> None:
        try:
            if self._mode == ClocksMode.GOVERN:
                self._look_for_pauses(conductor)
            for iteration in finished:
                conductor.iteration(iteration)
            conductor.step()
        except MessagesGone as error:
            self._alone = True
            self._run.log.refuse("going on with the other ranks", str(error))
            self._run.restore()
            return
        if (
            self._mode == ClocksMode.GOVERN and conductor.refused is not None
        ):  # the conductor has said why
            self._mode = ClocksMode.SHADOW
            self._run.restore()

    def _look_for_pauses(self, conductor: Conductor) -> None:
        assert self._actuator is not None
        try:
            self._actuator.look(self._run.iterations.index)
        except (DeviceError, FileError) as error:
            conductor.refuse(str(error))
        watch = self._actuator.watch
        if watch is not None and watch.ended is not None and not self._told_pauses_end:
            self._told_pauses_end = True
            self._run.log.refuse("lowering the clock of the idle GPU", watch.ended)

    def _only_watch(self, subject: str, reason: str, code: str | None = None) -> None:
        """Set nothing from now on; what would have been set is predicted from a trace."""
        self._mode = ClocksMode.SHADOW
        self._run.log.refuse(subject, reason, code)
        self._want_trace()

    # On a simulated device ------------------------------------------------------------------

    @property
    def _simulates(self) -> bool:
        return self._run.info.backend == "sim" and self._mode != ClocksMode.OBSERVE

    def _want_trace(self) -> None:
        if self._run.ranks.rank == 0:  # rank 0 rehearses and predicts for all
            self._run.trace.want()

    def _rehearse_along(self, finished: Sequence[Iteration]) -> None:
        """Each iteration of the program drives one of the simulated GPU."""
        simulates = self._simulates and self._run.ranks.rank == 0
        if simulates and self._rehearsal is None and self._run.trace.trace is not None:
            self._begin_rehearsal()
        if self._rehearsal is not None:
            for _ in finished:
                self._rehearsal.iterate()

    def _begin_rehearsal(self) -> None:
        from kilter.clocks.rehearsal import Rehearsal
        from kilter.device.sim.gpu import SimGpu

        run = self._run
        assert run.trace.trace is not None
        assert isinstance(run.device, SimGpu)
        lease = run.lease.take()
        self._rehearsal = Rehearsal(
            run.device,
            run.trace.trace,
            run.goal,
            apply=lease.set,
            verify=lease.verify,
            record=run.log,
            clock=run.log.now_s,
            seed=SEED,
            known=self._history.known(),
            predictor=self._history.predictor(),
        )

    def _finish_rehearsal(self) -> None:
        if self._rehearsal is not None:
            self._rehearse_on(self._rehearsal)
            self._run.log.rehearsed_iterations = self._rehearsal.iterations_alone
        elif self._run.ranks.rank == 0:
            self._run.log.refuse("rehearsing", self._run.why_no_trace())

    def _rehearse_on(self, rehearsal: Rehearsal) -> None:
        """Go on with the trace until the evidence is in, or the time for it is over."""
        log, over = self._run.log, False
        why_not = f"stopped after {self._rehearse_s:g} s; for more time: --rehearse 60s"
        log.rehearsal_begins()
        try:
            over = rehearsal.finish(seconds=self._rehearse_s, progress=log.rehearsing)
        except Hurried:
            why_not = "ended by Ctrl-C"
        log.rehearsal_ended()
        if not over:
            log.refuse("a complete rehearsal", why_not, REHEARSAL_CUT)

    def _predict(self) -> None:
        """What would have been set: the loop on a simulated GPU of this kind."""
        run = self._run
        if run.ranks.rank != 0:
            return
        if run.trace.trace is None:
            run.log.refuse("predicting a plan", run.why_no_trace())
            return
        from kilter.clocks.rehearsal import Rehearsal
        from kilter.device.sim.cards import profile_of
        from kilter.device.sim.gpu import SimGpu
        from kilter.device.sim.profile import load_profile

        name = profile_of(run.info.name)
        if name is None:
            known = ", ".join(names())
            run.log.refuse("predicting a plan", f"no profile of {run.info.name} (have {known})")
            return
        gpu = SimGpu(load_profile(name), seed=SEED)
        self._predicted = Rehearsal(
            gpu, run.trace.trace, run.goal, apply=gpu.set, record=lambda event: None, seed=SEED
        )
        self._rehearse_on(self._predicted)

    # The plan -------------------------------------------------------------------------------

    def _write_plan(self) -> None:
        rehearsal, conductor = self._rehearsal or self._predicted, self._conductor
        program = rehearsal.program if rehearsal else self._program
        if program is None:
            return
        from kilter.clocks.plan.governor import Phase, plan_of

        run, choice = self._run, program.choice
        phase = rehearsal.phase if rehearsal else conductor.phase if conductor else None
        if self._predicted is None:
            self._history.remember(program, held=phase is Phase.HOLD)
        if choice.setting == run.lease.found and phase is not Phase.HOLD:
            return  # the search is not over: nothing is decided
        predicted = self._predicted is not None
        label = Label.SIMULATED if predicted else run.info.label
        run.files.save_clocks(plan_of(choice, run.lease.found, label))
        run.log(
            Decided(
                t_s=run.log.now_s(),
                state="predicted" if predicted else "decided",
                setting=choice.setting,
                reason=choice.reason,
                time_ratio=choice.time_ratio,
                energy_ratio=choice.energy_ratio,
            )
        )

    def _why_not_begun(self) -> str:
        iterations, ranks = self._run.iterations, self._run.ranks
        if iterations.index < FIRST_BLOCK:
            return self._run.too_few(FIRST_BLOCK + 1)
        if ranks.world_size > 1 and self._run.messages() is None:
            return "the ranks have no process group (any more) to agree through"
        return "the script ended at once"
