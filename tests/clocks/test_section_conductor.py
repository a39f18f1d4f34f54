"""The conductor of sections: when its commands leave, and that the found clock comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilter.clocks.plan.timing import NOTHING, Command, Commanded, CommandSchedule, ScheduleArm
from kilter.clocks.section_conductor import SectionConductor
from kilter.core.errors import Held
from kilter.testing.box import FOUND, TIMEOUT_S, Box

LOW_HZ = 1.2e9
T = 1.0
"""Length of an iteration."""


class Bench:
    """A conductor with a clock that the test moves, and a setter that only remembers."""

    sets = True

    def __init__(self, **schedule: float) -> None:
        self.now_s = 0.0
        self.log: list[Commanded] = []
        self.low = False
        self.calls: list[float] = []
        self.conductor = SectionConductor(self, self.log.append, lambda: self.now_s)
        self.conductor.follow(made(**schedule))

    def down(self, sm_clock_hz: float, hold_s: float) -> None:
        assert sm_clock_hz == LOW_HZ
        self.low = True
        self.calls.append(self.now_s)

    def up(self) -> None:
        self.low = False
        self.calls.append(self.now_s)

    def until(self, t_s: float) -> None:
        """Let time pass, and act whenever something is due."""
        while self.conductor.due_s <= t_s:
            self.now_s = max(self.now_s, self.conductor.due_s)
            self.conductor.act()
        self.now_s = t_s

    def mark(self, iteration: int, t_s: float) -> None:
        self.until(t_s)
        self.conductor.passed(iteration, t_s)
        self.conductor.act()

    def sent(self) -> list[tuple[str, int, float]]:
        return [(c.edge, c.iteration, round(c.t_s, 6)) for c in self.log if c.state != "left out"]


def made(
    down_s: float = 0.4, up_s: float = 0.7, hold_s: float = 0.9, calls_per_s: float = 10.0
) -> CommandSchedule:
    down = Command(
        edge="down",
        key="a",
        sm_clock_hz=LOW_HZ,
        at_s=down_s,
        lead_s=min(0.1, (up_s - down_s) / 2),
        hold_s=hold_s,
    )
    up = Command(edge="up", key="a", sm_clock_hz=None, at_s=up_s, lead_s=0.05, hold_s=0.0)
    return CommandSchedule(number=1, commands=(down, up), iteration_s=T, calls_per_s=calls_per_s)


def test_commands_leave_at_their_times_after_every_marker() -> None:
    bench = Bench()
    for i in range(3):
        bench.mark(i, i * T)
    bench.until(3 * T)
    assert bench.sent() == [
        (edge, i, i * T + at) for i in range(3) for edge, at in (("down", 0.4), ("up", 0.7))
    ]
    assert bench.log[0].edge_s == pytest.approx(0.5)
    assert not bench.low


def test_a_command_before_its_marker_leaves_in_the_iteration_before() -> None:
    bench = Bench(down_s=-0.05)
    bench.mark(0, 0.0)
    bench.until(0.96)
    assert bench.sent() == [("down", 1, 0.95)]
    bench.mark(1, 1.02)
    bench.until(1.8)
    assert ("up", 1, 1.72) in bench.sent()


def test_a_marker_that_comes_early_sends_at_once_what_belongs_before_it() -> None:
    bench = Bench(down_s=-0.05)
    bench.mark(0, 0.0)
    bench.mark(1, 0.9)
    assert bench.sent()[-1] == ("down", 1, 0.9)
    assert bench.low


def test_the_time_to_the_next_marker_is_learned() -> None:
    bench = Bench(down_s=-0.05)
    for i in range(10):
        bench.mark(i, i * 0.8)
    bench.until(9 * 0.8 + 0.76)
    assert bench.sent()[-1] == ("down", 10, 9 * 0.8 + 0.75)


def test_an_iteration_that_ends_early_puts_the_clock_back_at_once() -> None:
    bench = Bench()
    bench.mark(0, 0.0)
    bench.mark(1, 0.5)
    assert not bench.low
    assert bench.log[-1].why == "the iteration was over before"


def test_a_section_that_does_not_end_is_put_back_at_its_deadline() -> None:
    bench = Bench(up_s=50.0, hold_s=0.9)
    bench.mark(0, 0.0)
    bench.until(1.2)
    assert bench.low
    bench.until(1.31)
    assert not bench.low
    assert bench.log[-1].why == "the deadline has passed"


def test_calls_are_limited_and_never_leave_the_clock_low() -> None:
    bench = Bench(down_s=0.01, up_s=0.02, calls_per_s=4.0)
    for i in range(100):
        bench.mark(i, i * 0.05)
    bench.until(6.0)
    for call in bench.calls:
        assert sum(call <= other < call + 1.0 for other in bench.calls) <= 4
    assert {c.why for c in bench.log if c.state == "left out"} >= {"at most 4 calls per second"}
    assert not bench.low


def test_another_schedule_puts_the_clock_back() -> None:
    bench = Bench()
    bench.mark(0, 0.0)
    bench.until(0.5)
    assert bench.low
    bench.conductor.follow(NOTHING)
    assert not bench.low
    assert bench.conductor.idle


@pytest.mark.parametrize("down_s", [0.4, -0.05])
def test_arms_rule_from_their_iterations_on(down_s: float) -> None:
    bench = Bench()
    low = made(down_s=down_s)
    bench.conductor.follow(
        NOTHING, [ScheduleArm(first=2, schedule=low), ScheduleArm(first=4, schedule=NOTHING)]
    )
    assert not bench.conductor.idle
    for i in range(6):
        bench.mark(i, i * T)
    assert [(edge, i) for edge, i, _ in bench.sent()] == [
        ("down", 2),
        ("up", 2),
        ("down", 3),
        ("up", 3),
    ]
    assert bench.conductor.idle


@given(
    lengths=st.lists(st.floats(0.05, 3.0), min_size=1, max_size=40),
    down_s=st.floats(-0.3, 0.5),
    length_s=st.floats(0.05, 0.5),
    calls=st.floats(2.0, 20.0),
)
def test_whatever_the_iterations_do_no_low_clock_outlives_its_deadline(
    lengths: list[float], down_s: float, length_s: float, calls: float
) -> None:
    bench = Bench(down_s=down_s, up_s=down_s + length_s, hold_s=0.6, calls_per_s=calls)
    t_s = 0.0
    for i, taken_s in enumerate(lengths):
        bench.mark(i, t_s)
        t_s += taken_s
    bench.until(t_s + 5.0)  # as late as a command for the next iteration, and its deadline, may be
    assert not bench.low
    assert len(bench.calls) % 2 == 0
    for down, up in zip(bench.calls[::2], bench.calls[1::2], strict=True):
        assert up - down <= 0.6 + 1e-9


# Real processes that are really killed, on the fake card whose settings outlive them.

PROGRAM = """
import sys, os, time
from kilter.clocks.plan.timing import Command, CommandSchedule
from kilter.clocks.section_conductor import Begin, Ended, ConductorReady
from kilter.clocks.section_process import SectionProcess
from kilter.observe.marker import Marker

uuid, log, hold_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
marker = Marker()
process = SectionProcess(
    marker, Begin(log=log, backend="nvml", device=uuid, program=os.getpid())
)
while not (found := process.answers()):
    time.sleep(0.01)
print(found[0].pid if isinstance(found[0], ConductorReady) else found[0], flush=True)
down = Command(edge="down", key="a", sm_clock_hz=1.2e9, at_s=0.05, lead_s=0.0, hold_s=hold_s)
up = Command(edge="up", key="a", sm_clock_hz=None, at_s=600.0, lead_s=0.0, hold_s=0.0)
process.follow(CommandSchedule(number=1, commands=(down, up), iteration_s=1000.0, calls_per_s=10.0))
time.sleep(0.2)
marker.mark(1)
for line in sys.stdin:
    if line == "stop\\n":
        print(process.stop(), flush=True)
    elif line == "look\\n":
        print(process.answers(), flush=True)
"""


class Program:
    """A program whose conductor has a low clock in force."""

    def __init__(self, box: Box, *, hold_s: float) -> None:
        self.box = box
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, box.uuid, str(box.root / "log.jsonl"), str(hold_s)],
            env=box.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.conductor = int(self._process.stdout.readline())

    def until(self, reached: Callable[[], bool]) -> None:
        by_s = time.monotonic() + TIMEOUT_S
        while not reached():
            assert time.monotonic() < by_s, f"stands at {self.box.setting()}"
            time.sleep(0.01)

    def until_low(self) -> None:
        self.until(lambda: self.box.setting().sm_clock_hz == 1.2e9)

    def until_found(self) -> None:
        self.until(lambda: self.box.setting() == FOUND)

    def free(self) -> bool:
        """Nobody controls the card any more."""
        try:
            self.box.place.lock(patience_s=0.1).close()
        except Held:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def ask(self, text: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    box = Box(tmp_path)
    begun: list[Program] = []

    def begin(*, hold_s: float = 600.0) -> Program:
        begun.append(Program(box, hold_s=hold_s))
        return begun[-1]

    yield begin
    for program in begun:
        program.end()
        program.until(program.free)


def test_the_end_of_the_program_restores(programs: Callable[..., Program]) -> None:
    program = programs()
    program.until_low()
    assert "restored=True" in program.ask("stop")
    assert program.box.setting() == FOUND


@pytest.mark.parametrize("dead", [("program",), ("conductor",), ("program", "conductor")])
def test_a_kill_while_the_clock_is_low_restores(
    dead: tuple[str, ...], programs: Callable[..., Program]
) -> None:
    program = programs()
    program.until_low()
    if "program" in dead:
        program.kill()
    if "conductor" in dead:
        os.kill(program.conductor, signal.SIGKILL)
    program.until_found()
    program.until(program.free)
    assert program.box.setting() == FOUND


def test_a_kill_before_the_first_command_leaves_all_as_found(
    programs: Callable[..., Program],
) -> None:
    program = programs()
    os.kill(program.conductor, signal.SIGKILL)
    program.until(program.free)
    assert program.box.setting() == FOUND


def test_a_program_that_hangs_in_a_collective_is_restored_by_the_deadline(
    programs: Callable[..., Program],
) -> None:
    program = programs(hold_s=0.5)
    program.until_low()
    program.until_found()
    assert "Ended" not in program.ask("look")


def test_a_conductor_that_hangs_is_restored_by_the_watcher(
    programs: Callable[..., Program],
) -> None:
    program = programs(hold_s=1.0)
    program.until_low()
    os.kill(program.conductor, signal.SIGSTOP)
    try:
        program.until_found()
        assert program.box.setting() == FOUND
    finally:
        os.kill(program.conductor, signal.SIGCONT)


def test_a_conductor_that_dies_is_noticed(programs: Callable[..., Program]) -> None:
    program = programs()
    program.until_low()
    os.kill(program.conductor, signal.SIGKILL)
    program.until_found()
    assert "the conductor has died" in program.ask("look")
