"""`kilter plan memory` and `kilter bench memory`: what is printed, and what others build on."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kilter.app import plan_memory
from kilter.app.bench import memory
from kilter.app.report.memory import planned_levels, problem_and_schedule
from kilter.core import codec
from kilter.core.errors import PlanError, UsageError
from kilter.core.label import Label
from kilter.core.plan import MoveData
from kilter.core.trace import Datum, IterationTrace, Kind, Operation

MB = 2**20
LAYERS = 12


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve layers of 64 MiB each, 1 ms forward and 2 ms backward: too fast for the link."""
    count = 2 * LAYERS
    operations = tuple(
        Operation(
            name=f"layer{k}" if k < LAYERS else f"layer{count - 1 - k}.backward",
            kind=Kind.FORWARD if k < LAYERS else Kind.BACKWARD,
            start_s=float(k),
            duration_s=1e-3 if k < LAYERS else 2e-3,
            reads=((k - 1,) if k else ()) if k < LAYERS else (count - 1 - k,),
            writes=(k,) if k < LAYERS else (),
        )
        for k in range(count)
    )
    data = tuple(
        Datum(
            name=f"map{k}",
            kind="feature_map",
            size_bytes=64 * MB,
            first_use=k,
            last_use=count - 1 - k,
            producer=k,
        )
        for k in range(LAYERS)
    )
    path = tmp_path / "trace.json"
    codec.save(
        path,
        IterationTrace(
            iteration_s=0.036,
            operations=operations,
            data=data,
            timeline="gpu",
            device="test",
            label=Label.MEASURED,
        ),
    )
    return path


def planned(trace: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    plan_memory.add_arguments(parser)
    return plan_memory.run(parser.parse_args([str(trace), *options]))


def test_json_has_the_keys_that_others_build_on(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(trace, "--memory-budget", "60%", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "kilter.plan-memory/1"
    assert found["label"] == "simulated"
    assert found["feasible"] is True
    assert found["planner"] == "mix"
    assert found["peak_bytes"] <= 0.6 * LAYERS * 64 * MB
    assert found["bound_s"] == pytest.approx(found["compute_s"], rel=0.5)
    assert found["bound_s"] <= found["iteration_s"] * (1 + 1e-6)
    assert found["solve_s"] > 0
    actions = found["actions"]
    assert sum(len(actions[kind]) for kind in ("swap", "recompute", "keep")) == LAYERS - 1
    for name in ("literal", "spanning", "exact", "mix"):
        assert found[name]["bound_s"] <= found[name]["iteration_s"] * (1 + 1e-6)
    for move in actions["swap"]:
        assert move["after"] < move["release"] < move["load"] <= move["before"]


def test_a_budget_in_bytes_and_in_words(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(trace, "--memory-budget", "512MiB", "--planner", "spanning") == 0
    out = capsys.readouterr().out
    assert "768.0 MiB -> " in out
    assert "[simulated]" in out


def test_an_impossible_budget_says_what_is_possible(trace: Path) -> None:
    with pytest.raises(PlanError, match="below"):
        planned(trace, "--memory-budget", "1MiB")


def test_a_trace_whose_operations_take_no_time_is_refused(trace: Path) -> None:
    whole = codec.load(trace, IterationTrace)
    timeless = tuple(replace(o, duration_s=0.0) for o in whole.operations)
    codec.save(trace, replace(whole, operations=timeless))
    with pytest.raises(PlanError, match="no operation of the trace takes time"):
        planned(trace, "--memory-budget", "60%")


@pytest.mark.parametrize("budget", ["much", "150%", "0"])
def test_a_budget_that_is_none_is_a_usage_error(trace: Path, budget: str) -> None:
    with pytest.raises(UsageError):
        planned(trace, "--memory-budget", budget)


@pytest.mark.parametrize("rate", ["-5", "nan", "inf", "fast"])
def test_a_rate_that_is_none_is_shown_as_it_was_given(
    trace: Path, rate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        planned(trace, "--memory-budget", "50%", f"--to-host={rate}")
    assert f"--to-host: '{rate}' is no rate in GB/s" in capsys.readouterr().err


def test_a_faster_link_is_a_better_plan(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = []
    for rate in ("10", "500"):
        options = ("--to-host", rate, "--to-device", rate, "--both", str(2 * float(rate)))
        planned(trace, "--memory-budget", "50%", "--planner", "spanning", "--json", *options)
        times.append(json.loads(capsys.readouterr().out)["iteration_s"])
    assert times[1] < times[0]


def test_the_chrome_trace_shows_every_transfer_and_both_levels(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "schedule.json"
    options = ("--planner", "spanning", "--chrome", str(target), "--json")
    planned(trace, "--memory-budget", "60%", *options)
    swaps = len(json.loads(capsys.readouterr().out)["actions"]["swap"])
    events = json.loads(target.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["tid"] == 2 for e in spans) == sum(e["tid"] == 3 for e in spans) == swaps > 0
    levels = [e["args"] for e in events if e["ph"] == "C"]
    assert max(level["planned"] for level in levels) <= 0.6 * LAYERS * 64 * MB
    assert max(level["without"] for level in levels) == LAYERS * 64 * MB


def test_bench_rows_are_bounded_and_ordered(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    memory.add_arguments(parser)
    options = ["--operations", "96", "--ratios", "2.5", "--budgets", "0.4", "--json"]
    assert memory.run(parser.parse_args(options)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["label"] == "simulated"
    rows = {row["planner"]: row for row in found["rows"]}
    assert rows["mix"]["slowdown"] <= rows["spanning"]["slowdown"] <= rows["literal"]["slowdown"]
    assert all(0 < row["of_bound"] <= 1 + 1e-6 for row in rows.values())
    assert rows["spanning"]["of_bound"] > 0.95
    assert rows["mix"]["of_bound"] > 0.95


def test_a_run_whose_operations_took_no_time_has_a_report(trace: Path) -> None:
    """Times below the clock's resolution: the report draws such a plan as any other."""
    whole = codec.load(trace, IterationTrace)
    timeless = tuple(replace(o, duration_s=0.0) for o in whole.operations)
    moved = MoveData(
        moves=(), recomputed=(), budget_bytes=10**9, min_bytes=1, link=(1e9, 1e9, 2e9, 0.0)
    )
    problem, schedule = problem_and_schedule(replace(whole, operations=timeless), moved)
    assert len(planned_levels(problem, schedule)) == len(timeless)
