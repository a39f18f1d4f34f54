"""Rows of `kilter bench branches`: one workload, every way of running it, side by side.

Every row has device time (events), wall time (with a synchronise per call), the time until it was
ready, memory, and its largest difference to a float64 run of the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kilter.app.bench.branch_workloads import WORKLOADS, build
from kilter.core.errors import UsageError
from kilter.observe.torch_internals.branches import pytree
from kilter.parallel import checks
from kilter.parallel.calls import Parallel, parallel
from kilter.parallel.capture import Captured, GraphPool, Turns
from kilter.parallel.compilation import compile_units
from kilter.parallel.loop import SerialLoop
from kilter.parallel.plan import assign_lanes
from kilter.parallel.regions import from_graph
from kilter.parallel.streams import CudaStreams, ForkJoin
from kilter.parallel.timing import unit_seconds
from kilter.parallel.trace import TRACE_ERRORS, WayRefused, first_line, trace
from kilter.parallel.ways import WAYS

WARM_UPS, CALLS = 50, 500
ROW_S = 2.0
"""A row's calls are limited to about this time, but there are at least 20."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
EVERYWHERE = ("cuda", "cpu")


@dataclass(frozen=True)
class _Ready:
    """A row that is ready to be measured."""

    call: Callable[..., Any]
    close: Callable[[], None] = lambda: None
    explain: Callable[[], str] = lambda: ""
    chosen: Callable[[], str | None] = lambda: None
    pool: Callable[[], int | None] = lambda: None


@dataclass(frozen=True)
class _Row:
    name: str
    about: str
    ready: Callable[[Any, Sequence[Tensor]], _Ready]
    """It is made from the module (or list of branches) and its inputs."""
    devices: tuple[str, ...] = ("cuda",)
    explains: bool = False


def run_rows(
    workload_name: str, precision: str, rows: Sequence[str] | None, *, device: str, quick: bool
) -> Iterator[dict[str, Any]]:
    """Measure the rows one after the other; each is yielded as soon as it is known."""
    if workload_name not in WORKLOADS:
        raise UsageError(f"no workload {workload_name!r}; there are: {', '.join(WORKLOADS)}")
    if precision not in DTYPES:
        raise UsageError(f"no precision {precision!r}; there are: {', '.join(DTYPES)}")
    workload, dtype = WORKLOADS[workload_name], DTYPES[precision]
    known = {row.name: row for row in ROWS if device in row.devices}
    for name in rows or known:
        if name not in known:
            raise UsageError(f"no row {name!r} on {device}; there are: {', '.join(known)}")
    tf32 = precision == "tf32"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        with torch.no_grad():
            made, inputs = build(workload, device=device, dtype=dtype)
            exact = _exact(made, inputs)
            for name in rows or known:
                if name == "published" and workload.published is None:
                    continue
                row = known[name]
                if name == "published":
                    given = partial(build, workload, device=device, dtype=dtype, published=True)
                else:
                    given = partial(tuple, (made, inputs))
                yield {
                    "workload": workload_name,
                    "precision": precision,
                    "row": name,
                    "about": row.about,
                    **_measure(row, given, exact, device, quick=quick),
                }
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _exact(made: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    wide = [m.double() for m in copy.deepcopy(made if isinstance(made, list) else [made])]
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    return _tensors(SerialLoop.of(wide if isinstance(made, list) else wide[0])(*given))


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def _measure(
    row: _Row,
    given: Callable[[], tuple[Any, Sequence[Tensor]]],
    exact: Sequence[Tensor],
    device: str,
    *,
    quick: bool,
) -> dict[str, Any]:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    made, inputs = given()
    began = time.perf_counter()
    ready = None
    try:
        ready = row.ready(made, inputs)
        ready.call(*inputs)
        found = [t.clone() for t in _tensors(ready.call(*inputs))]
        if on_gpu:
            torch.cuda.synchronize()
        ready_s = time.perf_counter() - began
        result: dict[str, Any] = {
            "refused": None,
            "chosen": ready.chosen(),
            "ready_s": ready_s,
            "max_error": checks.error(found, exact),
            **_times(partial(ready.call, *inputs), on_gpu, quick=quick),
        }
        if on_gpu:
            result["peak_bytes"] = torch.cuda.max_memory_allocated() - held
            result["pool_bytes"] = ready.pool()
        if row.explains:
            result["explain"] = ready.explain()
        return result
    except (WayRefused, *TRACE_ERRORS) as error:
        kind = "Refused" if isinstance(error, WayRefused) else type(error).__name__
        return {"refused": f"{kind}: {first_line(error)}", "ready_s": None}
    finally:
        if ready is not None:
            ready.close()


# --- what a row runs ------------------------------------------------------------------------------


def _serial(made: Any, inputs: Sequence[Tensor]) -> _Ready:
    return _Ready(SerialLoop.of(made))


def _compiled(made: Any, inputs: Sequence[Tensor], *, mode: str = "default") -> _Ready:
    return _Ready(torch.compile(SerialLoop.of(made), dynamic=False, mode=mode))


def _train_serial(made: Any, inputs: Sequence[Tensor]) -> _Ready:
    return _Ready(_training(SerialLoop.of(made), made))


def _auto(made: Any, inputs: Sequence[Tensor]) -> _Ready:
    ours = parallel(made)
    ours(*inputs)
    return _ours(ours, ours, inputs)


def _train_auto(made: Any, inputs: Sequence[Tensor]) -> _Ready:
    ours = parallel(made)
    return _ours(ours, _training(ours, made), inputs)


def _one_way(made: Any, inputs: Sequence[Tensor], *, mode: str, fold: bool) -> _Ready:
    """One way, which has to be used in every call."""
    ours = parallel(made, mode=mode, fold=fold)

    def checked(*given: Any) -> Any:
        found = ours(*given)
        plan = ours.plan()
        if plan is None or plan.chosen != mode:
            text = plan.reason.text if plan else "nothing prepared"
            raise WayRefused("not_chosen", text, mode)
        return found

    checked(*inputs)
    return _ours(ours, ours, inputs)


def _training(call: Callable[..., Any], made: Any) -> Callable[..., Any]:
    """The call, and the gradients of all weights of the sum of squares of its outputs."""
    weights = [
        p for part in (made if isinstance(made, list) else [made]) for p in part.parameters()
    ]

    def run(*inputs: Any) -> Any:
        with torch.enable_grad():
            found = call(*inputs)
            loss = sum(t.float().square().sum() for t in _tensors(found))
            torch.autograd.grad(loss, weights, allow_unused=True)
        return pytree.tree_map_only(Tensor, Tensor.detach, found)

    return run


def _ours(ours: Parallel, call: Callable[..., Any], inputs: Sequence[Tensor]) -> _Ready:
    def chosen() -> str | None:
        plan = ours.plan()
        searched = "+" if plan is not None and plan.searched else ""
        return None if plan is None else f"{plan.chosen}/{plan.streams}{searched}"

    def pool() -> int | None:
        return ours.memory_bytes() if inputs[0].is_cuda else None

    return _Ready(call, ours.close, ours.explain, chosen, pool)


def _branches_compiled(made: Any, inputs: Sequence[Tensor]) -> _Ready:
    """Nothing folded, every branch compiled by itself, one stream for each."""
    device = inputs[0].device
    traced = trace(SerialLoop.of(made), tuple(inputs))
    program = compile_units(from_graph(traced.graph).with_weights(Tensor.detach), {})
    seconds = unit_seconds(program, inputs, device)
    lanes = [
        assign_lanes([seconds.get(u.key, u.work * 1e-6) for u in step], len(step))
        for step in program.steps
    ]
    fork = ForkJoin(CudaStreams(device, capturing=True), lanes)
    pool = GraphPool()
    captured = Captured(
        lambda tensors: program.execute(tensors, fork), inputs, device, pool=pool, turns=Turns()
    )
    return _Ready(lambda *given: captured(given), captured.release, pool=pool.bytes)


def _way_row(
    mode: str,
    name: str | None = None,
    *,
    fold: bool = False,
    devices: tuple[str, ...] = ("cuda",),
    explains: bool = False,
) -> _Row:
    """A way that was asked for by name. Without `fold` it runs the loop's own operations."""
    ready = partial(_one_way, mode=mode, fold=fold)
    return _Row(name or mode, WAYS[mode].about, ready, devices, explains)


ROWS = (
    _Row("published", "eager loop with the published code's host traps", _serial, EVERYWHERE),
    _Row("serial", "eager loop, device buffers", _serial, EVERYWHERE),
    _Row("auto", "ours: tries its ways, keeps the fastest right one", _auto, EVERYWHERE, True),
    _way_row("fused", fold=True, explains=True),
    _way_row("convolved", fold=True, explains=True),
    _way_row("compiled", fold=True, explains=True),
    _way_row("folded", fold=True, devices=("cpu",)),
    _way_row("graph"),
    _way_row("graph_streams", "graph_fork"),
    _Row(
        "branches_compiled",
        "each branch of the loop compiled, forked inside one graph",
        _branches_compiled,
    ),
    _way_row("threads", devices=EVERYWHERE),
    _way_row("cpp_threads", devices=EVERYWHERE),
    _way_row("streams"),
    _Row("compile", "torch.compile", _compiled),
    _Row(
        "compile_reduce_overhead",
        "torch.compile, mode reduce-overhead",
        partial(_compiled, mode="reduce-overhead"),
    ),
    _Row("train_serial", "forward and backward of the eager loop", _train_serial, EVERYWHERE),
    _Row(
        "train_auto",
        "ours: forward and backward, tried and checked with their gradients",
        _train_auto,
        EVERYWHERE,
        True,
    ),
)

# --- times ----------------------------------------------------------------------------------------


def _times(call: Callable[[], Any], on_gpu: bool, *, quick: bool) -> dict[str, Any]:
    def once() -> tuple[float | None, float]:
        if not on_gpu:
            began = time.perf_counter()
            call()
            return None, time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
        return float(begin.elapsed_time(end)) * 1e-3, wall

    _, first = once()
    limit = (0.2 if quick else 1.0) * ROW_S
    for _ in range(min(WARM_UPS, max(3, int(0.25 * limit / first)))):
        once()
    _, typical = once()
    calls = min(CALLS, max(5 if quick else 20, int(limit / max(typical, 1e-6))))
    taken = [once() for _ in range(calls)]
    events = [e for e, _ in taken if e is not None]
    walls = [w for _, w in taken]
    return {
        "calls": calls,
        "device_s": _spread_of(events) if events else None,
        "wall_s": _spread_of(walls),
    }


def _spread_of(samples: Sequence[float]) -> dict[str, float]:
    low, median, high = np.percentile(np.asarray(samples), [10, 50, 90])
    return {"median": float(median), "p10": float(low), "p90": float(high)}


def conditions(device: str) -> dict[str, Any]:
    """Where and with what it was measured."""
    name = torch.cuda.get_device_name() if device == "cuda" else "host CPU"
    return {
        "device": name,
        "torch": str(torch.__version__),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "threads": torch.get_num_threads(),
    }


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())
