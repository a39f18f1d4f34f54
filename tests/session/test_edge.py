"""Programs with signals, closed descriptors and a store that hangs, as real processes: what they
see, write and return is what they would without us, and the record of the run is whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kilter.core.events import Failed, Refused, Stopped, read_events
from kilter.session.fence import PACKAGE
from kilter.testing.warm_python import WarmProcess, WarmPython

PATIENCE_S = 900.0

NET = """
import os, random, signal, sys, time
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
net = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(4)]
model = torch.nn.Sequential(*net)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(2048, 128)

def step():
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()

def inside_kilter(frame):
    while frame is not None and frame.f_code.co_filename != __file__:
        if "/src/kilter/" in frame.f_code.co_filename:
            return frame.f_code.co_name != "__exit__"
        frame = frame.f_back
    return False
"""


# Called as `python -c`, so that what is patched or closed is as it would be when kilter starts.
START = """
import sys
{first}
from kilter.app.cli.main import main
raise SystemExit(main())
"""
WITHOUT_STDERR = "import os; os.close(2); sys.stderr = sys.__stderr__ = None"
WITHOUT_ALL = (
    "import os; os.closerange(0, 3); sys.stdin = sys.__stdin__ = None\n"
    "sys.stdout = sys.__stdout__ = sys.stderr = sys.__stderr__ = None"
)


def start(
    warm: WarmPython, arguments: list[str], directory: Path, environ: dict[str, str], name: str = ""
) -> WarmProcess:
    """Its output is in the files `stdout` and `stderr` with this name at their end."""
    with (
        open(os.devnull, "rb") as nothing,
        (directory / f"stdout{name}").open("wb") as out,
        (directory / f"stderr{name}").open("wb") as err,
    ):
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(directory)}
        return warm.start(arguments, cwd=directory, environ=environ, streams=(nothing, out, err))


class Job:
    """`kilter run` of a script in a directory, after a line of Python that comes first."""

    def __init__(
        self, warm: WarmPython, directory: Path, source: str, *flags: str, first: str = ""
    ) -> None:
        self.directory = directory
        (directory / "job.py").write_text(source)
        self.process = start(
            warm,
            ["-c", START.format(first=first), "run", "--out", "run", *flags, "job.py"],
            directory,
            {k: v for k, v in os.environ.items() if not k.startswith("KILTER")},
        )

    def end(self) -> tuple[int, str, str]:
        code = self.process.wait(PATIENCE_S).returncode
        return code, *((self.directory / name).read_text() for name in ("stdout", "stderr"))

    def of(self, kind: type) -> list[object]:
        record = read_events(self.directory / "run" / "events-rank0.jsonl")
        return [event for event in record if isinstance(event, kind)]

    def wait_for(self, name: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not (self.directory / name).exists():
            assert time.monotonic() < end_s
            assert Path("/proc", str(self.process.pid)).exists(), self.end()
            time.sleep(0.02)


# --- signals -------------------------------------------------------------------------------------

ALARMS = """
class TooLong(Exception):
    pass

rung = arrived = 0

def ring(number, frame):
    global rung
    rung += 1
    raise TooLong("time is up")

signal.signal(signal.SIGALRM, ring)
moments = random.Random(0)
for _ in range(10):
    step()
while rung < 200:
    before = rung
    try:
        signal.setitimer(signal.ITIMER_REAL, moments.uniform(0.0005, 0.03))
        while rung == before:
            step()
    except TooLong:
        arrived += 1
        torch.set_grad_enabled(True)  # an alarm inside no_grad's entry leaves it on, in plain, too
print(arrived, "of", rung)
"""


def test_every_alarm_of_the_program_arrives(warm: WarmPython, tmp_path: Path) -> None:
    code, out, err = (job := Job(warm, tmp_path, NET + ALARMS, "--memory-budget", "60%")).end()
    assert (code, out) == (0, "200 of 200\n"), err
    assert job.of(Failed) == []


INTERRUPTED = """
class TooLong(Exception):
    pass

hits = 0

def ring(number, frame):
    global hits
    if inside_kilter(frame) and signal.getitimer(signal.ITIMER_REAL)[0]:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        hits += 1
        raise TooLong("time is up")

for _ in range(8):
    step()
start = [p.detach().clone() for p in model.parameters()], optimizer.state_dict()
import copy
start = copy.deepcopy(start)
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
kept = None
try:
    while True:
        kept = model(batch).square().mean()
        step()
except TooLong:
    pass
signal.setitimer(signal.ITIMER_REAL, 0.0)
with torch.no_grad():
    for parameter, value in zip(model.parameters(), start[0], strict=True):
        parameter.copy_(value)
optimizer.load_state_dict(start[1])
for _ in range(6):
    step()
print([p.double().sum().item().hex() for p in model.parameters()])
print("hits", hits, file=sys.stderr)
"""


def test_after_an_alarm_in_the_middle_of_our_work_the_numbers_are_plains(
    warm: WarmPython, tmp_path: Path
) -> None:
    plain = "".join(
        (NET, "for _ in range(14):\n    step()\n"
         "print([p.double().sum().item().hex() for p in model.parameters()])\n")
    )  # fmt: skip
    done = warm.run(["-c", plain], timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    code, out, err = (job := Job(warm, tmp_path, NET + INTERRUPTED, "--memory-budget", "60%")).end()
    assert (code, out) == (0, done.stdout), err
    assert "hits 1" in err
    assert job.of(Failed) == []


CTRL_C = """
def interrupt(number, frame):
    if inside_kilter(frame):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
while True:
    step()
"""


def test_ctrl_c_in_the_middle_of_our_work_shows_no_frame_of_ours(
    warm: WarmPython, tmp_path: Path
) -> None:
    code, _, err = (job := Job(warm, tmp_path, NET + CTRL_C, "--memory-budget", "60%")).end()
    assert code == -signal.SIGINT
    # (Where it came in an `except` of the standard library, another traceback stands before it.)
    lines = err[err.rindex("Traceback") :].splitlines()
    assert 'job.py", line' in lines[1], err
    assert lines[1].endswith("in <module>"), err
    assert not [line for line in lines if PACKAGE in line], err
    assert "KeyboardInterrupt" in lines
    [stopped] = job.of(Stopped)
    assert isinstance(stopped, Stopped)
    assert stopped.outcome == "raised KeyboardInterrupt"


# What comes after the script goes on until the test lets it.
SLOW_END = """
import os, time
from kilter.session.live import LiveRun

settle = LiveRun.settle

def slow(self, outcome):
    open("ending", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.01)
    settle(self, outcome)

LiveRun.settle = slow
"""


def test_ctrl_c_after_the_script_changes_nothing_of_its_end(
    warm: WarmPython, tmp_path: Path
) -> None:
    (tmp_path / "slow_end.py").write_text(SLOW_END)
    source = NET + "step()\nsys.exit(3)\n"
    job = Job(warm, tmp_path, source, "--device", "null", first="import slow_end")
    job.wait_for("ending")
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(0.2)
    (tmp_path / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (3, "")
    assert "Traceback" not in err
    [stopped] = job.of(Stopped)
    assert isinstance(stopped, Stopped)
    assert stopped.outcome == "exit 3"


LATE_ALARM = """
def ring(number, frame):
    open("rung", "w").close()
    raise TimeoutError("late")

signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 3600.0)
step()
"""
RING = "os.kill(os.getpid(), 14)\n    settle(self, outcome)"


def test_a_timer_that_the_script_has_left_behind_changes_nothing_of_its_end(
    warm: WarmPython, tmp_path: Path
) -> None:
    patch = SLOW_END.replace("settle(self, outcome)", RING, 1).replace(
        '    while not os.path.exists("go"):\n        time.sleep(0.01)\n', ""
    )
    (tmp_path / "rings.py").write_text(patch)
    job = Job(warm, tmp_path, NET + LATE_ALARM, "--device", "null", first="import rings")
    code, out, err = job.end()
    assert (tmp_path / "rung").exists()
    assert (code, out) == (0, ""), err
    assert "Traceback" not in err
    assert len(job.of(Stopped)) == 1


# --- no further threads --------------------------------------------------------------------------

NO_THREADS = """
import threading

for _ in range(3):
    step()

def start(thread):  # `ulimit -u` would count all processes of the user
    raise RuntimeError("can't start new thread")

threading.Thread.start = start
"""


def test_the_run_ends_as_ever_where_no_further_thread_can_be_started(
    warm: WarmPython, tmp_path: Path
) -> None:
    code, _, err = (job := Job(warm, tmp_path, NET + NO_THREADS, "--device", "null")).end()
    assert code == 0, err
    assert len(job.of(Stopped)) == 1
    assert job.of(Failed) == []
    assert (tmp_path / "run" / "report.json").exists()


# --- descriptors ---------------------------------------------------------------------------------

CLOSED = """
for _ in range(12):
    step()
print("done", flush=True)
with open("notes.txt", "w") as file:
    file.write("the program's own")
"""


@pytest.mark.parametrize(
    ("flags", "closed", "out"),
    [
        (("--device", "sim:v100", "--rehearse", "0.5s"), WITHOUT_STDERR, "done\n"),
        (("--memory-budget", "60%"), WITHOUT_STDERR, "done\n"),
        (("--memory-budget", "60%"), WITHOUT_ALL, ""),
    ],
)
def test_with_stderr_closed_we_say_nothing_anywhere(
    flags: tuple[str, ...], closed: str, out: str, warm: WarmPython, tmp_path: Path
) -> None:
    job = Job(warm, tmp_path, NET + CLOSED, *flags, first=closed)
    assert job.end() == (0, out, "")
    assert (tmp_path / "notes.txt").read_text() == "the program's own"
    assert len(job.of(Stopped)) == 1


def test_wrong_usage_with_stderr_closed_says_nothing_on_stdout(
    warm: WarmPython, tmp_path: Path
) -> None:
    job = Job(warm, tmp_path, NET, "--device", "nothing", first=WITHOUT_STDERR)
    assert job.end()[:2] == (2, "")


REPLACED = """
os.close(2)
file = open("checkpoint", "wb", buffering=0)
assert file.fileno() == 2
file.write(b"weights")
step()
"""


def test_a_file_that_took_the_descriptor_of_stderr_gets_no_line_of_ours(
    warm: WarmPython, tmp_path: Path
) -> None:
    assert Job(warm, tmp_path, NET + REPLACED, "--device", "null").end()[0] == 0
    assert (tmp_path / "checkpoint").read_bytes() == b"weights"


DAEMON = """
files = []
for number in range(40):
    step()
    if number == 15:
        os.closerange(3, 4096)
        files = [open(f"checkpoint-{n}", "wb", buffering=0) for n in range(24)]
        for file in files:
            file.write(b"weights")
for file in files:
    file.write(b", all of them")
print("done", flush=True)
"""


@pytest.mark.parametrize("flags", [("--device", "sim:v100"), ("--memory-budget", "60%")])
def test_a_script_that_closes_all_descriptors_has_its_files_to_itself(
    flags: tuple[str, ...], warm: WarmPython, tmp_path: Path
) -> None:
    code, out, err = (job := Job(warm, tmp_path, NET + DAEMON, *flags)).end()
    assert (code, out) == (0, "done\n"), err
    files = sorted(tmp_path.glob("checkpoint-*"))
    assert len(files) == 24
    assert {file.read_bytes() for file in files} == {b"weights, all of them"}
    assert len(job.of(Stopped)) == 1


# --- the ranks' store ----------------------------------------------------------------------------

SERVE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
RANK = """
import os, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
for _ in range(30 if os.environ["LONG"] == "1" else 3):
    step()
    time.sleep(0.05)
open(f"trained-{dist.get_rank()}", "w").close()
while not os.path.exists("frozen"):
    step()
    time.sleep(0.01)
open(f"over-{dist.get_rank()}", "w").close()
"""


@pytest.mark.parametrize("long", [False, True])
def test_the_end_does_not_wait_for_a_store_that_does_not_answer(
    long: bool, warm: WarmPython, tmp_path: Path
) -> None:
    """With a board that the ranks have talked through, and with one that is yet to be found."""
    (tmp_path / "job.py").write_text(RANK)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    environ = os.environ | {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": server.stdout.readline().strip(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
        "LONG": str(int(long)),
    }
    command = ["-m", "kilter", "run", "--device", "null", "--out", "run", "job.py"]
    ranks = [
        start(
            warm,
            command,
            tmp_path,
            environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            name=f"-{rank}",
        )
        for rank in range(2)
    ]
    try:
        end_s = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.glob("trained-*"))) < 2:
            assert time.monotonic() < end_s
            assert all(Path("/proc", str(rank.pid)).exists() for rank in ranks)
            time.sleep(0.05)
        server.send_signal(signal.SIGSTOP)
        (tmp_path / "frozen").touch()
        # torch itself would wait for minutes: a rank that ends at all has not asked it
        codes = [rank.wait(240).returncode for rank in ranks]
        errors = [path.read_text() for path in tmp_path.glob("stderr-*")]
        assert codes == [0, 0], errors
    finally:
        server.kill()
        server.communicate()
    for rank in range(2):
        record = list(read_events(tmp_path / "run" / f"events-rank{rank}.jsonl"))
        assert [type(e) for e in record if isinstance(e, Stopped | Failed)] == [Stopped]
        assert not [e for e in record if isinstance(e, Refused) and "thread" in e.reason]
