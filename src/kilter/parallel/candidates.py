"""Everything that the ways of running one input signature are built from: the request, its trace,
the programs made of the trace, and what several signatures share. `prepare` decides between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from kilter.core.reasons import Reason
from kilter.observe.torch_internals.branches import has_backward_hooks, has_gradient_hooks, pytree
from kilter.parallel import checks, training
from kilter.parallel.capture import Captured, GraphPool, Turns
from kilter.parallel.compilation import warm
from kilter.parallel.folding import check_devices, fold
from kilter.parallel.loop import Arguments, SerialLoop
from kilter.parallel.plan import assign_lanes
from kilter.parallel.program import BranchCall, BranchProgram, RunStep, from_callables, laid_like
from kilter.parallel.regions import from_graph
from kilter.parallel.timing import median_seconds, unit_seconds
from kilter.parallel.trace import TRACE_ERRORS, Trace, WayRefused, reason_of, tensor_of, trace
from kilter.parallel.watched import WatchedBranches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kilter.parallel.ways.way import Way

UNIT_S = 2.5
"""One piece is first estimated to compile in this time: seven took 18 s on a machine with an
H200."""


@dataclass(frozen=True)
class ParallelOptions:
    """What `parallel` was asked for."""

    mode: str
    streams: int | None = None
    compile: bool = True
    prepare_budget_s: float = 20.0
    max_graphs: int = 16
    fold: bool = True

    @property
    def auto(self) -> bool:
        return self.mode == "auto"


class WayRequest:
    """One call of the loop that is to be made ready, with its arguments."""

    def __init__(
        self,
        loop: SerialLoop,
        options: ParallelOptions,
        arguments: Arguments,
        state: WatchedBranches,
        *,
        gradients: bool,
    ) -> None:
        self.began = time.perf_counter()
        self.loop, self.options, self.arguments = loop, options, arguments
        self.state, self.gradients = state, gradients
        self.tensors = [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]
        self.device = _device(self.tensors, state)

    @property
    def on_gpu(self) -> bool:
        return bool(self.device.type == "cuda")

    def spent_s(self) -> float:
        return time.perf_counter() - self.began

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

    def results(self, run: BranchCall, weights: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a call, in training also the gradients of inputs and weights."""
        if self.gradients:
            return checks.gradients(run, self.examples(), weights)
        return list(run(self.tensors))


def _device(tensors: Sequence[Tensor], state: WatchedBranches) -> torch.device:
    for tensor in [*tensors, *state.tensors.values()]:
        if tensor.is_cuda:
            return tensor.device
    return tensors[0].device if tensors else torch.device("cpu")


# --- the trace ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TracedRequest:
    """A request as graphs of operations."""

    trace: Trace
    unfolded: fx.GraphModule
    """It is the graph as traced, over the same weights as `graph`."""
    program: BranchProgram
    """It is the folded graph, cut into branches."""
    weights: tuple[Tensor, ...]
    """The trace reads these weights, and autograd wants gradients for them; empty in inference."""

    @property
    def graph(self) -> fx.GraphModule:
        return self.trace.graph


def trace_request(request: WayRequest) -> TracedRequest:
    """Trace and simplify; `WayRefused` if the trace would not be right."""
    inputs, named = request.arguments
    traced = trace(request.loop, inputs, named, request.state.tensors)
    held = _held_tensors(traced, request.state)
    if request.gradients:
        _check_gradients(traced, request)
    unfolded = _copy(traced.graph)
    if request.options.fold:
        movements = not request.gradients
        request.state.watch_values(fold(traced.graph, request.device, movements=movements))
    check_devices(traced.graph, request.device)
    program = from_graph(traced.graph)
    if request.gradients:
        weights = tuple(t for t in held if t.requires_grad)
        return TracedRequest(traced, unfolded, program, weights)
    return TracedRequest(traced, unfolded, program.with_weights(Tensor.detach), ())


def _held_tensors(traced: Trace, state: WatchedBranches) -> list[Tensor]:
    """The tensors that the trace reads beside its inputs; `WayRefused` if one could be replaced
    unseen."""
    held: dict[int, Tensor] = {}
    for node in traced.graph.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = tensor_of(traced.graph, node)
        held[id(tensor)] = tensor
        literal = any("lift_fresh" in str(u.target) for u in node.users)
        if id(tensor) not in state.tensors and not literal:
            kind = f"{str(tensor.dtype).removeprefix('torch.')} tensor of shape"
            name = f"{kind} {list(tensor.shape)}"
            line = traced.reads.get(id(tensor), "an unknown line")
            text = f"reads a tensor ({name}) that could be replaced unseen, at {line}"
            raise WayRefused("unwatched_tensor", text, name)
    return list(held.values())


def _check_gradients(traced: Trace, request: WayRequest) -> None:
    """`WayRefused` if the gradient of the trace is not the gradient of the code."""
    line = traced.cuts_gradient
    if line is not None:
        text = f"takes a tensor out of autograd at {line}"
        raise WayRefused("cuts_gradient", text, line)
    if any(map(has_backward_hooks, request.state.modules)):
        raise WayRefused("gradient_hooks", "a module has backward hooks")
    if any(map(has_gradient_hooks, (*request.state.tensors.values(), *request.tensors))):
        raise WayRefused("gradient_hooks", "a weight or an input has gradient hooks")


def _copy(graph: fx.GraphModule) -> fx.GraphModule:
    """Another graph over the same weights."""
    body = fx.Graph()
    body.output(body.graph_copy(graph.graph, {}))
    return fx.GraphModule(graph, body)


# --- building -------------------------------------------------------------------------------------


@dataclass
class CompileCache:
    """What the signatures of one `Parallel` share."""

    compiled: dict[Hashable, BranchCall] = field(default_factory=dict)
    warm: set[Hashable] = field(default_factory=set)
    """The kernels of these units are compiled."""
    compile_s: float = 0.0
    faster: dict[Hashable, bool] = field(default_factory=dict)
    """It says for each convolution whether our kernel is faster than the library."""
    pool: GraphPool | None = None
    """It is the memory that all captured graphs share."""
    turns: Turns = field(default_factory=Turns)

    def has_pool(self) -> bool:
        """Whether the shared memory can take another graph."""
        return self.pool is not None and len(self.pool.graphs) > 0


@dataclass(frozen=True)
class Built:
    """A way that is ready to run on tensors, and how to end it."""

    run: Callable[[Sequence[Tensor]], Sequence[Any] | None]
    release: Callable[[], None] = lambda: None
    pool: GraphPool | None = None
    """It is the memory of its graphs."""


class CandidateBuilder:
    """Builds the ways of running one request."""

    def __init__(
        self,
        request: WayRequest,
        cache: CompileCache,
        traced: TracedRequest | Reason,
        strides: Sequence[Sequence[int]],
    ) -> None:
        self.request, self.cache = request, cache
        self.traced = traced
        """It is the trace, or why there is none."""
        self.strides = strides
        """They are the strides of the loop's results."""
        self.all_by_kernel = False
        """Whether every convolution of the program made last was faster by our kernel."""
        self._programs: dict[Hashable, BranchProgram | WayRefused] = {}
        self._seconds: dict[str, dict[Hashable, float]] = {}

    # --- programs ---------------------------------------------------------------------------------

    def once(self, key: Hashable, make: Callable[[], BranchProgram]) -> BranchProgram:
        """A program that is made once; also a refusal is remembered."""
        if key not in self._programs:
            try:
                self._programs[key] = make()
            except WayRefused as refused:
                self._programs[key] = refused
            except TRACE_ERRORS as error:
                reason = reason_of(error)
                self._programs[key] = WayRefused(reason.code, reason.text, reason.subject)
        found = self._programs[key]
        if isinstance(found, WayRefused):
            raise found
        return found

    def program(self, way: Way) -> BranchProgram:
        """The program that a way runs; `WayRefused` if it has none."""
        return self.once(way.name, lambda: way.program(self))

    def trace(self) -> TracedRequest:
        """The trace; `WayRefused` where there is none."""
        if isinstance(self.traced, Reason):
            raise WayRefused(self.traced.code, self.traced.text, self.traced.subject)
        return self.traced

    def forked_program(self) -> BranchProgram:
        """The traced program; `WayRefused` if it has no independent branches."""
        program = self.trace().program
        if not program.forks:
            raise WayRefused("no_branches", "no independent branches were found")
        return program

    def callables(self) -> BranchProgram:
        """The branches of a list as they are, called and not traced."""
        request = self.request
        if len(request.loop.branches) == 1:
            raise WayRefused("one_branch", "there is only one branch")
        positions = {id(t): i for i, t in enumerate(request.tensors)}
        splits: list[list[int]] = []
        wrapped: list[BranchCall] = []
        inputs, named = request.arguments
        for function, given in zip(request.loop.branches, request.loop.spread(inputs), strict=True):
            flat, spec = pytree.tree_flatten((given, named))
            at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
            splits.append([positions[id(flat[i])] for i in at])
            wrapped.append(partial(_call, function, flat, spec, at))
        return from_callables(wrapped, splits, len(request.tensors))

    def has_convolutions(self) -> bool:
        """Whether the library may choose between algorithms."""
        if isinstance(self.traced, Reason) or not self.request.on_gpu:
            return False
        if torch.are_deterministic_algorithms_enabled():
            return False
        return any("convolution" in str(n.target) for n in self.traced.unfolded.graph.nodes)

    def affordable(self) -> int | None:
        """How many pieces can be compiled in the time that is left, judged by those compiled so
        far; None: any number."""
        options = self.request.options
        if not options.auto:
            return None
        done = len(self.cache.compiled)
        each_s = self.cache.compile_s / done if done else UNIT_S
        left_s = options.prepare_budget_s - self.request.spent_s()
        return max(0, int(left_s / each_s))

    def lanes(self, way: Way, streams: int) -> list[tuple[tuple[int, ...], ...]]:
        """For each step the units of each stream, longest first."""
        program = self.program(way)
        if way.name not in self._seconds:
            request = self.request
            self._seconds[way.name] = (
                unit_seconds(program, request.tensors, request.device) if program.forks else {}
            )
        seconds = self._seconds[way.name]
        return [
            assign_lanes([seconds.get(unit.key, unit.work * 1e-6) for unit in step], streams)
            for step in program.steps
        ]

    def seconds_of(self, *runs: BranchCall) -> list[float]:
        """Median time of each call, in training with its backward. The calls take turns."""
        request = self.request
        weights = () if isinstance(self.traced, Reason) else self.traced.weights
        calls = [partial(request.results, run, weights) for run in runs]
        return median_seconds(calls, request.device)

    def build(self, way: Way, streams: int, *, searched: bool, pool: GraphPool | None) -> Built:
        """A way that is ready to run. `pool`: the memory of its graphs, if it captures any."""
        request = self.request
        if request.device.type not in way.works_on:
            raise WayRefused("device", "needs a CUDA device", way.name)
        if request.gradients and not way.differentiable:
            text = f"{way.name} has no gradients: wrap the call in torch.no_grad()"
            raise WayRefused("no_gradients", text, way.name)
        with _searching_algorithms(searched):
            program = self.program(way)
            if way.compiles and request.on_gpu:
                warm(program, self.cache.compiled, self.cache.warm, request.device)
            return way.build(program, Site(self, streams, pool))


@dataclass(frozen=True)
class Site:
    """Where a way makes its program ready: on so many streams (or threads), with memory for its
    graphs if it captures any."""

    builder: CandidateBuilder
    streams: int
    pool: GraphPool | None

    @property
    def request(self) -> WayRequest:
        return self.builder.request

    def laid(self, program: BranchProgram, run_step: RunStep) -> BranchCall:
        """A traced program as a call, with results that lie in memory like the loop's."""
        return lambda tensors: laid_like(program.execute(tensors, run_step), self.builder.strides)

    def eager(self, program: BranchProgram, run_step: RunStep) -> BranchCall:
        """A program as a call that may return anything. The tensors are taken out of the results
        only where the loop was traced, because only then are they put back."""
        traced = not isinstance(self.builder.traced, Reason)

        def run(tensors: Sequence[Tensor]) -> Sequence[Any]:
            made = program.execute(tensors, run_step)
            if not traced:
                return made
            found = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
            return laid_like(found, self.builder.strides)

        return run

    def capture(self, step: BranchCall) -> Built:
        assert self.pool is not None
        request, turns = self.request, self.builder.cache.turns
        captured = Captured(step, request.tensors, request.device, pool=self.pool, turns=turns)
        return Built(captured, captured.release, self.pool)

    def capture_training(self, program: BranchProgram, run_step: RunStep) -> Built:
        """Forward and backward of a program as two CUDA graphs."""
        assert self.pool is not None
        request, weights = self.request, self.builder.trace().weights
        leaves = {id(w): w.detach().requires_grad_() for w in weights}
        ours = program.with_weights(lambda t: leaves.get(id(t), t))
        step = training.CapturedStep(
            self.laid(ours, run_step),
            request.tensors,
            list(leaves.values()),
            request.device,
            pool=self.pool,
            turns=self.builder.cache.turns,
        )
        # Nothing to release: the memory is freed after the last backward that may still come.
        return Built(training.differentiable(step, weights), pool=self.pool)


@contextmanager
def _searching_algorithms(on: bool) -> Iterator[None]:
    """The library tries all algorithms of a convolution during the warm-ups inside, and a capture
    keeps the fastest. The user's setting is restored."""
    before = torch.backends.cudnn.benchmark
    if on:
        torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        if on:
            torch.backends.cudnn.benchmark = before


def _call(
    function: BranchCall,
    flat: Sequence[Any],
    spec: pytree.TreeSpec,
    at: Sequence[int],
    *tensors: Tensor,
) -> Any:
    """A branch on the arguments that it was prepared with, with the tensors replaced."""
    leaves = list(flat)
    for i, tensor in zip(at, tensors, strict=True):
        leaves[i] = tensor
    inputs, named = pytree.tree_unflatten(leaves, spec)
    return function(*inputs, **named)
