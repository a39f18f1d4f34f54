"""The daemon and real jobs: they come and go, and are really killed."""

import argparse
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
from kilter.app.cli import share_live
from kilter.app.cli.share_live import table
from kilter.core.errors import FileError, KilterError, NoDevice
from kilter.device.nvidia import NvidiaDevice
from kilter.session.fence import Fence
from kilter.sharing.daemon import Daemon
from kilter.sharing.elastic.share import listening_store
from kilter.sharing.link import DaemonLink
from kilter.sharing.messages import Facts, Identity, RatioTarget, Summary
from kilter.sharing.store import Channel, Endpoint, living, read_endpoint
from kilter.testing.fake_card import Card
from kilter.testing.fake_nvml import FakeNvml

HERE = Path(__file__).parent
KILTER = (sys.executable, "-m", "kilter", "share")
SCRIPT = str(HERE / "script.py")
TIMEOUT_S = 900


class Machine:
    """A directory with a daemon, jobs and two fake GPUs that are busy; all processes are ended at
    the end of the test."""

    def __init__(self, folder):
        self.folder, self.endpoint, self.processes = folder, folder / "endpoint.json", []
        cards = Card(load=1.0), Card(load=1.0)
        self.fake = FakeNvml.create(folder / "cards.json", *cards, virtual_time=False)
        self.environ = self.fake.environ() | {"OMP_NUM_THREADS": "1"}
        self.environ |= {"KILTER_STATE_DIR": str(folder / "state")}

    def locks(self):
        return [card.sm_lock_mhz for card in self.fake.state().cards]

    def start(self, *command):
        process = subprocess.Popen(
            [*KILTER, command[0], "--endpoint", str(self.endpoint), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=self.environ,
        )
        self.processes.append(process)
        return process

    def serve(self, policy="even", *options):
        machine = ("--gpus", "0-1", "--period", "1s")
        daemon = self.start("serve", *machine, "--policy", policy, *options)
        self.answer()
        return daemon

    def job(self, name, *options, epochs=10_000):
        out = self.folder / name
        out.mkdir()
        script = (str(HERE / "script.py"), "--out", str(out), "--epochs", str(epochs))
        return self.start("run", "--name", name, *options, *script, "--sleep", "0.02")

    def jobs(self):
        found = living(self.endpoint)
        return {} if found is None else {j.name.partition("#")[0]: j for j in found[1].jobs}

    def answer(self):
        """The daemon's store and summary; a busy machine may let it answer late."""
        self.until(lambda: living(self.endpoint), "the daemon answers")
        return living(self.endpoint) or self.answer()

    def until(self, condition, what):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, f"never: {what}; {living(self.endpoint)}"
            for process in self.processes:
                if process.poll() not in (None, 0, -signal.SIGKILL):
                    pytest.fail(f"never: {what}\n{process.communicate()[0]}")
            time.sleep(0.2)

    def until_job(self, name, condition, what):
        """A job that has not reported for a while is not listed."""
        self.until(lambda: (job := self.jobs().get(name)) and condition(job), f"{name} {what}")

    def until_ratio(self, name, ratios):
        self.until_job(name, lambda job: job.ratios == ratios, f"has the ratio {ratios}")

    def report(self, name):
        """What a job has told last, once it is there."""
        found = []
        self.until_job(name, lambda job: found.append(job) or True, "reports")
        return found[0]

    def until_advance(self, name, begun=None):
        begun = self.report(name).iteration if begun is None else begun
        self.until_job(name, lambda job: job.iteration > begun + 5, "advances")

    def end(self):
        for process in self.processes:
            with contextlib.suppress(OSError):
                # Ranks are in sessions of their own.
                ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
                os.killpg(process.pid, signal.SIGKILL)
                for rank in ranks.split():
                    os.kill(int(rank), signal.SIGKILL)
            process.wait()
            process.stdout.close()


@pytest.fixture
def machine(tmp_path):
    found = Machine(tmp_path)
    yield found
    found.end()


def test_jobs_join_are_killed_and_the_daemon_is_replaced(machine):
    daemon = machine.serve("even", "--max-slowdown", "20%")
    machine.job("a", "--ratios", "7,3", "--max-slowdown", "10%")
    machine.until_ratio("a", (5, 5))  # the policy is `even`
    second = machine.job("b", "--idle-ranks", "--ratios", "10,0", "--probe")
    machine.until_ratio("b", (5, 5))

    # The other job pauses while a step of b alone is measured, and goes on.
    machine.until_job("b", lambda job: job.alone_source == "probe", "was measured alone")
    machine.until_advance("a")

    # A second daemon is refused while the first is there.
    other = machine.start("serve", "--gpus", "0-1")
    assert other.wait(TIMEOUT_S) == 1
    assert "a daemon already shares this machine" in other.communicate()[0]
    machine.processes.remove(other)

    # Nothing of a command line is in the store, only the job's name.
    raw = machine.answer()[0]._store.get("job/1/status")
    assert b'"name":"a"' in raw
    assert b"script" not in raw

    # A job is killed, all its processes at once: it is missed, and the other goes on.
    os.killpg(second.pid, signal.SIGKILL)
    for rank in [job.pid for job in machine.jobs().values() if job.name.startswith("b")]:
        os.kill(rank, signal.SIGKILL)
    machine.until(lambda: "b" not in machine.jobs(), "the killed job is missed")
    machine.until_advance("a")

    # The clocks of both GPUs are lowered for a while, and judged by the contract of the job.
    machine.until(lambda: all(machine.locks()), "a lower clock is tried")
    contract = "that of a#1, 10.0 %"
    machine.until(lambda: contract in (machine.answer()[1].clocks or ""), "the contract is told")
    assert contract in table(machine.answer()[1])

    # The daemon is killed: the clocks come back, the job trains on with its ratio, and a new daemon
    # finds it.
    before = machine.report("a").iteration
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    assert living(machine.endpoint) is None
    machine.until(lambda: not any(machine.locks()), "the clocks are as found")
    machine.serve()
    assert machine.report("a").ratios == (5, 5)  # the new daemon finds the job
    machine.until_advance("a", before)


def test_a_job_ends_as_a_script_does_and_leaves(machine):
    daemon = machine.serve("maxmin")
    job = machine.job("short", epochs=3)
    told = job.communicate(timeout=TIMEOUT_S)[0]
    assert job.returncode == 0, told
    assert "Traceback" not in told
    assert json.loads((machine.folder / "short" / "rank0.json").read_text())["losses"]
    machine.until(lambda: "short" not in machine.jobs(), "the job has left")
    top = machine.start("top", "--json")
    found = json.loads(top.communicate(timeout=TIMEOUT_S)[0])
    assert found["schema"] == "kilter.share-top/1"
    assert found["gpus"] == [0, 1]
    daemon.send_signal(signal.SIGINT)
    assert daemon.wait(TIMEOUT_S) == 0
    assert not machine.endpoint.exists()


def test_the_token_is_for_its_owner_alone_and_a_wrong_one_gets_nothing(tmp_path):
    file = tmp_path / "endpoint.json"
    channel = Channel.open("127.0.0.1", file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    right = read_endpoint(file)
    wrong = Channel.join(Endpoint(right.host, right.port, "guessed", right.pid))
    from kilter.sharing.messages import RatioTarget

    wrong.want(1, RatioTarget(1, (10, 0), "mine"))
    assert channel.target(1) is None
    channel.want(1, RatioTarget(1, (5, 5), "ours"))
    assert wrong.target(1) is None
    file.chmod(0o644)
    with pytest.raises(FileError, match="chmod 600"):
        read_endpoint(file)


def test_a_job_with_a_wrong_token_trains_on_and_joins_once_the_token_is_right(tmp_path):
    own = listening_store("127.0.0.1")  # the job's own store
    file, said = tmp_path / "endpoint.json", []
    channel = Channel.open("127.0.0.1", file)
    channel.summarise(Summary(1, 1, "even", 1.0, (0,), (0.0,), (), ()))
    right = file.read_bytes()
    file.write_bytes(right.replace(read_endpoint(file).token.encode(), b"0" * 64))
    share = SimpleNamespace(address=("127.0.0.1", own.port))
    facts = Facts(1, 8, None, 1, False)
    link = DaemonLink(
        file, share, facts, Identity("a", (0,)), Fence(lambda *error: said.append(error))
    )
    link.start()
    try:
        with pytest.raises(KilterError, match="is not that of the daemon"):
            link._join()
        assert channel.status(1) is None
        assert link.is_alive()
        file.write_bytes(right)
        deadline = time.monotonic() + TIMEOUT_S
        while not any(channel.status(slot) for slot in range(1, channel.slots() + 1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        link.leave()
    assert not said


def test_a_ratio_that_the_job_cannot_have_is_told_of_and_not_carried_out(tmp_path):
    """`--idle-ranks --ratios 10,0` for a job of which every rank holds a part."""
    own = listening_store("127.0.0.1")
    file, told = tmp_path / "endpoint.json", []
    channel = Channel.open("127.0.0.1", file)
    channel.summarise(Summary(1, 1, "even", 1.0, (0, 1), (0.0, 0.0), (), ()))
    share = SimpleNamespace(address=("127.0.0.1", own.port))
    link = DaemonLink(
        file,
        share,
        Facts(2, 8, None, 1, may_idle=False),
        Identity("a", (0, 1), ratios=(10, 0)),
        Fence(lambda *error: None),
        told.append,
    )
    link.start()
    try:
        deadline = time.monotonic() + TIMEOUT_S
        while not channel.status(1):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        channel.want(1, RatioTarget(1, (0, 10), "a daemon of another version"))
        reported = channel.status(1).number
        while channel.status(1).number < reported + 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        link.leave()
    assert told == [
        "the job begins with an even split: with the ratio [10,0] a rank would have no samples"
    ]
    assert not own.check(["proposal/1"])


def test_the_store_listens_on_loopback_alone(tmp_path):
    channel = Channel.open("127.0.0.1", tmp_path / "endpoint.json")
    port = f"{read_endpoint(tmp_path / 'endpoint.json').port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port}")]
    assert listening == [f"0100007F:{port}"]
    assert not Path("/proc/net/tcp6").exists() or f":{port} " not in "".join(
        line for line in Path("/proc/net/tcp6").read_text().splitlines() if " 0A " in line
    )
    del channel


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("top",), 1, "no daemon answers"),
        (("serve", "--gpus", "x"), 2, "write 0-3 or 0,2"),
        (("serve", "--gpus", "0,0"), 2, "each once"),
        (("serve", "--period", "0s"), 2, "above 0"),
        (("serve", "--policy", "best"), 2, "invalid choice"),
        (("run", "missing.py"), 2, "missing.py"),
        (("run", "--ratios", "5,4", "train.py"), 2, "sum to 10"),
        (("run", "--memory", "much", "train.py"), 2, "much"),
        (("run", "--no-wait", "train.py"), 2, "say with --memory"),
        (("run", "--probe", "--alone-step", "1s", SCRIPT), 2, "leave one out"),
        (("run", "--max-slowdown", "2", "train.py"), 2, "write 2% for two percent"),
        (("serve", "--max-slowdown", "-1%"), 2, "--max-slowdown"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, code, complaint):
    from kilter.app.cli.main import main

    verb, *rest = arguments
    try:
        found = main(["share", verb, "--endpoint", str(tmp_path / "none.json"), *rest])
    except SystemExit as ended:
        found = ended.code
    assert found == code
    assert complaint in capsys.readouterr().err


def test_the_daemon_reads_the_meters_and_goes_on_with_a_broken_history(tmp_path):
    fake = FakeNvml.create(tmp_path / "cards.json", Card(), Card(memory_bytes=40 * 2**30))
    devices = [NvidiaDevice(card.uuid, nvml=fake) for card in fake.state().cards]
    file = tmp_path / "endpoint.json"
    (tmp_path / "endpoint.history.json").write_bytes(b"{")
    daemon = Daemon(file, (0, 1), "even", 1.0, devices=devices)
    seen, said = [], []

    def stop():
        seen.append(living(file)[1])
        fake.advance(1.0)
        return any(seen[-1].energy_j) or len(seen) > 100

    daemon.serve(stop, said=said.append)
    assert min(seen[-1].energy_j) > 0
    assert sum(seen[-1].energy_j) == pytest.approx(seen[-1].unshared_energy_j)
    assert 0 < seen[-1].free_bytes[1] <= 40 * 2**30
    assert "while no job was there" in table(seen[-1])
    assert "run-alone times are learned anew" in said[0]
    assert not file.exists()


def test_a_job_waits_for_memory_or_is_refused(monkeypatch, capsys):
    def summary(free):
        return Summary(1, 1, "even", 1.0, (0,), (0.0,), (), (), free_bytes=(free,))

    free = iter([2**30, 2**30, 2**35])
    monkeypatch.setattr(share_live, "_daemon", lambda args: summary(next(free)))
    monkeypatch.setattr(share_live.time, "sleep", lambda s: None)
    share_live._admit(argparse.Namespace(memory=2**34, no_wait=False))
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "the job waits: GPU 0 has 1.0 GiB free" in told[0]
    monkeypatch.setattr(share_live, "_daemon", lambda args: summary(0))
    with pytest.raises(NoDevice, match="without --no-wait"):
        share_live._admit(argparse.Namespace(memory=2**34, no_wait=True))
