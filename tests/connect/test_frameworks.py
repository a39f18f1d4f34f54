"""One conformance suite for the callbacks of all frameworks, on stand-ins of their protocols and on
the real packages where they are installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kilter.app.report import build as report

PACKAGES = {"huggingface": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
TIMEOUT_S = 900.0
STEPS = 30
STAND_INS = str(Path(__file__).parent)
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([STAND_INS, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
}
"""Lets programs in other directories import `frameworks`."""


def run_python(*arguments, **environment):
    found = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT | environment,
    )
    assert found.returncode == 0, found.stderr
    return found


@pytest.fixture(
    scope="module",
    params=[(name, kind) for name in PACKAGES for kind in ("fake", "real")],
    ids=lambda param: "-".join(param),
)
def trainings(request, tmp_path_factory, warm):
    """What came of the trainings, what was said on stderr, and where the runs are."""
    name, kind = request.param
    if kind == "real" and importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed; its stand-in was tested")
    out = tmp_path_factory.mktemp(f"{name}-{kind}")
    program = Path(__file__).with_name("framework_program.py")
    ended = warm.run([str(program), name, kind, str(out)])
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1]), ended.stderr, out


INTERRUPTED = """
import sys
import torch
from kilter.connect.governing import Governing

governing = Governing({"memory_budget": "60%", "device": "null", "out": sys.argv[1]})
governing.begin()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(5):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
raise KeyboardInterrupt
"""


def test_an_uncaught_ctrl_c_ends_the_process_as_without_kilter(warm, tmp_path):
    ended = warm.run(["-c", INTERRUPTED, str(tmp_path / "run")])
    assert ended.stderr.count("KeyboardInterrupt") >= 1
    assert ended.returncode == -signal.SIGINT
    assert report.build(tmp_path / "run").outcome is not None


def test_governs_and_counts_each_optimizer_step_once(trainings):
    found, _, out = trainings
    assert found["whole"]["raised"] is None
    run = report.build(out / "whole")
    assert run.outcome == "finished"
    assert run.restored
    assert run.iterations in (STEPS - 1, STEPS)  # the first mark begins the first iteration
    assert run.errors == ()


def test_rows_of_the_summary_reach_the_logger_before_it_is_closed(trainings):
    found, _, out = trainings
    run = report.build(out / "whole")
    (row,) = [r for r in found["whole"]["rows"] if any(n.startswith("kilter/") for n in r)]
    known = {
        "saving": run.saving,
        "slowdown": run.slowdown,
        "default_iteration_s": run.baseline.iteration_s,
        "default_energy_j": run.baseline.energy_j,
        "governed_iteration_s": run.governed.iteration_s,
        "governed_energy_j": run.governed.energy_j,
    }
    if out.name.startswith("huggingface"):  # the search of the others is not waited for
        assert known["default_energy_j"] is not None
    assert run.energy_j is None  # not known on a simulated device, so not logged as 0
    # A search that a busy machine has cut off has no saving, and no row of one.
    assert {name: value for name, value in row.items() if name.startswith("kilter/")} == (
        pytest.approx(
            {f"kilter/simulated/{n}": value for n, value in known.items() if value is not None}
        )
    )


def test_exception_of_the_training_passes_and_ends_the_run(trainings):
    found, _, out = trainings
    assert found["raises"]["raised"] == "Planned"
    run = report.build(out / "raises")
    assert run.outcome.startswith("raised ")
    assert run.restored


def test_logger_that_fails_does_not_end_the_training(trainings):
    found, stderr, out = trainings
    assert found["logger"]["raised"] is None
    assert report.build(out / "logger").outcome == "finished"
    assert "the server of the logger is down" in stderr


def test_device_that_cannot_be_had_does_not_end_the_training(trainings):
    found, stderr, out = trainings
    assert found["device"]["raised"] is None
    assert "the training goes on without it" in stderr
    assert "sim:nothing" in stderr
    assert not (out / "device").exists()


def test_wrong_option_is_said_before_the_training(trainings):
    found, _, _ = trainings
    assert found["wrong"] == {"raised": "UsageError", "rows": []}


FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "accelerate")


@pytest.mark.parametrize("code", ["import kilter", "from kilter import *"])
def test_import_of_kilter_imports_no_framework(code):
    modules = run_python("-c", f"{code}; import sys; print(*sys.modules)").stdout.split()
    assert not set(FRAMEWORKS) & set(modules)


def test_switched_off_with_the_environment(tmp_path):
    code = """
import kilter
import frameworks
logger = frameworks.Logger()
accelerator = frameworks.Accelerator(logger, 1)
with kilter.AccelerateCallback(accelerator, device="sim:v100", out="run") as governing:
    governing.step_end()
assert logger.rows == []
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    ended = run_python(program, KILTER="0")
    assert ended.stderr == ""


def test_training_that_is_left_at_the_end_of_the_process_is_ended(tmp_path):
    """Hugging Face tells no callback of an exception: the record must have an end all the same."""
    code = f"""
import kilter, sys
import frameworks
frameworks.install("huggingface")
trainer = frameworks.HuggingFaceTrainer(frameworks.Logger())
out = {str(tmp_path / "run")!r}
trainer.add_callback(kilter.HuggingFaceCallback(trainer, device="sim:v100", out=out))
def step():
    raise ZeroDivisionError
trainer.train(step, 3, 1)
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    found = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=ENVIRONMENT,
    )
    assert found.returncode == 1
    assert "ZeroDivisionError" in found.stderr
    run = report.build(tmp_path / "run")
    assert run.outcome == "raised ZeroDivisionError"
    assert run.restored


def test_without_the_trainer_rows_are_in_the_log_history(tmp_path):
    code = f"""
import sys
sys.argv = ["x", "huggingface", "fake", {str(tmp_path)!r}]
import kilter, torch
from kilter.session import options
import frameworks
options.REHEARSE_S = 0.1
frameworks.install("huggingface")
callback = kilter.HuggingFaceCallback(device="sim:v100", out={str(tmp_path / "run")!r})
logger = frameworks.Logger()
trainer = frameworks.HuggingFaceTrainer(logger, callbacks=[callback])
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def step():
    optimizer.zero_grad()
    model(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step()
trainer.train(step, {STEPS}, 1)
assert not any("kilter" in name for row in logger.rows for name in row)
assert "kilter/simulated/default_iteration_s" in trainer.state.log_history[-1]
assert trainer.state.log_history[-1]["step"] == {STEPS}
print("all of this holds")
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    assert run_python(program).stdout.splitlines()[-1] == "all of this holds"
