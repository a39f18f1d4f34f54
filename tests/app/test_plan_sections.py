"""`kilter plan sections` and the answer of `kilter sections --device`, from files to sentences."""

import json

import pytest
from tests.observe.traces import ALL_REDUCE, job, kernel, trace, write

from kilter.app.cli.main import main

DEVICE = ["--device", "sim:h200"]


def slow_network(path, exposed_ms, compute_ms=80.0):
    """Three iterations whose gradients cross a slow network behind the backward pass."""
    events = []
    for i in range(3):
        t = i * (compute_ms + exposed_ms) * 1e3
        for k in range(10):
            begin = t + k * compute_ms * 1e2
            events.append(kernel(f"gemm_{k}", begin, begin + compute_ms * 1e2))
        t += compute_ms * 1e3
        events.append(kernel(ALL_REDUCE, t, t + exposed_ms * 1e3, stream=17))
    return str(write(path, trace(events)))


def planned(capsys, *arguments):
    assert main(["plan", "sections", *arguments, *DEVICE, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_slow_network_pays_and_a_fast_one_does_not(tmp_path, capsys):
    slow = planned(capsys, slow_network(tmp_path / "a.json", 270.0))
    assert (slow["schema"], slow["label"]) == ("kilter.plan.sections/1", "simulated")
    assert slow["saving"] > 0.08
    assert slow["slowdown"] <= 0.01
    assert slow["ranks"][0]["stretches"][0]["sections"] == 1
    fast = planned(capsys, slow_network(tmp_path / "b.json", 0.5))
    assert fast["saving"] == 0.0
    assert fast["summary"].startswith("Nothing to gain: 0.6 % exposed, the longest section takes")
    assert "below the break-even of 98.3 ms" in fast["summary"]


def test_the_latency_decides(tmp_path, capsys):
    path = slow_network(tmp_path / "a.json", 60.0, compute_ms=200.0)
    assert planned(capsys, path)["saving"] == 0.0
    quick = planned(capsys, path, "--switch-latency-s", "0.001")
    assert quick["saving"] > 0.01
    assert quick["break_even_s"] == pytest.approx(2e-3)


def test_the_answer_in_words(tmp_path, capsys):
    path = slow_network(tmp_path / "a.json", 270.0)
    assert main(["plan", "sections", path, *DEVICE]) == 0
    out = capsys.readouterr().out
    assert out.startswith("A lower clock in 1 stretch of communication would save")
    assert "[simulated]" in out.splitlines()[0]
    assert main(["sections", path, *DEVICE, "--html", str(tmp_path / "s.html")]) == 0
    assert capsys.readouterr().out.startswith("A lower clock in 1 stretch")
    assert "A lower clock in 1 stretch" in (tmp_path / "s.html").read_text()


def test_the_search_of_a_run_on_simulated_ranks(tmp_path, capsys):
    slow = [slow_network(tmp_path / "a.json", 270.0), "--max-slowdown", "1%", "--search"]
    found = planned(capsys, *slow)["search"]
    assert found["taken"] == "sections"
    assert found["energy_ratio"] < 0.95
    assert found["time_ratio_ci95"][0] < 1.01
    assert planned(capsys, *slow)["search"] == found
    assert main(["plan", "sections", *slow, *DEVICE]) == 0
    assert "Search: Would hold" in capsys.readouterr().out.splitlines()[-1]
    fast = planned(capsys, slow_network(tmp_path / "b.json", 0.5), "--search")["search"]
    assert fast["taken"] != "sections"
    assert fast["depths"] == []


def test_wrong_usage(tmp_path, capsys):
    path = str(write(tmp_path / "t.json", job(0)))
    assert main(["plan", "sections", path, *DEVICE, "--switch-latency-s=-1"]) == 2
    assert main(["plan", "sections", str(tmp_path / "no.json"), *DEVICE]) == 1
    with pytest.raises(SystemExit) as stop:
        main(["plan", "sections", path])
    assert stop.value.code == 2
