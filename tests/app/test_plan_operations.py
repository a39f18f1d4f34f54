"""`kilter plan operations` and `kilter bench operations`, from files to tables."""

import json
import math

import pytest
from tests.observe.traces import job, kernel, launch, step, write

from kilter.app.bench.workloads import OPERATION_WORKLOADS, iteration, resnet50, vgg16
from kilter.app.cli.main import main
from kilter.core import codec


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.json"
    codec.save(path, iteration(vgg16(8), element_bytes=4, training=True))
    return path


def planned(trace, capsys, *options):
    device = ["--device", "sim:rtx3080ti"]
    assert main(["plan", "operations", str(trace), *device, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_networks_have_their_published_size():
    """Multiply-adds of one image: 4.1 and 15.5 billion (He et al. 2016, Simonyan 2015)."""
    assert sum(layer.flops for layer in resnet50(1)) / 2 == pytest.approx(4.1e9, rel=0.03)
    assert sum(layer.flops for layer in vgg16(1)) / 2 == pytest.approx(15.5e9, rel=0.01)
    weights = sum(layer.weights for layer in OPERATION_WORKLOADS["gpt"]())
    assert weights == pytest.approx(1.3e9, rel=0.02)


def test_free_switches_save_more_than_one_setting(trace, capsys):
    found = planned(trace, capsys, "--switch-latency-s", "0", "--max-slowdown", "2%")
    assert (found["schema"], found["label"]) == ("kilter.plan.operations/1", "simulated")
    assert found["kilter"]["saving"] > found["best_static"]["saving"] + 0.02
    assert found["kilter"]["saving"] >= found["exhaustive"]["saving"]
    assert found["kilter"]["slowdown"] <= 0.02
    assert found["kilter"]["switches"] > 0
    assert {"saving", "slowdown"} <= set(found["arithmetic_intensity"])


def test_the_baselines_pay_for_their_switches(trace, capsys):
    found = planned(trace, capsys, "--switch-latency-s", "0.1")
    assert found["kilter"]["switches"] == 0
    assert found["kilter"]["saving"] == found["best_static"]["saving"]
    assert found["exhaustive"]["slowdown"] > 1.0
    assert found["exhaustive"]["within_bound"] is False


def test_infinite_latency_is_the_best_single_setting(trace, capsys):
    found = planned(trace, capsys, "--switch-latency-s", "inf")
    assert found["switch_latency_s"] is None
    assert found["kilter"]["saving"] == found["best_static"]["saving"]
    assert found["arithmetic_intensity"]["slowdown"] is None


def test_the_sentence_names_the_switches(trace, capsys):
    device = ["--device", "sim:rtx3080ti"]
    assert main(["plan", "operations", str(trace), *device, "--switch-latency-s", "0"]) == 0
    out = capsys.readouterr().out
    assert "With switches free" in out
    assert "[simulated]" in out
    assert main(["plan", "operations", str(trace), *device]) == 0
    assert "one setting for the whole iteration is best" in capsys.readouterr().out


def test_a_kineto_trace_is_a_trace(tmp_path, capsys):
    path = write(tmp_path / "rank0.json", job(0))
    found = planned(path, capsys)
    assert found["operations"] >= 9
    # A Chrome trace may be the bare list of its events, and an event may hold any words.
    events = json.loads(path.read_bytes())["traceEvents"]
    events[0] = events[0] | {"args": {"schema": "aten::mm(Tensor, Tensor)"}}
    for trace in (events, {"schemaVersion": 1, "traceEvents": events}):
        path.write_text(json.dumps(trace))
        assert planned(path, capsys)["operations"] == found["operations"]


def matrices(*, steps, gpu=True):
    """Three products of 8192 x 8192 halves, each 5.5 ms long: the SM clock decides their time."""
    shapes = {"Input Dims": [[8192] * 2] * 2, "Input type": ["c10::Half"] * 2}
    product = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": 50}
    events = [step(n, 30e3 * n, 30e3 * n + 29e3) for n in range(steps)]
    for i in range(3):
        begin = 30e3 * i + 10
        events.append(product | {"ts": begin, "args": shapes if gpu else {}})
        if gpu:
            events += [launch(begin + 1, i + 1)]
            events += [kernel("gemm", begin + 100, begin + 5600, correlation=i + 1)]
    return {"traceEvents": events}


def test_products_of_matrices_follow_the_sm_clock(tmp_path, capsys):
    """A trace with shapes of inputs tells their bytes; their FLOPs count as well."""
    path = write(tmp_path / "t.json", matrices(steps=3))
    found = planned(path, capsys, "--device", "sim:a100")  # one memory clock
    assert found["best_static"]["saving"] < 0.1


def test_a_last_step_without_work_is_no_iteration(tmp_path, capsys):
    whole, longer = (planned(write(tmp_path / "t.json", matrices(steps=n)), capsys) for n in (3, 4))
    assert longer["kilter"]["iteration_s"] == whole["kilter"]["iteration_s"]


def test_a_trace_of_a_host_without_shapes_is_refused(tmp_path, capsys):
    path = write(tmp_path / "t.json", matrices(steps=3, gpu=False))
    assert main(["plan", "operations", str(path), "--device", "sim:v100"]) == 1
    assert "record_shapes=True" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", '{"schema": "kilter.plan/1"}', "[]"])
def test_broken_input_is_one_line_and_exit_code_1(tmp_path, capsys, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    assert main(["plan", "operations", str(path), "--device", "sim:v100"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert str(path) in err


def test_a_trace_without_work_and_wrong_usage(tmp_path, trace, capsys):
    empty = tmp_path / "empty.json"
    codec.save(empty, iteration([], element_bytes=4, training=False))
    assert main(["plan", "operations", str(empty), "--device", "sim:v100"]) == 1
    assert "nothing can be planned" in capsys.readouterr().err
    device = ["--device", "sim:v100"]
    assert main(["plan", "operations", str(trace), *device, "--switch-latency-s=-1"]) == 2


def test_bench_says_where_each_strategy_becomes_useless(tmp_path, capsys):
    page = tmp_path / "operations.html"
    device = ["--devices", "sim:v100"]
    assert main(["bench", "operations", *device, "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 3 * 2 * 5 * 5
    static = {
        (r["workload"], r["training"], r["switch_latency_s"]): r["saving"]
        for r in found["rows"]
        if r["strategy"] == "best_static"
    }
    for row in found["rows"]:
        if row["strategy"] == "kilter":
            key = (row["workload"], row["training"], row["switch_latency_s"])
            assert row["saving"] >= static[key]
            assert row["within_bound"]
            assert not math.isnan(row["saving"])
    assert {u["strategy"] for u in found["useless"]} == {
        "arithmetic_intensity",
        "exhaustive",
        "kilter",
    }
    assert "if switching were free" in page.read_text()


def test_what_a_trace_has_beside_impossible_times_is_planned(tmp_path, capsys):
    """The rest is named: a plan of a part of the trace must not look like one of all of it."""
    kernels = [kernel("gemm", at, at + 90, correlation=at) for at in (0, 100, 200)]
    odd = kernel("odd", math.nan, 70)
    path = write(tmp_path / "t.json", {"traceEvents": [*kernels, odd]})
    assert main(["plan", "operations", str(path), "--device", "sim:h200"]) == 0
    assert "1 event with impossible times: left out of all sums (odd)" in capsys.readouterr().err
