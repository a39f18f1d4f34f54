"""`kilter run --operations` on real jobs on CPUs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kilter.testing.warm_python import WarmPython

TIMEOUT_S = 120
JOB = """
import time, torch

torch.manual_seed(0)
torch.set_num_threads(1)
matrix = torch.eye(512)

class Busy(torch.nn.Linear):
    def forward(self, x):
        until_s = time.monotonic() + {busy_s}
        while time.monotonic() < until_s:
            torch.mm(matrix, matrix)
        return super().forward(x)

model = Busy(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range({iterations}):
    time.sleep({idle_s})
    optimizer.zero_grad()
    loss = model(torch.ones(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
THEN_SHORT = """
import json, pathlib

def planned(instead):
    lines = pathlib.Path("out", "events-rank0.jsonl").read_text().splitlines(keepends=True)
    told = [json.loads(line) for line in lines if line.endswith("\\n")]
    return any("break_even_s" in each and (each["instead"] or not instead) for each in told)

def iterate(idle_s, instead):
    for _ in range(1000):
        time.sleep(idle_s)
        optimizer.zero_grad()
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        if planned(instead):
            return

iterate({idle_s}, instead=False)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
iterate(0.02, instead=True)
"""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("KILTER"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(
    warm: WarmPython,
    where: Path,
    *options: str,
    iterations: int,
    busy_s: float,
    idle_s: float,
    job: str = JOB,
) -> tuple[dict[str, Any], str, str]:
    """What the report says of the clocks of operations, what was said, and what was printed."""
    program = job.format(iterations=iterations, busy_s=busy_s, idle_s=idle_s)
    (where / "train.py").write_text(program)
    kilter = ["-m", "kilter", "run", "--operations", "--out", "out", *options, "train.py"]
    done = warm.run(kilter, cwd=where, timeout_s=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    report = json.loads((where / "out" / "report.json").read_text())
    return report["operation_clocks"], done.stderr, done.stdout


def states(where: Path) -> set[str]:
    lines = (where / "out" / "commands-rank0.jsonl").read_text().splitlines()
    return {json.loads(line)["state"] for line in lines}


LONG = {"iterations": 30, "busy_s": 0.1, "idle_s": 0.2}
"""The stretch without work is longer than the break-even of an RTX 3080 Ti's switches."""


def test_a_dry_run_writes_down_what_the_conductor_would_have_set(
    tmp_path: Path, warm: WarmPython
) -> None:
    told, said, printed = run(warm, tmp_path, "--dry-run", "--device", "sim:rtx3080ti", **LONG)
    assert told["planned"]
    assert told["instead"] is None
    assert told["commands"] > 0
    assert not told["sets"]
    assert "set" not in states(tmp_path)
    assert "would set" in states(tmp_path)
    assert "stretch of operations would save" in said
    assert "written down, none sent" in said
    plain = warm.run(["train.py"], cwd=tmp_path, timeout_s=TIMEOUT_S)
    assert printed == plain.stdout  # the same losses


def test_the_plan_is_set_and_judged_on_a_simulated_device_and_the_clock_put_back(
    tmp_path: Path, warm: WarmPython
) -> None:
    told, said, _ = run(warm, tmp_path, "--device", "sim:rtx3080ti", "--rehearse", "60s", **LONG)
    assert told["sets"]
    assert told["restored"]
    assert told["search"]["pairs"] > 0
    assert "Would hold" in said
    assert "confirmed in" in said


def test_short_iterations_are_not_worth_switching_and_the_whole_job_is_governed(
    tmp_path: Path, warm: WarmPython
) -> None:
    told, said, _ = run(
        warm,
        tmp_path,
        *("--dry-run", "--device", "sim:h200"),
        iterations=60,
        busy_s=0.001,
        idle_s=0.0,
    )
    assert not told["planned"]
    assert told["commands"] == 0
    assert told["instead"] == told["summary"]
    assert "Nothing is worth switching: " in said
    assert "One clock for the whole job instead." in said


def test_a_job_that_changes_in_the_middle_is_planned_anew(tmp_path: Path, warm: WarmPython) -> None:
    """Its iterations become too short for two switches."""
    job = JOB + THEN_SHORT
    told, said, _ = run(
        warm,
        tmp_path,
        "--dry-run",
        "--device",
        "sim:rtx3080ti",
        **(LONG | {"iterations": 8}),
        job=job,
    )
    assert told["reopened"] >= 1
    assert told["instead"] == told["summary"]
    assert "Nothing is worth switching: " in said
    assert "the iteration's time changed " in said


def test_without_a_device_the_run_says_so_and_goes_on(tmp_path: Path, warm: WarmPython) -> None:
    told, said, _ = run(warm, tmp_path, "--device", "null", iterations=60, busy_s=0.001, idle_s=0.0)
    assert told is None
    assert "refused: setting clocks per operation: no GPU: how fast " in said
    assert "--device sim:" in said
