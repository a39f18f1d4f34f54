"""Everything the ways of running one input signature are built from: its trace, its programs, its
graphs. What becomes of them is decided in `prepare`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from kilter.act.branches import fused, native, numerics, training
from kilter.act.branches.capture import Captured, Turns, pool_bytes
from kilter.act.branches.convolutions import Convolution, is_faster, with_convolutions
from kilter.act.branches.folding import check_devices, fold
from kilter.act.branches.loop import Arguments, Loop
from kilter.act.branches.products import join_layers
from kilter.act.branches.program import (
    Program,
    Run,
    RunStep,
    compile_units,
    from_callables,
    from_graph,
    laid_like,
    merge_single,
    run_in_order,
    stack_equal,
)
from kilter.act.branches.state import State
from kilter.act.branches.streams import Cuda, ForkJoin
from kilter.act.branches.threads import Threads
from kilter.act.branches.timing import median_seconds, unit_seconds
from kilter.act.branches.tracing import (
    TRACE_ERRORS,
    Refused,
    Trace,
    reason_of,
    trace,
    without_collecting,
)
from kilter.act.branches.warming import warm
from kilter.plan.branches import Trial, assign_lanes

TRAINING_ON_GPU = ("graph", "graph_streams", "batched")
DIFFERENTIABLE = ("threads", "streams", *TRAINING_ON_GPU)
UNCOMPILED = {
    "compiled": "layers",
    "compiled_batched": "batched",
    "convolved": "convolutions",
    "fused": "joined",
}
"""The programs that these modes compile: branches with joined linear layers, stacked branches,
branches whose convolutions are by a kernel too, and fused heads with both."""

UNIT_S = 2.5
"""First guess at the time to compile one piece: seven took 18 s on a fresh machine with an H200."""


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
    warm: set[Hashable] = field(default_factory=set)
    """Pieces whose kernels are compiled."""
    compile_s: float = 0.0
    faster: dict[Hashable, bool] = field(default_factory=dict)
    """Whether the kernel is the faster way for a convolution."""
    pool: Any = None
    turns: Turns = field(default_factory=Turns)


class Parts:
    """Everything the candidates of one signature are built from."""

    def __init__(
        self,
        loop: Loop,
        options: Options,
        workshop: Workshop,
        arguments: Arguments,
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
        self.strides: list[tuple[int, ...]] = []
        """How the loop's results lie in memory."""
        self.trial_bytes: int | None = None
        self.all_by_kernel = False
        """Every convolution was the faster one by the kernel."""
        self._programs: dict[str, Program | Refused] = {}
        self._seconds: dict[str, dict[Hashable, float]] = {}

    def has_convolutions(self) -> bool:
        if self.traced is None or not self.on_gpu or torch.are_deterministic_algorithms_enabled():
            return False
        return any("convolution" in str(n.target) for n in self.unfolded.graph.nodes)

    def affordable(self) -> int | None:
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
        inputs, named = pytree.tree_unflatten(filled, spec)
        outputs = self.loop(*inputs, **named)
        return [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]

    def examples(self) -> list[Tensor]:
        """The inputs as leaves: gradients end here, and not in the user's graph behind them."""
        return [t.detach().requires_grad_(t.requires_grad) for t in self.tensors]

    def with_gradients(self, run: Run, weights: Sequence[Tensor]) -> list[Tensor]:
        """Outputs and gradients."""
        return numerics.gradients(run, self.examples(), weights)

    def results(self, run: Run) -> list[Tensor]:
        if self.gradients:
            return self.with_gradients(run, self.weights)
        return list(run(self.tensors))

    def seconds_of(self, run: Run) -> float:
        return median_seconds(lambda: self.results(run), self.device)

    # --- programs ---------------------------------------------------------------------------------

    def program(self, mode: str) -> Program:
        """The program that a mode runs; `Refused` if it has none."""
        if mode not in self._programs:
            try:
                with without_collecting():
                    self._programs[mode] = self._make(mode)
            except (Refused, *TRACE_ERRORS) as error:
                self._programs[mode] = Refused(reason_of(error))
        found = self._programs[mode]
        if isinstance(found, Refused):
            raise found
        return found

    def _make(self, mode: str) -> Program:
        if mode in ("threads", "streams") and self.loop.is_list:
            if len(self.loop.branches) == 1:
                raise Refused("there is only one branch")
            return self._callables()
        if self.traced is None:
            raise Refused(self.untraceable or "not traced")
        if mode == "batched":
            return stack_equal(self.program("graph_streams"))
        if mode == "layers":
            plain = self.program("graph_streams")
            triton = self.on_gpu and fused.has_triton()
            return join_layers(plain, triton=True, split=False) if triton else plain
        if mode == "convolutions":
            if not self.on_gpu or not fused.has_triton():
                raise Refused("needs a CUDA device and Triton")
            joined = join_layers(self.program("graph_streams"), triton=True)
            made = self._with_convolutions(joined)
            if [u.key for u in made.units()] == [u.key for u in self.program("layers").units()]:
                raise Refused("nothing is faster by the kernels")
            return made
        if mode == "heads":
            fold(self.unfolded, self.device, products=True)
            return fused.fuse(from_graph(self.unfolded).with_weights(Tensor.detach))
        if mode == "joined":
            joined = join_layers(self.program("heads"), triton=fused.has_triton())
            made = self._with_convolutions(joined) if fused.has_triton() else joined
            # Across larger pieces the compiler lays convolutions out its own way, in float32 with
            # up to twice the difference to float64.
            wide = any(t.dtype == torch.float32 for _, t in made.constants)
            return made if wide and not all(numerics.tf32_allowed()) else merge_single(made)
        if mode == "fused" and not self.on_gpu:
            return self.program("heads")
        if mode in UNCOMPILED:
            return compile_units(
                self.program(UNCOMPILED[mode]), self.workshop.compiled, self.affordable()
            )
        if not any(len(step) > 1 for step in self.raw.steps):
            raise Refused("no independent branches were found")
        return self.raw

    def _with_convolutions(self, program: Program) -> Program:
        known, asked = self.workshop.faster, set[Hashable]()
        new = with_convolutions(program, lambda found: found.key not in known)
        with suppress(Refused):  # each one is told below
            warm(new, {}, {unit.key for unit in program.units()}, self.device)

        def better(found: Convolution) -> bool:
            if found.key not in known:
                known[found.key] = is_faster(found, self.device)
            asked.add(found.key)
            return known[found.key]

        made = with_convolutions(program, better)
        self.all_by_kernel = bool(asked) and all(known[key] for key in asked)
        return made

    def trace(self) -> None:
        """Trace and simplify, once; notes the reason if that would not be right."""
        try:
            traced = trace(self.loop, *self.arguments)
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
            sources: list[Tensor] = []
            if self.options.fold:
                sources = fold(traced.graph, self.device, movements=not self.gradients)
            check_devices(traced.graph, self.device)
            self.raw = from_graph(traced.graph)
            if not self.gradients:
                self.raw = self.raw.with_weights(Tensor.detach)
            self.state.watch_values(sources)
            self.traced = traced
        except (Refused, *TRACE_ERRORS) as error:
            self.untraceable = reason_of(error)

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
        inputs, named = self.arguments
        for function, given in zip(self.loop.branches, self.loop.spread(inputs), strict=True):
            flat, spec = pytree.tree_flatten((given, named))
            at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
            splits.append([positions[id(flat[i])] for i in at])
            wrapped.append(partial(_call, function, flat, spec, at))
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

    def build(self, trial: Trial, *, last: bool) -> tuple[Run, Callable[[], None]]:
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
        if mode in UNCOMPILED and self.on_gpu:
            warm(program, self.workshop.compiled, self.workshop.warm, self.device)
        if mode == "threads":
            threads = Threads(self.device, streams)
            return self._eager(program, threads), threads.close
        if mode == "cpp_threads":
            runner = native.Runner(program, self.device)
            return (lambda tensors: laid_like(runner(tensors), self.strides)), runner.close
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
            return self._laid(program, run_step), _nothing
        if self.gradients:
            return self._capture_training(program, run_step, last=last)
        return self._capture(self._laid(program, run_step), last=last)

    def _laid(self, program: Program, run_step: RunStep) -> Run:
        return lambda tensors: laid_like(program.execute(tensors, run_step), self.strides)

    def _eager(self, program: Program, run_step: RunStep) -> Run:
        """Runs callables as they are: what they return is taken apart only where it was traced."""

        def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
            made = program.execute(tensors, run_step)
            if self.traced is None:
                return made
            found = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
            return laid_like(found, self.strides)

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
            self._laid(ours, run_step),
            self.tensors,
            list(leaves.values()),
            self.device,
            pool=pool,
            turns=self.workshop.turns,
        )
        self.trial_bytes = None if last else pool_bytes(pool)
        # Its memory goes back with the last backward that may still come.
        return training.differentiable(step, self.weights), _nothing


def _call(
    function: Run, flat: Sequence[Any], spec: pytree.TreeSpec, at: Sequence[int], *tensors: Tensor
) -> Any:
    """A branch on the arguments that it was prepared with, but for the tensors among them."""
    leaves = list(flat)
    for i, tensor in zip(at, tensors, strict=True):
        leaves[i] = tensor
    inputs, named = pytree.tree_unflatten(leaves, spec)
    return function(*inputs, **named)


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


def _nothing() -> None:
    pass
