"""Sections, waiting and transfer against an independent sweep, and broken sets of traces."""

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.traces import SEND_RECV, comms, job, kernel, launch, trace, write

from kilter.clocks.plan.sections import LEAST_S, analyse, summary
from kilter.core.errors import PlanError
from kilter.core.rank_trace import Collective, RankIteration, RankTrace
from kilter.model.intervals import union
from kilter.observe.rank_traces import KernelTable, read_rank

DATA = Path(__file__).parents[1] / "data"
TABLE = KernelTable()


def read(tmp_path, *contents):
    files = [write(tmp_path / f"{i}.json", content) for i, content in enumerate(contents)]
    return [read_rank(f, table=TABLE, otherwise=i) for i, f in enumerate(files)]


def sweep(path):
    """Seconds of each state, by adding up +1 and -1 at the edges of the raw events: no interval
    algebra, and a table of kernels of its own."""
    raw = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    edges = []
    for event in raw:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            what = "copy" if event["cat"] != "kernel" else "compute"
            if event["name"].startswith("nccl"):
                what = "comm"
            edges.append((event["ts"], what, 1))
            edges.append((event["ts"] + event["dur"], what, -1))
    edges.sort(key=lambda e: e[0])
    running, total = Counter(), Counter()
    for (time, what, change), (after, _, _) in pairwise(edges):
        running[what] += change
        state = tuple(name for name in ("comm", "compute", "copy") if running[name] > 0)
        total[state] += (after - time) * 1e-6
    return total


@pytest.mark.parametrize("name", ["ddp2_nvlink_resnet50", "par2_fsdp2_rank0", "par2_fsdp2_rank1"])
def test_times_of_measured_traces_are_those_of_a_sweep(name):
    path = DATA / f"{name}.kineto.json.gz"
    rank = analyse([read_rank(path, table=TABLE)]).ranks[0]
    true = sweep(path)
    comm = sum(s for state, s in true.items() if "comm" in state)
    compute = sum(s for state, s in true.items() if "compute" in state)
    overlapped = sum(s for state, s in true.items() if {"comm", "compute"} <= set(state))
    mean = rank.mean
    assert rank.iterations == 2
    assert mean.comm_s * 2 == pytest.approx(comm, rel=1e-6)
    assert mean.compute_s * 2 == pytest.approx(compute, rel=1e-6)
    assert mean.overlapped_s * 2 == pytest.approx(overlapped, rel=1e-6)
    assert mean.exposed_s * 2 == pytest.approx(comm - overlapped, rel=1e-6)
    assert mean.copy_s * 2 == pytest.approx(true["copy",], rel=1e-6)
    assert mean.idle_s * 2 == pytest.approx(true[()], rel=1e-5)


HTA = {
    "ddp2_nvlink_resnet50": (58155.456, 4952.618, 1108.969, 0.8242),
    "par2_fsdp2_rank0": (128307.020, 90601.772, 72033.551, 0.4208),
    "par2_fsdp2_rank1": (116865.796, 149895.411, 29958.127, 0.3030),
}
"""What HolisticTraceAnalysis 0.5.0 says of these traces: microseconds of computation, of nothing,
and of communication or copies alone; and the covered share of communication. Written down on
2026-11-23 (`benchmarks/sections_oracle.py`, HTA_DISABLE_NS_ROUNDING=1)."""


@pytest.mark.parametrize("name", HTA)
def test_times_of_measured_traces_are_those_of_holistic_trace_analysis(name):
    rank = analyse([read_rank(DATA / f"{name}.kineto.json.gz", table=TABLE)]).ranks[0]
    mean, (compute_us, idle_us, rest_us, covered) = rank.mean, HTA[name]
    assert mean.compute_s * rank.iterations == pytest.approx(compute_us * 1e-6, rel=1e-5)
    assert mean.idle_s * rank.iterations == pytest.approx(idle_us * 1e-6, rel=1e-5)
    rest_s = (mean.exposed_s + mean.copy_s) * rank.iterations
    assert rest_s == pytest.approx(rest_us * 1e-6, rel=1e-5)
    assert mean.overlapped_s / mean.comm_s == pytest.approx(covered, abs=6e-5)


@pytest.mark.parametrize("name", HTA)
def test_a_collective_is_ready_when_what_was_launched_before_it_is_over(name):
    path = DATA / f"{name}.kineto.json.gz"
    raw = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in raw
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    kernels = [e for e in raw if e.get("cat") == "kernel"]
    origin_us = min(e["ts"] for e in raw if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"))
    found = read_rank(path, table=TABLE).collectives
    assert len(found) >= 10
    own = sorted((e for e in kernels if e["name"].startswith("nccl")), key=lambda e: e["ts"])
    for collective, event in zip(found, own, strict=True):
        at_us = launched[event["args"]["correlation"]]
        before = [
            e["ts"] + e["dur"]
            for e in kernels
            if not e["name"].startswith("nccl") and launched[e["args"]["correlation"]] < at_us
        ]
        ready_us = min(max([at_us, *before]), event["ts"])
        assert collective.ready_s == pytest.approx((ready_us - origin_us) * 1e-6, abs=1e-9)


def test_waiting_of_a_measured_pair_is_what_the_durations_say():
    """Matched by their order, from the raw events."""
    paths = [DATA / f"par2_fsdp2_rank{r}.kineto.json.gz" for r in (0, 1)]
    analysis = analyse([read_rank(path, table=TABLE) for path in paths])
    raw = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in paths]
    kernels = [
        sorted((e["ts"], e["dur"]) for e in events if e.get("name", "").startswith("nccl"))
        for events in raw
    ]
    durations = np.array([[dur for _, dur in of_rank] for of_rank in kernels]) * 1e-6
    transfer = durations.min(axis=0)
    assert analysis.matched == 200
    assert analysis.left_out == ()
    for rank, own in zip(analysis.ranks, durations, strict=True):
        assert rank.mean.transfer_s * 2 == pytest.approx(transfer.sum(), rel=1e-6)
        assert rank.mean.wait_s * 2 == pytest.approx((own - transfer).sum(), rel=1e-6)
    assert abs(analysis.ranks[1].clock_offset_s) < 1e-5


SPANS = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 60)).map(lambda s: (s[0], s[0] + s[1])),
    min_size=1,
    max_size=12,
)


@given(compute=SPANS, comm=SPANS, copies=SPANS)
def test_the_parts_add_up_to_the_iteration(compute, comm, copies):
    scaled = [[(a * 1e-6, b * 1e-6) for a, b in spans] for spans in (compute, comm, copies)]
    rank = RankTrace(
        source="x",
        rank=0,
        world_size=1,
        device="",
        origin_s=0.0,
        compute=union(scaled[0]),
        copies=union(scaled[2]),
        collectives=tuple(
            Collective(op="all_reduce", begin_s=a, end_s=b, stream=1) for a, b in sorted(scaled[1])
        ),
        iterations=(RankIteration(number=0, begin_s=0.0, end_s=460e-6),),
        found_by="",
    )
    found = analyse([rank]).ranks[0]
    mean, cells = found.mean, range(460)
    states = [{c for a, b in spans for c in range(a, b)} for spans in (compute, comm, copies)]
    exposed = states[1] - states[0]
    assert mean.exposed_s == pytest.approx(len(exposed) * 1e-6)
    assert mean.overlapped_s == pytest.approx(len(states[1] & states[0]) * 1e-6)
    assert mean.copy_s == pytest.approx(len(states[2] - states[1] - states[0]) * 1e-6)
    assert mean.idle_s == pytest.approx(len(set(cells) - set.union(*states)) * 1e-6)
    parts = mean.compute_s + mean.exposed_s + mean.copy_s + mean.idle_s
    assert parts == pytest.approx(mean.iteration_s)
    in_sections = sum(s.exposed_s for s in found.sections) + found.short_sections.exposed_s
    assert in_sections == pytest.approx(mean.exposed_s)
    assert all(s.length_s >= LEAST_S * 0.999 for s in found.sections)


@pytest.mark.parametrize("seq", [True, False])
@pytest.mark.parametrize("clock_us", [0.0, 7200e6])
def test_the_late_rank_waits_for_nobody(tmp_path, seq, clock_us):
    traces = read(tmp_path, job(0, seq=seq), job(1, late_us=300.0, seq=seq, clock_us=clock_us))
    early, late = analyse(traces).ranks
    assert early.mean.wait_s == pytest.approx(300e-6)
    assert late.mean.wait_s == pytest.approx(0.0, abs=1e-9)
    assert early.mean.transfer_s == late.mean.transfer_s == pytest.approx(200e-6)
    assert late.clock_offset_s == pytest.approx(clock_us * 1e-6, abs=1e-6)
    (section,) = early.sections
    assert (section.op, section.group, section.bytes) == ("all_reduce", "default_pg", 4000)
    assert section.presence == 1.0
    assert section.wait_s == pytest.approx(300e-6)
    assert section.start_s == pytest.approx(400e-6)
    assert section.length_s == pytest.approx(500e-6)


@pytest.mark.parametrize("dur", [-5.0, 0.0, float("nan")])
def test_nobody_waits_for_a_collective_whose_time_is_impossible(tmp_path, dur):
    early, late = job(0, seq=False), job(1, late_us=300.0, seq=False)
    next(e for e in late["traceEvents"] if e["name"].startswith("nccl"))["dur"] = dur
    analysis = analyse(read(tmp_path, early, late))
    assert analysis.ranks[0].mean.wait_s == pytest.approx(300e-6 * 2 / 3)
    assert analysis.ranks[0].mean.transfer_s == pytest.approx(200e-6 * 2 / 3)
    assert any("rank 0: 1 of 3 collectives were seen" in text for text in analysis.left_out)


def test_missing_ranks_and_groups_seen_once_are_named(tmp_path):
    analysis = analyse(read(tmp_path, job(3, world_size=8)))
    assert any("ranks 0, 1, 2, 4, 5, 6, 7 of 8" in text for text in analysis.left_out)
    assert analysis.ranks[0].mean.wait_s is None
    assert analysis.ranks[0].mean.exposed_s == pytest.approx(500e-6)


def test_different_numbers_of_iterations_are_named_and_what_is_common_is_matched(tmp_path):
    analysis = analyse(read(tmp_path, job(0, iterations=4), job(1, iterations=3, late_us=100.0)))
    assert any("4 on rank 0, 3 on rank 1" in text for text in analysis.left_out)
    assert analysis.matched == 6


def test_groups_are_matched_by_their_members(tmp_path):
    """Two tensor-parallel pairs with the same name, one of which is slow."""
    contents = []
    for rank in range(4):
        group = [0, 1] if rank < 2 else [2, 3]
        duration = 100 if rank < 2 else 500
        late = 50 if rank % 2 else 0
        message = {"Collective name": "allreduce", "Process Group Name": "tp"}
        message |= {"Process Group Ranks": str(group), "Seq": 1}
        events = [
            kernel("gemm", 0, 100),
            kernel(
                "ncclDevKernel_AllReduce",
                100 + late,
                100 + late + duration - late,
                stream=9,
                **message,
            ),
        ]
        contents.append(trace(events, rank=rank, world_size=4))
    ranks = analyse(read(tmp_path, *contents)).ranks
    assert [round(r.mean.transfer_s * 1e6) for r in ranks] == [50, 50, 450, 450]
    assert [round(r.mean.wait_s * 1e6) for r in ranks] == [50, 0, 50, 0]


def test_point_to_point_is_matched_by_the_pair(tmp_path):
    contents = []
    for rank, length in ((0, 100), (1, 400), (2, 70)):
        message = {"Process Group Name": "pp", "Process Group Ranks": "[0, 1, 2]"}
        message |= {"Collective name": "send", "Dst Rank": 1, "Seq": rank}
        if rank == 1:
            message |= {"Collective name": "recv", "Src Rank": 0}
        events = [kernel("gemm", 0, 100), kernel(SEND_RECV, 100, 100 + length, **message)]
        contents.append(trace(events, rank=rank, world_size=3))
    ranks = analyse(read(tmp_path, *contents)).ranks
    assert [r.mean.transfer_s for r in ranks][:2] == [pytest.approx(100e-6)] * 2
    assert ranks[1].mean.wait_s == pytest.approx(300e-6)
    assert ranks[2].mean.wait_s is None


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        ((job(0), job(0)), "both of rank 0"),
        ((job(0), job(1, world_size=4)), "run of 2 ranks"),
        ((job(0), job(1, jitter=(0.0, 5e4, 1e5))), "apart"),
        ((job(0), job(7)), "rank 7, in a run of 2 ranks"),
    ],
)
def test_traces_of_different_runs_are_refused(tmp_path, contents, words):
    with pytest.raises(PlanError, match=words):
        analyse(read(tmp_path, *contents))


def test_other_collectives_are_another_run(tmp_path):
    other = json.loads(json.dumps(job(1, seq=False)).replace("allreduce", "broadcast"))
    with pytest.raises(PlanError, match="do not run the same collectives"):
        analyse(read(tmp_path, job(0, seq=False), other))


def test_no_collectives_is_an_answer(tmp_path):
    analysis = analyse(read(tmp_path, trace([kernel("gemm", 0, 10), kernel("gemm", 20, 30)])))
    assert "No communication kernels in the trace" in summary(analysis)
    assert analysis.ranks[0].sections == ()
    assert analysis.ranks[0].mean.compute_s == pytest.approx(20e-6)


def test_a_rank_without_communication_beside_one_that_waits_is_said(tmp_path):
    silent = trace([kernel("gemm", 0, 10), kernel("gemm", 20, 30)], world_size=2)
    analysis = analyse(read(tmp_path, silent, job(1)))
    assert "rank 0: holds no communication, though others do" in " ".join(analysis.left_out)
    assert analysis.ranks[1].mean.wait_s is None


def test_the_summary_names_the_worst_rank(tmp_path):
    text = summary(analyse(read(tmp_path, job(0), job(1, late_us=300.0))))
    assert "exposed communication on rank 0" in text
    assert "60.0 % of it waiting" in text


def test_transfers_in_both_directions_are_matched_each_in_its_own(tmp_path):
    """Both ends send first, and receive later."""
    contents = []
    for rank, (sent_us, received_us) in enumerate([(100, 10), (30, 50)]):
        to, by = {"Dst Rank": 1 - rank}, {"Src Rank": 1 - rank}
        events = [
            kernel("gemm", 0, 100),
            kernel(SEND_RECV, 100, 100 + sent_us, **{"Collective name": "send"}, **to),
            kernel(SEND_RECV, 300, 300 + received_us, **{"Collective name": "recv"}, **by),
        ]
        contents.append(trace(events, rank=rank, world_size=2))
    waits = [rank.mean.wait_s for rank in analyse(read(tmp_path, *contents)).ranks]
    assert waits == pytest.approx([50e-6, 20e-6], abs=1e-9)


def batched(rank, size, *, asked):
    """A stage of a pipeline that exchanges with one neighbour after the other by
    `batch_isend_irecv`: the kernels tell no peer, the operations before their launch do."""
    events = [kernel("gemm", 0, 100)]
    neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < size]
    for n, peer in enumerate(neighbours):
        at = 10 + 20 * min(rank, peer)
        if asked:
            sent = {"Collective name": "send", "Dst Rank": peer, "Process Group Name": "0"}
            received = {"Collective name": "recv", "Src Rank": peer, "Process Group Name": "0"}
            events += [comms(70 + n, **sent) | {"ts": at}, comms(80 + n, **received) | {"ts": at}]
        begin, end = 100 + 100 * n, 190 + 100 * n - 10 * rank
        events += [launch(at + 5, 90 + n), kernel(SEND_RECV, begin, end, correlation=90 + n)]
    groups = [("0", "default_pg", list(range(size)))]
    return trace(events, rank=rank, world_size=size, groups=groups)


def test_batched_transfers_belong_to_the_peer_that_was_asked_for(tmp_path):
    analysis = analyse(read(tmp_path, *(batched(rank, 3, asked=True) for rank in range(3))))
    assert {section.op for rank in analysis.ranks for section in rank.sections} == {"send_recv"}
    assert analysis.matched == analysis.collectives == 4
    # 0 and 1: 90 and 80 us; 1 and 2: 80 and 70 us
    waits = [rank.mean.wait_s for rank in analysis.ranks]
    assert waits == pytest.approx([10e-6, 10e-6, 0.0], abs=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_transfers_without_a_peer_are_matched_in_a_pair_alone(tmp_path, size):
    analysis = analyse(read(tmp_path, *(batched(rank, size, asked=False) for rank in range(size))))
    said = "rank 0: 1 of 1 collectives were seen on no other rank" in str(analysis.left_out)
    waits = [rank.mean.wait_s for rank in analysis.ranks]
    if size == 2:
        assert waits == pytest.approx([10e-6, 0.0], abs=1e-9)
        assert not said
    else:
        assert waits == [None] * 3
        assert said


def test_a_remnant_of_a_collective_is_no_section_in_the_place_of_the_long_one():
    """Of ten iterations, two see the collective end after an operation that did not wait for it."""
    compute, collectives, windows = [], [], []
    for i in range(10):
        at = 0.26 * i
        late_s = 0.2e-3 if i in (3, 7) else 0.0
        compute += [(at, at + 0.01), (at + 0.253, at + 0.254)]
        end_s = at + 0.254 + late_s
        collectives.append(Collective(op="all_reduce", begin_s=at + 0.01, end_s=end_s, stream=1))
        windows.append(RankIteration(number=i, begin_s=at, end_s=at + 0.26))
    trace = RankTrace(
        source="a", rank=0, world_size=2, device="x", origin_s=0.0, compute=compute, copies=[],
        collectives=tuple(collectives), iterations=tuple(windows), found_by="",
    )  # fmt: skip
    rank = analyse([trace]).ranks[0]
    (section,) = rank.sections
    assert section.presence == 1.0
    assert section.length_p5_s == pytest.approx(0.243)
    assert rank.short_sections.exposed_s == pytest.approx(0.04e-3)
    assert rank.mean.exposed_s == pytest.approx(section.exposed_s + 0.04e-3)
