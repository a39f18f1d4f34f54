"""The daemon of fair sharing: hosts the store, listens to the jobs, decides once a period."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from kilter.core.errors import DeviceError, FileError, Held
from kilter.device.protocol import Device
from kilter.sharing.board import Board
from kilter.sharing.history import AloneTimes, load_alone, save_alone
from kilter.sharing.messages import Summary
from kilter.sharing.plan.contracts import ContractedJob
from kilter.sharing.plan.maxmin import describe
from kilter.sharing.plan.policies import SHARING_POLICIES
from kilter.sharing.store import Channel, living, read_endpoint

_TICK_S = 0.25
_METER_S = 1.0
_DECISIONS_SHOWN = 10


class Clocks(Protocol):
    """Who looks after the clocks of the GPUs."""

    said: str
    """What they are, and why; empty if nobody has asked for anything."""

    def tick(self, now_s: float, jobs: Sequence[ContractedJob]) -> None: ...
    def close(self) -> None: ...


class Daemon:
    """One machine's daemon. `serve` runs until `stop` says so."""

    def __init__(
        self,
        file: Path,
        gpus: Sequence[int],
        policy: str,
        period_s: float,
        host: str = "127.0.0.1",
        devices: Sequence[Device] = (),
        clocks: Clocks | None = None,
    ) -> None:
        """Opens the store; `Held` if another daemon answers at this file. `devices` are the GPUs in
        the order of `gpus`, for their energy counters; without them no energy is counted."""
        if (other := living(file)) is not None:
            raise Held(
                f"a daemon already shares this machine (process {other[1].pid}); see: kilter share "
                "top"
            )
        self._file, self._policy, self._period_s = file, policy, period_s
        self._history = file.with_suffix(".history.json")
        self._notes: list[str] = []
        self.board = Board(gpus, SHARING_POLICIES[policy], period_s, self._load_history())
        self._saved = set(self.board.history)
        self._devices, self._metered_s = tuple(devices), -_METER_S
        self._clocks = clocks
        self._left: set[int] = set()
        self._free: tuple[int | None, ...] = ()
        self._beat = 0
        self._begun_s = time.monotonic()
        self._channel = Channel.open(host, file)
        self._summarise(0.0)

    def serve(
        self,
        stop: Callable[[], bool],
        *,
        until_idle_s: float | None = None,
        said: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run until `stop()`, or until there has been no job for `until_idle_s`."""
        for note in self._notes:
            said(note)
        try:
            self._serve(stop, until_idle_s, said)
        finally:
            if self._clocks is not None:
                self._clocks.close()
        self._close()

    def _serve(
        self, stop: Callable[[], bool], until_idle_s: float | None, said: Callable[[str], None]
    ) -> None:
        idle_since_s = 0.0
        shown = told = 0
        while not stop():
            now_s = time.monotonic() - self._begun_s
            self._listen(now_s)
            if self._devices and now_s - self._metered_s >= _METER_S:
                self._metered_s = now_s
                counters_j, self._free = zip(*map(_read, self._devices), strict=True)
                self.board.meter(now_s, counters_j)
            for slot, target in self.board.tick(now_s).items():
                self._channel.want(slot, target)
            for made in self.board.decisions[shown:]:
                said(describe(made.decision))
            shown = len(self.board.decisions)
            for note in self.board.probes.notes[told:]:
                said(note)
            told = len(self.board.probes.notes)
            if self._clocks is not None:
                before = self._clocks.said
                self._clocks.tick(now_s, self.board.contracted(now_s))
                if self._clocks.said not in ("", before):
                    said(self._clocks.said)
            self._save_history()
            self._summarise(now_s)
            if self.board.summaries(now_s):
                idle_since_s = now_s
            elif until_idle_s is not None and now_s - idle_since_s > until_idle_s:
                break
            time.sleep(_TICK_S)

    def _listen(self, now_s: float) -> None:
        for slot in range(1, self._channel.slots() + 1):
            if slot in self._left:
                continue
            if self._channel.has_left(slot):
                self._left.add(slot)
                self.board.forget(slot)
            elif (status := self._channel.status(slot)) is not None:
                self.board.report(slot, status, now_s)

    def _summarise(self, now_s: float) -> None:
        self._beat += 1
        recent = self.board.decisions[-_DECISIONS_SHOWN:]
        self._channel.summarise(
            Summary(
                beat=self._beat,
                pid=os.getpid(),
                policy=self._policy,
                period_s=self._period_s,
                gpus=self.board.gpus,
                utilisation=self.board.utilisation(),
                jobs=self.board.summaries(now_s),
                decisions=tuple(describe(made.decision) for made in recent),
                energy_j=self.board.energy.metered_j(),
                free_bytes=self._free,
                clocks=self._clocks.said or None if self._clocks is not None else None,
                unshared_energy_j=self.board.energy.unshared_mj / 1000,
            )
        )

    def _load_history(self) -> AloneTimes:
        try:
            return load_alone(self._history)
        except FileError as error:
            self._notes.append(f"{error}; run-alone times are learned anew")
            return {}

    def _save_history(self) -> None:
        """New jobs at once, others at the end: their times change with every step. Without a place
        to save the times, the daemon goes on."""
        if self.board.history.keys() != self._saved:
            self._saved = set(self.board.history)
            with contextlib.suppress(FileError):
                save_alone(self._history, self.board.history)

    def _close(self) -> None:
        """Save the history; take the file away, unless another daemon has written its own."""
        with contextlib.suppress(FileError):
            save_alone(self._history, self.board.history)
        if self._file.exists() and read_endpoint(self._file).pid == os.getpid():
            self._file.unlink()


def _read(device: Device) -> tuple[float | None, int | None]:
    """The energy counter in J, and the memory in bytes that nobody holds; None for what the device
    does not tell, both if it does not answer."""
    try:
        sample, whole = device.sample(energy=True), device.info().memory_bytes
    except DeviceError:
        return None, None
    used = sample.memory_used_bytes
    return sample.energy_j, None if whole is None or used is None else int(whole - used)
