"""The program's end of the conductor of sections: starts its process, and talks to it.

No call waits for the other process, but for `stop`. What the program closes is not ours any more
(`core/own_file`), and then the conductor takes the program for ended.
"""

from __future__ import annotations

import io
import os
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilter.clocks.plan.sections import places
from kilter.clocks.plan.timing import (
    NOTHING,
    Commanded,
    CommandSchedule,
    ScheduleArm,
    differences,
    edge_errors,
    edges,
)
from kilter.clocks.plan.waits import WaitPlan
from kilter.clocks.section_conductor import (
    WAIT_KEY,
    Answers,
    Begin,
    Ended,
    Follow,
    NoWaits,
    Orders,
    Stop,
)
from kilter.controller import Run
from kilter.core.errors import DeviceError
from kilter.core.own_file import OwnFile, OwnStream
from kilter.core.rank_trace import RankTrace
from kilter.device.own_socket import as_socket
from kilter.lease.beside import start_beside
from kilter.observe.marker import Marker

START_S = 60.0
STOP_S = 5.0
"""How long the end of the program waits for the found clock; the watcher does not give up then."""
RECENT = 1000
"""So many commands are kept to be held against the next window."""
_COMMANDED = msgspec.json.Decoder(Commanded)
_ANSWERS = msgspec.json.Decoder(Answers)


class SectionProcess:
    """One conductor (`lease/beside`)."""

    def __init__(self, marker: Marker, begin: Begin) -> None:
        """Raises `DeviceError` if it cannot be started."""
        self._rest = b""
        module, handles = "kilter.clocks.section_conductor", [marker.file.number]
        try:
            self._connection = start_beside(module, (), handles, timeout_s=START_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DeviceError(f"no conductor could be started: {error}") from error
        self.say(begin)

    def answers(self) -> list[Answers]:
        """What has come since the last call. The end of the connection is an `Ended`, too."""
        raw = b""
        try:
            with as_socket(self._connection) as connection:
                raw = connection.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            pass
        if not raw:
            return [Ended(restored=False, refused="the conductor has died")]
        *whole, self._rest = (self._rest + raw).split(b"\n")
        return [_ANSWERS.decode(line) for line in whole]

    def stop(self) -> Ended:
        self.say(Stop())
        by_s = time.monotonic() + STOP_S
        while time.monotonic() < by_s:
            for answer in self.answers():
                if isinstance(answer, Ended):
                    self._connection.close()
                    return answer
            time.sleep(0.002)
        self._connection.close()
        return Ended(restored=False, refused=f"the conductor does not answer for {STOP_S:g} s")

    def say(self, order: Orders) -> None:
        """A conductor that is gone says so by its end of the connection."""
        try:
            with as_socket(self._connection) as connection:
                connection.send(msgspec.json.encode(order) + b"\n", socket.MSG_NOSIGNAL)
        except OSError:
            return


class Conducting:
    """The conductor of one run: what it is told, what it has written down, and how far its
    commands were from the real edges. Its log is `commands-rank<k>.jsonl`; the edges that windows
    of the profiler have seen go to `edges-rank<k>.jsonl`."""

    def __init__(self, run: Run, marker: Marker, profile: str) -> None:
        """Raises `DeviceError` if the process cannot be started."""
        self._run = run
        directory, rank = run.files.directory, run.ranks.rank
        self._edges_path = directory / f"edges-rank{rank}.jsonl"
        self._log = CommandLog(directory / f"commands-rank{rank}.jsonl")
        self._schedule: CommandSchedule | None = None
        self._off: list[float] = []
        self.sets = run.info.can_set and not run.dry_run
        self.restored: bool | None = None
        """It says at the end whether what was found is back."""
        self.cpu_s: float | None = None
        """At the end, the conductor has taken so much processor time."""
        simulated = run.info.backend == "sim"
        self._process: SectionProcess | None = SectionProcess(
            marker,
            Begin(
                log=str(self._log.path),
                backend=run.info.backend if self.sets or run.info.backend == "nvml" else "",
                sets=self.sets,
                device=profile if simulated else run.info.uuid,
                program=os.getpid(),
            ),
        )

    def follow(
        self,
        schedule: CommandSchedule,
        arms: Sequence[ScheduleArm] = (),
        waits: WaitPlan | None = None,
    ) -> None:
        """The commands from here on, and from later iterations on."""
        self._schedule = arms[-1].schedule if arms else schedule
        if self._process is not None:
            self._process.say(Follow(schedule=schedule, arms=tuple(arms), waits=waits))

    def pause(self) -> None:
        """No commands: the default stands."""
        self.follow(NOTHING)

    def look(self) -> str | None:
        """Has the conductor ended on its own? Why, then."""
        for answer in () if self._process is None else self._process.answers():
            if isinstance(answer, NoWaits):
                self._run.log.refuse("lowering the clock in long waits", answer.why)
            if isinstance(answer, Ended):
                self._ended(answer)
                return answer.refused or "the conductor has ended"
        return None

    def stop(self) -> None:
        """Have the found clock put back."""
        if self._process is not None:
            self._ended(self._process.stop())

    def compare(self, trace: RankTrace) -> None:
        """Hold the commands against the edges of a trace."""
        commands = () if self._schedule is None else self._schedule.commands
        wanted = {(command.edge, command.key) for command in commands}
        real = [edge for edge in edges(places(trace)) if (edge.edge, edge.key) in wanted]
        file = OwnFile.open(self._edges_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with io.BufferedWriter(OwnStream(file)) as stream:
            stream.write(b"".join(msgspec.json.encode(edge) + b"\n" for edge in real))
        self._log.read()
        self._off += differences(self._log.recent, real)

    def told(self) -> dict[str, Any]:
        """What a record of clocks inside the iteration says of the commands so far."""
        self._log.read()
        counts = self._log.counts
        return {
            "sets": self.sets,
            "commands": counts["would set"] + counts["set"],
            "left_out": counts["left out"],
            "restored": self.restored,
            "conductor_cpu_s": self.cpu_s,
        }

    def told_of_sections(self) -> dict[str, Any]:
        """What the record `Sectioned` says of long waits, and of the commands' edges."""
        waits, errors = self._log.waits, edge_errors(self._off)
        told = {
            "waits": waits.count,
            "waits_low_s": waits.low_s,
            "waits_clock_hz": waits.sm_clock_hz,
        }
        if errors is not None:
            told |= {
                "edges": errors.n,
                "edge_error_p50_s": errors.p50_s,
                "edge_error_p95_s": errors.p95_s,
                "edge_bias_s": errors.bias_s,
            }
        return told

    def _ended(self, ended: Ended) -> None:
        self._process = None
        self.restored = ended.restored or not self.sets
        self.cpu_s = ended.cpu_s
        if ended.refused is not None:
            self._run.log.refuse("conducting", ended.refused)


class LowWaits(msgspec.Struct, frozen=True, kw_only=True):
    """Waits that had a low clock."""

    count: int = 0
    low_s: float = 0.0
    """The waits that are over took this together."""
    sm_clock_hz: float | None = None
    """The last one had this clock."""
    begun_s: float | None = None
    """The wait that goes on began then; None: there is none."""

    def after(self, command: Commanded) -> LowWaits:
        """With one more line of the log."""
        if command.state == "left out" or command.key != WAIT_KEY:
            return self
        if command.edge == "down":
            return msgspec.structs.replace(
                self,
                count=self.count + 1,
                sm_clock_hz=command.sm_clock_hz,
                begun_s=command.t_s,
            )
        low_s = 0.0 if self.begun_s is None else command.t_s - self.begun_s
        return msgspec.structs.replace(self, low_s=self.low_s + low_s, begun_s=None)


class CommandLog:
    """Reads the conductor's log as it grows, and keeps the last commands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.counts: Counter[str] = Counter()
        self.waits = LowWaits()
        self.recent: deque[Commanded] = deque(maxlen=RECENT)
        self._offset = 0

    def read(self) -> None:
        """Take the whole lines that have come."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole, _, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + bool(whole)
        for line in whole.splitlines():
            command = _COMMANDED.decode(line)
            self.counts[command.state] += 1
            self.waits = self.waits.after(command)
            self.recent.append(command)
