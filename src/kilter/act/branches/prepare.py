"""One input signature made ready: every way of running it is built, judged, timed; the best stays.

The serial loop stands whenever there is a reason, and the reason is kept for `explain()`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from kilter.act.branches import fused, native, numerics, training
from kilter.act.branches.capture import Captured, Turns, pool_bytes
from kilter.act.branches.folding import check_devices, fold
from kilter.act.branches.loop import Loop, assembler
from kilter.act.branches.products import join_layers, single_rows
from kilter.act.branches.program import (
    Program,
    Run,
    RunStep,
    Unit,
    compile_units,
    from_callables,
    from_graph,
    run_in_order,
    stack_equal,
    to_compile,
)
from kilter.act.branches.state import State
from kilter.act.branches.streams import Cuda, ForkJoin
from kilter.act.branches.threads import Threads
from kilter.act.branches.timing import median_seconds, unit_arguments, unit_seconds
from kilter.act.branches.tracing import TRACE_ERRORS, Refused, Trace, trace
from kilter.core.label import Label
from kilter.core.units import show_time
from kilter.plan.branches import (
    BranchPlan,
    Trial,
    assign_lanes,
    choose,
    group_equal,
    lane_counts,
    within,
)

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
TRAINING_ON_GPU = ("graph", "graph_streams", "batched")
DIFFERENTIABLE = ("threads", "streams", *TRAINING_ON_GPU)
COMPILED = ("fused", "compiled_batched", "compiled")
CAPTURED = ("graph", "graph_streams", "batched", *COMPILED)
SAME_KERNELS = ("threads", "streams", "graph")
"""On a GPU these run the serial loop's own kernels, so their results must be equal bit for bit."""
EAGER = ("graph_streams", "batched")
UNCOMPILED = {"compiled": "single", "compiled_batched": "batched", "fused": "joined"}
"""The programs that these modes compile: branches whose layers of one row are by a kernel, stacked
branches, and fused heads with joined layers."""
UNIT_S = 1.0
"""First guess at the time to compile one piece: 27 of inception blocks took 26 s on an H200."""

THREADS = 8
"""Pieces that are compiled side by side."""


@dataclass(frozen=True)
class Options:
    """What `parallel` was asked for."""

    mode: str
    streams: int | None
    compile: bool
    prepare_budget_s: float
    max_graphs: int
    fold: bool


@dataclass
class Workshop:
    """What the signatures of one `Parallel` share."""

    compiled: dict[Hashable, Run] = field(default_factory=dict)
    compile_s: float = 0.0
    pool: Any = None
    turns: Turns = field(default_factory=Turns)


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


class Bench:
    """Everything the candidates of one signature are built from."""

    def __init__(
        self,
        loop: Loop,
        options: Options,
        workshop: Workshop,
        arguments: tuple[Any, ...],
        state: State,
        *,
        gradients: bool,
    ) -> None:
        self.began = time.perf_counter()
        self.loop, self.options, self.workshop = loop, options, workshop
        self.arguments, self.state, self.gradients = arguments, state, gradients
        self.tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        self.device = _device(self.tensors, state)
        self.on_gpu = self.device.type == "cuda"
        self.opaque = loop.is_list and options.mode in ("threads", "streams")
        """Callables that are only called, once each, may do whatever they like."""
        self.traced: Trace | None = None
        self.untraceable: str | None = None
        self.weights: list[Tensor] = []
        """Those the trace reads and autograd wants gradients for."""
        self.trial_bytes: int | None = None
        self._programs: dict[str, Program | Refused] = {}
        self._seconds: dict[str, dict[Hashable, float]] = {}

    # --- deciding ---------------------------------------------------------------------------------

    def prepare(self, results: Any, known: BranchPlan | None) -> Prepared:
        """Try what there is. `results` are the loop's; `known` was decided before."""
        auto = self.options.mode == "auto"
        if auto and self.options.compile and self.on_gpu:
            # The compiler's workers start now, beside the tracing.
            importlib.import_module("torch._inductor.compile_fx")
        if not self.opaque:
            self._trace()
        outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
        # Only pure work may be repeated to be timed and compared.
        judge = None
        if self.traced is not None:
            try:
                judge = Judge(self, outputs)
            except TRACE_ERRORS as error:  # a backward of theirs that cannot run
                self.traced, self.untraceable = None, _reason(error)
        trials = [Trial(mode="serial", seconds=None)]
        if judge is not None and auto and known is None:
            seconds = self._seconds_of(self.run_loop)
            trials = [Trial(mode="serial", seconds=seconds, error=judge.serial_error, bitwise=True)]
        if auto and self.traced is None:
            trials.append(Trial(mode="auto", refused=self.untraceable))
        searched = known is not None and known.searched
        for mode, streams in self._wanted(known):
            if mode != "serial":
                why = self._why_not(mode, trials) if auto and known is None else None
                blank = Trial(mode=mode, streams=streams, searched=searched)
                trials.append(replace(blank, refused=why) if why else self._try(blank, judge))
        if auto and known is None and self._has_convolutions():
            best, _ = choose(trials)
            if best.mode in CAPTURED and best.mode not in SAME_KERNELS:
                trials.append(self._try(replace(_blank(best), searched=True), judge))
        if auto and known is None:
            chosen, reason = choose(trials)
        else:
            asked = [t for t in trials[1:] if t.refused is None]
            chosen = asked[0] if asked else trials[0]
            refusals = "; ".join(t.refused for t in trials[1:] if t.refused)
            reason = "asked for" if asked else refusals or "serial was chosen before"
        plan = self._plan(trials, chosen, reason, judge)
        made = Prepared(plan, self.state)
        if self.traced is not None:
            made.assemble = assembler(self.traced.out_spec, self.traced.out_const)
        if chosen.mode != "serial":
            try:
                made.run, made.release = self._build(chosen, last=True)
            except (Refused, *TRACE_ERRORS) as error:
                made.plan = replace(
                    plan, chosen="serial", streams=1, searched=False, reason=_reason(error)
                )
        if self.on_gpu:
            torch.cuda.empty_cache()  # the pools of the candidates that lost
            pool = self.workshop.pool
            made.plan = _with_memory(made.plan, 0 if pool is None else pool_bytes(pool))
        ready = show_time(time.perf_counter() - self.began)
        made.plan = replace(made.plan, reason=f"{made.plan.reason}; ready after {ready}")
        return made

    def _wanted(self, known: BranchPlan | None) -> list[tuple[str, int]]:
        """Modes to try, with their numbers of streams."""
        options = self.options
        if known is not None:
            return [(known.chosen, known.streams)]
        if options.mode != "auto":
            widths = [options.streams] if options.streams else self._widths(options.mode)
            return [(options.mode, widths[-1])]
        if self.traced is None:
            return []
        found = []
        modes = ON_CPU if not self.on_gpu else TRAINING_ON_GPU if self.gradients else ON_GPU
        for mode in modes:
            if mode in COMPILED and not options.compile:
                continue
            widths = self._widths(mode)
            # One for each, and a few: what lies between is seldom the best.
            found += [(mode, width) for width in widths if mode not in EAGER or width > 2] or [
                (mode, widths[-1])
            ]
        return found

    def _widths(self, mode: str) -> list[int]:
        """Numbers of streams worth trying for a mode."""
        if mode in ("graph", "serial", "fused"):
            return [1]
        try:
            # Not compiled only to be counted.
            program = self.program(UNCOMPILED.get(mode, mode))
        except Refused:
            return [1]
        widest = max((len(step) for step in program.steps), default=1)
        if mode in ("threads", "cpp_threads", "streams"):
            return [widest]
        if not self.on_gpu:
            return [1]
        return [w for w in lane_counts(widest) if w <= 8] or [1]

    def _has_convolutions(self) -> bool:
        if self.traced is None or not self.on_gpu or torch.are_deterministic_algorithms_enabled():
            return False
        return any("convolution" in str(n.target) for n in self.unfolded.graph.nodes)

    def _why_not(self, mode: str, trials: Sequence[Trial]) -> str | None:
        """Why a mode is not tried after all."""
        if mode not in COMPILED:
            return None
        ours = [t for t in trials if t.mode == "fused" and t.refused is None]
        if mode != "fused" and ours and choose(trials)[0] in ours:
            return "fused is right and leads: it compiles the same with fewer launches"
        return self._why_not_compile(mode)

    def _try(self, blank: Trial, judge: Judge | None) -> Trial:
        began = time.perf_counter()
        mode = blank.mode
        auto = self.options.mode == "auto"
        release: Callable[[], None] | None = None
        try:
            run, release = self._build(blank, last=False)
            if judge is None:
                return replace(blank, prepare_s=time.perf_counter() - began)
            found = self._results(run)
            error = judge.error(found)
            same = numerics.bitwise(found, judge.outputs)
            exact = mode in SAME_KERNELS and self.on_gpu and not self.gradients
            if exact and judge.repeatable and not same:
                raise Refused("not equal to the serial loop bit for bit")
            if not within(error, judge.serial_error, judge.floor):
                raise Refused(
                    f"differs from the float64 reference by {error:.3g}, the serial loop by "
                    f"{judge.serial_error:.3g}"
                )
            return replace(
                blank,
                seconds=self._seconds_of(run) if auto else None,
                error=error,
                bitwise=same,
                memory_bytes=self.trial_bytes,
                prepare_s=time.perf_counter() - began,
            )
        except (Refused, *TRACE_ERRORS) as error_:
            return replace(blank, refused=_reason(error_), prepare_s=time.perf_counter() - began)
        finally:
            if release is not None:
                release()
            if mode in COMPILED:
                self.workshop.compile_s += time.perf_counter() - began

    def _why_not_compile(self, mode: str) -> str | None:
        """Whether the time that is left is enough to compile anything of a mode's program."""
        try:
            program = self.program(UNCOMPILED[mode])
        except Refused as refused:
            return str(refused)
        new = len(to_compile(program, self.workshop.compiled))
        if new and self._affordable() == 0:
            spent = time.perf_counter() - self.began
            budget = self.options.prepare_budget_s
            return f"{new} pieces to compile; {spent:.0f} of {budget:.0f} s are spent"
        return None

    def _affordable(self) -> int | None:
        """How many pieces can be compiled in the time that is left, judged by those done."""
        if self.options.mode != "auto":
            return None
        done = len(self.workshop.compiled)
        each = self.workshop.compile_s / done if done else UNIT_S
        left = self.options.prepare_budget_s - (time.perf_counter() - self.began)
        return max(0, int(left / each))

    # --- running, to compare and to time ----------------------------------------------------------

    def run_loop(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The serial loop, from tensors to tensors."""
        leaves, spec = pytree.tree_flatten(self.arguments)
        given = iter(tensors)
        filled = [next(given) if isinstance(x, Tensor) else x for x in leaves]
        outputs = self.loop(*pytree.tree_unflatten(filled, spec))
        return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]

    def examples(self) -> list[Tensor]:
        """The inputs as leaves: gradients end here, and not in the user's graph behind them."""
        return [t.detach().requires_grad_(t.requires_grad) for t in self.tensors]

    def with_gradients(self, run: Run, weights: Sequence[Tensor]) -> list[Tensor]:
        """Outputs and gradients."""
        return numerics.gradients(run, self.examples(), weights)

    def _results(self, run: Run) -> list[Tensor]:
        if self.gradients:
            return self.with_gradients(run, self.weights)
        return list(run(self.tensors))

    def _seconds_of(self, run: Run) -> float:
        return median_seconds(lambda: self._results(run), self.device)

    # --- programs ---------------------------------------------------------------------------------

    def program(self, mode: str) -> Program:
        """The program that a mode runs; `Refused` if it has none."""
        if mode not in self._programs:
            try:
                self._programs[mode] = self._make(mode)
            except Refused as refused:
                self._programs[mode] = refused
        found = self._programs[mode]
        if isinstance(found, Refused):
            raise found
        return found

    def _make(self, mode: str) -> Program:
        if mode in ("threads", "streams") and self.loop.is_list:
            return self._callables()
        if self.traced is None:
            raise Refused(self.untraceable or "not traced")
        if mode == "batched":
            return stack_equal(self.program("graph_streams"))
        if mode == "single":
            plain = self.program("graph_streams")
            return single_rows(plain) if self.on_gpu and fused.has_triton() else plain
        if mode == "heads":
            fold(self.unfolded, self.device, products=True)
            return fused.fuse(from_graph(self.unfolded).with_weights(Tensor.detach))
        if mode == "joined":
            return join_layers(self.program("heads"), triton=fused.has_triton())
        if mode == "fused" and not self.on_gpu:
            return self.program("heads")
        if mode in UNCOMPILED:
            program = compile_units(
                self.program(UNCOMPILED[mode]), self.workshop.compiled, self._affordable()
            )
            if mode == "fused":
                plain = fused.by_reference(self.program("heads"))
                warm(plain, program, self.tensors, self.device)
            return program
        if not any(len(step) > 1 for step in self.raw.steps):
            raise Refused("no independent branches were found")
        return self.raw

    def _trace(self) -> None:
        """Trace and simplify, once; notes the reason if that would not be right."""
        try:
            traced = trace(self.loop, self.arguments)
            watched = set(self.state.tensors)
            held: dict[int, Tensor] = {}
            for node in traced.graph.graph.nodes:
                if node.op != "get_attr":
                    continue
                tensor = getattr(traced.graph, str(node.target))
                held[id(tensor)] = tensor
                literal = any("lift_fresh" in str(u.target) for u in node.users)
                if id(tensor) not in watched and not literal:
                    raise Refused("reads a tensor that is held where its replacement goes unseen")
            if self.gradients:
                self._check_gradients(traced)
                self.weights = [t for t in held.values() if t.requires_grad]
            self.unfolded = _copy(traced.graph)
            folded = None
            if self.options.fold:
                folded = fold(traced.graph, self.device, movements=not self.gradients)
            check_devices(traced.graph, self.device)
            self.raw = from_graph(traced.graph)
            if not self.gradients:
                self.raw = self.raw.with_weights(Tensor.detach)
            if folded is not None:
                self.state.watch_values(folded.sources)
            self.traced = traced
        except Refused as refused:
            self.untraceable = str(refused)

    def _check_gradients(self, traced: Trace) -> None:
        """`Refused` if the gradient of the trace is not the gradient of the code."""
        if traced.cuts_gradient is not None:
            raise Refused(f"takes something out of autograd at {traced.cuts_gradient}")
        for module in self.state.modules:
            if module._backward_hooks or module._backward_pre_hooks:
                raise Refused("a module has backward hooks")
        if any(t._backward_hooks for t in (*self.state.tensors.values(), *self.tensors)):
            raise Refused("a weight or an input has gradient hooks")

    def _callables(self) -> Program:
        positions = {id(t): i for i, t in enumerate(self.tensors)}
        splits: list[list[int]] = []
        wrapped: list[Run] = []
        spread = self.loop.spread(self.arguments)
        for function, argument in zip(self.loop.branches, spread, strict=True):
            flat, spec = pytree.tree_flatten(argument)
            at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
            splits.append([positions[id(flat[i])] for i in at])

            def call(
                *tensors: Tensor, function: Any = function, flat: Any = flat, spec: Any = spec,
                at: Any = at,
            ) -> Any:  # fmt: skip
                leaves = list(flat)
                for i, tensor in zip(at, tensors, strict=True):
                    leaves[i] = tensor
                return function(*pytree.tree_unflatten(leaves, spec))

            wrapped.append(call)
        return from_callables(wrapped, splits, len(self.tensors))

    def lanes(self, mode: str, streams: int) -> list[tuple[tuple[int, ...], ...]]:
        """For each step the units of each stream, longest first."""
        program = self.program(mode)
        if mode not in self._seconds:
            forks = any(len(step) > 1 for step in program.steps)
            measured = unit_seconds(program, self.tensors, self.device) if forks else {}
            self._seconds[mode] = measured
        seconds = self._seconds[mode]
        return [
            assign_lanes([seconds.get(unit.key, unit.work * 1e-6) for unit in step], streams)
            for step in program.steps
        ]

    # --- building ---------------------------------------------------------------------------------

    def _build(self, trial: Trial, *, last: bool) -> tuple[Run, Callable[[], None]]:
        """A mode made ready to run on tensors, and how to take it down again."""
        if not trial.searched:
            return self._build_mode(trial.mode, trial.streams, last=last)
        # Warm-ups inside search the algorithms, the capture keeps them; then all is as it was.
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True
        try:
            return self._build_mode(trial.mode, trial.streams, last=last)
        finally:
            torch.backends.cudnn.benchmark = before

    def _build_mode(self, mode: str, streams: int, *, last: bool) -> tuple[Run, Callable[[], None]]:
        self.trial_bytes = None
        if not self.on_gpu and mode in ("graph", "graph_streams", "streams"):
            raise Refused("needs a CUDA device")
        if self.gradients and mode not in DIFFERENTIABLE:
            raise Refused(f"{mode} has no gradients: wrap the call in torch.no_grad()")
        if mode == "graph" and self.traced is None:
            raise Refused(self.untraceable or "not traced")
        if mode == "graph" and not self.gradients:
            return self._capture(self.run_loop, last=last)
        program = self.raw if mode == "graph" else self.program(mode)
        if mode == "threads":
            threads = Threads(self.device, streams)
            return self._eager(program, threads), threads.close
        if mode == "cpp_threads":
            runner = native.Runner(program, self.device)
            return runner, runner.close
        if mode == "streams":
            return self._eager(program, ForkJoin(Cuda(self.device), self.lanes(mode, streams))), (
                _nothing
            )
        run_step: RunStep = run_in_order
        if not self.on_gpu or (streams == 1 and not program.ahead):
            program = program.in_line()
        else:
            run_step = ForkJoin(Cuda(self.device, capturing=True), self.lanes(mode, streams))
        if not self.on_gpu:
            return (lambda tensors: program.execute(tensors, run_step)), _nothing
        if self.gradients:
            return self._capture_training(program, run_step, last=last)
        return self._capture(lambda tensors: program.execute(tensors, run_step), last=last)

    def _eager(self, program: Program, run_step: RunStep) -> Run:
        """Runs callables as they are: what they return is taken apart only where it was traced."""

        def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
            made = program.execute(tensors, run_step)
            if self.traced is None:
                return made
            return [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]

        return run

    def _pool(self, *, last: bool) -> Any:
        """The shared pool for what stays, a pool of its own for what is only tried."""
        if not last:
            return torch.cuda.graph_pool_handle()
        self.workshop.pool = self.workshop.pool or torch.cuda.graph_pool_handle()
        return self.workshop.pool

    def _capture(self, step: Run, *, last: bool) -> tuple[Run, Callable[[], None]]:
        pool = self._pool(last=last)
        turns = self.workshop.turns
        captured = Captured(step, self.tensors, self.device, pool=pool, turns=turns)
        self.trial_bytes = None if last else pool_bytes(pool)
        return captured, captured.release

    def _capture_training(
        self, program: Program, run_step: RunStep, *, last: bool
    ) -> tuple[Run, Callable[[], None]]:
        leaves = {id(w): w.detach().requires_grad_() for w in self.weights}
        ours = program.with_weights(lambda t: leaves.get(id(t), t))
        pool = self._pool(last=last)
        step = training.CapturedStep(
            lambda tensors: ours.execute(tensors, run_step),
            self.tensors,
            list(leaves.values()),
            self.device,
            pool=pool,
            turns=self.workshop.turns,
        )
        self.trial_bytes = None if last else pool_bytes(pool)
        # Its memory goes back with the last backward that may still come.
        return training.differentiable(step, self.weights), _nothing

    def _plan(
        self, trials: Sequence[Trial], chosen: Trial, reason: str, judge: Judge | None
    ) -> BranchPlan:
        groups: tuple[tuple[int, ...], ...] = ()
        lanes: tuple[tuple[int, ...], ...] = ()
        steps = branches = 0
        if self.traced is not None:
            steps, branches = len(self.raw.steps), self.raw.branches
            if self.raw.steps and branches:
                groups = group_equal([u.key for u in self.raw.steps[self.raw.widest]])
        if chosen.streams > 1 and chosen.mode in CAPTURED:
            program = self.program(chosen.mode)
            lanes = self.lanes(chosen.mode, chosen.streams)[program.widest]
        return BranchPlan(
            chosen=chosen.mode,
            reason=reason,
            streams=chosen.streams,
            branches=branches or (len(self.loop.branches) if self.loop.is_list else 0),
            steps=steps,
            groups=groups,
            lanes=lanes,
            trials=tuple(trials),
            serial_error=judge.serial_error if judge else None,
            label=Label.MEASURED,
            searched=chosen.searched,
        )


def warm(plain: Program, program: Program, inputs: Sequence[Tensor], device: torch.device) -> None:
    """Run every distinct unit of `program` once, each in a thread: compilers spend most of their
    time outside the interpreter. What units are given is found with `plain`, which is `program`
    uncompiled: the same steps and slots."""
    examples = unit_arguments(plain.in_line(), inputs)
    both = zip(examples, program.in_line().units(), strict=True)
    units = {unit.key: (unit, given) for (_, given), unit in both}

    def once(unit: Unit, given: Sequence[Any]) -> None:
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(device):
            unit.run(*given)

    torch.cuda.synchronize(device)  # the threads' streams are not the one that made the examples
    with ThreadPoolExecutor(min(len(units), THREADS), "kilter-compile") as pool:
        futures = [pool.submit(once, unit, given) for unit, given in units.values()]
    torch.cuda.synchronize(device)
    for future in futures:
        future.result()


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Another graph over the same weights."""
    body = fx.Graph()
    body.output(body.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, body)


def _device(tensors: Sequence[Tensor], state: State) -> torch.device:
    for tensor in [*tensors, *state.tensors.values()]:
        if tensor.is_cuda:
            return tensor.device
    return tensors[0].device if tensors else torch.device("cpu")


def _reason(error: BaseException) -> str:
    if isinstance(error, Refused):
        return str(error)
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _nothing() -> None:
    pass


def _blank(trial: Trial) -> Trial:
    """The same way, not tried yet."""
    return Trial(mode=trial.mode, streams=trial.streams)


def _with_memory(plan: BranchPlan, kept: int) -> BranchPlan:
    chosen = plan.trial
    if chosen.mode not in CAPTURED:
        return plan
    trials = tuple(replace(t, memory_bytes=kept) if t is chosen else t for t in plan.trials)
    return replace(plan, trials=trials)
