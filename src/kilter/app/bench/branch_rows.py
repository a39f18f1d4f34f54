"""Rows of `kilter bench branches`: one workload, every way of running it, side by side.

Every row has device time (events) and wall time (with a synchronise per call), what it took to be
ready, memory, and its largest difference to a float64 run of the same weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from kilter.act.branches import numerics
from kilter.act.branches.capture import Captured, Turns, pool_bytes
from kilter.act.branches.loop import Loop
from kilter.act.branches.parallel import Parallel, parallel
from kilter.act.branches.program import Program, compile_units, from_graph
from kilter.act.branches.streams import Cuda, ForkJoin
from kilter.act.branches.timing import unit_seconds
from kilter.act.branches.tracing import TRACE_ERRORS, Refused, trace
from kilter.act.branches.workloads import WORKLOADS, Workload, build
from kilter.core.errors import UsageError
from kilter.plan.branches import assign_lanes

WARM_UPS, CALLS = 50, 500
ROW_S = 2.0
"""A row's calls are cut to about this time, but not below 20."""

GPU_ROWS = (
    "published",
    "serial",
    "auto",
    "fused",
    "convolved",
    "compiled_batched",
    "compiled",
    "batched",
    "graph",
    "graph_fork",
    "branches_compiled",
    "threads",
    "cpp_threads",
    "streams",
    "compile",
    "compile_reduce_overhead",
    "train_serial",
    "train_auto",
)
CPU_ROWS = (
    "published",
    "serial",
    "auto",
    "batched",
    "threads",
    "cpp_threads",
    "train_serial",
    "train_auto",
)
ABOUT = {
    "published": "eager loop with the published code's host traps",
    "serial": "eager loop, device buffers",
    "auto": "ours: tries its ways, keeps the fastest right one",
    "fused": "ours: Triton launches for all heads of a layer at once, joined linear layers",
    "compiled_batched": "ours: stacked groups compiled, forked inside one graph",
    "convolved": "ours: as compiled, convolutions of small maps by a kernel where it is faster",
    "compiled": "ours: every branch compiled after folding, forked inside one graph",
    "batched": "ours: stacked groups, not compiled, forked inside one graph",
    "graph": "one CUDA graph of the loop",
    "graph_fork": "one CUDA graph of the loop, a forked stream for each branch",
    "branches_compiled": "each branch of the loop compiled, forked inside one graph",
    "threads": "Python threads, a stream each",
    "cpp_threads": "C++ threads without interpreter lock, a stream each (the thesis's way)",
    "streams": "one Python thread, a stream for each branch",
    "compile": "torch.compile",
    "compile_reduce_overhead": "torch.compile, mode reduce-overhead",
    "train_serial": "forward and backward of the eager loop",
    "train_auto": "ours: forward and backward, tried and checked with their gradients",
}
OURS = ("auto", "fused", "convolved", "compiled", "compiled_batched", "train_auto")
"""Rows that explain themselves."""
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True)
class _Way:
    """A way made ready."""

    call: Callable[..., Any]
    close: Callable[[], None]
    explain: Callable[[], str]
    chosen: Callable[[], str | None]
    pool: Callable[[], int | None]


def run_rows(
    workload_name: str, precision: str, rows: Sequence[str] | None, *, device: str, quick: bool
) -> Iterator[dict[str, Any]]:
    """Measure the rows one after the other; each is yielded as soon as it is known."""
    if workload_name not in WORKLOADS:
        raise UsageError(f"no workload {workload_name!r}; there are: {', '.join(WORKLOADS)}")
    if precision not in DTYPES:
        raise UsageError(f"no precision {precision!r}; there are: {', '.join(DTYPES)}")
    workload, dtype = WORKLOADS[workload_name], DTYPES[precision]
    known = GPU_ROWS if device == "cuda" else CPU_ROWS
    for row in rows or known:
        if row not in known:
            raise UsageError(f"no row {row!r} on {device}; there are: {', '.join(known)}")
    tf32 = precision == "tf32"
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        with torch.no_grad():
            made, inputs = build(workload, device=device, dtype=dtype)
            exact = _exact(made, inputs)
            for row in rows or known:
                if row == "published" and workload.published is None:
                    continue
                yield {
                    "workload": workload_name,
                    "precision": precision,
                    "row": row,
                    "about": ABOUT[row],
                    **_measure(row, workload, dtype, device, made, inputs, exact, quick=quick),
                }
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _serial(made: Any) -> Callable[..., Any]:
    return Loop.of(made)


def _exact(made: Any, inputs: Sequence[Tensor]) -> list[Tensor]:
    wide = [m.double() for m in copy.deepcopy(made if isinstance(made, list) else [made])]
    given = [x.double() if x.is_floating_point() else x for x in inputs]
    found = _serial(wide if isinstance(made, list) else wide[0])(*given)
    return _tensors(found)


def _tensors(found: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def _measure(
    row: str,
    workload: Workload,
    dtype: torch.dtype,
    device: str,
    made: Any,
    inputs: Sequence[Tensor],
    exact: Sequence[Tensor],
    *,
    quick: bool,
) -> dict[str, Any]:
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    if row == "published":
        made, inputs = build(workload, device=device, dtype=dtype, published=True)
    began = time.perf_counter()
    way = None
    try:
        way = _way(row, made, inputs)
        found = _tensors(way.call(*inputs))
        found = [t.clone() for t in _tensors(way.call(*inputs))]
        if on_gpu:
            torch.cuda.synchronize()
        ready_s = time.perf_counter() - began
        result: dict[str, Any] = {
            "refused": None,
            "chosen": way.chosen(),
            "ready_s": ready_s,
            "max_error": numerics.error(found, exact),
            **_times(lambda: way.call(*inputs), on_gpu, quick=quick),
        }
        if on_gpu:
            result["peak_bytes"] = torch.cuda.max_memory_allocated() - held
            result["pool_bytes"] = way.pool()
        if row in OURS:
            result["explain"] = way.explain()
        return result
    except (Refused, *TRACE_ERRORS) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return {"refused": f"{type(error).__name__}: {first}", "ready_s": None}
    finally:
        if way is not None:
            way.close()


def _way(row: str, made: Any, inputs: Sequence[Tensor]) -> _Way:
    if row == "train_serial":
        return _plain(_training(_serial(made), made))
    if row == "train_auto":
        ours = parallel(made)
        return _ours(ours, _training(ours, made), inputs)
    if row in ("published", "serial"):
        return _plain(_serial(made))
    if row == "compile":
        return _plain(torch.compile(_serial(made), dynamic=False))
    if row == "compile_reduce_overhead":
        return _plain(torch.compile(_serial(made), dynamic=False, mode="reduce-overhead"))
    if row == "branches_compiled":
        return _branches_compiled(made, inputs)
    as_written = row in ("graph", "graph_fork", "threads", "cpp_threads", "streams")
    mode = "graph_streams" if row == "graph_fork" else row
    ours = parallel(made, mode=mode, fold=not as_written)

    def checked(*given: Any) -> Any:
        found = ours(*given)
        plan = ours.plan()
        if row != "auto" and (plan is None or plan.chosen != mode):
            raise Refused(plan.reason if plan else "nothing prepared")
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


def _ours(ours: Parallel, call: Callable[..., Any], inputs: Sequence[Tensor]) -> _Way:
    return _Way(
        call,
        ours.close,
        ours.explain,
        lambda: _chosen(ours),
        lambda: ours.memory_bytes() if inputs[0].is_cuda else None,
    )


def _chosen(ours: Parallel) -> str | None:
    plan = ours.plan()
    searched = "+" if plan is not None and plan.searched else ""
    return None if plan is None else f"{plan.chosen}/{plan.streams}{searched}"


def _plain(call: Callable[..., Any]) -> _Way:
    return _Way(call, lambda: None, lambda: "", lambda: None, lambda: None)


def _branches_compiled(made: Any, inputs: Sequence[Tensor]) -> _Way:
    """Row R13: nothing folded or stacked, every branch compiled by itself, one stream for each."""
    device = inputs[0].device
    program: Program = compile_units(
        from_graph(trace(_serial(made), tuple(inputs)).graph).with_weights(Tensor.detach), {}
    )
    seconds = unit_seconds(program, inputs, device)
    lanes = [
        assign_lanes([seconds.get(u.key, u.work * 1e-6) for u in step], len(step))
        for step in program.steps
    ]
    fork = ForkJoin(Cuda(device, capturing=True), lanes)
    pool = torch.cuda.graph_pool_handle()
    captured = Captured(
        lambda tensors: program.execute(tensors, fork), inputs, device, pool=pool, turns=Turns()
    )
    return _Way(
        lambda *given: captured(given),
        captured.release,
        lambda: "",
        lambda: None,
        lambda: pool_bytes(pool),
    )


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
