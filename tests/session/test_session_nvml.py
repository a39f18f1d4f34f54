"""`kilter run --device nvml`, as a real process on cards that are a file: from the first set to the
last restore, however the process ends and whatever the driver does meanwhile.

The job is a torch loop on the CPU, unchanged. It goes on until the test has seen what it waits for,
and ends when the test takes its lamp away; nothing here waits for a fixed time.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kilter.app.report import build as report
from kilter.core.events import (
    AnyEvent,
    Block,
    Decided,
    Failed,
    Fitted,
    Moved,
    Operated,
    Refused,
    Sectioned,
    Started,
    Stopped,
    read_events,
)
from kilter.testing.fake_card import Card, Rule
from kilter.testing.fake_nvml import FakeNvml
from kilter.testing.warm_python import WarmPython, rank_environs

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the lease needs /proc, pidfd and flock as Linux has them"
)

KILTER = str(Path(sys.executable).with_name("kilter"))
PATIENCE_S = 900.0

# Sensors of 10 ms instead of 100 ms: blocks, and so the whole loop, are ten times as fast.
FASTER = """
import kilter.clocks.search_leader, kilter.device.nvidia
import kilter.session.live, kilter.session.options
kilter.device.nvidia.SENSOR_PERIOD_S = {9: 0.01}
kilter.clocks.search_leader.LEAST_BLOCK_S = 0.04
kilter.clocks.search_leader.SENSOR_PERIODS = 4
kilter.session.live.TICK_S = 0.01
kilter.session.options.REHEARSE_S = 0.1
"""

# The job is a loop on the CPU: what it would compute on is said here.
ON_ITS_GPU = """
import os, kilter.observe.iteration_clock as clock
uuids = {uuids!r}
clock.IterationClock.gpu_uuid = uuids[int(os.environ.get("LOCAL_RANK", "0"))]
"""

LOOP = """
import os, sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
print("begun", flush=True)
while os.path.exists("lamp"):
    time.sleep(0.002)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    steps += 1
print("steps", steps, flush=True)
"""


# Called as `python -c`: what has to be patched is patched before kilter starts.
START = """
import faster
from kilter.app.cli.main import main
raise SystemExit(main())
"""


@dataclass
class Box:
    """A directory with cards, a job, and what has become of it."""

    root: Path
    fake: FakeNvml
    warm: WarmPython
    pid: int = 0
    wait: Callable[[], int] = field(default=lambda: 0)
    """For the job's end, at most for `PATIENCE_S`: its exit code."""

    @property
    def run(self) -> Path:
        return self.root / "run"

    def start(
        self,
        source: str = LOOP,
        *flags: str,
        patch: str = "",
        cold: tuple[str, ...] | None = None,
        ranks: int = 1,
        **more: str,
    ) -> None:
        """`cold`: by an interpreter of its own, after these words of a command. `ranks`: one
        process each, as a torchrun that is not ours starts them."""
        uuids = [card.uuid.removeprefix("GPU-") for card in self.fake.state().cards]
        on_gpu = ON_ITS_GPU.format(uuids=uuids)
        (self.root / "job.py").write_text(source)
        (self.root / "lamp").touch()
        (self.root / "faster").mkdir()
        (self.root / "faster" / "faster.py").write_text(FASTER + on_gpu + patch)
        (self.root / "faster" / "sitecustomize.py").write_text("import faster")
        environ = self.fake.environ()
        environ["PYTHONPATH"] = f"{self.root / 'faster'}{os.pathsep}{environ['PYTHONPATH']}"
        environ |= {"KILTER_STATE_DIR": str(self.root / "state"), "OMP_NUM_THREADS": "1"}
        environ.pop("KILTER_READ_ONLY", None)
        environ |= more
        arguments = ["run", "--device", "nvml", "--max-slowdown", "50%", "--out", str(self.run)]
        arguments += [*flags, "job.py"]
        with (
            open(os.devnull, "rb") as nothing,
            (self.root / "stdout").open("wb") as out,
            (self.root / "stderr").open("wb") as err,
        ):
            if cold is None:
                jobs = [
                    self.warm.start(
                        ["-c", START, *arguments],
                        cwd=self.root,
                        environ=environ | place,
                        streams=(nothing, out, err),
                    )
                    for place in ([{}] if ranks == 1 else rank_environs(ranks))
                ]
                self.pid = jobs[0].pid
                self.wait = lambda: max(job.wait(PATIENCE_S).returncode for job in jobs)
                return
            process = subprocess.Popen(
                [*cold, KILTER, *arguments], cwd=self.root, env=environ, stdout=out, stderr=err
            )
            self.pid, self.wait = process.pid, lambda: process.wait(PATIENCE_S)

    def lives(self) -> bool:
        try:
            return Path("/proc", str(self.pid), "stat").read_text().rpartition(") ")[2][0] != "Z"
        except OSError:
            return False

    def wait_for(self, what: Callable[[], object]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not what():
            assert time.monotonic() < end, self.end()
            assert self.lives(), self.end()
            time.sleep(0.02)

    def end(self) -> tuple[int, str, str]:
        """Take the lamp away; exit code, standard output, standard error."""
        (self.root / "lamp").unlink(missing_ok=True)
        code, self.pid = self.wait(), 0
        return code, (self.root / "stdout").read_text(), (self.root / "stderr").read_text()

    def events(self, rank: int = 0) -> list[AnyEvent]:
        file = self.run / f"events-rank{rank}.jsonl"
        return list(read_events(file)) if file.exists() and file.stat().st_size else []

    def of(self, kind: type[Any], rank: int = 0) -> list[Any]:
        return [event for event in self.events(rank) if isinstance(event, kind)]

    def locked(self, card: int = 0) -> bool:
        """Whether the card is set to anything else than it was."""
        now = self.fake.state().cards[card]
        limited = now.limit_mw not in (None, now.default_limit_mw)
        return now.sm_lock_mhz is not None or now.memory_lock_mhz is not None or limited

    def wait_for_restore(self, card: int = 0) -> None:
        """By the watcher, after the death of the job."""
        end = time.monotonic() + PATIENCE_S
        while self.locked(card):
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def box(warm: WarmPython, tmp_path: Path) -> Iterator[Box]:
    with make_box(warm, tmp_path, card()) as made:
        yield made


def card(**more: Any) -> Card:
    """One knob is enough here: the SM clock."""
    one = {"memory_clocks_mhz": (3201,), "power_limits_mw": (695_000, 700_000)}
    return Card(load=0.9, **(one | more))


@contextmanager
def make_box(warm: WarmPython, root: Path, *cards: Card) -> Iterator[Box]:
    made = Box(root, FakeNvml.create(root / "cards.json", *cards, virtual_time=False), warm)
    try:
        yield made
    finally:
        if made.pid and made.lives():
            os.kill(made.pid, signal.SIGKILL)
            made.wait()


def holding(box: Box) -> bool:
    return any(d.state == "hold" for d in box.of(Decided))


def blocks(box: Box, count: int) -> Callable[[], bool]:
    return lambda: len(box.of(Block)) >= count


def refusals(box: Box, rank: int = 0) -> dict[str, str]:
    return {refused.what: refused.reason for refused in box.of(Refused, rank)}


def test_what_was_held_is_told_and_the_card_is_left_as_found(box: Box) -> None:
    box.start()
    box.wait_for(lambda: holding(box))
    code, out, err = box.end()
    assert code == 0, err
    assert out.startswith("begun\nsteps ")
    assert not box.locked()
    assert box.fake.setters()
    stopped = box.of(Stopped)[-1]
    assert stopped.restored
    assert stopped.outcome == "finished"
    assert box.of(Failed) == box.of(Refused) == []
    said = report.build(box.run)
    if said.choice.setting != said.found:
        assert f"held {said.choice.setting}" in err
    assert "restored" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_the_watcher_restores_after_a_death(box: Box, number: signal.Signals) -> None:
    box.start()
    box.wait_for(box.locked)
    os.kill(box.pid, number)
    code, _, err = box.end()
    assert code == -number
    assert "Traceback" not in err
    box.wait_for_restore()
    assert box.of(Started)
    assert report.build(box.run).restored is None


@pytest.mark.parametrize(
    ("how", "code", "outcome"),
    [("sys.exit(3)", 3, "exit 3"), ("raise ValueError('mine')", 1, "raised ValueError")],
)
def test_the_job_ends_in_its_own_way(box: Box, how: str, code: int, outcome: str) -> None:
    box.start(LOOP + how)
    box.wait_for(box.locked)
    returned, out, err = box.end()
    assert returned == code
    assert "steps" in out
    assert ("ValueError: mine" in err) == (code == 1)
    assert not box.locked()
    assert box.of(Stopped)[-1].outcome == outcome
    assert box.of(Failed) == []


@pytest.mark.parametrize(
    ("cards", "flags", "environ", "told"),
    [
        ({"permitted": False}, (), {}, "not permitted"),
        ({"mig": True}, (), {}, "MIG"),
        ({}, (), {"KILTER_READ_ONLY": "1"}, "KILTER_READ_ONLY"),
        ({}, ("--dry-run",), {}, "--dry-run"),
    ],
    ids=["no permission", "MIG", "read only", "dry run"],
)
def test_where_nothing_may_be_set_nothing_is_and_the_reason_is_told(
    box: Box, cards: dict[str, bool], flags: tuple[str, ...], environ: dict[str, str], told: str
) -> None:
    with box.fake.edit() as state:
        state.permitted = cards.get("permitted", True)
        state.cards[0].mig = cards.get("mig", False)
    box.start(LOOP, *flags, **environ)
    box.wait_for(blocks(box, 4))
    code, _, err = box.end()
    assert code == 0
    assert box.fake.setters() == []
    started = box.of(Started)[0]
    assert told in (started.mode_reason or "")
    assert told in err
    assert started.mode == "shadow"
    # What the user asked for with --dry-run is no refusal.
    assert ("setting clocks" in refusals(box)) == ("--dry-run" not in flags)
    assert {block.arm for block in box.of(Block)} == {"baseline"}
    assert box.of(Failed) == []


def test_a_card_that_the_program_does_not_compute_on_is_left_alone(box: Box) -> None:
    """The script chose another GPU than the first: that one may be somebody else's."""
    other = "0123abcd-1111-2222-3333-444455556666"
    box.start(
        patch=f"import kilter.observe.iteration_clock as m\nm.IterationClock.gpu_uuid = {other!r}\n"
    )
    box.wait_for(blocks(box, 4))
    code, _, err = box.end()
    assert code == 0, err
    assert box.fake.setters() == []
    assert other in refusals(box)["watching the program's GPU"]
    assert "CUDA_VISIBLE_DEVICES" in err


def test_a_program_that_computes_on_no_card_leaves_all_alone(box: Box) -> None:
    box.start(patch="kilter.observe.iteration_clock.IterationClock.gpu_uuid = None\n")
    box.wait_for(blocks(box, 4))
    code, _, err = box.end()
    assert code == 0, err
    assert box.fake.setters() == []
    assert "no GPU" in refusals(box)["watching the program's GPU"]
    assert "the program computes on no GPU" in err


def test_the_card_that_the_program_computes_on_is_governed(box: Box) -> None:
    uuid = box.fake.state().cards[0].uuid.removeprefix("GPU-").upper()
    box.start(
        patch=f"import kilter.observe.iteration_clock as m\nm.IterationClock.gpu_uuid = {uuid!r}\n"
    )
    box.wait_for(box.locked)
    assert box.end()[0] == 0
    assert refusals(box) == {}


def test_a_limit_that_can_be_read_and_not_set_is_no_reason_to_refuse(box: Box) -> None:
    with box.fake.edit() as state:
        state.cards[0].power_limits_mw = (700_000, 700_000)
    box.start()
    box.wait_for(box.locked)
    code, _, err = box.end()
    assert code == 0, err
    assert box.of(Refused) == []
    assert not box.locked()


IMPATIENT = """
kilter.device.nvidia.NvidiaDevice.__init__.__kwdefaults__["timeout_s"] = 2.0
"""


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        (Rule(call="nvmlDeviceSet*", skip=3, times=1, error=4), ""),
        (Rule(call="nvmlDevice*", error=15), ""),
        (Rule(call="nvmlDevice*", hang_s=6.0), "did not return"),
    ],
    ids=["refused", "lost", "hangs"],
)
def test_trouble_in_the_middle_ends_the_setting_and_not_the_job(
    box: Box, rule: Rule, told: str
) -> None:
    box.start(patch=IMPATIENT if rule.hang_s else "")
    box.wait_for(box.locked)
    with box.fake.edit() as state:
        state.rules.append(rule)
    box.wait_for(lambda: "setting clocks" in refusals(box))
    seen = len(box.of(Block))
    box.wait_for(blocks(box, seen + 3))  # it goes on looking
    set_by_then = len(box.fake.setters())
    with box.fake.edit() as state:
        state.rules.clear()
    code, out, err = box.end()
    assert (code, "steps" in out) == (0, True), err
    assert told in refusals(box)["setting clocks"]
    assert {block.arm for block in box.of(Block)[seen + 1 :]} == {"baseline"}
    assert len(box.of(Stopped)) == 1
    assert box.of(Failed) == []
    assert len(box.fake.setters()) >= set_by_then
    assert "the default stands: " in err
    box.wait_for_restore()


FULL = """
import errno, os
write = os.write
def write_little(file, data):
    size = os.fstat(file).st_size
    if os.readlink(f"/proc/self/fd/{file}").endswith(".jsonl") and size + len(data) > 6000:
        if size == 6000:
            raise OSError(errno.ENOSPC, "No space left on device")
        data = data[:6000 - size]
    return write(file, data)
os.write = write_little
"""


def test_a_disk_that_fills_up_ends_the_governing_and_not_the_job(box: Box) -> None:
    box.start(patch=FULL)
    file = box.run / "events-rank0.jsonl"
    box.wait_for(lambda: file.exists() and file.stat().st_size == 6000)
    code, out, err = box.end()
    assert (code, "steps" in out) == (0, True), err
    assert "Traceback" not in err
    # the latter where a whole line had just filled the disk
    assert len(re.findall("the disk is full|No space left on device", err)) == 1, err
    assert not box.locked()
    assert box.events()


@pytest.mark.parametrize("name", ["trace.json", "plan.json", "report.html"])
def test_a_disk_without_room_for_a_file_at_the_end_still_restores(box: Box, name: str) -> None:
    full = f"""
import errno, os
replace = os.replace
def full(source, target):
    if str(target).endswith({name!r}):
        raise OSError(errno.ENOSPC, "No space left on device")
    return replace(source, target)
os.replace = full
"""
    box.start(LOOP, "--trace", patch=full)
    # Without a setting in force there is no plan to be written.
    box.wait_for(lambda: holding(box) if name == "plan.json" else box.locked())
    code, out, err = box.end()
    assert (code, "steps" in out) == (0, True), err
    assert "Traceback" not in err
    assert f"{name}: cannot be written (No space left on device)" in err
    assert not box.locked()
    assert not list(box.run.glob(".*")), "a half-written file was left"
    assert box.of(Stopped)[-1].restored


TWO = (
    LOOP.replace("torch.manual_seed(0)", "torch.distributed.init_process_group('gloo')")
    .replace(
        "    steps += 1",
        """    steps += 1
    on = torch.tensor(float(os.path.exists("lamp")))
    torch.distributed.all_reduce(on, torch.distributed.ReduceOp.MIN)
    if not on:
        break""",
    )
    .replace('while os.path.exists("lamp")', "while True")
)


def test_two_ranks_set_both_cards_alike_and_write_one_report(
    warm: WarmPython, tmp_path: Path
) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(TWO, ranks=2)
        box.wait_for(lambda: len(box.of(Block)) >= 12)
        code, _, err = box.end()
        assert code == 0, err
        assert not box.locked(0)
        assert not box.locked(1)
        asked = [
            [
                call.arguments
                for call in box.fake.calls("nvmlDeviceSetGpuLockedClocks")
                if call.card == number
            ]
            for number in (0, 1)
        ]
        assert asked[0]
        both = min(map(len, asked))  # at the end one may already have been asked for the next
        assert asked[0][:both] == asked[1][:both]
        assert max(map(len, asked)) - both <= 1
        assert box.of(Block, 1) == []
        assert [box.of(Stopped, rank)[-1].restored for rank in (0, 1)] == [True, True]
        assert box.of(Failed) == box.of(Failed, 1) == []
        assert err.count("report: ") == 1
        assert report.build(box.run).restored
        told = ("no result: the run ended", "the default stands")  # how far it got; a verdict
        assert any(words in err for words in told) or holding(box)
        # Before all that, one window has shown that the job's sections are too short for a clock.
        for rank in (0, 1):
            last = box.of(Sectioned, rank)[-1]
            assert (last.windows, last.planned, last.commands) == (1, False, 0)
            assert last.instead is not None
        assert "kilter: sections: rank " in err
        assert "Nothing to gain: " in err
        assert "One clock for the whole job instead: 0.0 % expected of the sections, " in err
        assert "[simulated; exposed: measured]" in err


LATE = TWO.replace(
    "    time.sleep(0.002)\n",
    """    until = time.monotonic() + (0.3 if os.environ["RANK"] == "1" else 0.002)
    while time.monotonic() < until:
        torch.mm(matrix, matrix)
""",
).replace("steps = 0\n", "steps = 0\nmatrix = torch.eye(256)\n")
"""Rank 0 waits in every iteration for rank 1, which computes."""


def test_the_sections_of_a_rank_that_waits_are_lowered_in_place_of_the_whole_job(
    warm: WarmPython, tmp_path: Path
) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(LATE, "--max-slowdown", "1%", ranks=2)
        box.wait_for(lambda: box.locked(0))
        code, _, err = box.end()
        assert code == 0, err
        assert not box.locked(0)
        assert {call.card for call in box.fake.setters()} == {0}
        assert box.of(Block) == box.of(Block, 1) == []
        assert box.of(Failed) == box.of(Failed, 1) == []
        last = box.of(Sectioned)[-1]
        assert (last.instead, last.planned, last.restored) == (None, True, True)
        assert "the default stood" in err  # the search has only begun
        assert "the found clock is back" in err


PIPELINE = """
import os
import torch, torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank = dist.get_rank()
module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(1 + 2 * rank)))
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, 2, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
while True:
    if rank == 0:
        schedule.step(torch.ones(4, 8))
    else:
        schedule.step(target=torch.ones(4, 8))
    optimizer.step()
    optimizer.zero_grad()
    on = torch.tensor(float(os.path.exists("lamp")))
    dist.all_reduce(on, dist.ReduceOp.MIN)
    if not on:
        break
"""


def test_the_stages_of_a_pipeline_are_tried_one_after_the_other(
    warm: WarmPython, tmp_path: Path
) -> None:
    """Each has its own slack: while one is tried, the other one's card is as it was found."""
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(PIPELINE, ranks=2)
        box.wait_for(lambda: len(box.fake.setters()) >= 5)
        code, _, err = box.end()
        assert code == 0, err
        held: set[int] = set()
        for call in box.fake.setters()[:5]:  # a candidate may also be given up at once
            (held.discard if call.name.startswith("nvmlDeviceReset") else held.add)(call.card)
            assert len(held) <= 1
        assert not box.locked(0)
        assert not box.locked(1)
        assert box.of(Failed) == box.of(Failed, 1) == []


LONG_GAP = """
import os, time
import torch

matrix = torch.eye(512)

class Busy(torch.nn.Linear):
    def forward(self, x):
        until_s = time.monotonic() + 0.1
        while time.monotonic() < until_s:
            torch.mm(matrix, matrix)
        return super().forward(x)

model = Busy(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while os.path.exists("lamp"):
    time.sleep(0.6)
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
"""


def test_a_death_while_the_clocks_of_operations_are_low_is_put_back(
    warm: WarmPython, tmp_path: Path
) -> None:
    """The program alone is killed: its conductor puts both clocks back, and ends."""
    early = "import kilter.observe.trace_source as source; source.OPENS_AT = 3"
    two = card(name="NVIDIA GeForce RTX 3080 Ti", memory_clocks_mhz=(5001, 9501))
    with make_box(warm, tmp_path, two) as box:
        box.start(LONG_GAP, "--operations", "--max-slowdown", "2%", patch=early)

        def both_low() -> bool:
            (now,) = box.fake.state().cards
            return now.sm_lock_mhz is not None and now.memory_lock_mhz is not None

        box.wait_for(both_low)
        os.kill(box.pid, signal.SIGKILL)
        code, _, err = box.end()
        assert code == -signal.SIGKILL
        assert "Traceback" not in err
        box.wait_for_restore()
        told = box.of(Operated)[-1]
        assert (told.sets, told.planned, told.instead) == (True, True, None)
        assert report.build(box.run).restored is None


def test_sections_can_be_declined(warm: WarmPython, tmp_path: Path) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(TWO, "--no-sections", ranks=2)
        box.wait_for(lambda: box.of(Block))
        code, _, err = box.end()
        assert code == 0, err
        assert box.of(Sectioned) == box.of(Sectioned, 1) == []
        assert "kilter: sections" not in err


PAUSING = """
import kilter.clocks.plan.pauses as pauses
pauses.LONG_PAUSE_S, pauses.RETURNS_WAITED = 0.3, 1.0
"""
PAUSES = LOOP.replace(
    "    time.sleep(0.002)\n",
    """    time.sleep(0.002)
    while os.path.exists("pause" + os.environ.get("LOCAL_RANK", "")) and os.path.exists("lamp"):
        time.sleep(0.01)
""",
)
AWAKE = 0.004
"""The load of a card that is idle for its sensors, and keeps its clock up."""


def pause(box: Box, rank: int = 0, name: str = "pause") -> None:
    """The program computes on its CPU, until the card is at its lowest clock."""
    (box.root / name).touch()
    with box.fake.edit() as state:
        state.cards[rank].load = AWAKE
    box.wait_for(lambda: box.fake.state().cards[rank].sm_lock_mhz == (345, 345))


def go_on(box: Box, rank: int = 0, name: str = "pause") -> None:
    with box.fake.edit() as state:
        state.cards[rank].load = 0.9
    (box.root / name).unlink()
    box.wait_for(lambda: box.fake.state().cards[rank].sm_lock_mhz != (345, 345))


def test_a_pause_is_spent_at_the_lowest_clock_and_the_search_goes_on(box: Box) -> None:
    box.start(PAUSES, patch=PAUSING)
    box.wait_for(blocks(box, 8))
    pause(box)
    go_on(box)
    seen = len(box.of(Block))
    box.wait_for(blocks(box, seen + 3))
    code, _, err = box.end()
    assert code == 0, err
    assert "the idle GPU went to 345 MHz in 1 long pause" in err
    assert not box.locked()
    assert box.of(Stopped)[-1].restored
    assert box.of(Failed) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_the_watcher_restores_after_a_death_in_a_pause(box: Box, number: signal.Signals) -> None:
    box.start(PAUSES, patch=PAUSING)
    box.wait_for(blocks(box, 8))
    pause(box)
    os.kill(box.pid, number)
    assert box.end()[0] == -number
    box.wait_for_restore()


def test_a_job_that_ends_in_a_pause_leaves_the_card_as_found(box: Box) -> None:
    box.start(PAUSES, patch=PAUSING)
    box.wait_for(blocks(box, 8))
    pause(box)
    code, _, err = box.end()
    assert code == 0, err
    assert not box.locked()
    assert box.of(Stopped)[-1].restored
    assert box.of(Failed) == box.of(Refused) == []


def test_trouble_in_a_pause_ends_the_setting_and_not_the_job(box: Box) -> None:
    box.start(PAUSES, patch=PAUSING)
    box.wait_for(blocks(box, 8))
    pause(box)
    with box.fake.edit() as state:
        refusal = box.fake.NVML_ERROR_NO_PERMISSION
        rule = Rule(call="nvmlDevice*GpuLockedClocks", error=refusal, times=1)
        state.rules.append(rule)
        state.cards[0].load = 0.9
    box.wait_for(lambda: not box.locked())
    (box.root / "pause").unlink()
    code, out, err = box.end()
    assert code == 0, err
    assert out.startswith("begun\nsteps ")
    assert box.of(Failed) == []
    assert "setting clocks" in refusals(box)


def test_ranks_lower_their_own_cards_in_a_pause_of_all(warm: WarmPython, tmp_path: Path) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        waits = """    while os.path.exists("pause") and os.path.exists("lamp"):
        time.sleep(0.01)
    model("""
        job = TWO.replace("    model(", waits, 1)
        box.start(job, patch=PAUSING, ranks=2)
        box.wait_for(blocks(box, 8))
        (box.root / "pause").touch()
        with box.fake.edit() as state:
            for each in state.cards:
                each.load = AWAKE
        box.wait_for(lambda: all(each.sm_lock_mhz == (345, 345) for each in box.fake.state().cards))
        with box.fake.edit() as state:
            for each in state.cards:
                each.load = 0.9
        (box.root / "pause").unlink()
        seen = len(box.of(Block))
        box.wait_for(blocks(box, seen + 3))
        code, _, err = box.end()
        assert code == 0, err
        assert not box.locked(0)
        assert not box.locked(1)
        assert box.of(Failed) == box.of(Failed, 1) == []


SPAWNED = """
import os, socket, time
import torch

def work(rank, port):
    where = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    with open(f"pid{rank}", "w") as file:
        file.write(str(os.getpid()))
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    on = torch.ones(())
    while on:
        time.sleep(0.002)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        on = torch.tensor(float(os.path.exists("lamp")))
        torch.distributed.all_reduce(on, torch.distributed.ReduceOp.MIN)

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port,), nprocs=2)
    print("over")
"""
# With one import of torch for both.
FORKED_BY_A_SERVER = SPAWNED.replace(
    "torch.multiprocessing.spawn(work, (port,), nprocs=2)",
    """from kilter.testing.warm_python import PRELOADED
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    torch.multiprocessing.start_processes(work, (port,), nprocs=2, start_method="forkserver")""",
)

# A child of `torch.multiprocessing` computes on the card of its number.
ON_ITS_NUMBER = """
from multiprocessing import process
def own(self):
    arguments = process.current_process()._args
    return uuids[arguments[1] if arguments else 0]
clock.IterationClock.gpu_uuid = property(own)
"""


def test_spawned_ranks_are_governed_as_one_job_and_write_one_report(
    warm: WarmPython, tmp_path: Path
) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(SPAWNED, patch=ON_ITS_NUMBER)
        box.wait_for(lambda: box.locked(0) and box.locked(1))
        code, out, err = box.end()
        assert code == 0, err
        assert out.splitlines()[-1] == "over"
        assert not box.locked(0)
        assert not box.locked(1)
        started = [box.of(Started, rank)[0] for rank in (0, 1)]
        assert [(s.rank, s.world_size) for s in started] == [(0, 2), (1, 2)]
        assert len({s.device.uuid for s in started}) == 2
        assert box.of(Block)
        assert box.of(Block, 1) == []
        stopped = [box.of(Stopped, rank)[-1] for rank in (0, 1)]
        assert [stop.restored for stop in stopped] == [True, True]
        assert box.of(Failed) == box.of(Failed, 1) == []
        assert err.count("report: ") == 1
        assert err.count("the script trains in 2 processes") == 1
        assert "no iteration seen" not in err
        said = report.build(box.run)
        assert said.restored
        energies = [stop.energy_j for stop in stopped]
        assert said.energy_j == sum(energies), "that of the launcher's own sensors is not counted"


def test_a_spawned_rank_that_is_killed_ends_the_job_as_ever_and_leaves_the_cards_as_found(
    warm: WarmPython, tmp_path: Path
) -> None:
    with make_box(warm, tmp_path, card(), card()) as box:
        box.start(FORKED_BY_A_SERVER, patch=ON_ITS_NUMBER)
        box.wait_for(lambda: box.locked(0) and box.locked(1))
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGKILL)
        code = box.wait()
        box.pid = 0
        err = (tmp_path / "stderr").read_text()
        assert code == 1
        # Whichever of the two its launcher looks at first.
        assert "torch.multiprocessing.spawn.Process" in err
        assert (box.run / "report.json").exists()
        box.wait_for_restore(0)
        box.wait_for_restore(1)
        assert report.build(box.run).restored is None


# --- memory beside clocks ------------------------------------------------------------------------

# The job's data lie in the CPU's memory, so that is what is governed.
ON_CPU = """
import kilter.memory.first_tensor
def large(self, tensor):
    self.device_type = "cpu"
    return tensor.numel() * tensor.element_size() >= 2**20 and not tensor.is_leaf
kilter.memory.first_tensor.FirstTensor._governs = large
"""

LARGE_LOOP = LOOP.replace(
    "torch.nn.Linear(8, 8)",
    "torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())"
    " for _ in range(4)))",
).replace("torch.ones(4, 8)", "torch.ones(4096, 64)")


def test_clocks_are_judged_once_the_memory_plan_is_in_force(box: Box) -> None:
    box.start(LARGE_LOOP, "--memory-budget", "5MiB", patch=ON_CPU)
    box.wait_for(lambda: len(box.of(Block)) > 3 and box.locked())
    code, _, said = box.end()
    assert code == 0
    (plan, *_) = box.of(Fitted)
    first = min(block.t_s - block.iterations * block.iteration_s for block in box.of(Block))
    assert plan.t_s < first
    moved = box.of(Moved)[-1]
    assert moved.planned > 3
    assert moved.peak_bytes <= moved.budget_bytes
    assert not box.of(Failed)
    assert not box.locked()
    assert "fitting and governing" in said
    assert "memory: peak" in said
    assert "restored" in said


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a pid namespace"
)
def test_a_start_in_a_container_says_that_the_watcher_dies_with_it(box: Box) -> None:
    from kilter.testing.box import CONTAINER

    box.start(cold=CONTAINER)
    box.wait_for(blocks(box, 1))
    code, _, err = box.end()
    assert code == 0
    assert "both are in one container; kilter daemon on the host outlives both" in err
