"""Kineto traces to iteration traces: small ones made by hand, and real ones of an H200."""

import gzip
import json
import re
from pathlib import Path

import pytest

from kilter.core.errors import FileError
from kilter.core.trace import Kind
from kilter.observe.chrome import chrome
from kilter.observe.kineto import ITERATION_END, MODULE, read_kineto

DATA = Path(__file__).parent.parent / "data"
RESNET = DATA / "ddp2_nvlink_resnet50.kineto.json.gz"
FSDP = DATA / "par2_fsdp2_rank0.kineto.json.gz"


class Recording:
    """Writes a trace event by event; times in microseconds."""

    def __init__(self):
        self.events = []
        self._correlation = 0

    def host(self, name, begin, end, cat="cpu_op", **args):
        args = {k.replace("_", " "): v for k, v in args.items()}
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": begin,
             "dur": end - begin, "args": args}
        )  # fmt: skip

    def kernel(self, name, launched, begin, end, *, stream=7, cat="kernel", **args):
        self._correlation += 1
        link = {"correlation": self._correlation}
        self.host("cudaLaunchKernel", launched, launched + 1, "cuda_runtime", **link)
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, "ts": begin,
             "dur": end - begin, "args": {"device": 0, "stream": stream, **link, **args}}
        )  # fmt: skip

    def iteration_ended(self, at):
        self.host(ITERATION_END, at, at)

    def read(self, tmp_path, **how):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": self.events}))
        return read_kineto(path, **how)


def us(operation):
    return round(operation.start_s * 1e6, 3), round(operation.duration_s * 1e6, 3)


def named(trace, name, kind):
    (found,) = [o for o in trace.operations if (o.name, o.kind) == (name, kind)]
    return found


def idle(trace):
    return sum(o.duration_s for o in trace.operations if o.kind in (Kind.GAP, Kind.DATA_WAIT))


def mm_flops(name, shapes, values):
    return 2.0 * shapes[0][0] * shapes[0][1] * shapes[1][1] if name == "aten::mm" else None


def training_step(record, at):
    """1000 us: a layer, its backward, the optimizer."""
    record.iteration_ended(at)
    record.host(MODULE + "layer", at + 100, at + 400)
    record.host("aten::linear", at + 150, at + 350, Sequence_number=3,
                Input_Dims=[[4, 8], [16, 8]], Input_type=["float", "float"])  # fmt: skip
    record.host("aten::mm", at + 200, at + 300, Sequence_number=3,
                Input_Dims=[[4, 8], [8, 16]], Input_type=["float", "float"])  # fmt: skip
    engine = "autograd::engine::evaluate_function: "
    record.host(engine + "MmBackward0", at + 500, at + 700, Sequence_number=3)
    record.host(engine + "torch::autograd::AccumulateGrad", at + 700, at + 750)
    record.host("Optimizer.step#SGD.step", at + 800, at + 950, "user_annotation")
    record.host("aten::add_", at + 820, at + 900, Input_Dims=[[16, 8]], Input_type=["float"])


def test_the_host_timeline_of_a_training_step(tmp_path):
    record = Recording()
    training_step(record, 10_000)
    training_step(record, 11_000)
    record.iteration_ended(12_000)
    trace = record.read(tmp_path, flops=mm_flops)
    assert trace.timeline == "host"
    assert trace.iterations == 2
    assert trace.iteration_s == pytest.approx(1e-3)
    forward = named(trace, "layer", Kind.FORWARD)
    assert us(forward) == (150, 200)
    assert forward.flops == 2 * 4 * 8 * 16
    assert forward.bytes_moved == 4 * (4 * 8 + 16 * 8 + 4 * 16)
    assert us(named(trace, "layer", Kind.BACKWARD)) == (500, 250)
    assert us(named(trace, "SGD", Kind.OPTIMIZER)) == (820, 80)
    assert trace.busy_s + idle(trace) == pytest.approx(trace.iteration_s)


def test_gpu_time_belongs_to_the_module_that_launched_it(tmp_path):
    record = Recording()
    for at in (10_000, 11_000):
        record.iteration_ended(at)
        record.host(MODULE + "layer", at + 10, at + 100)
        record.host("aten::mm", at + 20, at + 90, Sequence_number=3,
                    Input_Dims=[[4, 8], [8, 16]], Input_type=2 * ["c10::Half"])  # fmt: skip
        # The GPU is half an iteration behind.
        record.kernel("void gemm<1>(float)", at + 30, at + 500, at + 600)
        record.kernel("Memcpy HtoD (Pinned -> Device)", at + 200, at + 550, at + 650, stream=20,
                      cat="gpu_memcpy", bytes=4096)  # fmt: skip
        record.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", at + 300, at + 700, at + 1500)
    record.iteration_ended(12_000)
    trace = record.read(tmp_path, flops=mm_flops)
    layer = named(trace, "layer", Kind.FORWARD)
    assert trace.timeline == "gpu"
    assert layer.duration_s == pytest.approx(100e-6)
    assert layer.flops == 2 * 4 * 8 * 16
    assert layer.bytes_moved == 2 * (4 * 8 + 8 * 16 + 4 * 16)
    assert layer.stream == 7
    copy = named(trace, "Memcpy HtoD", Kind.COPY)
    assert (copy.stream, copy.bytes_moved) == (20, 4096)
    collective = named(trace, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", Kind.COLLECTIVE)
    assert collective.duration_s == pytest.approx(800e-6)


def test_idle_gpu_while_the_data_loader_works_is_waiting_for_data(tmp_path):
    record = Recording()
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    for at in (10_000, 11_000):
        record.iteration_ended(at)
        record.kernel("k", at + 10, at + 20, at + 100)
        record.host(loader, at + 200, at + 600, "user_annotation")
        record.kernel("l", at + 610, at + 620, at + 1000)
    record.iteration_ended(12_000)
    trace = record.read(tmp_path)
    wait = named(trace, "DataLoader", Kind.DATA_WAIT)
    gaps = [o.duration_s for o in trace.operations if o.kind is Kind.GAP]
    assert wait.duration_s == pytest.approx(400e-6)
    assert sum(gaps) == pytest.approx(130e-6)  # the mean of 120 and, at an iteration end, 140


@pytest.mark.parametrize(("iteration_s", "waited_s"), [(1e-3, 800e-6), (140e-6, 0.0)])
def test_a_wait_for_data_at_the_begin_of_the_only_iteration(tmp_path, iteration_s, waited_s):
    """The second GPU is behind its host: it has not been idle while the host was waiting."""
    record = Recording()
    record.iteration_ended(10_000)
    loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    record.host(loader, 10_010, 10_810, "user_annotation")
    record.kernel("k", 10_820, 10_830, 10_900)
    record.kernel("l", 10_825, 10_910, 10_970)
    record.iteration_ended(10_980)
    trace = record.read(tmp_path, iteration_s=iteration_s)
    waits = [o.duration_s for o in trace.operations if o.kind is Kind.DATA_WAIT]
    assert sum(waits) == pytest.approx(waited_s, rel=0.05)
    assert trace.busy_s == pytest.approx(130e-6)


def test_the_known_time_of_an_iteration_changes_gaps_and_no_kernel(tmp_path):
    record = Recording()
    for at in (10_000, 11_000):
        record.iteration_ended(at)
        record.kernel("k", at + 10, at + 100, at + 400)
        record.kernel("l", at + 20, at + 800, at + 1100)
    record.iteration_ended(12_000)
    trace = record.read(tmp_path, iteration_s=800e-6)
    assert trace.iteration_s == 800e-6
    assert [o.duration_s for o in trace.operations if o.kind is not Kind.GAP] == pytest.approx(
        [300e-6, 300e-6]
    )
    assert idle(trace) == pytest.approx(200e-6)


def test_recomputed_activations_belong_to_the_backward(tmp_path):
    record = Recording()
    for at in (10_000, 11_000):
        record.iteration_ended(at)
        record.host("autograd::engine::evaluate_function: CheckpointFunctionBackward",
                    at + 100, at + 500)  # fmt: skip
        record.host(MODULE + "block.fc", at + 150, at + 400)
        record.host("aten::mm", at + 200, at + 300)
    record.iteration_ended(12_000)
    trace = record.read(tmp_path)
    assert us(named(trace, "block.fc", Kind.BACKWARD)) == (150, 250)


def test_without_our_annotations_optimizer_steps_are_the_iteration_ends(tmp_path):
    record = Recording()
    for at in (0, 1000, 2000):
        record.host("aten::relu", at + 100, at + 200)
        record.host("Optimizer.step#Adam.step", at + 500, at + 600, "user_annotation")
        record.host("aten::add_", at + 510, at + 590)
    trace = record.read(tmp_path)
    assert trace.iteration_s == pytest.approx(1e-3)
    assert [o.name for o in trace.operations if o.kind is not Kind.GAP] == ["aten::relu", "Adam"]


def test_compiled_code_is_an_operation_though_nothing_inside_is_known(tmp_path):
    record = Recording()
    for at in (0, 1000):
        record.iteration_ended(at)
        record.host("Torch-Compiled Region: 0/0", at + 100, at + 400, "user_annotation")
    record.iteration_ended(2000)
    assert record.read(tmp_path).busy_s == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("path", "collectives_s"), [(RESNET, 0.773e-3), (FSDP, 61.565e-3)], ids=["resnet50", "fsdp2"]
)
def test_collectives_of_a_real_trace_are_what_the_run_reported(path, collectives_s):
    """The whole window of two iterations, against par2_facts and facts of the measurement."""
    trace = read_kineto(path, iterations=1)
    total_s = sum(o.duration_s for o in trace.operations if o.kind is Kind.COLLECTIVE)
    assert total_s / 2 == pytest.approx(collectives_s, rel=1e-3)


def test_the_period_of_a_real_trace_is_found():
    guessed, told = read_kineto(RESNET), read_kineto(RESNET, iterations=2)
    assert guessed.iterations == told.iterations == 2
    assert guessed.iteration_s == told.iteration_s == pytest.approx(31.41e-3, rel=0.03)
    assert guessed.device == "NVIDIA H200"


def test_streams_that_overlap_leave_no_gap():
    trace = read_kineto(RESNET)
    covered_s = trace.iteration_s - idle(trace)
    longest_s = max(
        sum(o.duration_s for o in trace.operations if o.stream == s and o.kernels)
        for s in {o.stream for o in trace.operations}
    )
    # Kernels of one stream overlap a little too: the next may begin while the last one drains.
    assert 0.99 * longest_s <= covered_s <= trace.busy_s


def test_chrome_export_keeps_every_operation_on_its_stream():
    trace = read_kineto(RESNET)
    events = [e for e in chrome(trace)["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(trace.operations)
    assert sum(e["dur"] for e in events) == pytest.approx(
        1e6 * sum(o.duration_s for o in trace.operations)
    )
    assert {e["tid"] for e in events} == {-1} | {o.stream for o in trace.operations if o.kernels}


GOOD = gzip.decompress(RESNET.read_bytes())


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("half.json", GOOD[: len(GOOD) // 2], "not a complete JSON file"),
        ("half.gz", RESNET.read_bytes()[:5000], "broken gzip file"),
        ("other.json", b'{"events": []}', "not a Kineto trace"),
        ("list.json", b"[1, 2]", "not a Kineto trace"),
        ("empty.json", b'{"traceEvents": []}', "holds no operations"),
        ("none.json", re.sub(rb'"dur": ?[0-9.]+', b'"dur":0', GOOD), "that take time"),
        ("latin.json", b'{"traceEvents": [{"name": "\xff"}]}', "JSON"),
    ],
)
def test_a_broken_file_is_one_clear_line(tmp_path, name, raw, says):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(FileError, match=says) as caught:
        read_kineto(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_is_left_out(tmp_path):
    """Arguments of other kinds than the profiler's, and times that no clock shows."""
    content = json.loads(GOOD)
    first = [e for e in content["traceEvents"] if e.get("cat") == "kernel"][:2]
    first[0]["args"] |= {"correlation": [1], "device": 0, "stream": {}}
    first[1]["ts"] = 9e17
    path = tmp_path / "strange.json"
    path.write_text(json.dumps(content))
    assert read_kineto(path).iteration_s == pytest.approx(read_kineto(RESNET).iteration_s, rel=0.05)


def test_a_missing_file(tmp_path):
    with pytest.raises(FileError, match="cannot be read"):
        read_kineto(tmp_path / "none.json")
