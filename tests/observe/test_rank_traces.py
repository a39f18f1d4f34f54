"""Reading the ranks' traces: the table of kernels, iterations, streaming, and broken files."""

import gzip
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.observe.traces import (
    ALL_REDUCE,
    SEND_RECV,
    comms,
    job,
    kernel,
    launch,
    step,
    trace,
    write,
)

from kilter.core.errors import FileError
from kilter.observe import trace_events
from kilter.observe.kineto import ITERATION_END, read_kineto
from kilter.observe.rank_traces import KernelTable, operation, read_rank
from kilter.observe.repetition import starts
from kilter.observe.trace_events import RawEvent, TraceFile

TABLE = KernelTable()


@pytest.mark.parametrize(
    ("name", "op"),
    [
        (ALL_REDUCE, "all_reduce"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "reduce_scatter"),
        (SEND_RECV, "send_recv"),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", "all_gather"),
        ("ncclDevKernel_Generic_4(ncclDevComm*, unsigned long, ncclWork*)", "other"),
        ("rcclGenericKernel<1>(rcclDevComm*)", "other"),
        ("mscclKernel_Sum_half_Simple", "other"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*)", "all_reduce"),
        ("void tensorrt_llm::kernels::oneShotAllReduceKernel<__half, 8>(x)", "all_reduce"),
        ("void one_shot_all_reduce_kernel<float, 4>(float**)", "all_reduce"),
        ("multimem_all_gather_kernel<16>", "all_gather"),
        ("void deep_ep::intranode::dispatch<8>(int4*)", "all_to_all"),
        ("void mori::moe::EpDispatchIntraNodeKernel<float>(x)", "all_to_all"),
        ("nvshmemi_put_kernel", "other"),
        ("Memcpy PtoP (Device -> Device)", "copy"),
    ],
)
def test_kernels_that_communicate(name, op):
    assert TABLE.op(name) == op


@pytest.mark.parametrize(
    "name",
    [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "void at::native::vectorized_elementwise_kernel<4, add>(int)",
        "void at::native::reduce_kernel<512, 1, sum_functor>(x)",
        "void at::native::_scatter_gather_elementwise_kernel<128>(x)",
        "triton_per_fused_broadcast_reduce_0",
        "Memcpy DtoD (Device -> Device)",
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::split_with_sizes_copy_kernel(x)",
    ],
)
def test_kernels_that_compute(name):
    assert TABLE.op(name) is None


def test_names_of_operations():
    assert operation("_allgather_base") == "all_gather"
    assert operation("reduce_scatter_tensor_coalesced") == "reduce_scatter"
    assert operation("allreduce") == "all_reduce"
    assert operation("send") == operation("recv") == "send_recv"


def test_a_file_of_ones_own_extends_the_table(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text('[[kernel]]\nlibrary = "ours"\npattern = "^my_fused"\nop = "all_gather"\n')
    assert KernelTable(own).op("my_fused_gemm_ag") == "all_gather"
    assert KernelTable(own).op(ALL_REDUCE) == "all_reduce"
    for text in ("[[kernel", '[[kernel]]\npattern = "("\nlibrary = "x"\n', "kernel = 3\n"):
        own.write_text(text)
        with pytest.raises(FileError, match=r"own\.toml: not a usable table"):
            KernelTable(own)


def test_metadata_comes_from_the_kernel_or_from_its_c10d_operation(tmp_path):
    message = {"Collective name": "_allgather_base", "In msg nelems": 10, "Out msg nelems": 20}
    message |= {"dtype": "BFloat16", "Process Group Name": "3", "Seq": 5}
    message |= {"Process Group Ranks": "[0, 4]"}
    events = [
        comms(77, **message),
        kernel("ncclDevKernel_Generic(x)", 10, 20, **{"External id": 77}),
        kernel(SEND_RECV, 30, 40, **{"Src Rank": 4, "Collective name": "recv", "Seq": 9}),
    ]
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE).collectives
    assert (found[0].op, found[0].bytes, found[0].ranks) == ("all_gather", 40, (0, 4))
    assert (found[0].group, found[0].sequence, found[0].dtype) == ("3", 5, "bfloat16")
    assert (found[1].op, found[1].peers, found[1].sequence) == ("send_recv", (4, 0), None)


def test_an_unknown_kernel_under_a_c10d_operation_is_warned_of(tmp_path):
    events = [comms(7), kernel("brand_new_exchange<4>", 0, 10, **{"External id": 7})]
    events.append(kernel("gemm", 10, 20, **{"External id": 8}))
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE)
    assert len(found.warnings) == 2  # the other: no iterations
    assert "brand_new_exchange" in found.warnings[0]
    assert "--kernels" in found.warnings[0]
    assert found.collectives == ()


@pytest.mark.parametrize("cat", ["user_annotation", "gpu_user_annotation"])
def test_iterations_are_the_steps_of_the_profiler(tmp_path, cat):
    """Work belongs to the step that launched it, however late it runs."""
    events = []
    for i in range(3):
        on_gpu = 1000.0 * i + (500 if cat == "user_annotation" else 0)
        events.append(step(4 + i, 1000.0 * i, 1000.0 * (i + 1), cat))
        events.append(launch(1000.0 * i + 1, 10 + i))
        events.append(kernel("gemm", on_gpu, on_gpu + 700, correlation=10 + i))
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE)
    assert [w.number for w in found.iterations] == [4, 5, 6]
    assert [round(w.begin_s * 1e6) for w in found.iterations] == [0, 1000, 2000]
    last = 2700 if cat == "user_annotation" else 3000
    assert round(found.iterations[-1].end_s * 1e6) == last


def test_iterations_are_found_without_marks(tmp_path):
    found = read_rank(write(tmp_path / "t.json", job(0, iterations=5)), table=TABLE)
    assert len(found.iterations) == 5
    assert [round(w.begin_s * 1e6) for w in found.iterations] == [0, 1000, 2000, 3000, 4000]


@given(
    layers=st.integers(2, 12),
    kernels=st.integers(3, 9),
    iterations=st.integers(2, 7),
    lost=st.integers(0, 5),
)
def test_the_period_is_the_iteration_and_not_the_layer(layers, kernels, iterations, lost):
    layer = list(range(10, 10 + kernels))
    once = [1, 2, *layer * layers, 3, *layer[::-1] * layers, 4, 5]
    lost = min(lost, len(once) // 25)
    sequence = np.array(once * iterations)
    sequence = np.delete(sequence, np.arange(lost) + len(once) // 2)
    found, rest = starts(sequence)
    assert len(found) == iterations
    assert rest is None
    for i, at in enumerate(found):
        assert abs(at - i * len(once)) <= lost


def test_an_incomplete_last_iteration_is_left_out():
    once = [1, 2, *[10, 11, 12] * 5, 3]
    found, rest = starts(np.array(once * 3 + once[:9]))
    assert found == [0, 18, 36]
    assert rest == 54


def test_the_layers_of_a_single_iteration_are_no_iterations():
    once = [1, 2, *list(range(10, 22)) * 48, 3, 4, 5, 6, 7]
    assert starts(np.array(once)) == ([0], None)
    assert len(starts(np.array(once * 2))[0]) == 2


def test_a_trace_that_begins_inside_an_iteration():
    once = [1, 2, *[10, 11, 12] * 5, 3]
    found, rest = starts(np.array(once[7:] + once * 3 + once[:7]))
    assert found == [0, 18, 36, 54]
    assert rest is None


def test_no_repetition_is_one_iteration():
    assert starts(np.arange(100)) == ([0], None)
    assert starts(np.array([1])) == ([0], None)


@given(
    names=st.lists(st.text(max_size=12), max_size=40),
    indent=st.sampled_from([None, 0, 2]),
    chunk=st.integers(16, 400),
    bare=st.booleans(),
)
def test_streaming_gives_every_event_whatever_the_chunks(
    tmp_path_factory, names, indent, chunk, bare
):
    events = [
        {
            "ph": "X",
            "name": name,
            "ts": i,
            "dur": 1,
            "args": {"stream": i, "x": [{"a": 1}, {"b": 2}]},
        }
        for i, name in enumerate(names)
    ]
    content = events if bare else {"a": [{"b": "},{"}, {}], "traceEvents": events, "z": [{}, {}]}
    path = tmp_path_factory.mktemp("t") / "t.json"
    path.write_text(json.dumps(content, indent=indent, ensure_ascii=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_events, "CHUNK_BYTES", chunk)
        file = TraceFile(path, RawEvent)
        found = list(file)
    assert [e.name for e in found] == names
    assert [e.args.stream for e in found] == list(range(len(names)))
    if not bare:
        assert file.head == {"a": content["a"], "z": content["z"]}


def test_numbers_that_json_does_not_have(tmp_path):
    path = tmp_path / "t.json"
    text = json.dumps(trace([kernel("gemm", 0, 10, occupancy="NAN"), kernel("a", 10, 20)]))
    path.write_text(text.replace('"NAN"', "-nan"))
    assert len(read_rank(path, table=TABLE).compute) == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "complete JSON"),
        (b"{}", "no traceEvents"),
        (b"hello", "complete JSON"),
        (b'{"traceEvents": []}', "no GPU kernels"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon"}]}', "not a Kineto trace"),
        (b'{"traceEvents": 3}', "no traceEvents"),
        (b"[1, 2]", "not a Kineto trace"),
        (b"\x1f\x8b\x08garbage", "gzip"),
        (json.dumps(job(0)).encode()[:3000], "breaks off"),
        (gzip.compress(json.dumps(job(0)).encode(), mtime=0)[:400], "gzip"),
        (b'\xff\xfe{"traceEvents": []}', "JSON"),
    ],
)
def test_broken_files_are_one_line(tmp_path, content, words):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=words) as caught:
        read_rank(path, table=TABLE)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_the_rank_comes_from_the_file_its_name_or_its_place(tmp_path):
    content = job(0)
    del content["distributedInfo"]
    named = write(tmp_path / "job_rank12.json.gz", content)
    assert read_rank(named, table=TABLE).rank == 12
    plain = write(tmp_path / "t.json", content)
    assert read_rank(plain, table=TABLE, otherwise=5).rank == 5
    assert read_rank(write(tmp_path / "rank3.json", job(1)), table=TABLE).rank == 1
    for rank in (-1, 2**64, 1e308):  # no numbers of a rank
        content["distributedInfo"] = {"rank": rank}
        assert read_rank(write(plain, content), table=TABLE, otherwise=5).rank == 5


def test_a_number_beyond_64_bits_is_no_number(tmp_path):
    events = [kernel(ALL_REDUCE, 0, 100, correlation=2**64, **{"External id": 1e308})]
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE)
    assert [c.op for c in found.collectives] == ["all_reduce"]


def test_the_work_of_another_gpu_is_left_out_by_name(tmp_path):
    events = [kernel("gemm", 0, 100), kernel("gemm", 0, 60, device=3)]
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE)
    assert found.compute == [(0.0, pytest.approx(1e-4))]
    assert "GPU 3" in found.warnings[0]


@pytest.mark.parametrize(
    ("begin", "end"),
    [(60, 50), (1e30, 1e30 + 1), (0, 1e30), (-1e15, -2e15), (60, math.nan), (math.nan, 70)],
)
def test_impossible_times_are_said_and_count_for_nothing(tmp_path, begin, end):
    events = [kernel("gemm", 0, 100), kernel("odd", begin, end), kernel("gemm", 150, 200)]
    path = write(tmp_path / "t.json", trace(events))
    found = read_rank(path, table=TABLE)
    assert sum(found.compute, ()) == pytest.approx((0.0, 1e-4, 1.5e-4, 2e-4))
    said = "1 event with impossible times: left out of all sums (odd)"
    assert found.warnings[0] == said
    (iteration,) = found.iterations
    assert (iteration.begin_s, iteration.end_s) == pytest.approx((0.0, 2e-4))
    told = []
    mean = read_kineto(path, iterations=1, warn=told.append)
    assert (told, mean.iteration_s) == ([said], pytest.approx(2e-4))


def test_a_large_trace_is_read_in_less_memory_than_its_size(tmp_path):
    """In a process of its own, so that the peak is that of the reading alone."""
    path = tmp_path / "large.json"
    event = json.dumps(kernel("gemm_with_a_long_name" * 20, 0, 1, correlation=1, grid=[1, 2, 3]))
    with open(path, "w") as file:
        file.write('{"traceEvents": [')
        for i in range(80_000):
            file.write(event.replace('"ts": 0', f'"ts": {i}') + ",\n")
        file.write(event + "]}")
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from kilter.observe.rank_traces import KernelTable, read_rank\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "read_rank(Path(sys.argv[1]), table=KernelTable())\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert path.stat().st_size > 40e6
    assert int(done.stdout) * 1024 < 0.8 * path.stat().st_size


def test_iterations_end_at_kilters_own_annotations(tmp_path):
    events = []
    for i in range(4):
        at = 1000.0 * i
        mark = {"ph": "X", "cat": "user_annotation", "name": ITERATION_END, "ts": at, "dur": 0}
        events += [mark, launch(at + 1, 10 + i)]
        events.append(kernel("gemm", at + 100, at + 800, correlation=10 + i))
    found = read_rank(write(tmp_path / "t.json", trace(events)), table=TABLE)
    assert [round(w.begin_s * 1e6) for w in found.iterations] == [0, 1000, 2000]
    assert round(found.iterations[-1].end_s * 1e6) == 2700
