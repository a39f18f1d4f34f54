"""`kilter run --memory-budget` as its user sees it: real processes, real files, real ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kilter.app.cli.main import main
from kilter.core import codec
from kilter.core.events import Moved, Refused, read_events
from kilter.core.trace import IterationTrace
from kilter.testing.warm_python import WarmPython

SCRIPT = """
import os, sys, time, torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))
model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4096, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(loss.item().hex(), sum(p.double().sum().item() for p in model.parameters()).hex(), flush=True)
"""
ITERATIONS = "16"
"""Of most runs: some are planned by then."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KILTER", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


Done = subprocess.CompletedProcess[str]


@pytest.fixture
def python(warm: WarmPython) -> Callable[..., Done]:
    return lambda *command: warm.run(command, timeout_s=900)


@pytest.fixture
def run(python: Callable[..., Done]) -> Callable[..., Done]:
    def run_governed(
        budget: str, *arguments: str, script: str = SCRIPT, options: tuple[str, ...] = ()
    ) -> Done:
        Path("train.py").write_text(script)
        options = ("--memory-budget", budget, "--out", "run", "--device", "null", *options)
        return python("-m", "kilter", "run", *options, "train.py", *arguments)

    return run_governed


@pytest.fixture(scope="module")
def plain(warm: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `SCRIPT` prints after `ITERATIONS` without kilter."""
    directory = tmp_path_factory.mktemp("plain")
    (directory / "train.py").write_text(SCRIPT)
    done = warm.run(["train.py", ITERATIONS], cwd=directory, timeout_s=900)
    assert done.stdout
    return done.stdout


def moved() -> Moved:
    return [e for e in read_events("run/events-rank0.jsonl") if isinstance(e, Moved)][-1]


def test_a_share_of_the_peak(
    run: Callable[..., Done], plain: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("50%", ITERATIONS)
    assert done.returncode == 0
    assert done.stdout == plain
    first, meanwhile, *summary = done.stderr.splitlines()
    assert "fitting a stand-in on the CPU [simulated], memory 50 %" in first
    assert meanwhile.startswith("kilter: memory: the plan for 12.5 MiB is in force: peak 25.0 MiB ")
    assert summary[0].startswith("kilter: memory: peak ")
    assert " -> " in summary[0]
    assert any("50 % of the plain peak" in line for line in summary)
    assert any("under a plan; 0 deviations, 0 late" in line for line in summary)
    assert not any("contract" in line for line in summary)  # no clocks were asked for

    # what the run wrote can be planned and rehearsed anew
    assert main(["plan", "memory", "run/trace.json", "--memory-budget", "50%", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["feasible"]
    assert planned["peak_before_bytes"] == moved().plain_peak_bytes
    assert main(["rehearse", "run/plan.json", "--trace", "run/trace.json", "--json"]) == 0
    rehearsed = json.loads(capsys.readouterr().out)["memory"]
    assert rehearsed["faults"] == []
    assert rehearsed["peak_bytes"] <= rehearsed["budget_bytes"]
    assert rehearsed["peak_before_bytes"] == planned["peak_before_bytes"]

    # and looked at
    assert main(["report", "run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    memory = report["memory"]
    assert memory["label"] == "simulated"
    assert memory["within"] is True
    assert memory["peak_bytes"] <= memory["budget_bytes"] < memory["peak_before_bytes"]
    assert memory["iteration_before_s"] > 0
    assert report["saving"] is None
    assert main(["report", "run"]) == 0
    text = capsys.readouterr().out
    assert "goal     memory 50 %" in text
    page = Path("run/report.html").read_text()
    assert "Device memory over one pass" in page
    assert "everything kept, peak" in page
    chrome = json.loads(Path("run/memory.chrome.json").read_bytes())
    assert {"compute", "to host", "to device"} <= {
        event["args"]["name"] for event in chrome["traceEvents"] if event["ph"] == "M"
    }


def test_memory_beside_clocks_on_a_simulated_card(
    run: Callable[..., Done], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--max-slowdown", "2%", "--device", "sim:h200")
    done = run("50%", "40", options=options)
    assert done.returncode == 0
    assert "memory: peak" in done.stderr
    assert "[simulated]" in done.stderr
    trace = codec.load("run/trace.json", IterationTrace)
    assert trace.memory is not None
    assert trace.memory.data
    assert main(["plan", "memory", "run/trace.json", "--memory-budget", "50%"]) == 0
    assert " offloaded, " in capsys.readouterr().out


def test_auto_does_nothing_while_the_job_fits(run: Callable[..., Done]) -> None:
    done = run("auto", "20", options=("--device", "sim:h200"))
    assert "memory: the job fits: peak " in done.stderr
    assert "nothing was moved" in done.stderr
    assert moved().out_bytes == 0


def test_auto_needs_a_card(run: Callable[..., Done]) -> None:
    done = run("auto", "5")
    assert done.returncode == 0
    assert "there is no card to fit: give a size or a share" in done.stderr


def test_a_budget_that_cannot_be_met_is_said_with_the_least_that_can(
    run: Callable[..., Done], plain: str
) -> None:
    done = run("3MiB", ITERATIONS)
    assert done.returncode == 0
    assert done.stdout == plain
    assert "3.0 MiB cannot be met, " in done.stderr
    assert "is the least that is possible; the best plan takes " in done.stderr
    assert (
        "kilter: memory: 3.0 MiB cannot be met, the best plan is in force: peak 25.0 "
        in done.stderr
    )
    more = "kilter: to fit: 2.0 MiB more are needed: try kilter.divided(2) or a smaller batch"
    assert more in done.stderr
    least_bytes, peak_bytes = moved().least_bytes, moved().peak_bytes
    assert least_bytes is not None
    assert peak_bytes is not None
    assert least_bytes <= peak_bytes <= 1.01 * least_bytes
    assert moved().planned > 0
    assert "on demand" in done.stderr
    assert "refused" not in done.stderr  # said once


def test_a_dry_run_moves_nothing_and_says_what_it_would(run: Callable[..., Done]) -> None:
    done = run("50%", "16", options=("--dry-run",))
    assert "would be" in done.stderr
    assert "nothing was moved" in done.stderr
    assert moved().out_bytes == 0
    trace = codec.load("run/trace.json", IterationTrace)
    assert (trace.memory or trace).data


def test_a_dry_run_says_once_that_a_budget_cannot_be_met(run: Callable[..., Done]) -> None:
    done = run("1MiB", "16", options=("--dry-run",))
    assert "kilter: memory: 1.0 MiB cannot be met, " in done.stderr
    assert "refused" not in done.stderr


def test_json_on_stderr(run: Callable[..., Done]) -> None:
    done = run("50%", "14", options=("--json",))
    *_, document = done.stderr.splitlines()
    assert json.loads(document)["memory"]["planned"] > 0


# --strict

ENDS = SCRIPT.replace("print(loss", "sys.exit(int(sys.argv[2])) if sys.argv[2:] else print(loss")
"""With a second argument, an exit code of its own."""


@pytest.mark.parametrize(
    ("budget", "arguments", "code", "said"),
    [
        ("60%", (ITERATIONS,), 0, ""),
        ("60%", (ITERATIONS, "0"), 0, ""),
        ("1GiB", (ITERATIONS,), 0, ""),  # fits as it is
        ("3MiB", (ITERATIONS,), 1, "MiB, over the budget of 3.0 MiB; exit code 1"),
        ("3MiB", (ITERATIONS, "0"), 1, "MiB, over the budget of 3.0 MiB; exit code 1"),
        ("3MiB", (ITERATIONS, "7"), 7, ""),
        ("60%", ("2",), 1, "exit code 1"),  # no plan yet
    ],
)
def test_strict_fails_where_the_budget_was_not_kept(
    run: Callable[..., Done], budget: str, arguments: tuple[str, ...], code: int, said: str
) -> None:
    done = run(budget, *arguments, script=ENDS, options=("--strict",))
    assert done.returncode == code
    *_, last = done.stderr.splitlines()
    assert last.startswith("kilter: --strict: ") == bool(said)
    assert last.endswith(said)


def test_strict_leaves_one_line_of_json(run: Callable[..., Done]) -> None:
    done = run("3MiB", ITERATIONS, options=("--strict", "--json"))
    assert done.returncode == 1
    assert json.loads(done.stderr.splitlines()[-1])["memory"]["within"] is False


def test_strict_where_memory_was_left_alone(run: Callable[..., Done]) -> None:
    done = run("50%", "5", script=SCRIPT.replace("4096", "16"), options=("--strict",))
    assert done.returncode == 1
    assert "kilter: --strict: memory was left alone; exit code 1" in done.stderr


def test_strict_fails_once_for_all_ranks(run: Callable[..., Done]) -> None:
    done = run("3MiB", ITERATIONS, options=("--strict", "--standalone", "--nproc-per-node", "2"))
    assert done.returncode == 1
    assert done.stderr.count("kilter: --strict: the peak of rank 0 is ") == 1


# Bad input and bad luck


def test_a_script_without_torch() -> None:
    Path("train.py").write_text("print('hello')")
    command = ["-m", "kilter", "run", "--memory-budget", "50%", "--out", "run", "train.py"]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=900, check=False
    )
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "no iteration seen: the script did not import torch" in done.stderr
    assert "the script did not import torch" in done.stderr
    assert "clocks" not in done.stderr


def test_a_script_that_saves_nothing_large(run: Callable[..., Done]) -> None:
    small = SCRIPT.replace("4096", "16")
    done = run("50%", "5", script=small)
    assert (
        "refused: the memory plan: no tensor of 1.0 MiB or more was seen being saved for backward"
        in done.stderr
    )
    assert "kilter: memory was left alone\n" in done.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [("raise ValueError('no')", 1, "ValueError: no"), ("sys.exit(7)", 7, "")],
)
def test_a_script_that_ends_early_keeps_its_exit_code(
    run: Callable[..., Done], end: str, code: int, said: str
) -> None:
    lines = SCRIPT.replace("    loss.backward()", f"    if step == 14: {end}\n    loss.backward()")
    done = run("50%", "20", script=lines)
    assert done.returncode == code
    assert said in done.stderr
    assert "kilter: memory: peak" in done.stderr


def test_a_killed_run_has_a_report(warm: WarmPython, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT)
    options = ("--memory-budget", "50%", "--out", "run", "--device", "null")
    command = ["-m", "kilter", "run", *options, "train.py", "100000"]
    with open(os.devnull, "r+b") as nothing:
        process = warm.start(command, cwd=Path.cwd(), environ=os.environ, streams=[nothing] * 3)
    events, plan = Path("run/events-rank0.jsonl"), Path("run/plan.json")
    while not (plan.exists() and events.exists() and b'"fitted"' in events.read_bytes()):
        assert Path("/proc", str(process.pid)).exists(), "the job has ended by itself"
        time.sleep(0.05)
    time.sleep(1.0)  # the plan's record follows at once, the next regular one only 5 s later
    os.kill(process.pid, signal.SIGKILL)
    process.wait(900.0)
    assert main(["report", "run"]) == 0
    assert "memory   peak " in capsys.readouterr().out  # not: nothing to move, or no plan yet
    assert main(["report", "run", "--html", "page.html"]) == 0
    assert "Device memory over one pass" in Path("page.html").read_text()


def test_a_disk_that_is_full_is_not_the_scripts_business(
    python: Callable[..., Done], plain: str, tmp_path: Path
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "trace.json").mkdir()  # nothing can be put in its place
    Path("train.py").write_text(SCRIPT)
    options = ("--memory-budget", "50%", "--out", str(directory), "--device", "null")
    done = python("-m", "kilter", "run", *options, "train.py", ITERATIONS)
    assert done.returncode == 0
    assert done.stdout == plain
    assert "kilter: stepped aside" in done.stderr


def test_an_error_of_ours_in_the_middle_of_a_pass_changes_no_number(
    run: Callable[..., Done], plain: str
) -> None:
    """The engine breaks while data are away: they come back, and the training goes on."""
    broken = """
from kilter.memory.engine.backend import CpuStandIn
calls = 0
def wait(self, event, original=CpuStandIn.wait):
    global calls
    calls += 1
    if calls == 150:
        raise KeyError("a bug of ours")
    return original(self, event)
CpuStandIn.wait = wait
"""
    done = run("12MiB", ITERATIONS, script=broken + SCRIPT)
    assert done.returncode == 0
    assert done.stdout == plain
    assert "KeyError" in done.stderr


def test_too_little_host_memory_is_refused_before_it_is_taken(
    run: Callable[..., Done], plain: str
) -> None:
    done = run("50%", ITERATIONS, options=("--host-memory", "1MiB"))
    assert done.returncode == 0
    assert done.stdout == plain
    assert "at most 1.0 MiB of host memory" in done.stderr.splitlines()[0]
    refused = [e for e in read_events("run/events-rank0.jsonl") if isinstance(e, Refused)]
    assert any("the limit of 1.0 MiB of host memory" in refusal.reason for refusal in refused)
    assert moved().host_bytes <= 2**20


CHANGING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))
    def forward(self, x):
        return x * self.weight
model = nn.Sequential(*(nn.Sequential(Scale(), nn.SiLU()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(4096 + 16 * step, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), file=sys.stderr if sys.argv[2:] else sys.stdout)
"""


def test_a_share_where_shapes_keep_changing_is_of_the_largest_pass(
    run: Callable[..., Done], python: Callable[..., Done]
) -> None:
    done = run("50%", "40", "aloud", script=CHANGING)
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    (told,) = (
        n for n, line in enumerate(lines) if line.startswith("kilter: passes keep differing")
    )
    steps = [n for n, line in enumerate(lines) if line.split()[0].isdecimal()]
    assert steps[15] < told < steps[20]  # when it happens, and not at the end
    found = moved()
    assert found.budget_bytes is not None
    assert found.plain_peak_bytes is not None
    assert "of the largest plain peak" in found.budget
    assert 0.4 * found.plain_peak_bytes < found.budget_bytes < 0.55 * found.plain_peak_bytes
    assert found.spilled > 0
    plain = python("train.py", "40")
    assert plain.stdout.splitlines() == [lines[n] for n in steps]


FOREIGN = """
import sys, numpy as np, torch
data = np.memmap("data.bin", dtype=np.float32, mode="r+", shape=(4, 4096, 64))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.from_numpy(data[step % 4])).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""


@pytest.mark.parametrize("spoil", ["0", "1"])
def test_a_memory_mapped_data_set_is_not_touched(
    run: Callable[..., Done],
    python: Callable[..., Done],
    spoil: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KILTER_SPOIL_EVICTED", spoil)
    data = bytes(range(64, 128)) * (4 * 4096 * 4)
    Path("data.bin").write_bytes(data)
    done = run("1MiB", script=FOREIGN)
    assert done.returncode == 0
    assert Path("data.bin").read_bytes() == data
    assert done.stdout == python("train.py").stdout
    assert moved().spilled > 0


def test_the_environment_can_ask_for_it(
    python: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILTER_MEMORY_BUDGET", "50%")
    Path("train.py").write_text(SCRIPT)
    done = python("-m", "kilter", "run", "--device", "null", "--out", "run", "train.py", "12")
    assert "memory 50 %" in done.stderr.splitlines()[0]
    assert os.environ["KILTER_MEMORY_BUDGET"] == "50%"
