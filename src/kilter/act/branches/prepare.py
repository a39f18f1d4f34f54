"""One input signature made ready: every way of running it is built, judged, timed; the best stays.

The serial loop stands whenever there is a reason, and the reason is kept for `explain()`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kilter.act.branches import numerics
from kilter.act.branches.bench import TRAINING_ON_GPU, UNCOMPILED, Bench
from kilter.act.branches.capture import pool_bytes
from kilter.act.branches.loop import assembler
from kilter.act.branches.program import to_compile
from kilter.act.branches.state import State
from kilter.act.branches.tracing import TRACE_ERRORS, Refused
from kilter.core.label import Label
from kilter.core.units import show_time
from kilter.plan.branches import BranchPlan, Trial, choose, group_equal, lane_counts, within

MODES = (
    "auto",
    "serial",
    "threads",
    "cpp_threads",
    "streams",
    "graph",
    "graph_streams",
    "batched",
    "compiled",
    "compiled_batched",
    "fused",
)

ON_CPU = ("threads", "batched")

ON_GPU = ("graph", "graph_streams", "batched", "fused", "compiled_batched", "compiled")
"""What `auto` tries. Threads and eager streams are not among the GPU's: a graph removes the
launches that they spread."""

COMPILED = ("fused", "compiled_batched", "compiled")

CAPTURED = ("graph", "graph_streams", "batched", *COMPILED)

SAME_KERNELS = ("threads", "streams", "graph")
"""On a GPU these run the serial loop's own kernels, so their results must be equal bit for bit."""

EAGER = ("graph_streams", "batched")


@dataclass
class Prepared:
    """What is known and ready for one signature."""

    plan: BranchPlan
    state: State
    run: Callable[[Sequence[Tensor]], Sequence[Tensor] | None] | None = None
    """None: the serial loop."""
    release: Callable[[], None] | None = None
    assemble: Callable[[Sequence[Any]], Any] = tuple
    absent: int = 0
    """Serial calls since the graph was given up; only counts when `run` is gone."""

    def give_up(self) -> None:
        """End its threads, give its memory back."""
        if self.run is not None and self.release is not None:
            self.release()
        self.run, self.absent = None, 0


def serial_plan(reason: str) -> BranchPlan:
    """The loop, and why."""
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


class Judge:
    """The serial loop's results, their own error, and how far another way may be off. In training
    the results are the outputs and the gradients, each in units of its own largest value."""

    def __init__(self, bench: Bench, outputs: Sequence[Tensor]) -> None:
        assert bench.traced is not None
        self.outputs = [t.detach() for t in outputs]
        self.own_scale = bench.gradients
        if bench.gradients:
            self.outputs = bench.with_gradients(bench.run_loop, bench.weights)
        try:
            self.exact = self._reference(bench)
        except (NotImplementedError, RuntimeError, TypeError):
            # No float64 form: the serial loop itself is the reference then.
            self.exact = self.outputs
        self.serial_error = self.error(self.outputs)
        self.floor = numerics.one_rounding(self._scaled(self.outputs))
        again = (
            bench.with_gradients(bench.run_loop, bench.weights)
            if bench.gradients
            else bench.run_loop(bench.tensors)
        )
        self.repeatable = numerics.bitwise(again, self.outputs)

    def _reference(self, bench: Bench) -> list[Tensor]:
        assert bench.traced is not None
        if bench.gradients:
            return numerics.reference_gradients(bench.unfolded, bench.examples(), bench.weights)
        return numerics.reference(bench.traced.graph, bench.tensors)

    def _scaled(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return numerics.to_own_scale(found, self.exact) if self.own_scale else found

    def error(self, found: Sequence[Tensor]) -> float:
        return numerics.error(self._scaled(found), self._scaled(self.exact))


def prepare(bench: Bench, results: Any, known: BranchPlan | None) -> Prepared:
    """Try what there is. `results` are the loop's; `known` was decided before."""
    auto = bench.options.mode == "auto"
    if auto and bench.options.compile and bench.on_gpu:
        # The compiler's workers start now, beside the tracing.
        importlib.import_module("torch._inductor.compile_fx")
    if not bench.opaque:
        bench.trace()
    outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
    # Only pure work may be repeated to be timed and compared.
    judge = None
    if bench.traced is not None:
        try:
            judge = Judge(bench, outputs)
        except TRACE_ERRORS as error:  # a backward of theirs that cannot run
            bench.traced, bench.untraceable = None, _reason(error)
    trials = [Trial(mode="serial", seconds=None)]
    if judge is not None and auto and known is None:
        seconds = bench.seconds_of(bench.run_loop)
        trials = [Trial(mode="serial", seconds=seconds, error=judge.serial_error, bitwise=True)]
    if auto and bench.traced is None:
        trials.append(Trial(mode="auto", refused=bench.untraceable))
    searched = known is not None and known.searched
    for mode, streams in _wanted(bench, known):
        if mode != "serial":
            why = _why_not(bench, mode, trials) if auto and known is None else None
            blank = Trial(mode=mode, streams=streams, searched=searched)
            trials.append(replace(blank, refused=why) if why else _try(bench, blank, judge))
    if auto and known is None and bench.has_convolutions():
        best, _ = choose(trials)
        if best.mode in CAPTURED and best.mode not in SAME_KERNELS:
            trials.append(_try(bench, replace(_blank(best), searched=True), judge))
    if auto and known is None:
        chosen, reason = choose(trials)
    else:
        asked = [t for t in trials[1:] if t.refused is None]
        chosen = asked[0] if asked else trials[0]
        refusals = "; ".join(t.refused for t in trials[1:] if t.refused)
        reason = "asked for" if asked else refusals or "serial was chosen before"
    plan = _plan(bench, trials, chosen, reason, judge)
    made = Prepared(plan, bench.state)
    if bench.traced is not None:
        made.assemble = assembler(bench.traced.out_spec, bench.traced.out_const)
    if chosen.mode != "serial":
        try:
            made.run, made.release = bench.build(chosen, last=True)
        except (Refused, *TRACE_ERRORS) as error:
            made.plan = replace(
                plan, chosen="serial", streams=1, searched=False, reason=_reason(error)
            )
    if bench.on_gpu:
        torch.cuda.empty_cache()  # the pools of the candidates that lost
        pool = bench.workshop.pool
        made.plan = _with_memory(made.plan, 0 if pool is None else pool_bytes(pool))
    ready = show_time(time.perf_counter() - bench.began)
    made.plan = replace(made.plan, reason=f"{made.plan.reason}; ready after {ready}")
    return made


def _wanted(bench: Bench, known: BranchPlan | None) -> list[tuple[str, int]]:
    """Modes to try, with their numbers of streams."""
    options = bench.options
    if known is not None:
        return [(known.chosen, known.streams)]
    if options.mode != "auto":
        widths = [options.streams] if options.streams else _widths(bench, options.mode)
        return [(options.mode, widths[-1])]
    if bench.traced is None:
        return []
    found = []
    modes = ON_CPU if not bench.on_gpu else TRAINING_ON_GPU if bench.gradients else ON_GPU
    for mode in modes:
        if mode in COMPILED and not options.compile:
            continue
        widths = _widths(bench, mode)
        # One for each, and a few: what lies between is seldom the best.
        found += [(mode, width) for width in widths if mode not in EAGER or width > 2] or [
            (mode, widths[-1])
        ]
    return found


def _widths(bench: Bench, mode: str) -> list[int]:
    """Numbers of streams worth trying for a mode."""
    if mode in ("graph", "serial", "fused"):
        return [1]
    try:
        # Not compiled only to be counted.
        program = bench.program(UNCOMPILED.get(mode, mode))
    except Refused:
        return [1]
    widest = max((len(step) for step in program.steps), default=1)
    if mode in ("threads", "cpp_threads", "streams"):
        return [widest]
    if not bench.on_gpu:
        return [1]
    return [w for w in lane_counts(widest) if w <= 8] or [1]


def _why_not(bench: Bench, mode: str, trials: Sequence[Trial]) -> str | None:
    """Why a mode is not tried after all."""
    if mode not in COMPILED:
        return None
    ours = [t for t in trials if t.mode == "fused" and t.refused is None]
    if mode != "fused" and ours and choose(trials)[0] in ours:
        return "fused is right and leads: it compiles the same with fewer launches"
    return _why_not_compile(bench, mode)


def _why_not_compile(bench: Bench, mode: str) -> str | None:
    """Whether the time that is left is enough to compile anything of a mode's program."""
    try:
        program = bench.program(UNCOMPILED[mode])
    except Refused as refused:
        return str(refused)
    new = len(to_compile(program, bench.workshop.compiled))
    if new and bench.affordable() == 0:
        spent = time.perf_counter() - bench.began
        budget = bench.options.prepare_budget_s
        return f"{new} pieces to compile; {spent:.0f} of {budget:.0f} s are spent"
    return None


def _try(bench: Bench, blank: Trial, judge: Judge | None) -> Trial:
    began = time.perf_counter()
    mode = blank.mode
    auto = bench.options.mode == "auto"
    release: Callable[[], None] | None = None
    try:
        run, release = bench.build(blank, last=False)
        if judge is None:
            return replace(blank, prepare_s=time.perf_counter() - began)
        found = bench.results(run)
        error = judge.error(found)
        same = numerics.bitwise(found, judge.outputs)
        exact = mode in SAME_KERNELS and bench.on_gpu and not bench.gradients
        if exact and judge.repeatable and not same:
            raise Refused("not equal to the serial loop bit for bit")
        if not within(error, judge.serial_error, judge.floor):
            raise Refused(
                f"differs from the float64 reference by {error:.3g}, the serial loop by "
                f"{judge.serial_error:.3g}"
            )
        return replace(
            blank,
            seconds=bench.seconds_of(run) if auto else None,
            error=error,
            bitwise=same,
            memory_bytes=bench.trial_bytes,
            prepare_s=time.perf_counter() - began,
        )
    except (Refused, *TRACE_ERRORS) as error_:
        return replace(blank, refused=_reason(error_), prepare_s=time.perf_counter() - began)
    finally:
        if release is not None:
            release()
        if mode in COMPILED:
            bench.workshop.compile_s += time.perf_counter() - began


def _plan(
    bench: Bench, trials: Sequence[Trial], chosen: Trial, reason: str, judge: Judge | None
) -> BranchPlan:
    groups: tuple[tuple[int, ...], ...] = ()
    lanes: tuple[tuple[int, ...], ...] = ()
    steps = branches = 0
    if bench.traced is not None:
        steps, branches = len(bench.raw.steps), bench.raw.branches
        if bench.raw.steps and branches:
            groups = group_equal([u.key for u in bench.raw.steps[bench.raw.widest]])
    if chosen.streams > 1 and chosen.mode in CAPTURED:
        program = bench.program(chosen.mode)
        lanes = bench.lanes(chosen.mode, chosen.streams)[program.widest]
    return BranchPlan(
        chosen=chosen.mode,
        reason=reason,
        streams=chosen.streams,
        branches=branches or (len(bench.loop.branches) if bench.loop.is_list else 0),
        steps=steps,
        groups=groups,
        lanes=lanes,
        trials=tuple(trials),
        serial_error=judge.serial_error if judge else None,
        label=Label.MEASURED,
        searched=chosen.searched,
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, Refused):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _blank(trial: Trial) -> Trial:
    """The same way, not tried yet."""
    return Trial(mode=trial.mode, streams=trial.streams)


def _with_memory(plan: BranchPlan, kept: int) -> BranchPlan:
    chosen = plan.trial
    if chosen.mode not in CAPTURED:
        return plan
    trials = tuple(replace(t, memory_bytes=kept) if t is chosen else t for t in plan.trials)
    return replace(plan, trials=trials)
