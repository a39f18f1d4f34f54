"""The class of a job: named first, with the evidence that the record holds, and unknown else."""

import dataclasses
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import runs

from kilter.app.cli.main import main
from kilter.app.report import build as report
from kilter.app.report import html, summary
from kilter.clocks.plan.job_class import Bound
from kilter.core.events import Fitted, Moved, Sampled, Sectioned
from kilter.core.label import Label
from kilter.core.plan import Goal, MemoryBudget
from kilter.core.setting import Activity, Setting
from kilter.core.trace import IterationTrace, Kind, Operation
from kilter.core.units import GIB, MHZ

DEFAULT = Setting()


def watched(clock_share=0.05, **changes):
    """A measured run with a probe at 960 MHz; `changes` are of every reading at the default."""
    job = runs.WrittenJob(clock_share=clock_share, noise=0.0, drift=0.0, throttled_share=0.0)
    run = runs.RunWriter(job, label=Label.MEASURED, uuid="GPU-0")
    run.start()
    for _ in range(3):
        run.block("warm", DEFAULT, arm="baseline")
    run.pairs("probe", Setting(sm_clock_hz=960 * MHZ), 2)
    run.events = [
        msgspec.structs.replace(e, **changes)
        if isinstance(e, Sampled) and e.sm_clock_hz == runs.TOP_HZ
        else e
        for e in run.events
    ]
    return run


def built(run, trace=None):
    return report.summarise([report.sort_events(run.events)], run="r", trace=trace, plan=None)


def traced(*parts):
    """A GPU's timeline of one second: (kind, seconds) in order."""
    operations, at_s = [], 0.0
    for kind, seconds in parts:
        operations.append(
            Operation(name=kind.value, kind=kind, start_s=at_s, duration_s=seconds, flops=1e9)
        )
        at_s += seconds
    return IterationTrace(
        iteration_s=1.0,
        operations=tuple(operations),
        timeline="gpu",
        device="Tesla V100-SXM2-16GB",
        label=Label.MEASURED,
    )


def test_compute_bound_follows_the_clock():
    job = built(watched(clock_share=0.9)).job
    assert (job.name, job.label) == (Bound.COMPUTE, Label.MEASURED)
    slower = 0.1 + 0.9 * 1530 / 960 - 1.0
    assert f"37 % less SM clock changes the time of an iteration by {100 * slower:+.1f} %" in (
        job.evidence
    )


def test_memory_bound_does_not_follow_the_clock_and_is_busy():
    assert built(watched(clock_share=0.02)).job.name is Bound.MEMORY


def test_insensitive_to_the_clock_is_not_memory_bound_unless_it_is_busy():
    run = watched(clock_share=0.02)
    run.events = [
        msgspec.structs.replace(e, sm_utilisation=None) if isinstance(e, Sampled) else e
        for e in run.events
    ]
    assert built(run).job.name is Bound.UNKNOWN


def test_between_the_two_is_unknown():
    found = built(watched(clock_share=0.3))
    assert found.job.name is Bound.UNKNOWN
    assert found.job.label is None
    assert "the class of the job is unknown" in summary.full(found).splitlines()[0]


def test_idle_by_utilisation():
    job = built(watched(sm_utilisation=0.4)).job
    assert job.name is Bound.IDLE


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ([(Kind.DATA_WAIT, 0.5), (Kind.FORWARD, 0.5)], Bound.INPUT),
        ([(Kind.GAP, 0.5), (Kind.FORWARD, 0.5)], Bound.IDLE),
        ([(Kind.DATA_WAIT, 0.1), (Kind.GAP, 0.4), (Kind.FORWARD, 0.5)], Bound.IDLE),
        ([(Kind.COLLECTIVE, 0.3), (Kind.FORWARD, 0.7)], Bound.COMMUNICATION),
        ([(Kind.COLLECTIVE, 0.1), (Kind.FORWARD, 0.9)], Bound.COMPUTE),
    ],
)
def test_trace_tells_what_the_gpu_waits_for(parts, name):
    job = built(watched(clock_share=0.9), traced(*parts)).job
    assert (job.name, job.label) == (name, Label.MEASURED)


@pytest.mark.parametrize(
    ("bytes_moved", "name", "words"),
    [
        (1e9, Bound.MEMORY, "operations below 14 FLOP per byte"),
        (1e6, Bound.COMPUTE, "operations above 300 FLOP per byte"),
        (1e7, Bound.UNKNOWN, "neither operations below 14 FLOP per byte"),
        (None, Bound.UNKNOWN, "no lower SM clock"),
    ],
)
def test_intensity_tells_where_no_clock_could_be_tried(bytes_moved, name, words):
    run = runs.RunWriter(runs.WrittenJob(throttled_share=0.0), label=Label.MEASURED, uuid="GPU-0")
    run.start()
    for _ in range(3):
        run.block("warm", DEFAULT, arm="baseline")
    trace = traced((Kind.FORWARD, 0.9), (Kind.COLLECTIVE, 0.1))
    busy = dataclasses.replace(trace.operations[0], bytes_moved=bytes_moved)
    trace = dataclasses.replace(trace, operations=(busy, *trace.operations[1:]))
    job = built(run, trace).job
    assert job.name is name
    assert words in job.evidence


@pytest.mark.parametrize(
    ("reason", "words"),
    [("power_cap", "its power cap"), ("thermal", "its temperature"), ("hardware", "its hardware")],
)
def test_throttled_at_the_default(reason, words):
    run = watched(clock_share=0.9, throttle=(reason,), sm_clock_hz=1380 * MHZ)
    found = built(run)
    assert found.job.name is Bound.THROTTLED
    assert found.job.share == 1.0
    assert f"{words} holds the clock down in 100 % of " in found.job.evidence
    assert "at 1380 MHz on average" in found.job.evidence
    assert summary.summary(found, None).splitlines()[0].startswith("kilter: throttled: ")


@pytest.mark.parametrize(
    ("activity", "name"),
    [
        (Activity(sm=0.9, dram=0.8, tensor=0.7), Bound.MEMORY),
        (Activity(sm=0.9, dram=0.3, tensor=0.7), Bound.COMPUTE),
        (Activity(sm=0.9, dram=None, tensor=0.7), Bound.COMPUTE),
        (Activity(sm=0.9, dram=0.5, tensor=0.5), Bound.UNKNOWN),
        (Activity(), Bound.UNKNOWN),
    ],
)
def test_the_busiest_unit_tells_where_the_clock_does_not(activity, name):
    found = built(watched(clock_share=0.3, activity=activity))
    assert found.job.name is name
    if name is Bound.MEMORY:
        assert found.job.evidence == "80 % of the memory's bandwidth is used, by the GPU's counters"
        assert found.job.label is Label.MEASURED


def test_a_lower_clock_that_was_tried_is_better_evidence_than_a_busy_unit():
    run = watched(clock_share=0.9, activity=Activity(sm=0.9, dram=0.8, tensor=0.1))
    assert built(run).job.name is Bound.COMPUTE


def test_limit_under_our_own_setting_is_no_throttling():
    run = watched(clock_share=0.9, throttle=())
    run.events = [
        msgspec.structs.replace(e, throttle=("power_cap",))
        if isinstance(e, Sampled) and e.sm_clock_hz != runs.TOP_HZ
        else e
        for e in run.events
    ]
    assert built(run).job.name is Bound.COMPUTE


def test_clock_that_somebody_set_is_no_throttling():
    assert built(watched(clock_share=0.9, throttle=("clock_setting",))).job.name is Bound.COMPUTE


def test_exposed_communication_of_a_sections_run():
    run = watched(clock_share=0.9)
    run.events.append(
        Sectioned(
            t_s=9.0,
            summary="nothing to gain",
            planned=False,
            exposed_share=0.41,
            longest_s=0.01,
            break_even_s=0.004,
            saving=0.0,
            slowdown=0.0,
            stretches=0,
            windows=1,
            reopened=0,
            collectives=4,
            sets=False,
        )
    )
    job = built(run).job
    assert job.name is Bound.COMMUNICATION
    assert job.evidence == "exposed communication takes 41 % of an iteration"


@pytest.mark.parametrize(("waited_s", "name"), [(0.3, Bound.OFFLOADING), (0.01, Bound.COMPUTE)])
def test_offloading_that_stalls(waited_s, name):
    run = watched(clock_share=0.9)
    goal = Goal(max_slowdown=0.02, memory_budget=MemoryBudget(size_bytes=24 * GIB))
    run.events[0] = msgspec.structs.replace(run.events[0], goal=goal)
    run.events += [PLAN, msgspec.structs.replace(MOVED, waited_s=waited_s)]
    job = built(run).job
    assert job.name is name
    if name is Bound.OFFLOADING:
        assert job.share == pytest.approx(0.3)
        assert job.label is Label.MEASURED


PLAN = Fitted(
    t_s=1.0,
    planner="spanning",
    budget_bytes=24 * GIB,
    feasible=True,
    peak_before_bytes=30 * GIB,
    peak_bytes=23 * GIB,
    compute_s=0.7,
    iteration_s=0.9,
    stall_s=0.2,
    recompute_s=0.0,
    out_bytes=GIB,
    in_bytes=GIB,
    hidden=0.5,
    host_bytes=GIB,
    swapped=3,
    recomputed=0,
    kept=9,
)
MOVED = Moved(
    t_s=5.0,
    passes=10,
    planned=8,
    deviations=0,
    late=0,
    spilled=0,
    recomputed=0,
    out_bytes=8 * GIB,
    in_bytes=8 * GIB,
    host_bytes=GIB,
    backend="cuda",
    budget_bytes=24 * GIB,
    budget="as asked for",
    applied=True,
    plain_peak_bytes=30 * GIB,
    plain_peak_seen=True,
    peak_bytes=23 * GIB,
    least_bytes=10 * GIB,
    plain_iteration_s=0.8,
    iteration_s=1.0,
    in_force=(0,),
)


def test_simulated_evidence_is_called_so():
    run = runs.governed(runs.WrittenJob(clock_share=0.9))
    run.stop()
    assert built(run).job.label is Label.SIMULATED


def test_first_sentence_of_text_page_and_json(tmp_path, capsys):
    run = watched(clock_share=0.9)
    run.stop()
    directory = runs.write(tmp_path, run)
    main(["report", str(directory)])
    assert capsys.readouterr().out.startswith("class    compute-bound: 37 % less SM clock")
    main(["report", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["job"]["name"] == "compute-bound"
    page = html.page(report.build(directory))
    assert page.index("Compute-bound: 37 % less SM clock") < page.index("<h1>")


def test_nothing_on_record_is_unknown():
    run = runs.RunWriter(label=Label.MEASURED, uuid="GPU-0")
    run.start()
    job = built(run).job
    assert (job.name, job.evidence) == (Bound.UNKNOWN, "no block of iterations is on record")
    run.block("warm", Setting(), arm="baseline")
    run.events = [
        msgspec.structs.replace(e, sm_utilisation=None) if isinstance(e, Sampled) else e
        for e in run.events
    ]
    assert built(run).job.evidence == (  # a trace may be there, and be cut off
        "no trace could be read, and no utilisation of the GPU in a block is on record"
    )


@given(
    used=st.one_of(st.none(), st.floats(0.0, 1.0)),
    clock_share=st.floats(0.0, 1.0),
    reasons=st.lists(st.sampled_from(["power_cap", "thermal", "idle", "other"]), unique=True),
)
def test_each_record_has_one_class_and_a_share_that_is_one(used, clock_share, reasons):
    found = built(watched(clock_share=clock_share, sm_utilisation=used, throttle=tuple(reasons)))
    job = found.job
    assert (job.name is Bound.UNKNOWN) == (job.label is None)
    assert job.share is None or 0.0 <= job.share <= 1.0
    if {"power_cap", "thermal"} & set(reasons):
        assert job.name is Bound.THROTTLED
    assert summary.full(found).startswith("class    ")
