"""One input signature made ready: every way of running it is built, checked and timed, and the best
is kept. Where nothing is right and faster, the serial loop is used, and `explain()` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import msgspec
import torch
from torch import Tensor

from kilter.core.label import Label
from kilter.core.reasons import Reason
from kilter.core.units import show_time
from kilter.observe.torch_internals.branches import import_compiler, pytree
from kilter.parallel.candidates import (
    Built,
    CandidateBuilder,
    CompileCache,
    TracedRequest,
    WayRequest,
    trace_request,
)
from kilter.parallel.capture import GraphPool
from kilter.parallel.checks import Judge
from kilter.parallel.loop import assembler
from kilter.parallel.plan import BranchPlan, Trial, choose, combined, group_equal
from kilter.parallel.trace import TRACE_ERRORS, WayRefused, reason_of, without_collecting
from kilter.parallel.watched import WatchedBranches
from kilter.parallel.ways import WAYS, Way

NOT_TRACED = Reason("not_traced", "", "not traced")


@dataclass
class Prepared:
    """What is known and ready for one signature."""

    plan: BranchPlan
    state: WatchedBranches
    run: Callable[[Sequence[Tensor]], Sequence[Any] | None] | None = None
    """It is None for the serial loop."""
    release: Callable[[], None] | None = None
    assemble: Callable[[Sequence[Any]], Any] = tuple
    served: bool = False
    """Whether it has run a call."""
    absent: int = 0
    """Serial calls since its graph was given up; counts only while `run` is None."""

    def give_up(self) -> None:
        """End its threads and give its memory back."""
        if self.run is not None and self.release is not None:
            self.release()
        self.run, self.absent = None, 0


def serial_plan(reason: Reason) -> BranchPlan:
    """The serial loop, and why."""
    return BranchPlan(
        chosen="serial",
        reason=reason,
        streams=1,
        branches=0,
        steps=0,
        groups=(),
        lanes=(),
        trials=(Trial(mode="serial"),),
        serial_error=None,
        label=Label.MEASURED,
    )


def prepare(
    request: WayRequest, cache: CompileCache, results: Any, known: BranchPlan | None
) -> Prepared:
    """Try the ways that may be right. `results` are the loop's; `known` was decided before, for a
    signature whose graph was given up since."""
    outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
    traced = _trace(request)
    judge: Judge | None = None
    if isinstance(traced, TracedRequest):
        # Only pure work may be repeated to be timed and compared.
        try:
            judge = Judge(request, traced, outputs)
        except TRACE_ERRORS as error:  # a backward of the user's that cannot run
            traced = reason_of(error)
    strides = [x.stride() if x.layout is torch.strided else () for x in outputs]
    builder = CandidateBuilder(request, cache, traced, strides)
    contest = _Contest(builder, judge)
    if known is not None:
        chosen, reason = contest.only(known.chosen, known.streams, searched=known.searched)
    elif request.options.auto:
        chosen, reason = contest.all()
    else:
        chosen, reason = contest.only(request.options.mode, request.options.streams)
    plan = _plan(builder, contest.trials, chosen, reason, judge)
    made = Prepared(plan, request.state)
    if isinstance(traced, TracedRequest):
        made.assemble = assembler(traced.trace.out_spec, traced.trace.out_const)
    try:
        built = contest.settled()
        if built is not None:
            made.run, made.release = built.run, built.release
    except (WayRefused, *TRACE_ERRORS) as error:
        reason = reason_of(error)
        made.plan = replace(plan, chosen="serial", streams=1, searched=False, reason=reason)
    if request.on_gpu:
        torch.cuda.empty_cache()  # frees the pools of the candidates that lost
        made.plan = _with_memory(made.plan, cache)
    text = f"{made.plan.reason.text}; ready after {show_time(request.spent_s())}"
    made.plan = replace(made.plan, reason=msgspec.structs.replace(made.plan.reason, text=text))
    return made


def _trace(request: WayRequest) -> TracedRequest | Reason:
    """The trace of a request, or why there is none."""
    options = request.options
    way = WAYS.get(options.mode)
    if way is not None and way.calls_branches and request.loop.is_list:
        # Callables that are only called, each once, may do whatever they like.
        return NOT_TRACED
    with without_collecting():
        if options.auto and options.compile and request.on_gpu:
            import_compiler()
        try:
            return trace_request(request)
        except (WayRefused, *TRACE_ERRORS) as error:
            return reason_of(error)


class _Contest:
    """Tries ways one after the other. The best is kept as it was built, the others are released."""

    def __init__(self, builder: CandidateBuilder, judge: Judge | None) -> None:
        self.builder, self.judge = builder, judge
        self.request = builder.request
        self.trials = [Trial(mode="serial")]
        self.best: tuple[Trial, Built] | None = None
        """It is the chosen one of `trials`, as it was built; None: the serial loop."""

    # --- which ways -------------------------------------------------------------------------------

    def only(
        self, mode: str, streams: int | None, *, searched: bool = False
    ) -> tuple[Trial, Reason]:
        """One way that was asked for, or decided before."""
        if mode != "serial":
            way = WAYS[mode]
            count = streams or way.stream_counts(self.builder)[-1]
            cache = self.builder.cache
            if way.captures and self.request.on_gpu and not cache.has_pool():
                cache.pool = GraphPool()
            self._try(way, count, searched=searched, pool=cache.pool)
        if self.best is not None:
            return self.best[0], Reason("asked_for", mode, "asked for")
        none = Reason("serial_before", mode, "serial was chosen before")
        return self.trials[0], combined(self.trials) or none

    def all(self) -> tuple[Trial, Reason]:
        """Every way that may be right and faster."""
        builder, judge = self.builder, self.judge
        if judge is None:
            assert isinstance(builder.traced, Reason)
            self.trials.append(Trial(mode="auto", refused=builder.traced))
            return choose(self.trials)
        (seconds,) = builder.seconds_of(self.request.run_loop)
        serial = Trial(mode="serial", seconds=seconds, error=judge.serial_error, bitwise=True)
        self.trials = [serial]
        for way in self._candidates():
            why = self._why_not(way)
            if why is not None:
                self.trials.append(Trial(mode=way.name, refused=why))
                continue
            for streams in way.stream_counts(builder):
                self._try(way, streams)
        best, _ = choose(self.trials)
        if best.mode != "serial" and WAYS[best.mode].searches(builder):
            self._try(WAYS[best.mode], best.streams, searched=True)
        return self._final()

    def _final(self) -> tuple[Trial, Reason]:
        """The best way against the serial loop once more, in turns: their first times were taken
        at different moments, and the machine may have been busy with other work in one of them."""
        if self.best is None:
            return choose(self.trials)
        best, built = self.best
        serial_s, best_s = self.builder.seconds_of(self.request.run_loop, built.run)
        serial = replace(self.trials[0], seconds=serial_s)
        again = replace(best, seconds=best_s)
        self.trials = [serial, *(again if t is best else t for t in self.trials[1:])]
        chosen, reason = choose((serial, again))
        if chosen is serial:
            built.release()
            self.best = None
        else:
            self.best = again, built
        return chosen, reason

    def _candidates(self) -> list[Way]:
        request = self.request
        return [
            way
            for way in WAYS.values()
            if request.device.type in way.tried_on
            and (way.differentiable or not request.gradients)
            and (request.options.compile or not way.compiles)
        ]

    def _why_not(self, way: Way) -> Reason | None:
        """Why a way is not tried after all."""
        return why_needless(way, self.trials, self.builder) or way.why_not(self.builder)

    # --- one way ----------------------------------------------------------------------------------

    def _try(
        self, way: Way, streams: int, *, searched: bool = False, pool: GraphPool | None = None
    ) -> None:
        """Build, check and time a way. `pool`: the memory of its graphs; none: memory of their
        own."""
        builder, request, began = self.builder, self.request, perf_counter()
        blank = Trial(mode=way.name, streams=streams, searched=searched)
        own = None
        if pool is None and way.captures and request.on_gpu:
            pool = own = GraphPool()
        built: Built | None = None
        try:
            built = builder.build(way, streams, searched=searched, pool=pool)
            trial = self._checked(way, blank, built)
            if own is not None:
                trial = replace(trial, memory_bytes=own.bytes())
        except (WayRefused, *TRACE_ERRORS) as error:
            trial = replace(blank, refused=reason_of(error))
        spent_s = perf_counter() - began
        if way.compiles:
            builder.cache.compile_s += spent_s
        trial = replace(trial, prepare_s=spent_s)
        self.trials.append(trial)
        if built is not None:
            self._keep_the_better(trial, built)

    def _checked(self, way: Way, blank: Trial, built: Built) -> Trial:
        if self.judge is None:
            return blank
        request = self.request
        exact = way.same_kernels and request.on_gpu and not request.gradients
        error, same = self.judge.check(built.run, same_kernels=exact)
        seconds = self.builder.seconds_of(built.run)[0] if request.options.auto else None
        return replace(blank, seconds=seconds, error=error, bitwise=same)

    def _keep_the_better(self, trial: Trial, built: Built) -> None:
        """Keep the new way if it is the best so far, and release the other one."""
        asked_for = self.trials[0].seconds is None
        better = trial.refused is None and (asked_for or choose(self.trials)[0] is trial)
        loser: Built | None = built
        if better:
            loser = None if self.best is None else self.best[1]
            self.best = trial, built
        if loser is not None:
            loser.release()

    def settled(self) -> Built | None:
        """The best way, ready to be kept. Its memory becomes the memory that all graphs share. If
        there is such memory already, the graph is captured again in it: it then takes no memory
        of its own beside the graphs of other signatures."""
        if self.best is None:
            return None
        trial, built = self.best
        self.best = None
        cache = self.builder.cache
        if built.pool is None or built.pool is cache.pool:
            return built
        if not cache.has_pool():
            cache.pool = built.pool
            return built
        built.release()
        del built
        way = WAYS[trial.mode]
        return self.builder.build(way, trial.streams, searched=trial.searched, pool=cache.pool)


def why_needless(way: Way, trials: Sequence[Trial], builder: CandidateBuilder) -> Reason | None:
    """Why a way need not be tried, by the ways that were found right before it."""
    right = dict.fromkeys(t.mode for t in trials[1:] if t.seconds is not None)
    reasons = (WAYS[mode].makes_needless(way, trials, builder) for mode in right)
    return next((reason for reason in reasons if reason is not None), None)


def _plan(
    builder: CandidateBuilder,
    trials: Sequence[Trial],
    chosen: Trial,
    reason: Reason,
    judge: Judge | None,
) -> BranchPlan:
    loop = builder.request.loop
    groups: tuple[tuple[int, ...], ...] = ()
    lanes: tuple[tuple[int, ...], ...] = ()
    steps = branches = 0
    if isinstance(builder.traced, TracedRequest):
        program = builder.traced.program
        steps, branches = len(program.steps), program.branches
        if branches:
            groups = group_equal([u.key for u in program.steps[program.widest]])
    if chosen.streams > 1 and WAYS[chosen.mode].captures:
        way = WAYS[chosen.mode]
        lanes = builder.lanes(way, chosen.streams)[builder.program(way).widest]
    return BranchPlan(
        chosen=chosen.mode,
        reason=reason,
        streams=chosen.streams,
        branches=branches or (len(loop.branches) if loop.is_list else 0),
        steps=steps,
        groups=groups,
        lanes=lanes,
        trials=tuple(trials),
        serial_error=judge.serial_error if judge else None,
        label=Label.MEASURED,
        searched=chosen.searched,
    )


def _with_memory(plan: BranchPlan, cache: CompileCache) -> BranchPlan:
    """The plan with the memory that its graphs keep."""
    chosen = plan.trial
    if chosen.mode == "serial" or not WAYS[chosen.mode].captures:
        return plan
    kept = 0 if cache.pool is None else cache.pool.bytes()
    trials = tuple(replace(t, memory_bytes=kept) if t is chosen else t for t in plan.trials)
    return replace(plan, trials=trials)
