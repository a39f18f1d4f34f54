"""What a run says, and when: an error at once, a rehearsal with an end, why nothing was seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import kilter
from kilter.app.listener import StderrListener
from kilter.app.report import build as report
from kilter.app.report import summary
from kilter.core.events import AnyEvent, Refused, Started, Stopped, read_events
from kilter.core.plan import Goal
from kilter.core.ranks import Ranks
from kilter.session.lifecycle import Session
from kilter.session.options import Options
from kilter.testing.warm_python import WarmPython

KILTER = (sys.executable, "-m", "kilter", "run")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KILTER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def train(iterations: int, *, by_hand: bool = False) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(iterations):
        model(torch.ones(4, 8)).square().mean().backward()
        if by_hand:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()


def fail(iterations: int) -> None:
    train(iterations)
    raise ValueError("the program's own")


def of(kind: type[AnyEvent], run: Path | None) -> list[AnyEvent]:
    assert run is not None
    return [e for e in read_events(run / "events-rank0.jsonl") if isinstance(e, kind)]


def script(text: str) -> str:
    Path("job.py").write_text(text)
    return "job.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KILTER, *arguments], capture_output=True, text=True, timeout=900, check=False
    )


# --- the rehearsal --------------------------------------------------------------------------------


def test_after_an_error_nothing_is_rehearsed() -> None:
    job = kilter.govern(device="sim:v100", out="run")
    with pytest.raises(ValueError, match="the program's own"), job as session:
        fail(60)
    stopped = of(Stopped, session.run)[0]
    assert stopped.rehearsed_iterations == 0
    assert ("rehearsing", "the script ended early (raised ValueError)") in [
        (refused.what, refused.reason) for refused in of(Refused, session.run)
    ]


def test_a_script_that_is_too_short_is_told_how_many_iterations_it_had() -> None:
    job = kilter.govern(device="sim:v100", out="run")
    with job as session:
        train(5)
    assert "the script ended after 5 iterations: at least 14 are needed" in [
        refused.reason for refused in of(Refused, session.run)
    ]


def test_after_ctrl_c_nothing_is_rehearsed_and_the_summary_is_there() -> None:
    command = script(
        "import os, signal\n"
        "print('begun', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "import time; time.sleep(60)\n"
    )
    done = run("--device", "sim:v100", "--out", "run", command)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    lines = done.stderr.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("kilter: "))
    assert lines[last].startswith("kilter: report: ")
    assert "refused: rehearsing: the script ended early (raised KeyboardInterrupt)" in done.stderr
    assert lines[-1] == "KeyboardInterrupt"


class CtrlC(StderrListener):
    """Somebody presses Ctrl-C as soon as the rehearsal shows its progress."""

    pressed = False

    def rehearsing(self, seconds: float | None) -> None:
        if not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_rehearsal_and_the_summary_is_written(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = Options(
        goal=Goal(max_slowdown=0.02),
        device="sim:v100",
        out=Path("run").absolute(),
        rehearse_s=600.0,
    )
    with Session(options, Ranks(), CtrlC()) as job:
        train(60)
    reasons = {refused.what: refused.reason for refused in of(Refused, job.run)}
    assert reasons == {"a complete rehearsal": "ended by Ctrl-C"}
    assert of(Stopped, job.run)[0].outcome == "finished"
    assert "kilter: report: " in capfd.readouterr().err


def test_a_rehearsal_takes_no_more_time_than_it_was_given(
    capfd: pytest.CaptureFixture[str],
) -> None:
    options = Options(
        goal=Goal(max_slowdown=0.02),
        device="sim:v100",
        out=Path("run").absolute(),
        rehearse_s=0.0,
    )
    with Session(options, Ranks(), StderrListener()) as job:
        train(60)
    assert of(Stopped, job.run)[0].rehearsed_iterations == 0
    told = capfd.readouterr().err
    assert "refused: a complete rehearsal: stopped after 0 s; for more time: --rehearse" in told
    assert "next: " in told


def test_a_trace_that_takes_too_long_to_read_is_not_a_driver_that_hangs(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def read(*_: object, **__: object) -> None:
        begun.set()
        over.wait(60)

    monkeypatch.setattr("kilter.session.lifecycle.END_S", 0.3)
    monkeypatch.setattr("kilter.observe.profiler_window.read_kineto", read)
    with kilter.govern(device="sim:v100", out="run"):
        train(60)
        assert begun.wait(60)
    over.set()
    told = capfd.readouterr().err
    assert "the last iterations: our own thread does not end: it still reads the trace" in told
    assert "rehearsing: the trace was not read in time" in told


# --- nothing was seen -----------------------------------------------------------------------------


def test_training_without_an_optimizer_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with kilter.govern(device="sim:v100", out="run") as job:
        train(30, by_hand=True)
    unseen = of(Stopped, job.run)[0].unseen
    assert unseen is not None
    assert "no optimizer of torch.optim stepped" in unseen
    assert "job.mark()" in unseen
    told = capfd.readouterr().err
    assert f"kilter: {unseen}\n" in told
    assert "before its iterations could be observed" not in told
    with kilter.govern(device="sim:v100", out="next") as job:
        train(2)
    assert of(Stopped, job.run)[0].unseen is None


def test_a_share_without_iterations_says_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with kilter.govern(memory_budget="60%", device="null", out="run") as job:
        weight = torch.ones(512, 512, requires_grad=True)
        for _ in range(3):
            (weight @ torch.ones(512, 1024)).sin().square().mean().backward()
    told = capfd.readouterr().err
    assert "memory: no budget (60 % of the plain peak" in told
    assert f"kilter: {of(Stopped, job.run)[0].unseen}\n" in told
    assert "job.mark()" in told


def test_a_script_that_fails_before_it_trains_is_not_told_to_mark_iterations() -> None:
    with pytest.raises(ImportError), kilter.govern(device="sim:v100", out="run") as job:
        raise ImportError("accelerate")
    assert of(Stopped, job.run)[0].unseen == (
        "no iteration seen: the script ended early (raised ImportError), before an optimizer of "
        "torch.optim stepped"
    )


def test_a_script_that_waits_for_processes_of_its_own_is_told_at_once() -> None:
    command = script(
        "import multiprocessing, sys, time\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(8,))\n"
        "    child.start(); child.join()\n"
        "    print('over', file=sys.stderr, flush=True)\n"
    )
    told = run("--device", "null", command).stderr
    at_once, _, at_the_end = told.partition("over\n")
    sentence = "the script waits for processes that it forked with multiprocessing"
    assert sentence in at_once
    assert "kilter run --nproc-per-node N SCRIPT" in at_once
    assert "multiprocessing.get_context('spawn')" in at_once
    assert sentence in at_the_end


def test_a_forked_child_may_govern_itself_as_the_summary_says(warm: WarmPython) -> None:
    """It is the only advice that leaves the start method as it is."""
    command = script(
        "import multiprocessing, torch, kilter\n"
        "def work():\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    with kilter.govern(device='null', out='child'):\n"
        "        for _ in range(30):\n"
        "            model(torch.ones(1, 2)).sum().backward()\n"
        "            optimizer.step()\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join()\n"
        "raise SystemExit(child.exitcode)\n"
    )
    done = warm.run(["-m", "kilter", "run", "--device", "null", command])
    assert done.returncode == 0, done.stderr
    assert of(Stopped, Path("child"))[0].iterations >= 29


def test_iterations_of_forked_processes_are_said_not_to_be_observed(warm: WarmPython) -> None:
    command = script(
        "import os, torch\n"
        "if not os.fork():\n"
        "    weight = torch.ones(2, requires_grad=True)\n"
        "    optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )
    told = warm.run(["-m", "kilter", "run", "--device", "null", command]).stderr
    assert "kilter does not observe the 1 process that it forked; if they train, start" in told


def test_work_in_a_subprocess_is_noticed_at_the_end() -> None:
    command = script(
        "import subprocess, sys\n"
        "code = 'import time\\nwhile time.process_time() < 1.5: pass'\n"
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
    )
    told = run("--device", "null", command).stderr
    assert "processes that it started computed for" in told
    assert "put kilter run before the command that trains" in told


# --- what is left behind --------------------------------------------------------------------------


def test_the_scripts_help_leaves_no_run() -> None:
    command = script("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = run("--device", "null", command, "--help")
    assert done.returncode == 0
    assert "usage: job.py" in done.stdout
    assert "kilter: no iteration seen: the script did not import torch" in done.stderr
    assert "kilter: report:" not in done.stderr
    assert [path.name for path in Path("runs").iterdir()] == [".gitignore"]


def test_a_short_run_with_an_iteration_or_an_error_or_a_place_is_kept() -> None:
    with kilter.govern(device="null"):
        train(2)
    with pytest.raises(ValueError, match="the program's own"), kilter.govern(device="null"):
        fail(0)
    with kilter.govern(device="null", out="asked"):
        pass
    assert len(list(Path("runs").glob("*/report.json"))) == 2
    assert Path("asked/report.json").exists()


def test_secrets_of_the_command_line_are_nowhere_in_the_files_which_are_the_owners_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", "hunter2", "--token=hunter2"])
    with kilter.govern(device="sim:v100", out="run") as job:
        train(60)
    assert job.run is not None
    files = [path for path in job.run.iterdir() if path.is_file()]
    assert {"events-rank0.jsonl", "report.json", "report.html", "trace.json"} <= {
        path.name for path in files
    }
    for path in files:
        assert b"hunter2" not in path.read_bytes(), path
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert "--api-key *** --token=***" in summary.full(report.build(job.run))


def test_host_and_versions_are_recorded() -> None:
    with kilter.govern(device="null", out="run") as job:
        train(2)
    started = of(Started, job.run)[0]
    assert started.torch == torch.__version__
    assert started.host


# --- said once --------------------------------------------------------------------------------


def test_a_dry_run_is_said_once_and_refuses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with kilter.govern(device="sim:v100", dry_run=True, out="run"):
        train(60)
    told = capfd.readouterr().err
    assert told.count("--dry-run") == 1
    assert "setting clocks" not in told
    assert "kilter: nothing was set\n" in told
