"""`kilter bench period`: the JSON contract, and clear errors on bad input."""

import json

import numpy as np
import pytest

from kilter.app.cli.main import main

HEADER = "t_s,power_instant_w,energy_mj,gpu_util,mem_util,sm_mhz"


def recording(tmp_path, period_s=1.3, rows=400, text=None):
    path = tmp_path / "run.csv"
    t = 5.0 + 0.1 * np.arange(rows)
    power = np.where(t / period_s % 1.0 < 0.5, 500.0, 200.0)
    lines = [HEADER, *(f"{a:.3f},{p:.1f},,90,40,1980" for a, p in zip(t, power, strict=True))]
    path.write_text(text if text is not None else "\n".join(lines) + "\n")
    marks = tmp_path / "marks.json"
    marks.write_text(json.dumps(list(np.arange(5.0, 40.0, period_s))))
    return path, marks


def bench(capsys, *arguments):
    code = main(["bench", "period", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_its_keys(tmp_path, capsys):
    path, marks = recording(tmp_path)
    code, out, _ = bench(capsys, "--telemetry", path, "--marks", marks, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["schema"] == "kilter.bench.period/1"
    assert document["label"] == "replayed"
    assert document["detected"] is True
    assert document["period_s"] == pytest.approx(1.3, rel=0.02)
    assert document["relative_error"] < 0.02
    assert document["reason"]
    assert document["method"]


def test_without_a_period_the_reason_is_given(tmp_path, capsys):
    path, _ = recording(tmp_path, period_s=1e9)
    code, out, _ = bench(capsys, "--telemetry", path, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["detected"] is False
    assert document["period_s"] is document["relative_error"] is None
    assert "do not vary" in document["reason"]


def test_synthetic_cases_are_summarised(capsys):
    code, out, _ = bench(capsys, "--seed", 6, "--cases", 5, "--json")  # with a job that changes
    document = json.loads(out)
    assert code == 0
    assert document["label"] == "simulated"
    assert len(document["rows"]) == 5
    assert 0.0 <= document["summary"]["not_confused"] <= 1.0


def test_a_long_gap_is_no_part_of_the_job(tmp_path, capsys):
    path, _ = recording(tmp_path, rows=800)
    header, *rows = path.read_text().splitlines()
    late = [f"{float(t) + 36000:.3f},{rest}" for t, rest in (r.split(",", 1) for r in rows[400:])]
    path.write_text("\n".join([header, *rows[:400], *late]))
    code, out, _ = bench(capsys, "--telemetry", path, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["period_s"] == pytest.approx(1.3, rel=0.02)
    assert document["left_out"].startswith("of 800 readings 400 are looked at")


def test_a_period_of_a_part_of_the_recording_is_said_to_be_that(tmp_path, capsys):
    path, _ = recording(tmp_path, rows=2400)
    header, *rows = path.read_text().splitlines()
    t = np.array([float(row.split(",")[0]) for row in rows])
    phase = np.where(t < 95.0, (t - 5.0) / 2.0, (t - 95.0) / 9.0) % 1.0
    powers = 200.0 + 100.0 * (phase < 0.6) + 30.0 * (phase < 0.2)
    lines = [f"{a:.3f},{p},,90,40,1980" for a, p in zip(t, powers, strict=True)]
    path.write_text("\n".join([header, *lines]))
    _, out, _ = bench(capsys, "--telemetry", path)
    assert "of the recording" in out


NO_UNITS = (
    "\n1,-5,,4,5,6\n",
    "\n1,1e308,,4,5,6\n",
    "\n1e-300,5,,4,5,6\n2e-300,5,,4,5,6\n",
    "\n1e18,5,,4,5,6\n2e18,5,,4,5,6\n",
    "\n1,200,1,4,5,6\n2,200,201,4,5,6\n",
)
"""Power below zero or without end, times in another unit, energy in joules."""


@pytest.mark.parametrize(
    "text",
    ["", "t_s\n1\n", HEADER + "\n", HEADER + "\n1,2,3\n", HEADER + "\n1,x,3,4,5,6\n"]
    + [HEADER + rows for rows in NO_UNITS],
)
def test_bad_recordings_are_one_line(tmp_path, capsys, text):
    path, _ = recording(tmp_path, text=text)
    code, out, err = bench(capsys, "--telemetry", path)
    assert (code, out) == (1, "")
    assert str(path) in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("text", ["{}", "[1.0]", "[2.0, 1.0]", "[1.0,", '["a", "b"]'])
def test_bad_marks_are_one_line(tmp_path, capsys, text):
    path, marks = recording(tmp_path)
    marks.write_text(text)
    code, out, err = bench(capsys, "--telemetry", path, "--marks", marks)
    assert (code, out) == (1, "")
    assert str(marks) in err
    assert len(err.strip().splitlines()) == 1


def test_marks_without_telemetry_and_no_cases_are_wrong_usage(tmp_path, capsys):
    _, marks = recording(tmp_path)
    assert bench(capsys, "--marks", marks)[0] == 2
    with pytest.raises(SystemExit, match="2"):
        bench(capsys, "--cases", 0)
