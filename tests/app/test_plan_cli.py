"""`kilter plan clocks` and `kilter rehearse`, from a trace to a verdict, and broken input."""

import json
import re

import pytest

from kilter.app.cli.main import main
from kilter.core import codec
from kilter.core.label import Label
from kilter.core.plan import Effect, MoveData, Plan, SetClocks
from kilter.core.setting import Setting
from kilter.core.trace import IterationTrace, Kind, Operation


def trace_file(tmp_path, operations=20):
    parts = tuple(
        Operation(
            name=f"layer{i}",
            kind=Kind.FORWARD,
            start_s=i * 1e-3,
            duration_s=1e-3,
            flops=1e9,
            bytes_moved=1.5e9,
        )
        for i in range(operations)
    )
    path = tmp_path / "trace.json"
    trace = IterationTrace(
        iteration_s=0.03, operations=parts, timeline="gpu", device="x", label=Label.MEASURED
    )
    codec.save(path, trace)
    return path


def plan_of(*actions, memory=None):
    effect = Effect(time_ratio=1.0)
    return Plan(
        planner="x",
        actions=actions,
        effect=effect,
        reason="",
        label=Label.SIMULATED,
        memory=memory,
    )


def test_from_a_trace_to_a_rehearsed_plan(tmp_path, capsys):
    trace, plan = trace_file(tmp_path), tmp_path / "plan.json"
    assert main(["plan", "clocks", str(trace), "--device", "sim:v100", "-o", str(plan)]) == 0
    assert "[simulated]" in capsys.readouterr().out
    made = codec.load(plan, Plan)
    assert made.label is Label.SIMULATED
    assert made.actions, "a memory-bound job has clocks to spare"
    card = ["--device", "sim:v100"]
    code = main(["rehearse", str(plan), "--trace", str(trace), *card, "--pairs", "12", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["schema"] == "kilter.rehearse/1"
    assert report["verdict"] == "safe"
    assert report["saving"] == pytest.approx(1 - made.effect.energy_ratio, abs=0.02)


def test_plan_json_is_the_file_format(tmp_path, capsys):
    main(["plan", "clocks", str(trace_file(tmp_path)), "--device", "sim:a100", "--json"])
    out = capsys.readouterr().out
    assert codec.decode(out.encode(), Plan, where="stdout").planner == "job_clocks"


@pytest.mark.parametrize("verb", ["plan", "rehearse"])
def test_broken_input_is_one_line_and_exit_code_1(tmp_path, capsys, verb):
    good, bad = trace_file(tmp_path), tmp_path / "bad.json"
    bad.write_bytes(good.read_bytes()[:100])
    if verb == "plan":
        code = main(["plan", "clocks", str(bad), "--device", "sim:v100"])
    else:
        code = main(["rehearse", str(bad), "--trace", str(good), "--device", "sim:v100"])
    out, err = capsys.readouterr()
    assert (code, out) == (1, "")
    assert str(bad) in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "raw",
    [
        '{"schemaVersion": 1, "baseTimeNanoseconds": 1e30, "traceEvents": []}',
        '[{"ph": "X", "ts": 1e30, "name": "aten::mm"}]',
    ],
)
def test_a_trace_of_the_profiler_is_told_from_one_of_ours(tmp_path, capsys, raw):
    path = tmp_path / "kineto.json"
    path.write_text(raw)
    assert main(["plan", "clocks", str(path), "--device", "sim:v100"]) == 1
    assert capsys.readouterr().err == (
        f"kilter plan: {path}: a trace of torch.profiler, expected the trace.json of a run of "
        "kilter\n"
    )


def test_an_empty_trace_is_refused(tmp_path, capsys):
    path = trace_file(tmp_path, operations=0)
    assert main(["plan", "clocks", str(path), "--device", "sim:v100"]) == 1
    assert "no operations" in capsys.readouterr().err


def test_a_plan_of_memory_needs_a_trace_with_its_data(tmp_path, capsys):
    link = (1.0, 1.0, 1.0, 0.0)
    moved = MoveData(budget_bytes=1, min_bytes=1, link=link, moves=((0, 0, 1),), recomputed=())
    codec.save(tmp_path / "plan.json", plan_of(memory=moved))
    code = main(["rehearse", str(tmp_path / "plan.json"), "--trace", str(trace_file(tmp_path))])
    assert code == 1
    assert "lists no required data" in capsys.readouterr().err


def test_a_plan_for_another_card_is_told_in_its_units(tmp_path, capsys):
    trace, plan = trace_file(tmp_path), tmp_path / "plan.json"
    slower = SetClocks(
        setting=Setting(sm_clock_hz=1192.5e6), effect=Effect(time_ratio=1.0), reason=""
    )
    codec.save(plan, plan_of(slower))
    code = main(["rehearse", str(plan), "--trace", str(trace), "--device", "sim:h200"])
    assert code == 1
    assert re.search(r"SM clock \d+ MHz is none of the \d+ it takes", capsys.readouterr().err)


def test_too_few_pairs_are_wrong_usage(tmp_path, capsys):
    trace, plan = trace_file(tmp_path), tmp_path / "plan.json"
    main(["plan", "clocks", str(trace), "--device", "sim:v100", "-o", str(plan)])
    card = ["--device", "sim:v100", "--pairs", "1"]
    assert main(["rehearse", str(plan), "--trace", str(trace), *card]) == 2
    assert "at least 2" in capsys.readouterr().err


def test_an_unknown_card_is_wrong_usage(tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "clocks", str(trace_file(tmp_path)), "--device", "sim:h9000"])
    assert stop.value.code == 2
