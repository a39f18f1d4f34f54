"""Joins the swapper to a session: finds the job's device, makes its budget, tells what came of it.

    import torch -> a waiting hook -> the first large tensor saved for backward -> backend, link,
    budget -> `Swapper` -> plan -> the same at every iteration end: is there something to tell?

Nothing is opened before the program itself has used the device: it may still choose another one,
or fork. Hooks on saved tensors belong to a thread, so the waiting one is set where torch is
imported, and in any thread that turns out to step an optimizer.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kilter.controller import Run
from kilter.core.errors import BudgetTooSmall, KilterError, PlanError
from kilter.core.events import Moved
from kilter.core.memory_record import MemoryCounts
from kilter.core.plan import MemoryBudget
from kilter.core.reasons import Reason
from kilter.core.script_end import ScriptEnd
from kilter.core.units import MIB, show_bytes
from kilter.memory import messages
from kilter.memory.host_memory import HostLimit
from kilter.memory.state_and_weights import StateAndWeightPolicy, words
from kilter.memory.usable_bytes import usable_device_bytes
from kilter.observe import torch_internals
from kilter.observe.imports import after_import
from kilter.observe.iteration_clock import Iteration

if TYPE_CHECKING:
    import torch

    from kilter.memory.engine import Swapper
    from kilter.memory.engine.backend import Backend
    from kilter.memory.engine.pass_record import PassRecord
    from kilter.memory.plan.choose import MemoryPlan
    from kilter.memory.plan.problem import Link, Problem
    from kilter.memory.schedule import PlannedPass

UNLIMITED = 2**60
"""More bytes than any device has."""
SEEN_PASSES = 2
"""Passes of one kind after which its peak is known: the first creates gradients and state."""
UNTRIED = 6
"""Iteration ends after which a share does not wait any longer for what can be recomputed."""
PLAIN = 4
"""Iterations without us, to know what they take; only where the budget is a share of that."""
LARGER_PEAK = 1.01
"""A plain peak that is larger than the largest so far by this factor makes another budget."""
SETTLED = 3
"""Iterations under a plan after which the job counts as settled; the peak is measured in them."""
GIVE_UP = 60
"""Iteration end after which clocks no longer wait for a memory plan."""
TELL_EVERY_S = 5.0
"""The report of a killed run may be so old."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What the framework's allocator is configured by. Where the program says nothing, segments may
grow: data that come and go in many sizes would leave fragments of the fixed ones."""
GROWING = "expandable_segments:True"
LINK_BYTES = 64 * MIB
"""Buffers that the link is measured with."""
MOST_BOUND = 3000
BOUND_S = 5.0
"""Operations up to which the bound is computed, and for how long, at the end of the script."""
BOUND_ROUNDING = 1e-6
"""A bound may exceed the time that it bounds by this fraction: both are rounded."""


class MemoryController:
    """Makes the program fit `budget`. All but `tick` and `end` belong to the program's threads."""

    def __init__(self, run: Run, budget: MemoryBudget, *, gradients: str = "auto") -> None:
        self._run = run
        self._budget = budget
        self._host = HostLimit(run.goal.host_memory_bytes)
        self._gradients = gradients
        self._torch: Any = None
        self._waiting = after_import("torch", run.fence(self._arrived))
        self._waits: dict[int, Any] = {}
        """By thread, the waiting hook in it."""
        self._over = False
        self._grows = False
        """We have configured the framework's allocator."""
        self._kind: str | None = None
        self._backend: Backend | None = None
        self._link: Link | None = None
        self._swapper: Swapper | None = None
        self._floor: StateAndWeightPolicy | None = None
        self._card_bytes = UNLIMITED
        self._budget_bytes: int | None = None
        self._words = "not known: no data were met"
        self._told_s = 0.0
        self._plans: tuple[MemoryPlan, ...] = ()
        self._told_plans: list[MemoryPlan] = []
        """All that were ever in force, in this order."""
        self._refused: set[Reason] = set()
        self._seen = False
        """The job ran with everything kept, and its peak is known."""
        self._plain_left: int | None = None
        """Iterations without us that are still to come; None: not begun."""
        self._plain_peak_bytes = 0
        self._share_of_bytes: int | None = None
        """The plain peak that the budget is a share of."""
        self._untried = 0
        self._was_planned = False
        self._peak_bytes: int | None = None
        self._iteration_ended = -1
        self._phases: dict[int, str] = {}
        """By iteration end, what the iteration that it ends was: `plain` or `planned`."""
        self._times: dict[str, deque[float]] = {"plain": deque(maxlen=64)}
        self._times["planned"] = deque(maxlen=512)
        self._schedules: deque[PlannedPass] = deque(maxlen=1)

    # Begin and end

    def begin(self) -> None:
        """Begin as soon as the program has imported torch."""
        if "torch" not in sys.modules and not any(name in os.environ for name in ALLOCATOR):
            os.environ[ALLOCATOR[0]] = GROWING
            self._grows = True
        forked = weakref.WeakMethod(self._forked)
        os.register_at_fork(after_in_child=lambda: _call(forked()))
        self._waiting.install()

    def script_ended(self) -> None:
        """The program is over: take the hooks out. Data that are away still find their way back."""
        self._over = True
        self._waiting.cancel()
        if os.environ.get(ALLOCATOR[0]) == GROWING and self._grows:
            del os.environ[ALLOCATOR[0]]  # the allocator has read it long ago
        if self._torch is None:
            return
        swapper, here = self._swapper, threading.get_ident()
        if swapper is not None:
            self._peak_bytes = self._measured_peak_bytes(swapper)
        if swapper is not None and self._owner == here:
            if self._plain_left:
                swapper.step_in()
            if self._floor is not None:
                self._floor.close()
            swapper.__exit__(None, None, None)
        graph = self._torch.autograd.graph
        if graph.disable_saved_tensors_hooks is self._disable:
            graph.disable_saved_tensors_hooks = self._disable_before
        waiting = self._waits.pop(here, None)
        if waiting is not None:
            waiting.__exit__()

    def end(self, finished: Sequence[Iteration], outcome: ScriptEnd) -> None:
        """Tell what came of it, once all times are known, and how the program has ended."""
        self._time(finished)
        self._conclude(outcome)
        self._save_schedule()

    def _conclude(self, outcome: ScriptEnd) -> None:
        swapper = self._swapper
        if swapper is None:
            nothing = messages.nothing_saved(MIB, on_gpu=self._kind == "cuda")
            self._refuse(messages.NO_TORCH if self._torch is None else nothing)
            return
        if outcome.out_of_memory:
            allocator = None if self._grows else f"{ALLOCATOR[0]}={GROWING}"
            planned = swapper.report().planned > 0
            self._refuse(messages.out_of_memory(planned=planned, allocator=allocator))
        if self._run.dry_run:
            self._plan_only(swapper)
        else:
            self._look(swapper)
        self._tell(swapper, *self._bounds(swapper))

    def _forked(self) -> None:
        """A child has the hooks of the thread that forked it, and nothing to govern."""
        self._over = True
        self._waiting.cancel()

    # Waiting for data

    def _arrived(self) -> None:
        import torch

        self._torch = torch
        graph = torch.autograd.graph
        self._disable_before = graph.disable_saved_tensors_hooks
        self._disable = self._without_ours(self._disable_before)
        graph.disable_saved_tensors_hooks = self._disable
        self._wait_here()

    def _wait_here(self) -> None:
        from kilter.memory.engine.store import kept, read_kept

        torch = self._torch

        def pack(tensor: Any) -> Any:
            waiting = self._swapper is None and threading.get_ident() in self._waits
            if waiting and not self._over and self._large(tensor):
                self._run.fence(self._meet)(tensor)
            return kept(tensor)

        disable = torch_internals.uncompiled  # Dynamo would compile our own frames
        hooks = torch.autograd.graph.saved_tensors_hooks(disable(pack), disable(read_kept))
        hooks.__enter__()
        self._waits[threading.get_ident()] = hooks

    def _without_ours(self, disable: Callable[[str], Any]) -> Callable[[str], Any]:
        """`torch.func.grad` and its kin refuse to work under hooks on saved tensors. Ours step out
        of the way, unless the program has put its own above them."""

        @contextmanager
        def disabled(error_message: str) -> Iterator[None]:
            taken = []
            top = torch_internals.top_saved_hooks(True)
            while top is not None and self._is_ours(top):
                torch_internals.pop_saved_hooks()
                taken.append(top)
                top = torch_internals.top_saved_hooks(True)
            try:
                with disable(error_message):
                    yield
            finally:
                for hooks in reversed(taken):
                    torch_internals.push_saved_hooks(*hooks)

        return disabled

    def _is_ours(self, hooks: tuple[Any, Any]) -> bool:
        return str(getattr(hooks[0], "__module__", "")).startswith("kilter.")

    def _large(self, tensor: torch.Tensor) -> bool:
        """Whether this is the first of the data that the job is to be governed by."""
        if tensor.numel() * tensor.element_size() < MIB or (
            tensor.is_leaf and tensor.requires_grad
        ):
            return False
        if type(tensor) is not self._torch.Tensor or tensor.device.type not in ("cuda", "cpu"):
            return False
        if self._kind is None:
            # Asking whether there is CUDA begins to use it: only where the answer matters.
            seen = self._run.info.backend == "nvml" or tensor.is_cuda
            built = self._torch.version.cuda is not None
            self._kind = "cuda" if seen or (built and self._torch.cuda.is_available()) else "cpu"
        if tensor.device.type != self._kind:
            return False
        return self._kind == "cpu" or not self._torch.cuda.is_current_stream_capturing()

    def _meet(self, tensor: torch.Tensor) -> None:
        """The program has used the device: open it, and take our place in front of the wait."""
        from kilter.memory.engine import CpuStandIn, Swapper
        from kilter.memory.plan.problem import H200_PCIE5

        if self._kind == "cuda":
            from kilter.memory.engine.cuda import Cuda, measure_link

            again = partial(Cuda.open, tensor.device.index, self._host)
            cuda = again()
            self._backend, self._link = cuda, measure_link(cuda, size_bytes=LINK_BYTES)
        else:
            self._backend, self._link = CpuStandIn(host=self._host), H200_PCIE5
        self._set_budget(self._backend.device)
        limit_bytes = self._card_bytes if self._budget_bytes is None else self._budget_bytes
        swapper = Swapper(
            self._backend,
            budget_bytes=UNLIMITED if self._run.dry_run else limit_bytes,
            link=self._link,
            fence=self._run.fence,
        )
        swapper.may_plan = self._budget_bytes is not None or self._run.dry_run
        here = threading.get_ident()
        self._waits.pop(here).__exit__()  # on top: autograd has just called it
        swapper.__enter__()
        self._owner = here
        self._swapper = swapper
        if self._kind == "cuda" and not self._run.dry_run:  # a stand-in counts activations alone
            self._floor = StateAndWeightPolicy(
                swapper, again, self._link, self._run.fence, self._gradients
            )
            self._floor.begin(self._backend.used_bytes() or 0, limit_bytes)

    # The budget

    def _set_budget(self, device: torch.device) -> None:
        """What is known before anything was observed."""
        budget = self._budget
        card_bytes, words = self._card(device)
        self._card_bytes = UNLIMITED if card_bytes is None else card_bytes
        if budget.size_bytes is not None:
            self._budget_bytes, self._words = budget.size_bytes, "as asked"
            if card_bytes is not None and card_bytes < budget.size_bytes and self._kind == "cuda":
                self._budget_bytes = card_bytes
                self._words = f"less than the {budget} asked for, to fit {words}"
        elif budget.share is not None:
            self._words = f"{budget} of the plain peak, which is being observed"
        elif card_bytes is not None:
            self._budget_bytes, self._words = card_bytes, f"to fit {words}"
        else:
            self._words = "auto, but there is no card to fit: give a size or a share"

    def _card(self, device: torch.device) -> tuple[int | None, str]:
        """What the card has for this process, and how that was found."""
        if device.type == "cuda":
            return usable_device_bytes(self._torch.cuda, device)
        size_bytes = self._run.info.memory_bytes
        return size_bytes, f"{show_bytes(size_bytes)} of {self._run.info.name}"

    def _set_share(self, swapper: Swapper) -> None:
        """A share of the plain peak, once that was observed."""
        records = swapper.records()
        report = swapper.report()
        changing = report.watched_every > 1
        if not changing and not any(record.passes >= SEEN_PASSES for record in records):
            return
        spilled = report.spilled > 0
        if not spilled and not (self._plain_over(swapper) and self._tried(swapper)):
            return  # the budget stays the card's until all that is to be watched was watched
        if spilled:
            words = f"the card's {show_bytes(self._card_bytes)}"
            self._take_share(swapper, self._card_bytes, words)
            self._words += ", since the job does not fit without a plan"
            return
        self._share_of_bytes = self._plain_bytes(swapper)
        words = f"the plain peak, {show_bytes(self._share_of_bytes)}"
        self._take_share(swapper, self._share_of_bytes, words)
        if changing:
            self._words += f", the largest of {report.passes} passes of changing shapes"

    def _raise_share(self, swapper: Swapper) -> None:
        """Another kind of pass turned out to be larger than all that were seen when the share was
        taken."""
        peak_bytes = self._plain_bytes(swapper)
        if self._share_of_bytes is None or peak_bytes <= LARGER_PEAK * self._share_of_bytes:
            return
        self._share_of_bytes = peak_bytes
        words = f"the largest plain peak, {show_bytes(peak_bytes)}"
        self._take_share(swapper, peak_bytes, words)

    def _take_share(self, swapper: Swapper, of_bytes: int, words: str) -> None:
        assert self._budget.share is not None
        self._budget_bytes = int(self._budget.share * of_bytes)
        self._words = f"{self._budget} of {words}"
        if not self._run.dry_run:
            swapper.limit(self._budget_bytes)

    def _plain_bytes(self, swapper: Swapper) -> int:
        """The largest peak with everything kept, of all kinds of passes."""
        peaks = [record.peak_bytes for record in swapper.records()]
        return max([self._plain_peak_bytes, *peaks])

    def _plain_over(self, swapper: Swapper) -> bool:
        """Let some iterations run without us: their time and peak are what a plan is held against.
        They fit, since the watched ones did."""
        cuda = self._torch.cuda if self._kind == "cuda" else None
        device = None if self._backend is None else self._backend.device
        if self._plain_left is None:
            if not self._on_top():
                return True
            self._plain_left = PLAIN
            swapper.step_out()
            if cuda is not None:
                cuda.reset_peak_memory_stats(device)
            return False
        if self._plain_left == 0:
            return True
        if not self._here():
            return False  # an iteration of another thread, which has no hooks to put back
        self._phases[self._iteration_ended] = "plain"
        self._plain_left -= 1
        if self._plain_left > 0:
            return False
        swapper.step_in()
        if cuda is not None:
            self._plain_peak_bytes = int(cuda.max_memory_allocated(device))
        return True

    def _tried(self, swapper: Swapper) -> bool:
        self._untried += 1
        return swapper.tried or self._untried > UNTRIED

    def _here(self) -> bool:
        return self._owner == threading.get_ident()

    def _on_top(self) -> bool:
        """The swapper's hooks can be taken out: this is their thread, and nobody's lie on them."""
        top = torch_internals.top_saved_hooks(True)
        return self._here() and top is not None and self._is_ours(top)

    # While the program runs

    def iteration_ended(self, index: int) -> None:
        """An iteration of the program ends here, in its thread."""
        self._iteration_ended = index
        swapper = self._swapper
        if swapper is None:
            here = threading.get_ident()
            if self._torch is not None and here not in self._waits and not self._over:
                self._wait_here()
            return
        self._look(swapper)
        if self._run.log.now_s() - self._told_s > TELL_EVERY_S:
            self._tell(swapper)

    def _look(self, swapper: Swapper) -> None:
        if self._budget.share is not None and not self._over:
            if self._budget_bytes is None:
                self._set_share(swapper)
            else:
                self._raise_share(swapper)
        report = swapper.report()
        if not self._seen and not report.spilled:
            self._seen = report.watched_every > 1 or any(
                record.passes >= SEEN_PASSES for record in swapper.records()
            )
        planned = swapper.planned
        if planned and self._was_planned and not self._run.dry_run:
            self._phases[self._iteration_ended] = "planned"
        self._was_planned = planned
        if report.plans != self._plans and not self._run.dry_run:
            old, self._plans = self._plans, report.plans
            for record, plan, numbers in swapper.plans():
                if plan not in old:
                    self._fitted(record, plan, numbers)
        self._tell_refused(report.refused)
        if report.watched_every > 1 and messages.CHANGING_SHAPES not in self._refused:
            self._tell_refused((messages.CHANGING_SHAPES,))
            self._run.log.notice(messages.CHANGING_SHAPES.text)
        if self._floor is not None and self._budget_bytes is not None and not self._over:
            self._floor.iteration_ended(report, self._budget_bytes, self._run.log.now_s())
            if self._floor.taken_back is not None:
                self._tell_refused((self._floor.taken_back,))

    def _tell_refused(self, reasons: tuple[Reason, ...]) -> None:
        """Each reason once; one that holds for several data, with their number."""
        unknown = [reason for reason in dict.fromkeys(reasons) if reason not in self._refused]
        self._refused.update(unknown)
        for reason, count in Counter(replace(reason, subject="") for reason in unknown).items():
            if reason.code != BudgetTooSmall.code:  # told with the least that is possible
                text = reason.text if count == 1 else f"{reason.text} ({count} data)"
                self._refuse(replace(reason, text=text))

    def _refuse(self, reason: Reason) -> None:
        self._run.log.refuse("a part of the memory plan", reason.text, reason.code)

    def _fitted(self, record: PassRecord, plan: MemoryPlan, numbers: tuple[int, ...]) -> None:
        from kilter.memory.schedule import fitted, schedule_of

        problem, every = self._problem(record, plan.budget_bytes)
        kept = len(problem.intervals) - plan.swapped - plan.recomputed
        self._run.log(fitted(plan, t_s=self._run.log.now_s(), kept=kept))
        self._told_plans.append(plan)
        if plan.peak_before_bytes < max((p.peak_before_bytes for p in self._plans), default=0):
            return  # a smaller pass than the one in the files
        self._schedules.append(
            schedule_of(
                record,
                plan,
                problem=problem,
                intervals=[every.index(number) for number in numbers],
                device="cpu" if self._kind == "cpu" else self._run.info.name,
                reason=f"a memory budget of {show_bytes(self._budget_bytes)}: {self._words}",
            )
        )

    def _problem(self, record: PassRecord, budget_bytes: int) -> tuple[Problem, tuple[int, ...]]:
        assert self._link is not None
        return record.problem(link=self._link, budget_bytes=budget_bytes, min_bytes=MIB)

    # What came of it

    def _measured_peak_bytes(self, swapper: Swapper) -> int | None:
        """Of passes of all kinds, as they run now. Since the newest of them was measured, the
        allocator alone knows."""
        peak_bytes = swapper.report().highest_bytes
        if self._kind == "cuda" and swapper.planned and self._backend is not None:
            allocated_bytes = int(self._torch.cuda.max_memory_allocated(self._backend.device))
            peak_bytes = max(peak_bytes, allocated_bytes)
        return peak_bytes or None

    def _tell(
        self, swapper: Swapper, least_bytes: int | None = None, bound_s: float | None = None
    ) -> None:
        self._told_s = self._run.log.now_s()
        report = swapper.report()
        plain, planned = (list(self._times[kind]) for kind in ("plain", "planned"))
        state = None if self._floor is None else self._floor.report
        weights = None if self._floor is None else self._floor.weights
        movers = [moved for moved in (report, state, weights) if moved is not None]
        if weights is not None:
            self._tell_refused((*report.refused, *weights.refused))
        if state is not None:
            self._tell_refused((*report.refused, *state.refused))
        counts = {name: getattr(report, name) for name in MemoryCounts.__struct_fields__}
        for name in ("out_bytes", "in_bytes", "host_bytes"):
            counts[name] = sum(getattr(moved, name) for moved in movers)
        self._run.log(
            Moved(
                t_s=self._told_s,
                backend="cuda" if self._kind == "cuda" else "stand-in",
                budget_bytes=self._budget_bytes,
                budget=self._words,
                applied=not self._run.dry_run,
                plain_peak_bytes=self._plain_bytes(swapper) or None,
                plain_peak_seen=self._seen,
                peak_bytes=self._peak_bytes or self._measured_peak_bytes(swapper),
                least_bytes=least_bytes,
                plain_iteration_s=statistics.median(plain) if plain else None,
                iteration_s=statistics.median(planned) if planned else None,
                consumed=0 if state is None else state.visits,
                in_force=tuple(
                    self._told_plans.index(plan)
                    for plan in report.plans
                    if plan in self._told_plans
                ),
                state="" if state is None else words(state, weights),
                bound_s=bound_s,
                **counts,
            )
        )

    def _plan_only(self, swapper: Swapper) -> None:
        """What would have been done."""
        from kilter.memory.plan.choose import plan

        record = max(swapper.records(), key=lambda r: r.peak_bytes, default=None)
        if record is None or self._budget_bytes is None:
            return
        problem, numbers = self._problem(record, self._budget_bytes)
        try:
            self._fitted(record, plan(problem), numbers)
        except PlanError as error:
            self._refuse(messages.of_error(error))

    def _bounds(self, swapper: Swapper) -> tuple[int | None, float | None]:
        """For the largest pass that was planned, or seen: the smallest peak, and the time that no
        schedule beats."""
        planned = max(swapper.plans(), key=lambda p: p[1].peak_before_bytes, default=None)
        record = max(swapper.records(), key=lambda r: r.peak_bytes, default=None)
        if planned is not None:
            record = planned[0]
        if record is None or self._budget_bytes is None:
            return None, None
        problem, _ = self._problem(record, self._budget_bytes)
        bound_s = None
        if len(record.operation_s) <= MOST_BOUND and problem.floor_bytes <= problem.budget_bytes:
            from kilter.memory.plan.exact import relax

            # No solver installed, or not in time: the bound stays unknown.
            with suppress(KilterError):
                bound_s = relax(problem, limit_s=BOUND_S).bound_s
        if bound_s is not None and planned is not None:
            iteration_s = planned[1].iteration_s
            retimed = (
                bound_s > (1 + BOUND_ROUNDING) * iteration_s
            )  # it bounds another plan than this
            bound_s = None if retimed else min(bound_s, iteration_s)
        return problem.floor_bytes, bound_s

    # In the session's own thread

    def tick(self, finished: Sequence[Iteration], *, settled: bool) -> None:
        """Durations of iterations have become known; a plan may have come into force."""
        self._time(finished)
        self._save_schedule()

    def _time(self, finished: Sequence[Iteration]) -> None:
        for iteration in finished:
            phase = self._phases.pop(iteration.index, None)
            if phase is not None and not self._run.trace.disturbs(iteration):
                self._times[phase].append(iteration.duration_s)

    def _save_schedule(self) -> None:
        if self._schedules:
            planned = self._schedules.popleft()
            self._run.files.save_memory(planned.trace, planned.plan)

    @property
    def settled(self) -> bool:
        """The clocks may be judged from here on: the job runs as it is going to run."""
        if self._swapper is None or self._run.dry_run or self._iteration_ended >= GIVE_UP:
            return True
        decided = self._floor is None or self._floor.settled
        return decided and len(self._times["planned"]) >= SETTLED


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()
