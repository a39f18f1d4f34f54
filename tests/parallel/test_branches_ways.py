"""The registry of ways, what is kept of those that were tried, and what the room promises."""

import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kilter
from kilter.app.bench.branch_rows import ROWS, run_rows
from kilter.parallel import parallel, timing
from kilter.parallel.candidates import (
    Built,
    CandidateBuilder,
    CompileCache,
    ParallelOptions,
    WayRequest,
    trace_request,
)
from kilter.parallel.loop import SerialLoop
from kilter.parallel.plan import Trial
from kilter.parallel.prepare import _Contest
from kilter.parallel.program import run_in_order
from kilter.parallel.watched import WatchedBranches
from kilter.parallel.ways import WAYS
from kilter.parallel.ways.way import Way

ROOM = Path(kilter.__file__).parent / "parallel"


@pytest.fixture(autouse=True)
def _one_thread_without_grad():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


def branches():
    return [nn.Sequential(nn.Linear(8, w), nn.ReLU(), nn.Linear(w, 4)) for w in (5, 6)]


def builder_of(modules, x):
    loop = SerialLoop.of(modules)
    state = WatchedBranches(loop.branches)
    request = WayRequest(loop, ParallelOptions("auto"), ((x,), {}), state, gradients=False)
    return CandidateBuilder(request, CompileCache(), trace_request(request), [(4, 1)] * 2)


# --- the registry ---------------------------------------------------------------------------------


def test_every_way_says_what_it_is():
    for name, way in WAYS.items():
        assert way.name == name
        assert way.about
        assert set(way.tried_on) <= set(way.works_on) <= {"cpu", "cuda"}
        assert way.captures or not way.compiles


def test_a_new_way_is_one_class_and_one_entry(monkeypatch):
    """`auto` tries it, it can be asked for, and `explain` names it: nothing else was told of it."""
    calls = []

    class Mine(Way):
        name, about = "mine", "a way of a test"
        works_on = tried_on = ("cpu",)

        def program(self, builder):
            return builder.trace().program

        def build(self, program, site):
            run = site.laid(program, run_in_order)
            return Built(lambda tensors: calls.append(1) or run(tensors))

    monkeypatch.setitem(WAYS, "mine", Mine())
    modules, x = branches(), torch.randn(2, 8)
    with parallel(modules) as fast:
        fast(x)
        assert "mine" in {t.mode for t in fast.plan().trials}
    with parallel(modules, mode="mine") as fast:
        fast(x)
        calls.clear()
        assert torch.equal(fast(x)[0], modules[0](x))
        assert calls == [1]
        assert "mine on 1 stream: asked for" in fast.explain()


# --- what is kept of those that were tried --------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "again", "chosen", "released"),
    [
        ([3.0, 1.0, 2.0], [3.0, 1.0], "threads", ["folded"]),
        ([3.0, 2.0, 1.0], [3.0, 1.0], "folded", ["threads"]),
        ([1.0, 2.0, 3.0], None, "serial", ["threads", "folded"]),
        # The serial loop was timed alone while the machine was busy with other work.
        ([417.0, 2.0, 1.0], [1.5, 1.0], "folded", ["threads"]),
        ([417.0, 2.0, 1.0], [1.0, 1.1], "serial", ["threads", "folded"]),
    ],
)
def test_the_winner_is_built_once_and_the_others_are_released(
    monkeypatch, seconds, again, chosen, released
):
    """The times of the serial loop and the two ways, each alone, then of serial loop and winner."""
    times = iter([*seconds, *(again or ())])
    monkeypatch.setattr(
        CandidateBuilder, "seconds_of", lambda self, *runs: [*islice(times, len(runs))]
    )
    plain, made, gone = CandidateBuilder.build, [], []

    def build(self, way, streams, **options):
        built = plain(self, way, streams, **options)
        made.append(way.name)

        def release():
            gone.append(way.name)
            built.release()

        return Built(built.run, release, built.pool)

    monkeypatch.setattr(CandidateBuilder, "build", build)
    with parallel(branches()) as fast:
        fast(torch.randn(2, 8))
        assert fast.plan().chosen == chosen
        assert made == ["threads", "folded"]
        assert gone == released
        assert next(times, None) is None
        if chosen != "serial":
            assert f"{again[0] / again[1]:.2f}x faster" in fast.explain()
    assert set(gone) == {"threads", "folded"}


@pytest.mark.parametrize(("busy_s", "idle_s"), [(0.0, 0.5), (0.05, 1.0), (0.0, 9.0)])
def test_calls_that_are_compared_are_timed_in_turns(monkeypatch, busy_s, idle_s):
    """On a machine that is 400 times slower for some time."""
    now_s = 0.0

    def call(seconds):
        def run():
            nonlocal now_s
            now_s += seconds * (400.0 if busy_s <= now_s < idle_s else 1.0)

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now_s))
    slow, fast = timing.median_seconds([call(2e-3), call(1e-3)], torch.device("cpu"))
    assert slow / fast == pytest.approx(2.0)


def test_the_memory_of_the_first_winner_is_shared_by_the_graphs_after_it():
    """Pools that only remember: the first winner stays as it is, a later one is captured again in
    the memory that is there; without a graph in it that memory is not used any more."""
    builder, released = builder_of(branches(), torch.randn(2, 8)), []
    first, second, third = (SimpleNamespace(graphs=[number]) for number in range(3))
    cache = builder.cache

    def settled(pool):
        contest = _Contest(builder, None)
        built = Built(list, lambda: released.append(pool), pool)
        contest.best = Trial(mode="graph"), built
        return contest.settled(), built

    kept, built = settled(first)
    assert kept is built
    assert cache.pool is first
    again = []
    builder.build = lambda way, streams, **options: again.append((way.name, options["pool"]))
    settled(second)
    assert released == [second]
    assert again == [("graph", first)]
    first.graphs.clear()
    kept, built = settled(third)
    assert kept is built
    assert cache.pool is third


# --- what the room promises -----------------------------------------------------------------------


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_planning_and_the_package_itself_import_no_torch():
    code = "import sys, kilter.parallel.plan; print('torch' in sys.modules)"
    assert run(code).strip() == "False"


def test_the_public_function_and_the_package_have_one_name():
    code = (
        "import torch, kilter.parallel.plan, kilter\n"
        "from kilter import parallel\n"
        "for make in (kilter.parallel, parallel, kilter.parallel.parallel):\n"
        "    fast = make([torch.nn.Identity(), torch.neg], mode='threads')\n"
        "    print(type(fast).__name__, [int(y) for y in fast(torch.ones(1))])\n"
    )
    assert run(code).splitlines() == ["Parallel [1, -1]"] * 3


def test_private_names_of_torch_stand_in_one_file():
    private = re.compile(
        r"torch(\.\w+)*\._[a-z]|aten\._[a-z]|\._(schema|version|modules|parameters)\b"
    )
    for path in ROOM.rglob("*.py"):
        assert not private.search(path.read_text(encoding="utf-8")), path


def test_the_rows_of_the_benchmark_keep_their_names_and_keys():
    names = {d: [row.name for row in ROWS if d in row.devices] for d in ("cuda", "cpu")}
    assert names["cuda"] == [
        *("published", "serial", "auto", "fused", "convolved", "compiled", "graph", "graph_fork"),
        *("branches_compiled", "threads", "cpp_threads", "streams", "compile"),
        *("compile_reduce_overhead", "train_serial", "train_auto"),
    ]
    assert names["cpu"] == [
        *("published", "serial", "auto", "folded", "threads", "cpp_threads"),
        *("train_serial", "train_auto"),
    ]
    rows = list(run_rows("ensemble", "fp32", ["serial", "threads"], device="cpu", quick=True))
    keys = {"workload", "precision", "row", "about", "refused", "chosen", "ready_s", "max_error"}
    for row in rows:
        assert set(row) == keys | {"calls", "device_s", "wall_s"}
        assert set(row["wall_s"]) == {"median", "p10", "p90"}
    assert [row["chosen"] for row in rows] == [None, "threads/4"]
