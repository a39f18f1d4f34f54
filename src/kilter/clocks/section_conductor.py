"""The conductor of sections: a process beside the program's that sets clocks inside the iteration.

    python -P -m kilter.clocks.section_conductor CONNECTION MARKER

Started by `kilter.clocks.section_process` and by nobody else. The program's thread or its GPU's
stream moves the marker word; this process polls the word, and sends each command at its time after
the marker. It
holds the lease of the device, so that each low clock has a deadline: when this process dies, the
lease's watcher puts the clock back; when the program dies or hangs, this process does. In a dry run
the device is only read, if at all, and the log says what would have been set.

Between its commands this process looks for long waits (`plan/waits`): it reads the device's power
while an iteration is overdue, and holds a low clock for as long as the wait lasts.

Not to be confused with `clocks/conductor`, which runs the blocks of the search for the whole job.
"""

from __future__ import annotations

import math
import os
import select
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import IO, NamedTuple

import msgspec

from kilter.clocks.plan.timing import (
    NOTHING,
    Command,
    Commanded,
    CommandSchedule,
    CommandState,
    ScheduleArm,
)
from kilter.clocks.plan.waits import WaitPlan, WaitWatch
from kilter.core.errors import DeviceError, KilterError
from kilter.core.setting import Setting
from kilter.device.protocol import Device
from kilter.lease.beside import death_of, leave_program
from kilter.lease.lease import Lease
from kilter.observe.marker import MarkerReader

STEP_S = 0.002
"""How often the marker is looked at while there are commands to send. Where its time stands beside
it, a late look delays only the commands that are due at once."""
FINE_STEP_S = 0.0002
"""It is looked at this often about the time at which a marker without a time is expected."""
NEAR_SHARE = 0.05
"""So many lengths of an iteration, but at least two steps, are near to that time."""
IDLE_STEP_S = 0.05
"""How often the marker is looked at while there are no commands, and only long waits matter."""
WAIT_HOLD_S = 2.0
"""Deadline of the low clock of a wait, renewed while the wait lasts."""
WAIT_KEY = "wait"
"""It stands in the place of a section's key."""
UNSURE_S = 0.005
"""A marker whose time is less well known counts for nothing: this process had no processor."""
RATE_WINDOW_S = 1.0
MOST_LOG_BYTES = 1 << 28
"""A month of commands takes so much; what is sent later is not written down."""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the conductor, first: which device, and where the log goes."""

    log: str
    backend: str
    """It is `nvml` or `sim`, or empty: no device is opened."""
    sets: bool = True
    """It is False in a dry run, in which a device is only read."""
    device: str = ""
    """It is the UUID of the GPU, or the name of the simulated one."""
    program: int
    """It is the process id of the program."""


class Follow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the conductor: the commands from here on, and from later iterations on."""

    schedule: CommandSchedule
    arms: tuple[ScheduleArm, ...] = ()
    waits: WaitPlan | None = None
    """It is None if nothing is done about long waits."""


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the conductor, last."""


class ConductorReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the conductor: the device is there."""

    pid: int


class NoWaits(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the conductor: why nothing is done about long waits any more."""

    why: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the conductor, last: whether the found setting is back, and why it ended early."""

    restored: bool
    refused: str | None = None
    cpu_s: float | None = None
    """This process took so much processor time; None: it did not say."""


Orders = Begin | Follow | Stop
Answers = ConductorReady | NoWaits | Ended
_ORDERS = msgspec.json.Decoder(Orders)


class Setter:
    """Sets clocks under a lease; without one nothing is set (a dry run). Each call may raise
    `KilterError`, and the found clock is back then."""

    def __init__(self, lease: Lease | None) -> None:
        self._lease = lease
        self.sets = lease is not None

    def down(self, low: Setting, hold_s: float) -> None:
        """Low clocks, for at most so long."""
        if self._lease is not None:
            self._lease.set(low, hold_s=hold_s)

    def up(self) -> None:
        """The clock as found."""
        if self._lease is not None:
            self._lease.set(Setting())


class _Pending(NamedTuple):
    due_s: float
    iteration: int
    command: Command
    marker_s: float | None
    """`due_s` was reckoned from the marker at this time."""
    schedule: CommandSchedule


INTERVALS = 9
"""The time to the next marker is the median of so many times between markers."""


class SectionConductor:
    """When which command leaves: `follow` a schedule, tell it each marker (`passed`), and call
    `act` at `due_s`. An error of the setter leaves `act`, and nothing is sent any more."""

    def __init__(
        self,
        setter: Setter,
        record: Callable[[Commanded], None],
        clock: Callable[[], float] = time.monotonic,
        power: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`power` of the device now; None: it cannot be read, and is not asked for again."""
        self._setter = setter
        self._record = record
        self._clock = clock
        self._power: Callable[[], float | None] | None = power
        self._watch: WaitWatch | None = None
        self._schedule = NOTHING
        self._arms: tuple[ScheduleArm, ...] = ()
        self._pending: list[_Pending] = []
        """They are in order of their time."""
        self._last: tuple[int, float] | None = None
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._calls: deque[float] = deque()
        self._lowered = 1
        """The low clocks took so many calls, and putting them back takes as many."""
        self._low_until_s: float | None = None

    @property
    def low(self) -> bool:
        """A low clock was asked for, and not yet the found one."""
        return self._low_until_s is not None

    @property
    def due_s(self) -> float:
        """When `act` has something to do; infinite: not before the next marker."""
        due_s = self._pending[0].due_s if self._pending else math.inf
        if self._watch is not None:
            due_s = min(due_s, self._watch.due_s)
        return min(due_s, math.inf if self._low_until_s is None else self._low_until_s)

    @property
    def step_s(self) -> float:
        """How soon a marker without a time has to be looked at again."""
        if not self._coming:
            return STEP_S if self.low else IDLE_STEP_S
        if self._last is None:
            return STEP_S
        length_s = self._expected_s
        near_s = max(2 * STEP_S, NEAR_SHARE * length_s)
        away_s = self._last[1] + length_s - self._clock()
        return FINE_STEP_S if abs(away_s) <= near_s else STEP_S

    @property
    def _expected_s(self) -> float:
        """From the last marker to the next one."""
        if len(self._intervals) == INTERVALS:
            return statistics.median(self._intervals)
        planned = (self._schedule, *(arm.schedule for arm in self._arms))
        return max(schedule.iteration_s for schedule in planned)

    @property
    def idle(self) -> bool:
        """There is nothing to send, whatever the marker says."""
        return not self._coming and not self.low and self._watch is None

    @property
    def _coming(self) -> bool:
        """There are commands, now or from a later iteration on."""
        planned = (self._schedule, *(arm.schedule for arm in self._arms))
        return any(schedule.commands for schedule in planned)

    def follow(self, order: Follow) -> None:
        """From the next marker on, and the arms from their iterations on, in order. What is low is
        put back: the new schedule may not do so."""
        self._schedule, self._arms = order.schedule, order.arms
        self._drop("the schedule has changed")
        if self.low:
            self._put_back("the schedule has changed")
        if order.waits is None or self._power is None:
            self._watch = None
        elif self._watch is None:
            self._watch = WaitWatch(order.waits, acts=self._setter.sets)
        else:
            self._watch.plan = order.waits

    def passed(self, iteration: int, t_s: float, within_s: float = 0.0) -> None:
        """The marker of an iteration was passed at this time, or so much before or after it."""
        if self._watch is not None:
            if self._watch.low:
                self._put_back("the iteration is over")
            self._watch.passed(iteration, t_s)
        if within_s > UNSURE_S:
            return
        if self._last is not None and iteration == self._last[0] + 1:
            self._intervals.append(t_s - self._last[1])
        self._last = (iteration, t_s)
        ahead = [p for p in self._pending if p.iteration == iteration]
        self._pending = [p for p in self._pending if p.iteration != iteration]
        self._drop("the iteration was over before")
        while self._arms and self._arms[0].first <= iteration:
            self._schedule, self._arms = self._arms[0].schedule, self._arms[1:]
        next_s = t_s + self._expected_s
        for late in ahead:  # the marker came earlier than was expected
            self._send(late)
        self._plan(self._schedule, iteration, t_s, t_s, ahead=False)
        self._plan(self._after(iteration), iteration + 1, next_s, t_s, ahead=True)
        self._pending.sort(key=lambda p: p.due_s)

    def _plan(
        self, schedule: CommandSchedule, iteration: int, begin_s: float, t_s: float, *, ahead: bool
    ) -> None:
        """The commands of an iteration that leave after it has begun, or `ahead` of that."""
        for command in schedule.commands:
            if (command.at_s < 0.0) is ahead:
                due_s = begin_s + command.at_s
                self._pending.append(_Pending(due_s, iteration, command, t_s, schedule))

    def _after(self, iteration: int) -> CommandSchedule:
        """The schedule of the iteration that follows this one."""
        due = [arm.schedule for arm in self._arms if arm.first <= iteration + 1]
        return due[-1] if due else self._schedule

    def act(self) -> None:
        """Send what is due."""
        now_s = self._clock()
        while self._pending and self._pending[0].due_s <= now_s:
            self._send(self._pending.pop(0))
        if self._low_until_s is not None and self._clock() >= self._low_until_s:
            self._put_back("the deadline has passed")
        if self._watch is not None and self._watch.due_s <= self._clock():
            self._look_for_wait(self._watch)

    def _look_for_wait(self, watch: WaitWatch) -> None:
        """The iteration is overdue, or the clock is low for a wait."""
        now_s = self._clock()
        free = not (self.low or self._pending) and self._may_call(now_s, watch.plan.calls_per_s)
        if not (watch.low or free):
            watch.busy(now_s)
            return
        power_w = None if self._power is None else self._power()
        if power_w is None:
            if watch.low:
                self._put_back("the power cannot be read")
            self._watch = self._power = None
            return
        verdict = watch.read(now_s, power_w)
        if verdict == "up":
            self._put_back(f"{power_w:.0f} W: the wait is over")
        elif verdict == "down":
            self._wait(watch, f"{power_w:.0f} W: a wait")
        elif self._low_until_s is not None and self._low_until_s <= now_s + WAIT_HOLD_S / 2:
            self._hold_wait(watch.plan)

    def _wait(self, watch: WaitWatch, why: str) -> None:
        now_s, plan = self._clock(), watch.plan
        self._hold_wait(plan)
        iteration, marker_s = (-1, None) if watch.last is None else watch.last
        command = Command(
            edge="down",
            key=WAIT_KEY,
            sm_clock_hz=plan.sm_clock_hz,
            at_s=0.0,
            lead_s=0.0,
            hold_s=WAIT_HOLD_S,
        )
        self._note(_Pending(now_s, iteration, command, marker_s, NOTHING), now_s, why)

    def _hold_wait(self, plan: WaitPlan) -> None:
        """A low clock whose deadline begins anew. For a lease that has set it already this is no
        call to the device."""
        self._low_until_s = self._clock() + WAIT_HOLD_S
        self._setter.down(Setting(sm_clock_hz=plan.sm_clock_hz), WAIT_HOLD_S)

    def _drop(self, why: str) -> None:
        """Commands that can no longer come at their time: up at once, down not at all."""
        pending, self._pending = self._pending, []
        for each in pending:
            if each.command.edge == "up" and self.low:
                self._up(each, why)
            else:
                self._leave_out(each, why)

    def _send(self, pending: _Pending) -> None:
        command, now_s = pending.command, self._clock()
        if command.edge == "up":
            if self.low:
                self._up(pending, "")
            else:
                self._leave_out(pending, "the clock is as found already")
        elif now_s + command.lead_s >= self._next_up_s(pending):
            self._leave_out(pending, "too late to act before the clock is put back")
        elif not self._may_call(now_s, pending.schedule.calls_per_s, command.setting.calls):
            why = f"at most {pending.schedule.calls_per_s:g} calls per second"
            self._leave_out(pending, why)
        else:
            self._low_until_s = now_s + command.hold_s
            self._setter.down(command.setting, command.hold_s)
            self._note(pending, now_s, "")

    def _next_up_s(self, down: _Pending) -> float:
        """When the command leaves that puts this one's clock back."""
        at_s = (c.at_s for c in down.schedule.commands if c.edge == "up")
        length_s = min((s - down.command.at_s for s in at_s if s > down.command.at_s), default=0.0)
        return down.due_s + length_s

    def _may_call(self, now_s: float, calls_per_s: float, calls: int = 1) -> bool:
        """There is room for so many calls and for those that put the clocks back."""
        while self._calls and self._calls[0] <= now_s - RATE_WINDOW_S:
            self._calls.popleft()
        return len(self._calls) + 2 * calls <= calls_per_s * RATE_WINDOW_S

    def _up(self, pending: _Pending, why: str) -> None:
        now_s = self._clock()
        self._setter.up()
        self._low_until_s = None
        self._note(pending, now_s, why)

    def _put_back(self, why: str) -> None:
        """Without a command of the schedule."""
        now_s = self._clock()
        key = ""
        if self._watch is not None and self._watch.low:
            key = WAIT_KEY
        if self._watch is not None:
            self._watch.over(now_s)
        command = Command(edge="up", key=key, sm_clock_hz=None, at_s=0.0, lead_s=0.0, hold_s=0.0)
        self._up(_Pending(now_s, -1, command, None, NOTHING), why)

    def _note(self, pending: _Pending, now_s: float, why: str) -> None:
        if pending.command.edge == "down":
            self._lowered = pending.command.setting.calls
        self._calls.extend([now_s] * self._lowered)
        took_s = self._clock() - now_s if self._setter.sets else 0.0
        state: CommandState = "set" if self._setter.sets else "would set"
        self._record(_line(pending, now_s, state, why, took_s))

    def _leave_out(self, pending: _Pending, why: str) -> None:
        self._record(_line(pending, self._clock(), "left out", why, 0.0))


def _line(
    pending: _Pending, now_s: float, state: CommandState, why: str, took_s: float
) -> Commanded:
    command = pending.command
    return Commanded(
        t_s=now_s,
        iteration=pending.iteration,
        edge=command.edge,
        key=command.key,
        sm_clock_hz=command.sm_clock_hz,
        memory_clock_hz=command.memory_clock_hz,
        edge_s=now_s + command.lead_s,
        late_s=now_s - pending.due_s,
        took_s=took_s,
        marker_s=pending.marker_s,
        state=state,
        why=why,
    )


# The process.


def main(arguments: list[str]) -> None:
    """Run until the program stops this process, ends or dies."""
    connection, marker = (int(number) for number in arguments)
    if leave_program():
        return
    with socket.socket(fileno=connection) as program:
        serve(program, MarkerReader(marker))


def serve(program: socket.socket, marker: MarkerReader) -> None:
    """Take the device, conduct, put back."""
    lines = _Lines(program)
    begin = lines.first()
    if begin is None:
        return
    refused: str | None = None
    restored = True
    with ExitStack() as stack:
        lease: Lease | None = None
        try:
            log = stack.enter_context(open(begin.log, "ab", buffering=0))
            device = _opened(begin, lines)
            if device is not None:
                stack.callback(device.close)
            if device is not None and begin.sets:
                lease = Lease(device)
                lease.__enter__()
            lines.say(ConductorReady(pid=os.getpid()))
            conductor = SectionConductor(Setter(lease), _Log(log), power=_Power(device, lines))
            _conduct(conductor, lines, marker, begin.program)
        except (KilterError, OSError) as error:
            refused = str(error)
        finally:
            if lease is not None:
                outcome = lease.restore()
                restored = outcome.restored
                refused = refused or (None if restored else outcome.reason)
    lines.say(Ended(restored=restored, refused=refused, cpu_s=time.process_time()))


def _conduct(
    conductor: SectionConductor, lines: _Lines, marker: MarkerReader, program: int
) -> None:
    """Until the program says stop, closes the connection, or dies."""
    death = death_of(program)  # None: dead already, and the connection says so
    watched = [lines.number] if death is None else [lines.number, death]
    going = lines.waiting(conductor)
    while going:
        timeout_s = None
        if not conductor.idle:
            step_s = conductor.step_s
            if marker.tells_time:
                step_s = max(STEP_S, step_s)
            timeout_s = max(0.0, min(step_s, conductor.due_s - time.monotonic()))
        ready, _, _ = select.select(watched, [], [], timeout_s)
        if watched[0] in ready:
            going = lines.orders(conductor)
        if death in ready:
            going = False
        passed = marker.look()
        if passed is not None:
            conductor.passed(*passed)
        conductor.act()


class _Lines:
    """JSON, one message per line, over the connection to the program."""

    def __init__(self, program: socket.socket) -> None:
        self._program = program
        self._rest = b""
        self._waiting: list[Orders] = []
        """They came together with the first ones."""

    @property
    def number(self) -> int:
        return self._program.fileno()

    def first(self) -> Begin | None:
        """None if the program is gone."""
        self._waiting = self._read()
        order = self._waiting.pop(0) if self._waiting else None
        return order if isinstance(order, Begin) else None

    def orders(self, conductor: SectionConductor) -> bool:
        """Take what has come. False: it is over."""
        return self.obey(conductor, self._read())

    def waiting(self, conductor: SectionConductor) -> bool:
        """Take what had come before there was a conductor. False: it is over."""
        return not self._waiting or self.obey(conductor, self._waiting)

    @staticmethod
    def obey(conductor: SectionConductor, found: list[Orders]) -> bool:
        """False: it is over; so it is where nothing was found."""
        for order in found:
            if isinstance(order, Stop):
                return False
            if isinstance(order, Follow):
                conductor.follow(order)
        return bool(found)

    def say(self, answer: Answers) -> None:
        with suppress(OSError):  # the program is gone
            self._program.sendall(msgspec.json.encode(answer) + b"\n", socket.MSG_NOSIGNAL)

    def _read(self) -> list[Orders]:
        """Whole messages, at least one; none if the program has closed the connection."""
        while True:
            try:
                raw = self._program.recv(1 << 16)
            except ConnectionResetError:
                return []
            if not raw:
                return []
            *whole, self._rest = (self._rest + raw).split(b"\n")
            if whole:
                return [_ORDERS.decode(line) for line in whole]


def _opened(begin: Begin, lines: _Lines) -> Device | None:
    """None: no device is wanted, or a dry run cannot read it, which only long waits need."""
    try:
        return open_device(begin) if begin.backend else None
    except DeviceError as error:
        if begin.sets:
            raise
        lines.say(NoWaits(why=str(error)))
        return None


def open_device(begin: Begin) -> Device:
    """The device that the program named. Raises device errors."""
    if begin.backend == "sim":
        from kilter.device.sim.gpu import SimGpu
        from kilter.device.sim.profile import load_profile

        return SimGpu(load_profile(begin.device))
    from kilter.device.find import find

    return find("nvml", uuid=begin.device, environ=os.environ)


class _Power:
    """Reads the power of a device, and tells the program why it cannot be read."""

    def __init__(self, device: Device | None, lines: _Lines) -> None:
        self._device = device
        self._lines = lines

    def __call__(self) -> float | None:
        why = "this device tells no power"
        try:
            power_w = None if self._device is None else self._device.sample().power_w
        except DeviceError as error:
            power_w, why = None, str(error)
        if power_w is None:
            self._lines.say(NoWaits(why=why))
        return power_w


class _Log:
    """Lines at the end of a file. A disk that is full must not keep a clock low."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._left = MOST_LOG_BYTES

    def __call__(self, line: Commanded) -> None:
        raw = msgspec.json.encode(line) + b"\n"
        self._left -= len(raw)
        if self._left >= 0:
            with suppress(OSError):
                self._file.write(raw)


if __name__ == "__main__":
    main(sys.argv[1:])
