"""`parallel(branches)`: the branches of a list or a module run together, with the same numbers.

For each input signature the ways of running are tried once: built, compared with the serial loop
and a float64 reference, timed. The fastest right one is kept; serial stands whenever there is a
reason, and the reason is kept for `explain()`.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from kilter.act.branches import fused, native, numerics
from kilter.act.branches.capture import Captured, Turns, pool_bytes
from kilter.act.branches.folding import Folded, check_devices, fold
from kilter.act.branches.products import split_products
from kilter.act.branches.program import (
    Program,
    RunStep,
    compile_units,
    from_callables,
    from_graph,
    run_in_order,
    stack_equal,
)
from kilter.act.branches.state import State, needs_grad
from kilter.act.branches.streams import Cuda, ForkJoin
from kilter.act.branches.threads import Threads
from kilter.act.branches.timing import median_seconds, unit_seconds
from kilter.act.branches.tracing import TRACE_ERRORS, Refused, Trace, trace
from kilter.core.errors import UsageError
from kilter.core.label import Label
from kilter.core.units import show_bytes, show_time
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
COMPILED = ("fused", "compiled_batched", "compiled")
CAPTURED = ("graph", "graph_streams", "batched", *COMPILED)
SAME_KERNELS = ("threads", "streams", "graph")
"""On a GPU these run the serial loop's own kernels, so their results must be equal bit for bit."""
EAGER = ("graph_streams", "batched")
UNCOMPILED = {"compiled": "graph_streams", "compiled_batched": "batched"}
READMIT = 8
"""Calls that a signature whose graph was evicted runs serially before it is captured again, so
that more signatures than graphs do not spend their time on captures."""
UNIT_S = 0.7
"""First guess at the time to compile one piece."""
RESTLESS = 3
"""Calls that change their own modules before such a signature is left to the serial loop."""


@dataclass
class _Entry:
    """What is known and prepared for one signature."""

    plan: BranchPlan
    run: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None
    """None: the serial loop."""
    state: State
    release: Callable[[], None] | None = None
    traced: Trace | None = None
    absent: int = 0
    """Serial calls since the graph was evicted; only counts when `run` is gone."""


class _Bench:
    """Everything the candidates of one signature are built from."""

    def __init__(self, owner: Parallel, arguments: tuple[Any, ...], state: State) -> None:
        self.began = time.perf_counter()
        self.owner = owner
        self.arguments = arguments
        self.state = state
        self.leaves = pytree.tree_leaves(arguments)
        self.tensors = [x for x in self.leaves if isinstance(x, Tensor)]
        self.device = _device(self.tensors, state)
        self.on_gpu = self.device.type == "cuda"
        self.traced: Trace | None = None
        self.folded: Folded | None = None
        self.untraceable: str | None = None
        self._programs: dict[str, Program | Refused] = {}
        self._seconds: dict[str, dict[Hashable, float]] = {}

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
        if mode in ("threads", "streams") and self.owner.is_list:
            return self._callables()
        if self.traced is None:
            raise Refused(self.untraceable or "not traced")
        if mode == "batched":
            return stack_equal(self.program("graph_streams"))
        if mode == "compiled":
            return compile_units(self.program("graph_streams"), self.owner.compiled)
        if mode == "compiled_batched":
            return compile_units(self.program("batched"), self.owner.compiled)
        if mode == "fused":
            fold(self.unfolded, self.device, products=True)
            base = fused.fuse(from_graph(self.unfolded))
            if not self.on_gpu:
                return base
            if fused.has_triton() and not torch.backends.cuda.matmul.allow_tf32:
                base = split_products(base)
            return compile_units(base, self.owner.compiled)
        if not any(len(step) > 1 for step in self.raw.steps):
            raise Refused("no independent branches were found")
        return self.raw

    def trace(self) -> None:
        """Trace and simplify, once; notes the reason if that would not be right."""
        try:
            traced = trace(self.owner.serial, self.arguments)
            reads = [n for n in traced.graph.graph.nodes if n.op == "get_attr"]
            watched = set(self.state.tensors)
            for node in reads:
                held = getattr(traced.graph, str(node.target))
                literal = any("lift_fresh" in str(u.target) for u in node.users)
                if id(held) not in watched and not literal:
                    raise Refused("reads a tensor that is held where its replacement goes unseen")
            self.unfolded = _copy(traced.graph)
            if self.owner.fold:
                self.folded = fold(traced.graph, self.device)
            check_devices(traced.graph, self.device)
            self.raw = from_graph(traced.graph)
            if self.folded is not None:
                self.state.watch_values(self.folded.sources)
            self.traced = traced
        except Refused as refused:
            self.untraceable = str(refused)

    def _callables(self) -> Program:
        functions = self.owner.branches
        splits: list[list[int]] = []
        count = 0
        wrapped: list[Callable[..., Any]] = []
        per_branch = _spread(self.arguments, len(functions))
        positions = {id(t): i for i, t in enumerate(self.tensors)}
        for function, argument in zip(functions, per_branch, strict=True):
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
            count = len(self.tensors)
        return from_callables(wrapped, splits, count)

    def lanes(self, mode: str, streams: int) -> list[tuple[tuple[int, ...], ...]]:
        """For each step the units of each stream, longest first."""
        program = self.program(mode)
        if mode not in self._seconds:
            self._seconds[mode] = unit_seconds(program, self.tensors, self.device)
        seconds = self._seconds[mode]
        return [
            assign_lanes([seconds.get(unit.key, unit.work * 1e-6) for unit in step], streams)
            for step in program.steps
        ]


class Parallel:
    """Branches made to run together. Made by `parallel`; call it like the module it was made of.

    `with fast: ...` or `close()` ends its threads and gives its graphs' memory back.
    """

    def __init__(
        self,
        branches: nn.Module | Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        mode: str = "auto",
        streams: int | None = None,
        compile: bool = True,
        prepare_budget_s: float = 20.0,
        max_graphs: int = 16,
        fold: bool = True,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"mode {mode!r} is not one of {', '.join(MODES)}")
        if max_graphs < 1:
            raise UsageError(f"max_graphs={max_graphs} must be at least 1")
        if streams is not None and streams < 1:
            raise UsageError(f"streams={streams} must be at least 1")
        self.is_list = isinstance(branches, (list, tuple, nn.ModuleList))
        self.branches: list[Callable[..., Any]] = (
            list(branches) if self.is_list else [branches]  # type: ignore[arg-type, list-item]
        )
        if not self.branches or not all(callable(b) for b in self.branches):
            raise UsageError("branches must be one module, or a list of modules or callables")
        self.mode, self.streams, self.fold = mode, streams, fold
        self.compile, self.prepare_budget_s, self.max_graphs = compile, prepare_budget_s, max_graphs
        self.compiled: dict[Hashable, Callable[..., Any]] = {}
        self._compile_s = 0.0
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._last: _Entry | None = None
        self._fallback: str | None = None
        self._pool: Any = None
        self._turns = Turns()
        self._preparing = threading.RLock()
        self._state: State | None = None
        self._restless = 0

    # --- calling ----------------------------------------------------------------------------------

    def serial(self, *inputs: Any) -> Any:
        """The loop as it was written: the meaning of a call in every mode."""
        if not self.is_list:
            return self.branches[0](*inputs)
        spread = _spread(inputs, len(self.branches))
        return tuple(b(*arguments) for b, arguments in zip(self.branches, spread, strict=True))

    def __call__(self, *inputs: Any) -> Any:
        if self.mode == "serial" or torch.compiler.is_compiling():
            return self.serial(*inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if self._state is None:
            self._state = State(self.branches)
        self._fallback = self._why_serial(leaves, tensors)
        if self._fallback is not None:
            return self.serial(*inputs)
        key = _signature(leaves, spec)
        entry = self._entries.get(key)
        if entry is None:
            return self._first(key, inputs)
        if entry.run is None and entry.release is not None:
            entry.absent += 1
            if entry.absent > READMIT and entry.state.changed() is None:
                return self._first(key, inputs, known=entry.plan)
        self._entries.move_to_end(key)
        self._last = entry
        # Launched first and judged after: the check runs on the host while the device works.
        results = None if entry.run is None else entry.run(tensors)
        changed = entry.state.changed()
        if changed is not None:
            self._forget()
            return self._first(key, inputs)
        if results is None:
            return self.serial(*inputs)
        return self._assemble(entry, results)

    def _assemble(self, entry: _Entry, results: Sequence[Any]) -> Any:
        if entry.traced is None:
            return tuple(results)
        rest = iter(results)
        const, spec = entry.traced.out_const, entry.traced.out_spec
        outputs = [const[i] if i in const else next(rest) for i in range(spec.num_leaves)]
        return pytree.tree_unflatten(outputs, spec)

    def _why_serial(self, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> str | None:
        """Why this call must run as written, whatever was prepared."""
        assert self._state is not None
        if needs_grad(self._state, leaves):
            return "autograd records this call: wrap it in torch.no_grad() or inference_mode()"
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
            return "an input is a tensor subclass"
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, int, float, str, bool, type(None), torch.dtype)):
                return f"an input is a {type(leaf).__name__}"
        if any(t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing():
            return "called inside somebody else's capture"
        hooks = torch.overrides._get_current_function_mode_stack()
        if hooks or torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            return "called under a tensor mode"
        return None

    # --- preparing --------------------------------------------------------------------------------

    def _first(
        self, key: Hashable, inputs: tuple[Any, ...], known: BranchPlan | None = None
    ) -> Any:
        before = State(self.branches)
        # The user's own errors come from here, outside every handler of ours.
        results = self.serial(*inputs)
        # Callables that are only called, once each, may change whatever they like.
        opaque = self.is_list and self.mode in ("threads", "streams")
        changes = None if opaque else before.changed()
        if changes is not None:  # lazily made weights, a cache, a counter
            self._restless += 1
            self._state = None
            self._fallback = f"the call itself changes something: {changes}"
            if self._restless >= RESTLESS:
                self._entries[key] = self._last = _Entry(
                    _serial_plan(self._fallback), None, State([])
                )
            return results
        with self._preparing, torch.inference_mode(False), torch.no_grad():
            self._state = State(self.branches)
            state = State([]) if opaque else self._state
            bench = _Bench(self, tuple(inputs), state)
            if bench.device.type == "cuda":
                with torch.cuda.device(bench.device):
                    entry = self._prepare(bench, results, known)
            else:
                entry = self._prepare(bench, results, known)
            self._entries[key] = self._last = entry
            self._entries.move_to_end(key)
            self._evict()
        return results

    def _prepare(self, bench: _Bench, results: Any, known: BranchPlan | None) -> _Entry:
        device = bench.device
        began = time.perf_counter()
        if self.mode == "auto" and self.compile and bench.on_gpu:
            # The compiler's workers start now, beside the tracing.
            importlib.import_module("torch._inductor.compile_fx")
        opaque = self.mode in ("threads", "streams") and self.is_list
        if not opaque:
            bench.trace()
        outputs = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]
        # Only pure work may be repeated to be timed and compared.
        pure = bench.traced is not None
        trials = [Trial(mode="serial", seconds=None)]
        judge = _Judge(bench, outputs) if pure else None
        if pure and judge is not None and self.mode == "auto" and known is None:
            serial_s = median_seconds(lambda: self.serial(*bench.arguments), device)
            trials = [
                Trial(mode="serial", seconds=serial_s, error=judge.serial_error, bitwise=True)
            ]
        if known is not None:
            candidates = [(known.chosen, known.streams)]
        elif self.mode == "auto":
            candidates = self._candidates(bench) if pure else []
        else:
            widths = [self.streams] if self.streams else self._widths(bench, self.mode)
            candidates = [(self.mode, width) for width in widths[-1:]]
        if self.mode == "auto" and not pure:
            trials.append(Trial(mode="auto", refused=bench.untraceable))
        for mode, streams in candidates:
            if mode != "serial":
                trials.append(self._try(bench, mode, streams, judge))
        if self.mode == "auto" and known is None:
            chosen, reason = choose(trials)
        else:
            asked = [t for t in trials[1:] if t.refused is None]
            chosen = asked[0] if asked else trials[0]
            refusals = "; ".join(t.refused for t in trials[1:] if t.refused)
            reason = "asked for" if asked else refusals or "serial was chosen before"
        plan = self._plan(bench, trials, chosen, reason, judge)
        entry = _Entry(plan, None, bench.state, traced=None if opaque else bench.traced)
        if chosen.mode != "serial":
            try:
                entry.run, entry.release = self._build(
                    bench, chosen.mode, chosen.streams, last=True
                )
            except (Refused, *TRACE_ERRORS) as error:
                entry.plan = replace(plan, chosen="serial", streams=1, reason=_reason(error))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the pools of the candidates that lost
            kept = pool_bytes(self._pool) if self._pool is not None else 0
            entry.plan = _with_memory(entry.plan, kept)
        entry.plan = _with_total(entry.plan, time.perf_counter() - began)
        return entry

    def _candidates(self, bench: _Bench) -> list[tuple[str, int]]:
        found = []
        for mode in ON_GPU if bench.device.type == "cuda" else ON_CPU:
            if mode in COMPILED and not self.compile:
                continue
            widths = self._widths(bench, mode)
            # One for each, and a few: what lies between is seldom the best.
            found += [(mode, width) for width in widths if mode not in EAGER or width > 2] or [
                (mode, widths[-1])
            ]
        return found

    def _widths(self, bench: _Bench, mode: str) -> list[int]:
        """Numbers of streams worth trying for a mode."""
        if mode in ("graph", "serial"):
            return [1]
        if mode == "fused":
            return [1, 4]
        try:
            # Not compiled only to be counted.
            program = bench.program(UNCOMPILED.get(mode, mode))
        except Refused:
            return [1]
        widest = max((len(step) for step in program.steps), default=1)
        if mode in ("threads", "cpp_threads", "streams"):
            return [widest]
        if bench.device.type != "cuda":
            return [1]
        return [w for w in lane_counts(widest) if w <= 8] or [1]

    def _try(self, bench: _Bench, mode: str, streams: int, judge: _Judge | None) -> Trial:
        began = time.perf_counter()
        blank = Trial(mode=mode, streams=streams)
        if mode in COMPILED and self.mode == "auto":
            why = self._why_not_compile(bench, mode)
            if why is not None:
                return replace(blank, refused=why)
        release: Callable[[], None] | None = None
        try:
            run, release = self._build(bench, mode, streams, last=False)
            memory = self._trial_bytes
            seconds = error = None
            same = False
            if judge is not None:
                found = list(run(bench.tensors))
                error = judge.error(found)
                same = numerics.bitwise(found, judge.outputs)
                on_gpu = bench.device.type == "cuda"
                if mode in SAME_KERNELS and on_gpu and judge.repeatable and not same:
                    raise Refused("not equal to the serial loop bit for bit")
                if not within(error, judge.serial_error, judge.floor):
                    raise Refused(
                        f"differs from the float64 reference by {error:.3g}, the serial loop by "
                        f"{judge.serial_error:.3g}"
                    )
                if self.mode == "auto":
                    seconds = median_seconds(lambda: run(bench.tensors), bench.device)
            return replace(
                blank,
                seconds=seconds,
                error=error,
                bitwise=same,
                memory_bytes=memory,
                prepare_s=time.perf_counter() - began,
            )
        except (Refused, *TRACE_ERRORS) as error_:
            return replace(blank, refused=_reason(error_), prepare_s=time.perf_counter() - began)
        finally:
            if release is not None:
                release()
            if mode in COMPILED:
                self._compile_s += time.perf_counter() - began

    def _why_not_compile(self, bench: _Bench, mode: str) -> str | None:
        """Whether a mode's units can be compiled in the time that is left, judged by those done."""
        try:
            program = bench.program(UNCOMPILED.get(mode, "graph_streams"))
        except Refused as refused:
            return str(refused)
        keys = {u.key for step in program.steps for u in step if u.graph is not None and u.work}
        new = len(keys - set(self.compiled)) if mode != "fused" else 4
        each = self._compile_s / len(self.compiled) if self.compiled else UNIT_S
        spent = time.perf_counter() - bench.began
        if spent + new * each > self.prepare_budget_s:
            return (
                f"compiling {new} more pieces would take about {new * each:.0f} s; "
                f"{spent:.0f} of {self.prepare_budget_s:.0f} s are spent"
            )
        return None

    def _build(
        self, bench: _Bench, mode: str, streams: int, *, last: bool
    ) -> tuple[Callable[[Sequence[Tensor]], Sequence[Tensor]], Callable[[], None]]:
        """A mode made ready to run on tensors, and how to take it down again."""
        device = bench.device
        self._trial_bytes: int | None = None
        if device.type != "cuda" and mode in ("graph", "graph_streams", "streams"):
            raise Refused("needs a CUDA device")
        if mode == "graph" and bench.traced is None:
            raise Refused(bench.untraceable or "not traced")
        if mode == "graph":
            return self._capture(bench, self._as_written(bench), last=last)
        program = bench.program(mode)
        if mode == "threads":
            threads = Threads(device, streams)
            return self._eager(bench, program, threads), threads.close
        if mode == "cpp_threads":
            runner = native.Runner(program, device)
            return runner, runner.close
        if mode == "streams":
            fork = ForkJoin(Cuda(device), bench.lanes(mode, streams))
            return self._eager(bench, program, fork), _nothing
        if device.type != "cuda":
            return (lambda tensors: program.execute(tensors, run_in_order)), _nothing
        if streams == 1:
            return self._capture(
                bench, lambda tensors: program.execute(tensors, run_in_order), last=last
            )
        lanes = bench.lanes(mode, streams)
        fork = ForkJoin(Cuda(device, capturing=True), lanes)
        return self._capture(bench, lambda tensors: program.execute(tensors, fork), last=last)

    def _eager(
        self, bench: _Bench, program: Program, run_step: RunStep
    ) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
        """Runs callables as they are: what they return is taken apart only where it was traced."""

        def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
            made = program.execute(tensors, run_step)
            if bench.traced is None:
                return made
            return [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]

        return run

    def _as_written(self, bench: _Bench) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        leaves, spec = pytree.tree_flatten(bench.arguments)
        at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

        def step(tensors: Sequence[Tensor]) -> list[Tensor]:
            filled = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                filled[i] = tensor
            outputs = self.serial(*pytree.tree_unflatten(filled, spec))
            return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]

        return step

    def _capture(
        self,
        bench: _Bench,
        step: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        *,
        last: bool,
    ) -> tuple[Captured, Callable[[], None]]:
        if last:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
        pool = self._pool if last else torch.cuda.graph_pool_handle()
        captured = Captured(step, bench.tensors, bench.device, pool=pool, turns=self._turns)
        self._trial_bytes = None if last else pool_bytes(pool)
        return captured, captured.release

    def _plan(
        self,
        bench: _Bench,
        trials: Sequence[Trial],
        chosen: Trial,
        reason: str,
        judge: _Judge | None,
    ) -> BranchPlan:
        groups: tuple[tuple[int, ...], ...] = ()
        lanes: tuple[tuple[int, ...], ...] = ()
        steps = branches = 0
        if bench.traced is not None:
            raw = bench.raw
            steps, branches = len(raw.steps), raw.branches
            if raw.steps and branches:
                groups = group_equal([u.key for u in raw.steps[raw.widest]])
        if chosen.streams > 1 and chosen.mode in CAPTURED:
            program = bench.program(chosen.mode)
            lanes = bench.lanes(chosen.mode, chosen.streams)[program.widest]
        return BranchPlan(
            chosen=chosen.mode,
            reason=reason,
            streams=chosen.streams,
            branches=branches or (len(self.branches) if self.is_list else 0),
            steps=steps,
            groups=groups,
            lanes=lanes,
            trials=tuple(trials),
            serial_error=judge.serial_error if judge else None,
            label=Label.MEASURED,
        )

    def _evict(self) -> None:
        """Keep at most `max_graphs` prepared forms, and the decisions of some more."""
        prepared = [k for k, e in self._entries.items() if e.run is not None]
        for key in prepared[: max(0, len(prepared) - self.max_graphs)]:
            entry = self._entries[key]
            if entry.release is not None:
                entry.release()
            entry.run, entry.traced, entry.absent = None, None, 0
        while len(self._entries) > 16 * self.max_graphs:
            _, entry = self._entries.popitem(last=False)
            if entry.run is not None and entry.release is not None:
                entry.release()

    def _forget(self) -> None:
        for entry in self._entries.values():
            if entry.run is not None and entry.release is not None:
                entry.release()
        self._entries.clear()

    # --- looking ----------------------------------------------------------------------------------

    def plan(self) -> BranchPlan | None:
        """What was decided for the signature called last; None before the first call."""
        return None if self._last is None else self._last.plan

    def explain(self) -> str:
        """Groups, streams, every way that was tried with its time, and why this one was chosen."""
        if self._fallback is not None:
            return f"the last call ran serially: {self._fallback}"
        plan = self.plan()
        if plan is None:
            return "not called yet: ways of running are tried at the first call"
        return describe(plan)

    def memory_bytes(self) -> int:
        """Device memory that the graphs hold now."""
        return 0 if self._pool is None else pool_bytes(self._pool)

    def close(self) -> None:
        """End the threads and give the graphs' memory back; the next call prepares anew."""
        self._forget()
        self._last, self._state = None, None

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Judge:
    """The serial loop's results, their own error, and how far another way may be off."""

    def __init__(self, bench: _Bench, outputs: Sequence[Tensor]) -> None:
        assert bench.traced is not None
        self.outputs = [t.detach() for t in outputs]
        try:
            self.exact = numerics.reference(bench.traced.graph, bench.tensors)
        except (NotImplementedError, RuntimeError, TypeError):
            # No float64 form: the serial loop itself is the reference then.
            self.exact = self.outputs
        self.serial_error = numerics.error(self.outputs, self.exact)
        self.floor = numerics.one_rounding(self.outputs)
        again = bench.owner.serial(*bench.arguments)
        self.repeatable = numerics.bitwise(
            [x for x in pytree.tree_leaves(again) if isinstance(x, Tensor)], self.outputs
        )

    def error(self, found: Sequence[Tensor]) -> float:
        return numerics.error(found, self.exact)


def describe(plan: BranchPlan) -> str:
    """A plan as a table for people."""
    lines = [
        f"{plan.chosen} on {plan.streams} stream(s): {plan.reason} ({plan.label.value})",
        f"{plan.branches} branches in {plan.steps} steps",
    ]
    if plan.groups:
        groups = " ".join("{" + ",".join(map(str, g)) + "}" for g in plan.groups)
        lines.append(f"equal branches of the widest step: {groups}")
    if plan.lanes:
        lanes = " | ".join(",".join(map(str, lane)) for lane in plan.lanes)
        lines.append(f"streams of the widest step, main first: {lanes}")
    for t in plan.trials:
        name = f"  {t.mode:<14}{t.streams:>2} "
        if t.refused is not None:
            lines.append(f"{name} refused: {t.refused}")
            continue
        error = "" if t.error is None else f", error {t.error:.2g}"
        same = ", bitwise equal" if t.bitwise else ""
        memory = "" if t.memory_bytes is None else f", {show_bytes(t.memory_bytes)}"
        lines.append(f"{name} {show_time(t.seconds)}{error}{same}{memory}")
    return "\n".join(lines)


def parallel(
    branches: nn.Module | Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    mode: str = "auto",
    streams: int | None = None,
    compile: bool = True,
    prepare_budget_s: float = 20.0,
    max_graphs: int = 16,
    fold: bool = True,
) -> Parallel:
    """Run independent branches together, with the numbers of the serial loop.

    `branches`: a list of modules or callables, or one module whose branches are found by tracing.
    A list is called with one input for each branch (a tuple is several arguments), or with one
    input for all of them, and returns a tuple in the same order. `mode`: `auto` tries what there is
    and keeps the fastest right one; any other mode is used if it is right, else serial. `compile`:
    whether `auto` may use `torch.compile`; for each signature it starts nothing that would
    not be ready within about `prepare_budget_s`. `max_graphs`: signatures whose graphs are kept.
    `fold`: whether constant tables and data movement are simplified. Raises `UsageError`; what the
    branches raise is raised.
    """
    return Parallel(
        branches,
        mode=mode,
        streams=streams,
        compile=compile,
        prepare_budget_s=prepare_budget_s,
        max_graphs=max_graphs,
        fold=fold,
    )


def _spread(inputs: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """The arguments of each branch."""
    if len(inputs) == 1 and count != 1:
        inputs = inputs * count
    if len(inputs) != count:
        raise UsageError(f"{count} branches take {count} inputs, or one for all; got {len(inputs)}")
    return [x if isinstance(x, tuple) else (x,) for x in inputs]


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Another graph over the same weights."""
    body = fx.Graph()
    body.output(body.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, body)


def _signature(leaves: Sequence[Any], spec: Any) -> Hashable:
    """Everything that a prepared form depends on besides the branches themselves."""
    return (
        tuple(
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else (type(x), x)
            for x in leaves
        ),
        spec,
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )


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


def _serial_plan(reason: str) -> BranchPlan:
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


def _nothing() -> None:
    pass


def _with_memory(plan: BranchPlan, kept: int) -> BranchPlan:
    trials = tuple(
        replace(t, memory_bytes=kept)
        if (t.mode, t.streams) == (plan.chosen, plan.streams) and t.mode in CAPTURED
        else t
        for t in plan.trials
    )
    return replace(plan, trials=trials)


def _with_total(plan: BranchPlan, seconds: float) -> BranchPlan:
    return replace(plan, reason=f"{plan.reason}; ready after {show_time(seconds)}")
