"""`kilter.govern` in a program: what the program must never notice, and what its user is told."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kilter
from kilter.app.cli.main import main
from kilter.clocks import actuator as actuator
from kilter.clocks import conductor, search_leader
from kilter.clocks.controller import ClocksController
from kilter.core.errors import DeviceLost, UsageError
from kilter.core.events import AnyEvent, Block, Failed, Refused, Started, Stopped, read_events
from kilter.core.label import Label
from kilter.core.messages import MessagesGone
from kilter.core.plan import Goal
from kilter.core.ranks import Ranks
from kilter.core.setting import DeviceInfo, Sample, Setting, Supported
from kilter.lease.lease import Lease
from kilter.lease.run_lease import RunLease
from kilter.observe.profiler_window import Window
from kilter.observe.sampler import Sampler
from kilter.observe.trace_source import TraceSource
from kilter.session import lifecycle, live, options, run_directory
from kilter.session.lifecycle import Session
from kilter.session.listener import SilentListener
from kilter.session.live import LiveRun
from kilter.session.log import RunLog
from kilter.session.messages import StoreMessages
from kilter.session.options import Options
from kilter.session.recorder import Recorder
from kilter.session.run_directory import check_out
from kilter.testing.warm_python import WarmPython

JOB_VARIABLES = ("KILTER", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "REHEARSE_S", 0.1)
    monkeypatch.setattr(live, "TICK_S", 0.01)


def train(steps: int, mark: Callable[[], None] = lambda: None) -> list[bytes]:
    """Losses, bit by bit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy().tobytes())
        mark()
    return losses


def events(run: Path | None) -> list[AnyEvent]:
    assert run is not None
    return list(read_events(run / "events-rank0.jsonl"))


def of(kind: type[AnyEvent], run: Path | None) -> list[AnyEvent]:
    return [event for event in events(run) if isinstance(event, kind)]


@pytest.mark.parametrize("device", ["sim:v100", "null"])
def test_losses_are_the_same_bit_by_bit_and_nothing_stays_behind(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    plain = train(60)
    threads = set(threading.enumerate())
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks
    before = dict(hooks)
    with kilter.govern(device=device, out="run") as job:
        governed = train(60)
    assert governed == plain
    assert hooks == before
    assert {thread for thread in threading.enumerate() if not thread.daemon} <= threads
    assert not [t for t in set(threading.enumerate()) - threads if t.name == "kilter"]
    ours = [path for path in temporary.iterdir() if not path.name.startswith("torchinductor")]
    assert ours == []
    stopped = of(Stopped, job.run)[0]
    assert stopped.iterations == 59
    assert stopped.restored
    assert of(Failed, job.run) == []
    assert train(60) == plain


def test_an_explicit_mark_wins() -> None:
    with kilter.govern(device="null", out="run") as job:
        train(10)
        train(30, job.mark)
    assert job.iterations.source == "explicit"
    # ten by the optimizer, one more before the first mark
    assert of(Stopped, job.run)[0].iterations == 10 + 30


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KILTER", "0")
    threads = threading.enumerate()
    with kilter.govern(device="sim:v100") as job:
        train(5, job.mark)
        assert threading.enumerate() == threads
    assert list(tmp_path.iterdir()) == []


def test_a_script_too_short_to_observe_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with kilter.govern(device="sim:v100", out="run") as job:
        train(3)
    reason = of(Refused, job.run)[-1].reason
    assert "3 iterations" in reason or "before its iterations could be observed" in reason
    assert reason in capfd.readouterr().err


def test_one_session_governs_a_process(tmp_path: Path) -> None:
    with kilter.govern(device="null", out="outer") as outer:
        with kilter.govern(device="sim:v100", out="inner") as inner:
            train(20, inner.mark)
        train(20, outer.mark)
    assert not (tmp_path / "inner").exists()
    assert of(Stopped, outer.run)[0].iterations == 40
    assert [refused.what for refused in of(Refused, outer.run)] == ["a session inside this one"]
    with kilter.govern(device="null", out="next") as job:
        train(5)
    assert of(Stopped, job.run)


def test_a_raising_program_raises() -> None:
    class Mine(Exception):
        pass

    job = None
    try:
        with kilter.govern(device="null", out="run") as job:
            train(5)
            raise Mine
    except Mine:
        assert job is not None
    assert of(Stopped, job.run)[0].outcome == "raised Mine"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_without_us() -> None:
    children = []
    try:
        with kilter.govern(device="null", out="run") as job:
            train(5)
            if child := os.fork():
                children.append(child)
                train(5)
            else:
                job.mark()
                sys.exit(7)
    except SystemExit as ended:
        os._exit(int(ended.code or 0))
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert len(of(Started, job.run)) == len(of(Stopped, job.run)) == 1
    assert of(Stopped, job.run)[0].iterations == 9


def test_files_that_the_program_deletes_are_missed_in_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with kilter.govern(device="null", out="run"):
        train(3)
        shutil.rmtree("run")
    assert "run: deleted while the program ran" in capsys.readouterr().err


# --- the trace ---------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads in which a profiler was prepared."""
    profile = torch.autograd.profiler.profile
    prepare, threads = profile._prepare_trace, []

    def note(profiler: object) -> None:
        threads.append(threading.get_ident())
        prepare(profiler)

    monkeypatch.setattr(profile, "_prepare_trace", note)
    return threads


@pytest.mark.parametrize(
    ("how", "recorded"),
    [
        ({"device": "null"}, False),
        ({"device": "null", "trace": True}, True),
        ({"device": "sim:v100"}, True),
        ({"device": "sim:v100", "dry_run": True}, True),
        ({"device": "sim:v100", "memory_budget": "1GiB"}, False),
    ],
    ids=str,
)
def test_a_trace_is_recorded_where_it_is_needed_or_asked_for(
    how: dict[str, object], recorded: bool, prepared: list[int]
) -> None:
    with kilter.govern(out="run", **how) as job:  # type: ignore[arg-type]
        train(30)
    assert prepared == [threading.get_ident()] * recorded
    assert Path("run/trace.chrome.json").exists() == recorded
    why = of(Stopped, job.run)[0].no_trace
    assert why is None if recorded else "--trace" in why
    assert not of(Failed, job.run)


def test_only_rank_0_records_a_trace(prepared: list[int]) -> None:
    options = Options(goal=Goal(), device="null", out=Path("run").absolute(), trace=True)
    with Session(options, Ranks(1, 2, 1), SilentListener()):
        train(30)
    assert prepared == []


def test_training_in_threads_is_said_and_not_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    with kilter.govern(device="null", out="run", trace=True) as job:
        threads = [threading.Thread(target=train, args=(60,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = {refused.what: refused.reason for refused in of(Refused, job.run)}
    assert "another thread" in told["recording a trace"]
    assert "2 threads trained" in told["telling the iterations of several threads apart"]
    error = capfd.readouterr().err
    assert all(reason in error for reason in told.values())
    assert "registerClient" not in error
    assert not of(Failed, job.run)


IN_BACKWARD = """
import torch
from torch import nn
torch.manual_seed(0)
layers = [layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.ReLU())]
model = nn.Sequential(*layers, nn.Linear(16, 1))
optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}
assert len(optimizers) == 12
def hook(p):
    optimizers[p].step()
    optimizers[p].zero_grad()
for p in optimizers:
    p.register_post_accumulate_grad_hook(hook)
for _ in range(20):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    print(loss.item().hex())
"""


@pytest.mark.parametrize(
    "flags",
    [("--device", "sim:v100", "--rehearse", "0.5s"), ("--device", "null"), None],
    ids=str,
)
def test_an_optimizer_that_steps_in_backward(
    flags: tuple[str, ...] | None, warm: WarmPython
) -> None:
    """PyTorch's recipe; at least one of these ended with a segmentation fault."""
    Path("job.py").write_text(IN_BACKWARD)
    governed = "import kilter\nwith kilter.govern(device='sim:v100', dry_run=True, out='run'):\n"
    Path("governed.py").write_text(
        governed + "".join(f"    {line}\n" for line in IN_BACKWARD.splitlines())
    )
    ours = ["governed.py"] if flags is None else ["-m", "kilter", "run", *flags, "job.py"]
    plain, seen = (warm.run(command) for command in (["job.py"], ours))
    assert plain.returncode == 0
    assert (seen.returncode, seen.stdout) == (0, plain.stdout), seen.stderr


# --- where the records go ------------------------------------------------------------------------


def test_a_run_is_never_written_over_another() -> None:
    with kilter.govern(device="null", out="run"):
        train(2)
    before = Path("run/events-rank0.jsonl").read_bytes()
    with (
        pytest.raises(UsageError, match="holds a run already"),
        kilter.govern(device="null", out="run"),
    ):
        raise AssertionError("the program must not begin")
    Path("job.py").write_text("raise AssertionError('the program must not begin')")
    assert main(["run", "--device", "null", "--out", "run", "job.py"]) == 2
    assert Path("run/events-rank0.jsonl").read_bytes() == before


def test_other_ranks_of_the_run_may_be_there_first(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events-rank1.jsonl").touch()
    check_out(tmp_path / "run", Ranks(0, 2, 0))
    with pytest.raises(UsageError):
        check_out(tmp_path / "run", Ranks(1, 2, 1))


def test_workers_that_start_again_write_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for restarts in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with kilter.govern(device="null", out="run") as job:
            train(2)
        assert job.run is not None
        runs.append(job.run.relative_to(Path.cwd()).as_posix())
    assert runs == ["run", "run/restart-1", "run/restart-2"]


def test_ranks_of_one_node_find_the_same_place_and_the_next_job_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    environ = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    first = {run_directory._job_name(environ | {"RANK": rank}) for rank in "01"}
    monkeypatch.setattr(os, "getppid", lambda: 4712)
    assert len(first) == 1
    assert run_directory._job_name(environ) not in first


# --- the board of several ranks ------------------------------------------------------------------


def test_notes_go_through_the_store_of_the_job_and_its_end_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    serve = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", serve]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        boards = [StoreMessages(lambda: dist.PrefixStore("kilter", store)) for _ in range(2)]
        assert boards[0].look("order/0") is None
        boards[0].post("order/0", b"note")
        boards[0].post("ended/0", b"")
        assert boards[1].look("order/0") == b"note"
        assert boards[1].look("ended/0") == b""
        boards[1].drop("order/0")
        boards[1].drop("order/0")
        assert boards[1].look("order/0") is None
        server.send_signal(signal.SIGSTOP)  # its host does not answer: nobody waits for it
        os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # each of its threads
        boards[0].post("order/1", b"later")
        assert boards[0].look("order/1") is None
        server.send_signal(signal.SIGCONT)
        end_s = time.monotonic() + 600.0
        while boards[0].look("order/1") != b"later":
            assert time.monotonic() < end_s
    finally:
        server.kill()  # stopped, it would not end by itself
        server.communicate()
    for reach in (
        lambda: boards[0].look("order/0"),
        lambda: boards[0].post("order/1", b""),
        lambda: boards[0].drop("order/1"),
    ):
        with pytest.raises(MessagesGone, match="gone"):
            reach()
    capfd.readouterr()  # what torch itself says about it


def test_a_process_without_a_group_has_no_board() -> None:
    assert StoreMessages.find(2) is None


# --- errors of ours ------------------------------------------------------------------------------


class Card:
    """A device in memory that is really set, and forgets with the process."""

    def __init__(self) -> None:
        self.now = Setting()
        self.was_set = False

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            name="card",
            uuid="CARD-0",
            backend="test",
            label=Label.SIMULATED,
            can_set=True,
            persistent=False,
            sensor_period_s=0.002,
        )

    def supported(self) -> Supported:
        return Supported(sm_clocks_hz=(0.9e9, 1.2e9, 1.5e9))

    def settings(self) -> Setting:
        return self.now

    def set(self, setting: Setting) -> None:
        self.was_set = self.was_set or setting != Setting()
        self.now = setting

    def reset(self) -> None:
        self.set(Setting())

    def sample(self, *, energy: bool = False) -> Sample:
        clock_hz = self.now.sm_clock_hz or 1.5e9
        return Sample(
            t_s=time.monotonic(), power_w=clock_hz / 1e7, sm_clock_hz=clock_hz, sm_utilisation=1.0
        )

    def close(self) -> None: ...


class Ears(SilentListener):
    def __init__(self) -> None:
        self.heard: list[str] = []
        self.ends = 0

    def failed(self, error: str) -> None:
        self.heard.append(error)

    def ended(self, run: Path, options: Options, *, keep: bool) -> None:
        self.ends += 1


class Injected(RuntimeError):
    pass


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(lifecycle, "open_device", lambda spec, ranks: made)
    monkeypatch.setattr(live, "TICK_S", 0.002)
    monkeypatch.setattr(actuator, "LOW_SETTING_HOLD_S", 0.05)
    monkeypatch.setattr(search_leader, "LEAST_BLOCK_S", 0.004)
    monkeypatch.setattr(search_leader, "SENSOR_PERIODS", 2)
    return made


def work(job: Session, until: Callable[[], bool]) -> int:
    """Iterations until something has happened, and a few more."""
    done, end = 0, time.monotonic() + 600.0
    while not until():
        assert time.monotonic() < end
        time.sleep(0.0005)
        job.mark()
        done += 1
    for _ in range(50):
        time.sleep(0.0005)
        job.mark()
    return done + 50


def govern(ears: Ears) -> Session:
    options = Options(goal=Goal(max_slowdown=0.5), out=Path("run").absolute())
    return Session(options, Ranks(), ears)


def test_the_card_of_these_tests_is_set_and_restored(card: Card) -> None:
    ears = Ears()
    with govern(ears) as job:
        work(job, lambda: card.was_set)
    assert card.now == Setting()
    assert ears.heard == []
    assert ears.ends == 1
    assert of(Block, job.run)
    assert of(Stopped, job.run)[0].restored


PARTS = [
    (kind, name)
    for kind in (
        Session,
        LiveRun,
        RunLog,
        RunLease,
        TraceSource,
        ClocksController,
        actuator.DeviceActuator,
        Recorder,
        conductor.Conductor,
        Sampler,
    )
    for name, value in vars(kind).items()
    if inspect.isfunction(value)
    and (not name.startswith("__") or name == "__call__")
    and name not in ("mark", "_run")  # the program's own call; a thread that is not behind us
]

NOT_CALLED = {
    # without a simulated device
    "ClocksController._begin_rehearsal", "ClocksController._finish_rehearsal",
    "ClocksController._rehearse_on", "RunLog.rehearsal_begins", "RunLog.rehearsal_ended",
    "RunLog.rehearsing",
    # without a trace
    "ClocksController._predict", "ClocksController._want_trace", "TraceSource._open",
    "TraceSource.again", "TraceSource.disturbs", "TraceSource.observe", "TraceSource.want",
    # without other ranks, or another session
    "Conductor._late", "Conductor._leave", "Session._refuse_inner",
    # where nothing is refused, and nothing fails
    "ClocksController._only_watch", "ClocksController._why_not_begun", "Conductor._give_up",
    "Conductor.refuse", "LiveRun.step_aside", "RunLog.notice", "RunLog.refuse",
    "Session._step_aside", "TraceSource.abandon",
    # with the sensors of this card
    "Sampler._catch_tick", "Sampler._quick_power_w",
    # where the program has no profiler of its own
    "Window._abandon", "Window._make_way", "Window._take_out", "Window.abandon",
}  # fmt: skip
"""What a run like these does not call: no error can be injected there. All else is struck."""


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=lambda v: getattr(v, "__name__", v))
def test_an_error_of_ours_is_told_once_and_never_reaches_the_program(
    kind: type, name: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in every function: at its first call, and in a second run once the card is set."""
    real = getattr(kind, name)
    for late in (False, True):
        struck = threading.Event()
        monkeypatch.setattr(
            kind, name, _striking(real, struck, (lambda: card.was_set) if late else (lambda: True))
        )
        card.now, card.was_set = Setting(), False
        ears = Ears()
        job = govern(ears)
        job._options = Options(goal=Goal(max_slowdown=0.5), out=Path(f"run-{late}").absolute())
        with job:
            done = work(job, partial(_something_happened, card, struck))
        assert late or struck.is_set() or f"{kind.__name__}.{name}" in NOT_CALLED
        assert done >= 50
        assert card.now == Setting(), "restored"
        assert len(ears.heard) == struck.is_set()
        assert all("Injected" in heard for heard in ears.heard)
        assert Session._running is None
        for thread in threading.enumerate():
            if thread.name == "kilter":
                thread.join(600.0)
                assert not thread.is_alive()


WINDOW_PARTS = [
    name
    for name, value in vars(Window).items()
    if inspect.isfunction(value) and name not in ("__init__", "_forked", "_timed")
]


@pytest.mark.parametrize("name", WINDOW_PARTS)
def test_an_error_in_the_window_leaves_no_profiler_on(
    name: str, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck = threading.Event()
    real = getattr(Window, name)
    monkeypatch.setattr(Window, name, _striking(real, struck, lambda: True))
    ears = Ears()
    goal = Goal(max_slowdown=0.5)
    options = Options(goal=goal, out=Path("run").absolute(), trace=True)
    plain = train(30)
    with Session(options, Ranks(), ears):
        assert train(30) == plain
    assert struck.is_set() or f"Window.{name}" in NOT_CALLED
    assert len(ears.heard) == struck.is_set()
    assert not torch.autograd._profiler_enabled()


def test_a_run_that_may_not_set_after_all_records_what_its_prediction_needs(
    card: Card, monkeypatch: pytest.MonkeyPatch, prepared: list[int]
) -> None:
    def refuse(lease: object) -> None:
        raise DeviceLost("somebody else holds it")

    monkeypatch.setattr(Lease, "__enter__", refuse)
    with govern(Ears()) as job:
        work(job, lambda: bool(prepared))
        train(5, job.mark)
    assert prepared == [threading.get_ident()]


def _something_happened(card: Card, struck: threading.Event) -> bool:
    return card.was_set or struck.is_set()


def _striking(
    real: Callable[..., object], struck: threading.Event, now: Callable[[], bool]
) -> Callable[..., object]:
    def strike(*args: object, **kwargs: object) -> object:
        if not struck.is_set() and now():
            struck.set()
            raise Injected("in the middle of it")
        return real(*args, **kwargs)

    strike.__qualname__ = real.__qualname__
    return strike


def test_an_error_while_the_device_is_opened_is_told(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: str, ranks: Ranks) -> Card:
        raise DeviceLost("it fell off the bus")

    monkeypatch.setattr(lifecycle, "open_device", refuse)
    ears = Ears()
    with govern(ears) as job:
        job.mark()
    assert ears.heard == ["it fell off the bus"]
