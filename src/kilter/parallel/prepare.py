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
from kilter.act.branches.capture import pool_bytes
from kilter.act.branches.loop import assembler
from kilter.act.branches.parts import TRAINING_ON_GPU, UNCOMPILED, Parts
from kilter.act.branches.program import to_compile
from kilter.act.branches.state import State
from kilter.act.branches.tracing import TRACE_ERRORS, Refused, reason_of, without_collecting
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
    "convolved",
    "fused",
)

ON_CPU = ("threads", "batched")

ON_GPU = (
    "fused",
    "graph",
    "graph_streams",
    "batched",
    "convolved",
    "compiled_batched",
    "compiled",
)
"""What `auto` tries, in this order: first what may make the others needless, while there is time to
compile. Threads and eager streams are not among the GPU's: a graph removes the launches that they
spread."""

FAR = 3.0
"""`fused` is so many times faster than the loop's own graph when the loop's forks are not even
tried: forking a graph of window heads gains 2.0 to 2.6 times on an H200."""

COMPILED = ("fused", "convolved", "compiled_batched", "compiled")

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
    served: bool = False
    """Has run a call."""
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

    def __init__(self, parts: Parts, outputs: Sequence[Tensor]) -> None:
        assert parts.traced is not None
        self.outputs = [t.detach() for t in outputs]
        self.own_scale = parts.gradients
        if parts.gradients:
            self.outputs = parts.with_gradients(parts.run_loop, parts.weights)
        try:
            self.exact = self._reference(parts)
        except (NotImplementedError, RuntimeError, TypeError):
            # No float64 form: the serial loop itself is the reference then.
            self.exact = self.outputs
        self.serial_error = self.error(self.outputs)
        self.floor = numerics.one_rounding(self._scaled(self.outputs))
        again = (
            parts.with_gradients(parts.run_loop, parts.weights)
            if parts.gradients
            else parts.run_loop(parts.tensors)
        )
        self.repeatable = numerics.bitwise(again, self.outputs)

    def _reference(self, parts: Parts) -> list[Tensor]:
        assert parts.traced is not None
        if parts.gradients:
            return numerics.reference_gradients(parts.unfolded, parts.examples(), parts.weights)
        return numerics.reference(parts.traced.graph, parts.tensors)

    def _scaled(self, found: Sequence[Tensor]) -> Sequence[Tensor]:
        return numerics.to_own_scale(found, self.exact) if self.own_scale else found

    def error(self, found: Sequence[Tensor]) -> float:
        return numerics.error(self._scaled(found), self._scaled(self.exact))


def prepare(parts: Parts, results: Any, known: BranchPlan | None) -> Prepared:
    """Try what there is. `results` are the loop's; `known` was decided before."""
    auto = parts.options.mode == "auto"
    with without_collecting():
        if auto and parts.options.compile and parts.on_gpu:
            # The compiler's workers start now, beside the tracing.
            importlib.import_module("torch._inductor.compile_fx")
        if not parts.opaque:
            parts.trace()
    outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
    parts.strides = [x.stride() if x.layout is torch.strided else () for x in outputs]
    # Only pure work may be repeated to be timed and compared.
    judge = None
    if parts.traced is not None:
        try:
            judge = Judge(parts, outputs)
        except TRACE_ERRORS as error:  # a backward of theirs that cannot run
            parts.traced, parts.untraceable = None, reason_of(error)
    trials = [Trial(mode="serial", seconds=None)]
    if judge is not None and auto and known is None:
        seconds = parts.seconds_of(parts.run_loop)
        trials = [Trial(mode="serial", seconds=seconds, error=judge.serial_error, bitwise=True)]
    if auto and parts.traced is None:
        trials.append(Trial(mode="auto", refused=parts.untraceable))
    searched = known is not None and known.searched
    for mode in _modes(parts, known):
        why = _why_not(parts, mode, trials) if auto and known is None else None
        if why is not None:
            trials.append(Trial(mode=mode, refused=why))
            continue
        for streams in [known.streams] if known is not None else _streams(parts, mode):
            trials.append(_try(parts, Trial(mode=mode, streams=streams, searched=searched), judge))
    if auto and known is None and parts.has_convolutions():
        best, _ = choose(trials)
        ours = best.mode == "convolved" and parts.all_by_kernel
        if best.mode in CAPTURED and best.mode not in SAME_KERNELS and not ours:
            trials.append(_try(parts, replace(_blank(best), searched=True), judge))
    if auto and known is None:
        chosen, reason = choose(trials)
    else:
        asked = [t for t in trials[1:] if t.refused is None]
        chosen = asked[0] if asked else trials[0]
        refusals = "; ".join(t.refused for t in trials[1:] if t.refused)
        reason = "asked for" if asked else refusals or "serial was chosen before"
    plan = _plan(parts, trials, chosen, reason, judge)
    made = Prepared(plan, parts.state)
    if parts.traced is not None:
        made.assemble = assembler(parts.traced.out_spec, parts.traced.out_const)
    if chosen.mode != "serial":
        try:
            made.run, made.release = parts.build(chosen, last=True)
        except (Refused, *TRACE_ERRORS) as error:
            made.plan = replace(
                plan, chosen="serial", streams=1, searched=False, reason=reason_of(error)
            )
    if parts.on_gpu:
        torch.cuda.empty_cache()  # the pools of the candidates that lost
        pool = parts.workshop.pool
        made.plan = _with_memory(made.plan, 0 if pool is None else pool_bytes(pool))
    ready = show_time(time.perf_counter() - parts.began)
    made.plan = replace(made.plan, reason=f"{made.plan.reason}; ready after {ready}")
    return made


def _modes(parts: Parts, known: BranchPlan | None) -> list[str]:
    """Modes to try, in order."""
    options = parts.options
    if known is not None or options.mode != "auto":
        mode = options.mode if known is None else known.chosen
        return [] if mode == "serial" else [mode]
    if parts.traced is None:
        return []
    modes = ON_CPU if not parts.on_gpu else TRAINING_ON_GPU if parts.gradients else ON_GPU
    return [mode for mode in modes if options.compile or mode not in COMPILED]


def _streams(parts: Parts, mode: str) -> list[int]:
    """Numbers of streams to try a mode with."""
    widths = _widths(parts, mode)
    if parts.options.mode != "auto":
        return [parts.options.streams or widths[-1]]
    # One for each, and a few: what lies between is seldom the best.
    return [w for w in widths if mode not in EAGER or w > 2] or widths[-1:]


def _widths(parts: Parts, mode: str) -> list[int]:
    """Numbers of streams worth trying for a mode."""
    if mode in ("graph", "serial", "fused"):
        return [1]
    try:
        # Not compiled only to be counted.
        program = parts.program(UNCOMPILED.get(mode, mode))
    except Refused:
        return [1]
    widest = max((len(step) for step in program.steps), default=1)
    if mode in ("threads", "cpp_threads", "streams"):
        return [widest]
    if not parts.on_gpu:
        return [1]
    return [w for w in lane_counts(widest) if w <= 8] or [1]


def _why_not(parts: Parts, mode: str, trials: Sequence[Trial]) -> str | None:
    """Why a mode is not tried after all."""
    right = {t.mode: t for t in trials if t.seconds is not None}
    ours, plain = right.get("fused"), right.get("graph")
    if ours is not None and mode not in ("fused", "graph"):
        if mode in COMPILED and choose(trials)[0] is ours:
            return "fused is right and leads: it compiles the same with fewer launches"
        if plain is not None and FAR * _seconds(ours) < _seconds(plain):
            return f"fused is right and more than {FAR:.0f} times faster than the loop's own graph"
    also = mode in ("compiled", "compiled_batched") and "convolved" in right
    if also and parts.all_by_kernel and choose(trials)[0].mode == "convolved":
        return "convolved leads, and each convolution is faster by the kernel"
    return _why_not_compile(parts, mode) if mode in COMPILED else None


def _why_not_compile(parts: Parts, mode: str) -> str | None:
    """Whether the time that is left is enough to compile anything of a mode's program."""
    try:
        program = parts.program(UNCOMPILED[mode])
    except Refused as refused:
        return str(refused)
    new = len(to_compile(program, parts.workshop.compiled))
    if new and parts.affordable() == 0:
        spent = time.perf_counter() - parts.began
        budget = parts.options.prepare_budget_s
        return f"{new} pieces to compile; {spent:.0f} of {budget:.0f} s are spent"
    return None


def _try(parts: Parts, blank: Trial, judge: Judge | None) -> Trial:
    began = time.perf_counter()
    mode = blank.mode
    auto = parts.options.mode == "auto"
    release: Callable[[], None] | None = None
    try:
        run, release = parts.build(blank, last=False)
        if judge is None:
            return replace(blank, prepare_s=time.perf_counter() - began)
        found = parts.results(run)
        error = judge.error(found)
        same = numerics.bitwise(found, judge.outputs)
        exact = mode in SAME_KERNELS and parts.on_gpu and not parts.gradients
        if exact and judge.repeatable and not same:
            raise Refused("not equal to the serial loop bit for bit")
        if not within(error, judge.serial_error, judge.floor):
            raise Refused(
                f"differs from the float64 reference by {error:.3g}, the serial loop by "
                f"{judge.serial_error:.3g}"
            )
        return replace(
            blank,
            seconds=parts.seconds_of(run) if auto else None,
            error=error,
            bitwise=same,
            memory_bytes=parts.trial_bytes,
            prepare_s=time.perf_counter() - began,
        )
    except (Refused, *TRACE_ERRORS) as error_:
        return replace(blank, refused=reason_of(error_), prepare_s=time.perf_counter() - began)
    finally:
        if release is not None:
            release()
        if mode in COMPILED:
            parts.workshop.compile_s += time.perf_counter() - began


def _plan(
    parts: Parts, trials: Sequence[Trial], chosen: Trial, reason: str, judge: Judge | None
) -> BranchPlan:
    groups: tuple[tuple[int, ...], ...] = ()
    lanes: tuple[tuple[int, ...], ...] = ()
    steps = branches = 0
    if parts.traced is not None:
        steps, branches = len(parts.raw.steps), parts.raw.branches
        if parts.raw.steps and branches:
            groups = group_equal([u.key for u in parts.raw.steps[parts.raw.widest]])
    if chosen.streams > 1 and chosen.mode in CAPTURED:
        program = parts.program(chosen.mode)
        lanes = parts.lanes(chosen.mode, chosen.streams)[program.widest]
    return BranchPlan(
        chosen=chosen.mode,
        reason=reason,
        streams=chosen.streams,
        branches=branches or (len(parts.loop.branches) if parts.loop.is_list else 0),
        steps=steps,
        groups=groups,
        lanes=lanes,
        trials=tuple(trials),
        serial_error=judge.serial_error if judge else None,
        label=Label.MEASURED,
        searched=chosen.searched,
    )


def _seconds(trial: Trial) -> float:
    assert trial.seconds is not None
    return trial.seconds


def _blank(trial: Trial) -> Trial:
    """The same way, not tried yet."""
    return Trial(mode=trial.mode, streams=trial.streams)


def _with_memory(plan: BranchPlan, kept: int) -> BranchPlan:
    chosen = plan.trial
    if chosen.mode not in CAPTURED:
        return plan
    trials = tuple(replace(t, memory_bytes=kept) if t is chosen else t for t in plan.trials)
    return replace(plan, trials=trials)
